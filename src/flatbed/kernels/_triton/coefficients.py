"""Scalars and coefficients of all parameters or tables of one GPU, computed by one kernel per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatbed.cuda.streams import distinct_stream, is_capturing, relaxed_capture
from flatbed.errors import FlatbedError
from flatbed.kernels import step
from flatbed.kernels._triton.launch import Launch, element, shared_kernel
from flatbed.kernels.step import Scaling, StepOptions
from flatbed.rule import MAX_COEFFICIENTS, Group, Rule

LANES = 256  # parameters per program of `prepare_kernel`
MAX_PARTIALS = 4096  # per launch of `squares_kernel`
CAPTURES = 8  # CUDA graphs that can be captured between two eager steps

# Columns of the table of parameters, one line each.
FIRST_BLOCK = tl.constexpr(0)  # the first block of the parameter, counted within its launch
NUMEL = tl.constexpr(1)
GROUP = tl.constexpr(2)
PARAM = tl.constexpr(3)
MASTER = tl.constexpr(4)
EMA = tl.constexpr(5)
SCALARS = tl.constexpr(6)  # two columns
STATES = tl.constexpr(8)  # four columns
COLUMNS = tl.constexpr(12)

# Entries of the vector `step_stats`.
SKIP = tl.constexpr(step.SKIP)
NORM = tl.constexpr(step.NORM)
SKIPPED = tl.constexpr(step.SKIPPED)
STEPS = tl.constexpr(step.STEPS)

# Length of a line of hyperparameters or coefficients: one value that all rules have, then the rule's values.
LINE = tl.constexpr(1 + MAX_COEFFICIENTS)


@triton.jit
def pointer(address, dtype: tl.constexpr, VECTOR: tl.constexpr):
    """Return an address as a pointer with a hint of its alignment; without the hint if `VECTOR` is 1.

    With the hint, each thread loads `VECTOR` elements at a time: the same number for all tensors that are
    computed together. Without it, loads are not vectorized.
    """
    if VECTOR > 1:
        result = tl.multiple_of(address.to(tl.pointer_type(dtype)), VECTOR * (dtype.primitive_bitwidth // 8))
    else:
        result = address.to(tl.pointer_type(dtype))
    return result


@triton.jit(do_not_specialize=["n_parameters", "partials_ptr", "n_partials", "scale_ptr", "found_inf_ptr"])
def prepare_kernel(
    table_ptr, grads_ptr, hyperparameters_ptr, coefficients_ptr, stats_ptr, n_parameters,
    partials_ptr, scale_ptr, found_inf_ptr, n_partials, max_norm,
    RULE: tl.constexpr, N_SCALARS: tl.constexpr,
    CLIP: tl.constexpr, NORMED: tl.constexpr, SKIPPING: tl.constexpr, SCALED: tl.constexpr,
    LANES: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Compute what all elements of a parameter share: the gradient's factor, coefficients, scalars.

    Every program adds all partial sums, in the same order.
    """
    lanes = tl.arange(0, LANES)
    parameter = (tl.program_id(0) * LANES + lanes).to(tl.int64)
    valid = parameter < n_parameters
    row_ptr = table_ptr + parameter * COLUMNS
    grad = tl.load(grads_ptr + parameter, mask=valid, other=0)
    line_ptr = hyperparameters_ptr + tl.load(row_ptr + GROUP, mask=valid, other=0) * LINE
    h = ()
    for i in tl.static_range(1, LINE):
        h = h + (tl.load(line_ptr + i, mask=valid, other=0.5),)  # noqa: RUF005
    first_ptr = pointer(tl.load(row_ptr + SCALARS, mask=valid, other=0), tl.float32, 1)
    second_ptr = pointer(tl.load(row_ptr + (SCALARS + 1), mask=valid, other=0), tl.float32, 1)
    first = tl.zeros([LANES], tl.float64)
    second = tl.zeros([LANES], tl.float64)
    if N_SCALARS > 0:
        first = tl.load(first_ptr, mask=valid, other=0.0).to(tl.float64)
    if N_SCALARS > 1:
        second = tl.load(second_ptr, mask=valid, other=0.0).to(tl.float64)
    scalars, coefficients = RULE(h, (first, second))

    # Placed after the loads above, so that they overlap with the norm.
    factor = tl.full([], 1.0, tl.float64)
    skip = tl.full([], 0.0, tl.float64)
    norm = tl.full([], 0.0, tl.float64)
    if SCALED:
        factor = 1.0 / tl.load(scale_ptr).to(tl.float64)
        skip = tl.load(found_inf_ptr).to(tl.float64)
    if NORMED:
        many = tl.arange(0, PARTIALS)  # at most as many as one launch of `squares_kernel` stores
        total = tl.load(partials_ptr + many, mask=many < n_partials, other=0.0)
        for begin in range(PARTIALS, n_partials, PARTIALS):
            total += tl.load(partials_ptr + begin + many, mask=begin + many < n_partials, other=0.0)
        norm = tl.sqrt(tl.sum(total, 0)) * factor
        if SKIPPING:
            skip = tl.where(norm < float("inf"), skip, 1.0)  # nan too
        if CLIP:
            ratio = max_norm / (norm + 1e-6)
            factor *= tl.where(ratio > 1.0, 1.0, ratio)  # nan stays nan, as in torch

    if tl.program_id(0) == 0:
        tl.store(stats_ptr + SKIP, skip)
        tl.store(stats_ptr + NORM, norm)
        tl.store(stats_ptr + SKIPPED, tl.load(stats_ptr + SKIPPED) + tl.where(skip != 0.0, 1.0, 0.0))
        tl.store(stats_ptr + STEPS, tl.load(stats_ptr + STEPS) + 1.0)

    moves = valid & (tl.where(skip == 0.0, grad, 0) != 0)
    if N_SCALARS > 0:
        tl.store(first_ptr, scalars[0].to(tl.float32), mask=moves)
    if N_SCALARS > 1:
        tl.store(second_ptr, scalars[1].to(tl.float32), mask=moves)
    coefficient_ptr = coefficients_ptr + parameter * LINE
    sign = tl.load(line_ptr, mask=valid, other=1.0)
    tl.store(coefficient_ptr, factor * sign, mask=valid)
    tl.static_assert(len(coefficients) < LINE)
    for i in tl.static_range(len(coefficients)):
        tl.store(coefficient_ptr + 1 + i, coefficients[i], mask=valid)


