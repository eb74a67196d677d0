"""Scalars and coefficients of all parameters or tables of one GPU, computed by one kernel per step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels._triton import step
from flatbed.kernels._triton.launch import Kernel, element, outside_of_capture
from flatbed.kernels.step import Scaling, StepOptions
from flatbed.rule import MAX_COEFFICIENTS, Group, Rule, hyperparameter

LANES = 256  # parameters per program of `prepare`
LINE = 1 + MAX_COEFFICIENTS
MAX_PARTIALS = 4096  # per launch of `squares`
CAPTURES = 8  # CUDA graphs that can be captured between two eager steps

# Columns of the table of parameters.
FIRST_BLOCK, NUMEL, GROUP, PARAM, MASTER, EMA, SCALARS = range(7)
STATES = SCALARS + 2
COLUMNS = STATES + 4

PREPARE = Kernel(step.prepare, num_warps=4)


class ArgumentTables:
    """Addresses of gradients and hyperparameters, in one piece of memory. A captured step has its own."""

    def __init__(self, n_slots: int, n_groups: int, device: torch.device, *, pinned: bool = False) -> None:
        start = n_slots + n_slots % 2  # a multiple of 16 bytes
        size = start + n_groups * LINE
        self.memory = torch.zeros(size, dtype=torch.int64, device=device, pin_memory=pinned)
        self.grads = self.memory[:n_slots]  # addresses; 0 stands for no gradient
        self.hyperparameters = self.memory[start:].view(torch.float64).view(n_groups, LINE)


def on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method with its object's device as the current one, which launches go to."""

    @functools.wraps(method)
    def there(self: Any, *args: Any) -> Any:
        if self.device.type != "cuda" or torch._C._cuda_getDevice() == self.device.index:
            return method(self, *args)
        with torch.cuda.device(self.device):
            return method(self, *args)

    return there


