"""A rule over the parameters of one GPU: tables of addresses, and three kernels that follow them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels._triton import step
from flatbed.kernels._triton.launch import TYPES, Kernel, Stream, address, element, outside_of_capture
from flatbed.kernels.step import Grads, ParamSlot, Scaling, Settings, in_order, is_whole, stride_of
from flatbed.rule import MAX_NUMBERS, Group, Rule, number

BLOCK = (
    512  # elements per program, 4 per thread: on an H200, 8 per thread were up to 10% slower, 16 up to 25%
)
LANES = 256  # parameters per program of `prepare`
MAX_PARTIALS = 4096  # per launch of `squares`
CAPTURES = 8  # CUDA graphs that can be captured between two eager steps
EMPTY = 16  # stands for the address of a gradient without elements, which is 0 like that of none
FIRST_BLOCK, NUMEL, GROUP, PARAM, MASTER, EMA, SCALARS = range(7)
STATES = SCALARS + 2
COLUMNS = STATES + 4

SQUARES = Kernel(step.squares, num_warps=2)
PREPARE = Kernel(step.prepare, num_warps=4)
UPDATE = Kernel(step.update, num_warps=4)


class LaunchKey(NamedTuple):
    """What the parameters of one launch have in common."""

    has: int
    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool
    ema: bool

    @staticmethod
    def of(row: ParamSlot, rule: Rule) -> LaunchKey:
        has = sum(1 << bit for bit, name in enumerate(rule.state) if name in row.state)
        master, ema = row.master is not None, row.ema is not None
        return LaunchKey(has, row.param.dtype, row.grad_dtype, row.state_dtype, master, ema)

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.param, torch.float32)

    @property
    def vector(self) -> int:
        """How many elements a thread loads at a time: 16 bytes of the widest."""
        used = [self.param, self.grad]
        used += [self.state] if self.has else []
        used += [self.compute] if self.master or self.ema else []
        return 16 // max(dtype.itemsize for dtype in used)


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of all parameters of one kind."""

    kind: LaunchKey
    blocks: Tensor  # int32: the row of each block
    partials: Tensor  # where `squares` writes
    blocks_per_partial: int
    salt: int


class StepFlags(NamedTuple):
    """What a step is asked to do, as far as its launches depend on it."""

    clip: bool
    normed: bool
    skipping: bool
    scaled: bool
    stochastic: bool
    stochastic_state: bool
    ema_weight: float

    @staticmethod
    def of(settings: Settings, scaling: Scaling | None) -> StepFlags:
        weight = 1.0 - (settings.ema_decay or 0.0)
        clip, skipping = settings.max_norm is not None, settings.skip_nonfinite
        by_chance = settings.stochastic_rounding, settings.stochastic_state
        return StepFlags(clip, settings.normed, skipping, scaling is not None, *by_chance, weight)


class Tables:
    """What a step reads beside the table of rows, in one piece of memory. A captured step has its own."""

    def __init__(self, n_rows: int, n_groups: int, device: torch.device, *, pinned: bool = False) -> None:
        at = n_rows + n_rows % 2  # a multiple of 16 bytes
        n_numbers = n_groups * (1 + MAX_NUMBERS)
        self.memory = torch.zeros(at + n_numbers, dtype=torch.int64, device=device, pin_memory=pinned)
        self.grads = self.memory[:n_rows]  # addresses
        # A group's hyperparameters in each line.
        self.numbers = self.memory[at:].view(torch.float64).view(n_groups, 1 + MAX_NUMBERS)


class Launches(NamedTuple):
    """Launches ready to go; `prepare` takes what may differ from step to step."""

    squares: list[Callable[..., None]]
    prepare: Callable[..., None]
    update: list[Callable[..., None]]