class ArgumentTables:
    """Addresses of gradients and hyperparameters, in one piece of memory. A captured step has its own."""

    def __init__(self, n_slots: int, n_groups: int, device: torch.device, *, pinned: bool = False) -> None:
        start = n_slots + n_slots % 2  # a multiple of 16 bytes
        size = start + n_groups * LINE.value
        self.memory = torch.zeros(size, dtype=torch.int64, device=device, pin_memory=pinned)
        self.grads = self.memory[:n_slots]  # addresses; 0 stands for no gradient
        self.hyperparameters = self.memory[start:].view(torch.float64).view(n_groups, LINE.value)


class Coefficients:
    """The coefficients of a rule for each line of a table of parameters.

    The table's lines need a group and the addresses of scalars. After `prepare`, `values` has a line of
    coefficients for each line of the table.
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
        self.values = torch.zeros(len(table), LINE.value, dtype=torch.float64, device=self.device)
        self._eager = self.arguments = ArgumentTables(len(table), len(groups), self.device)
        """`arguments` are the tables of this step."""
        # Launches are bound to the dtype of a GradScaler's tensors, whatever the default dtype of torch.
        options: Any = {"dtype": torch.float32, "device": self.device}
        self._one, self._zero = torch.ones(1, **options), torch.zeros(1, **options)
        self._partials = self._zero.double()[:0] if partials is None else partials
        own = self.table, self._eager.memory, self.values, self._partials, self._one, self._zero, step_stats
        self._memory = [*own, *also_used]
        if self.device.type == "cuda":
            self._first_stream = torch.cuda.current_stream(self.device).cuda_stream
        self._addresses: list[int] = []
        self._hyperparameters: list[tuple[float, ...]] = []
        self._launches: dict[tuple[bool, ...], Launch] = {}
        self._spare: list[tuple[ArgumentTables, ArgumentTables]] = []
        self._spare_ready: torch.cuda.Event | None = None
        self._captured: list[tuple[ArgumentTables, ArgumentTables]] = []

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs hold launches with these coefficients."""
        return bool(self._captured)

    def begin_step(self, addresses: list[int]) -> None:
        """Begin a step: upload addresses of gradients and hyperparameters if some are new.

        The address 0 stands for no gradient. Kernels of rows only test for 0, so that 1 stands for any
        gradient.
        """
        values, on_device = [], []  # a line for each group; lines and learning rates that are on the device
        for line, group in enumerate(self.groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                on_device.append((line, lr))
                group = {**group, "lr": math.inf}  # unlike any number that may replace it
            found = [-1.0 if group["maximize"] else 1.0, *[0.0] * MAX_COEFFICIENTS]
            for column, name in enumerate(self.rule.hyperparameters, 1):
                found[column] = float(
                    group["betas"][name == "beta2"] if name in ("beta1", "beta2") else group[name]
                )
            values.append(tuple(found))
        self.capturing = is_capturing(self.device)
        self.arguments = self._stage(addresses, values) if self.capturing else self._eager
        if not self.capturing:
            if self.device.type == "cuda":
                if torch._C._cuda_getCurrentRawStream(self.device.index) != self._first_stream:
                    for tensor in self._memory:
                        tensor.record_stream(torch.cuda.current_stream(self.device))
                if len(self._spare) < CAPTURES:
                    self._replenish()
            if addresses != self._addresses:
                self._addresses = []  # until the upload is issued
                _upload(self._eager.grads, addresses)
                self._addresses = addresses
            if values != self._hyperparameters:
                self._hyperparameters = []
                _upload(self._eager.hyperparameters, values)
                self._hyperparameters = values
        if on_device:
            lines = [self.arguments.hyperparameters[line, 1:2] for line, _ in on_device]
            torch._foreach_copy_(lines, [lr.reshape(1) for _, lr in on_device])

    def prepare(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Count the step, and compute clipping and coefficients for all lines."""
        flags = options.max_norm is not None, options.needs_norm, options.skip_nonfinite, scaling is not None
        if self.capturing:
            launch = self._bind(flags)
        else:
            launch = self._launches[flags] = self._launches.get(flags) or self._bind(flags)
        partials = self._partials if squares is None else squares
        scale = self._one if scaling is None or scaling.scale is None else scaling.scale
        found_inf = self._zero if scaling is None or scaling.found_inf is None else scaling.found_inf
        launch(partials, scale, found_inf, len(partials), float(options.max_norm or 0.0))

    def _bind(self, flags: tuple[bool, ...]) -> Launch:
        rule, n, tables = self.rule, len(self.table), self.arguments
        n_at_once = min(MAX_PARTIALS, max(16, 1 << (len(self._partials) - 1).bit_length()))
        constants = (element(rule.prepare), len(rule.scalars), *flags, LANES, n_at_once)
        prepare = shared_kernel(prepare_kernel, *constants)
        fixed = (self.table, tables.grads, tables.hyperparameters, self.values, self.step_stats, n)
        varying = (self._partials, self._one, self._zero, len(self._partials), 1.0)
        return prepare.bind(-(-n // LANES), fixed, varying)

    # ---- capture

    def _stage(self, addresses: list[int], values: list[tuple[float, ...]]) -> ArgumentTables:
        """Return new tables for the graph being captured, filled from memory that never changes again."""
        if not self._spare:
            raise FlatbedError(
                f"take an eager step before this capture: one is needed after every change of parameters or "
                f"state, and after {CAPTURES} captures"
            )
        own, staging = self._spare.pop()
        staging.grads.numpy()[...] = addresses
        staging.hyperparameters.numpy()[...] = values
        with relaxed_capture() as is_relaxed:
            if is_relaxed:  # the copy runs at once, outside of the graph
                aside = distinct_stream(self.device, {torch.cuda.current_stream(self.device).cuda_stream})
                with torch.cuda.stream(aside):
                    if self._spare_ready is not None:
                        aside.wait_event(self._spare_ready)
                    own.memory.copy_(staging.memory, non_blocking=True)
                aside.synchronize()
        if not is_relaxed:  # the graph copies at every replay
            own.memory.copy_(staging.memory, non_blocking=True)
        self._captured.append((own, staging))
        return own

    def _replenish(self) -> None:
        """Allocate the tables of later captures, since a capture cannot allocate them."""
        sizes = len(self.table), len(self.groups)
        while len(self._spare) < CAPTURES:
            staging = ArgumentTables(*sizes, torch.device("cpu"), pinned=True)
            self._spare.append((ArgumentTables(*sizes, self.device), staging))
        self._spare_ready = torch.cuda.current_stream(self.device).record_event()


def _upload(to: Tensor, values: Any) -> None:
    # Pinned memory returns to its pool only after the copy has finished.
    pinned = to.device.type == "cuda"
    source = torch.empty(to.shape, dtype=to.dtype, device="cpu", pin_memory=pinned)
    source.numpy()[...] = values
    to.copy_(source, non_blocking=True)