class Coefficients:
    """The coefficients of a rule for each line of a table of parameters.

    The table's lines need a group and the addresses of scalars. `values` has a line of coefficients for
    each of them after `prepare`.
    """

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Group],
        table: Tensor,
        *,
        step_stats: Tensor,
        partials: Tensor | None = None,
        also_used: Iterable[Tensor] = (),
    ) -> None:
        self.rule, self.groups, self.table, self.step_stats = rule, groups, table, step_stats
        self.device = table.device
        self.capturing = False
        self._first_stream = _current_stream(self.device)
        self.values = torch.zeros(len(table), LINE, dtype=torch.float64, device=self.device)
        self._eager = ArgumentTables(len(table), len(groups), self.device)
        self._one, self._zero = torch.ones(1, device=self.device), torch.zeros(1, device=self.device)
        self._partials = self._zero.double()[:0] if partials is None else partials
        own = self.table, self._eager.memory, self.values, self._partials, self._one, self.step_stats
        self._memory = [*own, *also_used]
        self._addresses: list[int] = []
        self._hyperparameters: list[tuple[float, ...]] = []
        self._launches: dict[tuple[bool, ...], Callable[..., None]] = {}
        self._spare: list[tuple[ArgumentTables, ArgumentTables]] = []
        self._spare_ready: torch.cuda.Event | None = None
        self._captured: list[tuple[ArgumentTables, ArgumentTables]] = []

    @property
    def captured(self) -> bool:
        """Tell if CUDA graphs hold launches with these coefficients."""
        return bool(self._captured)

    @property
    def arguments(self) -> ArgumentTables:
        """The tables of this step."""
        return self._captured[-1][0] if self.capturing else self._eager

    def enter_stream(self) -> None:
        """Find if this step is captured. Memory is recorded for streams other than the first."""
        self.capturing = is_capturing(self.device)
        if not self.capturing and _current_stream(self.device) != self._first_stream:
            for tensor in self._memory:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    # ---- arguments

    def set_grads(self, addresses: list[int]) -> None:
        """Upload the addresses of gradients if some are new; 0 stands for no gradient."""
        if self.capturing:
            self._stage(addresses)
        elif addresses != self._addresses:
            self._addresses = []  # until the upload is issued
            _upload(self._eager.grads, addresses)
            self._addresses = addresses

    def _stage(self, addresses: list[int]) -> None:
        """Give the graph being captured tables of its own, filled from memory that never changes again."""
        if not self._spare:
            raise FlatbedError(
                f"take an eager step before this capture: one is needed after every change of parameters or "
                f"state, and after {CAPTURES} captures"
            )
        own, staging = self._spare.pop()
        values, on_device = self._read_hyperparameters()
        staging.grads.numpy()[...] = addresses
        staging.hyperparameters.numpy()[...] = values
        with outside_of_capture(self.device, self._spare_ready) as outside:
            if outside:  # once
                own.memory.copy_(staging.memory, non_blocking=True)
        if not outside:  # at every replay
            own.memory.copy_(staging.memory, non_blocking=True)
        _copy_learning_rates(own.hyperparameters, on_device)
        self._captured.append((own, staging))

    def _read_hyperparameters(self) -> tuple[list[tuple[float, ...]], list[tuple[int, Tensor]]]:
        """A line for every group; and the learning rates that are on the device, with their line."""
        values, on_device = [], []
        for line, group in enumerate(self.groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                on_device.append((line, lr))
                group = {**group, "lr": 0.0}
            sign = -1.0 if group["maximize"] else 1.0
            found = [float(hyperparameter(group, name)) for name in self.rule.hyperparameters]
            values.append((sign, *found, *[0.0] * (MAX_COEFFICIENTS - len(found))))
        return values, on_device

    def _upload_hyperparameters(self) -> None:
        values, on_device = self._read_hyperparameters()
        if values != self._hyperparameters:
            _upload(self._eager.hyperparameters, values)
            self._hyperparameters = values
        _copy_learning_rates(self._eager.hyperparameters, on_device)

    def _replenish(self) -> None:
        """Allocate the tables of later captures, which cannot allocate them."""
        if len(self._spare) < CAPTURES and self.device.type == "cuda":
            sizes = len(self.table), len(self.groups)
            while len(self._spare) < CAPTURES:
                staging = ArgumentTables(*sizes, torch.device("cpu"), pinned=True)
                self._spare.append((ArgumentTables(*sizes, self.device), staging))
            self._spare_ready = torch.cuda.current_stream(self.device).record_event()

    # ---- the launch

    @on_its_device
    def prepare(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Count the step, and compute clipping and coefficients for all lines."""
        flags = options.max_norm is not None, options.needs_norm, options.skip_nonfinite, scaling is not None
        if self.capturing:
            launch = self._bind(flags, self.arguments)
        else:
            self._upload_hyperparameters()
            self._replenish()
            launch = self._launches.get(flags) or self._bind(flags, self._eager)
            self._launches[flags] = launch
        partials = self._partials if squares is None else squares
        scale = self._one if scaling is None or scaling.scale is None else scaling.scale
        found_inf = self._zero if scaling is None or scaling.found_inf is None else scaling.found_inf
        launch(partials, scale, found_inf, len(partials), float(options.max_norm or 0.0))

    def _bind(self, flags: tuple[bool, ...], tables: ArgumentTables) -> Callable[..., None]:
        rule, n = self.rule, len(self.table)
        n_at_once = min(MAX_PARTIALS, max(16, 1 << (len(self._partials) - 1).bit_length()))
        counts = len(rule.scalars), rule.n_coefficients
        constants = (element(rule.prepare), *counts, *flags, LANES, n_at_once)
        fixed = (self.table, tables.grads, tables.hyperparameters, self.values, self.step_stats, n)
        varying = (self._partials, self._one, self._zero, len(self._partials), 1.0)
        return PREPARE.bind(-(-n // LANES), constants, *fixed, *varying)


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _upload(to: Tensor, values: Any) -> None:
    # Pinned memory returns to its pool only after the copy has finished.
    pinned = to.device.type == "cuda"
    source = torch.empty(to.shape, dtype=to.dtype, device="cpu", pin_memory=pinned)
    source.numpy()[...] = values
    to.copy_(source, non_blocking=True)


def _copy_learning_rates(hyperparameters: Tensor, on_device: list[tuple[int, Tensor]]) -> None:
    if on_device:
        lines = [hyperparameters[line, 1:2] for line, _ in on_device]
        torch._foreach_copy_(lines, [lr.reshape(1) for _, lr in on_device])