def _on_its_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Launches go to the current device; with several of them, that may be another one."""

    @functools.wraps(method)
    def there(self: TritonStepper, *args: Any) -> Any:
        if self.device.type != "cuda" or torch._C._cuda_getDevice() == self.device.index:
            return method(self, *args)
        with torch.cuda.device(self.device):
            return method(self, *args)

    return there


class TritonStepper:
    """Runs a rule over parameters on one GPU, or on the CPU under Triton's interpreter."""

    addressed = True

    def __init__(self, rule: Rule, groups: Sequence[Group], rows: list[ParamSlot], shared: Tensor) -> None:
        self.rule = rule
        self.groups = groups
        self.rows = rows
        self.shared = shared
        self.device = rows[0].param.device
        self._stream = Stream(self.device)
        # A parameter with holes is updated in a dense copy.
        self._copies = {i: _dense(row.param) for i, row in enumerate(rows) if not is_whole(row.param)}
        self._empty = [i for i, row in enumerate(rows) if row.param.numel() == 0]
        self._table, self._parts = self._build()
        self._tables = self._make_tables()
        self._coefficients = self._zeros(len(rows), 1 + MAX_NUMBERS)
        self._one, self._zero = torch.ones(1, device=self.device), torch.zeros(1, device=self.device)
        self._constant = (
            address(self._partials),
            address(self._one),
            address(self._one),
            len(self._partials),
        )
        self._uploaded: list[tuple[float, ...]] = []
        self._launches: dict[StepFlags, Launches] = {}
        self._spare: list[tuple[Tables, Tables]] = []
        self._replenished: torch.cuda.Event | None = None
        self._captured: list[tuple[Tables, Tables]] = []
        self._now: Grads = ()
        self._stale = True

    # ---- tables

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _make_tables(self) -> Tables:
        return Tables(len(self.rows), len(self.groups), self.device)

    def _make_staging(self) -> Tables:
        pinned = self.device.type == "cuda"
        return Tables(len(self.rows), len(self.groups), torch.device("cpu"), pinned=pinned)

    def _build(self) -> tuple[Tensor, list[Part]]:
        kinds: dict[LaunchKey, list[int]] = {}
        for i, row in enumerate(self.rows):
            kinds.setdefault(LaunchKey.of(row, self.rule), []).append(i)
        table = np.zeros((len(self.rows), COLUMNS), np.int64)
        plans = []
        for kind, members in kinds.items():
            counts = np.array([-(-self.rows[i].param.numel() // BLOCK) for i in members])
            for i, first in zip(members, np.cumsum(counts) - counts, strict=True):
                self._fill(table[i], i, int(first))
            blocks = torch.from_numpy(np.repeat(np.array(members, np.int32), counts)).to(self.device)
            per_partial = max(1, -(-len(blocks) // MAX_PARTIALS))
            plans.append((kind, blocks, per_partial, -(-len(blocks) // per_partial)))
        self._partials = self._zeros(sum(n for *_, n in plans))
        pieces = torch.split(self._partials, [n for *_, n in plans])
        parts = [
            Part(kind, blocks, piece, per_partial, salt)
            for salt, ((kind, blocks, per_partial, _), piece) in enumerate(zip(plans, pieces, strict=True))
        ]
        return torch.from_numpy(table).to(self.device), parts

    def _fill(self, line: np.ndarray[Any, Any], i: int, first_block: int) -> None:
        row = self.rows[i]
        line[FIRST_BLOCK] = first_block
        line[NUMEL] = row.param.numel()
        line[GROUP] = row.group
        line[PARAM] = self._copies.get(i, row.param).data_ptr()
        line[MASTER] = 0 if row.master is None else row.master.data_ptr()
        line[EMA] = 0 if row.ema is None else row.ema.data_ptr()
        for slot, name in enumerate(self.rule.scalars):
            line[SCALARS + slot] = row.scalars[name].data_ptr()
        for slot, name in enumerate(self.rule.state):
            line[STATES + slot] = row.state[name].data_ptr() if name in row.state else 0

    # ---- gradients and hyperparameters

    @property
    def captured(self) -> bool:
        return bool(self._captured)

    @property
    def tables(self) -> Tables:
        """Those of this step: a captured one has its own."""
        return self._captured[-1][0] if self._stream.capturing else self._tables

    @_on_its_device
    def place(self, grads: Grads, unordered: frozenset[int], addresses: list[int] | None) -> None:
        self._stream.enter(self._memory)
        if unordered:
            grads = list(grads)
            for i in unordered:
                if (grad := grads[i]) is not None:
                    grads[i] = in_order(self.rows[i].param, grad)
        self._now = grads  # copies must live until they have been read
        if unordered or (addresses is None and (self._stream.capturing or self._stale)):
            addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
        if addresses is not None:
            for i in self._empty:
                addresses[i] = 0 if grads[i] is None else EMPTY
            self._stale = True  # until they are there: a captured step has a table of its own
            if self._stream.capturing:
                self._stage(addresses)
            else:
                self._upload(self._tables.grads, addresses)
                self._stale = False

    def _memory(self) -> list[Tensor]:
        """All that the launches read and write beside parameters, gradients and state."""
        maps = [part.blocks for part in self._parts]
        tables = [
            self._table,
            self._tables.memory,
            self._coefficients,
            self._partials,
            self._one,
            self.shared,
        ]
        return [*tables, *maps]

    def _upload(self, to: Tensor, values: Any) -> None:
        # Pinned memory goes back to its pool only when the copy has been made.
        pinned = to.device.type == "cuda"
        source = torch.empty(to.shape, dtype=to.dtype, device="cpu", pin_memory=pinned)
        source.numpy()[...] = values
        to.copy_(source, non_blocking=True)

    def _stage(self, addresses: list[int]) -> None:
        """Tables for the graph being captured, filled from memory that stays as it is at every replay."""
        if not self._spare:
            raise FlatbedError(
                f"take an eager step before this capture: one is needed after every change of parameters or "
                f"state, and after {CAPTURES} captures"
            )
        own, staging = self._spare.pop()
        values, on_device = self._read_numbers()
        staging.grads.numpy()[...] = addresses
        staging.numbers.numpy()[...] = values
        with outside_of_capture(self.device, self._replenished) as outside:
            if outside:  # now, once and for all
                own.memory.copy_(staging.memory, non_blocking=True)
        if not outside:  # at every replay
            own.memory.copy_(staging.memory, non_blocking=True)
        _copy_numbers(own.numbers, on_device)
        self._captured.append((own, staging))

    def _read_numbers(self) -> tuple[list[tuple[float, ...]], list[tuple[int, Tensor]]]:
        """Every group's hyperparameters; and the learning rates that live on the device, with their line."""
        values, on_device = [], []
        for line, group in enumerate(self.groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                on_device.append((line, lr))
                group = {**group, "lr": 0.0}
            sign = -1.0 if group["maximize"] else 1.0
            numbers = [float(number(group, name)) for name in self.rule.numbers]
            values.append((sign, *numbers, *[0.0] * (MAX_NUMBERS - len(numbers))))
        return values, on_device

    def _upload_numbers(self) -> None:
        values, on_device = self._read_numbers()
        if values != self._uploaded:
            self._upload(self._tables.numbers, values)
            self._uploaded = values
        _copy_numbers(self._tables.numbers, on_device)

    # ---- launches

    @_on_its_device
    def squares(self, settings: Settings, scaling: Scaling | None) -> Tensor:
        for launch in self._ready(settings, scaling).squares:
            launch(self._stream.handle)
        return self._partials

    @_on_its_device
    def update(self, settings: Settings, scaling: Scaling | None, squares: Tensor | None) -> None:
        launches, stream = self._ready(settings, scaling), self._stream.handle
        if not self._stream.capturing:
            self._upload_numbers()
            self._replenish()
        for i, copy in self._copies.items():
            copy.copy_(self.rows[i].param)
        varying = self._constant if scaling is None and squares is None else self._varying(scaling, squares)
        launches.prepare(stream, *varying, float(settings.max_norm or 0.0))
        for launch in launches.update:
            launch(stream)
        for i, copy in self._copies.items():
            self.rows[i].param.copy_(copy)
        self._now = ()

    def _varying(self, scaling: Scaling | None, squares: Tensor | None) -> tuple[Any, ...]:
        partials = self._partials if squares is None else squares
        scale = self._one if scaling is None or scaling.scale is None else scaling.scale
        found_inf = self._zero if scaling is None or scaling.found_inf is None else scaling.found_inf
        return address(partials), address(scale), address(found_inf), len(partials)

    def _replenish(self) -> None:
        """What a capture needs, and cannot get while it lasts, is kept ready."""
        if len(self._spare) < CAPTURES and self.device.type == "cuda":
            while len(self._spare) < CAPTURES:
                self._spare.append((self._make_tables(), self._make_staging()))
            self._replenished = torch.cuda.current_stream(self.device).record_event()

    def _ready(self, settings: Settings, scaling: Scaling | None) -> Launches:
        mode = StepFlags.of(settings, scaling)
        if self._stream.capturing:
            return self._bind(mode, self.tables)
        launches = self._launches.get(mode)
        if launches is None:
            launches = self._launches[mode] = self._bind(mode, self._tables)
        return launches

    def _bind(self, mode: StepFlags, tables: Tables) -> Launches:
        return Launches(
            [self._bind_squares(part, tables) for part in self._parts],
            self._bind_prepare(mode, tables),
            [self._bind_update(part, mode, tables) for part in self._parts],
        )

    def _bind_squares(self, part: Part, tables: Tables) -> Callable[..., None]:
        constants = (TYPES[part.kind.grad], 16 // part.kind.grad.itemsize, BLOCK)
        sizes = len(part.blocks), part.blocks_per_partial
        return SQUARES.bind(
            len(part.partials), constants, self._table, tables.grads, part.blocks, part.partials, *sizes
        )

    def _bind_prepare(self, mode: StepFlags, tables: Tables) -> Callable[..., None]:
        constants = (
            element(self.rule.prepare),
            len(self.rule.scalars),
            self.rule.n_coefficients,
            *(mode.clip, mode.normed, mode.skipping, mode.scaled),
            LANES,
            _padded(len(self._partials)),
        )
        fixed = (self._table, tables.grads, tables.numbers, self._coefficients, self.shared, len(self.rows))
        varying = (self._partials, self._one, self._one, len(self._partials), 1.0)
        return PREPARE.bind(-(-len(self.rows) // LANES), constants, *fixed, *varying)

    def _bind_update(self, part: Part, mode: StepFlags, tables: Tables) -> Callable[..., None]:
        kind = part.kind
        stochastic = mode.stochastic and kind.param == torch.bfloat16 and not kind.master
        types = (TYPES[dtype] for dtype in (kind.param, kind.grad, kind.state, kind.compute))
        stochastic_state = mode.stochastic_state and kind.state == torch.bfloat16
        options = (kind.master, kind.ema, stochastic, stochastic_state)
        constants = (element(self.rule.update), kind.has, *types, *options, kind.vector, BLOCK)
        memory = (self._table, tables.grads, self._coefficients, self.shared, part.blocks)
        return UPDATE.bind(len(part.blocks), constants, *memory, mode.ema_weight, part.salt)


def _padded(n_partials: int) -> int:
    """How many partial sums are read at once: a power of two."""
    return min(MAX_PARTIALS, max(16, 1 << (n_partials - 1).bit_length()))


def _copy_numbers(numbers: Tensor, on_device: list[tuple[int, Tensor]]) -> None:
    if on_device:
        lines = [numbers[line, 1:2] for line, _ in on_device]
        torch._foreach_copy_(lines, [lr.reshape(1) for _, lr in on_device])


def _dense(param: Tensor) -> Tensor:
    return torch.empty_strided(tuple(param.shape), stride_of(param), dtype=param.dtype, device=param.device)
