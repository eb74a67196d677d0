"""The step of parameters on one GPU: tables of addresses, and launches of the kernels that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from flatbed.kernels._triton.coefficients import (
    COLUMNS,
    EMA,
    FIRST_BLOCK,
    GROUP,
    MASTER,
    MAX_PARTIALS,
    NUMEL,
    PARAM,
    SCALARS,
    STATES,
    Coefficients,
)
from flatbed.kernels._triton.launch import TYPES, Launch, element, shared_kernel
from flatbed.kernels._triton.update import BLOCK, squares_kernel, update_kernel
from flatbed.kernels.step import (
    Grads,
    ParamSlot,
    Scaling,
    StepOptions,
    in_order,
    is_whole,
    squares_of,
    stride_of,
)
from flatbed.rule import Group, Rule


class LaunchKey(NamedTuple):
    """The properties that the parameters of one launch share."""

    has: int
    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool
    ema: bool
    norm_class: int

    @staticmethod
    def of(slot: ParamSlot, rule: Rule) -> LaunchKey:
        has = sum(1 << bit for bit, name in enumerate(rule.state) if name in slot.state)
        master, ema = slot.master is not None, slot.ema is not None
        dtypes = slot.param.dtype, slot.grad_dtype, slot.state_dtype
        return LaunchKey(has, *dtypes, master, ema, slot.norm_class)

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.param, torch.float32)

    @property
    def vector(self) -> int:
        """Elements that a thread loads at once: 16 bytes of the widest dtype."""
        used = [self.param, self.grad]
        used += [self.state] if self.has else []
        used += [self.compute] if self.master or self.ema else []
        return 16 // max(dtype.itemsize for dtype in used)


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """The blocks of all parameters with one launch key."""

    key: LaunchKey
    blocks: Tensor  # int32: the slot of each block
    partials: Tensor  # output of `squares`
    blocks_per_partial: int
    salt: int


class TritonStepper:
    """Applies a rule to parameters on one GPU, or on the CPU under Triton's interpreter."""

    def __init__(
        self, rule: Rule, groups: Sequence[Group], slots: list[ParamSlot], step_stats: Tensor
    ) -> None:
        self.rule = rule
        self.slots = slots
        self.device = slots[0].param.device
        # A parameter with holes is updated in a dense copy.
        self._copies = {i: _dense(slot.param) for i, slot in enumerate(slots) if not is_whole(slot.param)}
        self._empty = [i for i, slot in enumerate(slots) if slot.param.numel() == 0]
        self._table, self._groups, self._partials = self._build()
        blocks = [group.blocks for group in self._groups]
        self._coefficients = Coefficients(
            rule, groups, self._table, step_stats=step_stats, partials=self._partials, also_used=blocks
        )
        sizes: dict[int, int] = {}
        for group in self._groups:  # those of one norm class are neighbours
            sizes[group.key.norm_class] = sizes.get(group.key.norm_class, 0) + len(group.partials)
        pieces = torch.split(self._partials, [*sizes.values()])
        self._squares_by_class = dict(zip(sizes, pieces, strict=True))
        self.whole_grads: Grads | None = None
        """The gradients that the norm measures, if slots are parts of whole parameters."""
        self._squares: list[Launch] = []
        self._updates: list[Launch] = []
        self._ordered: list[Tensor] = []

    def _build(self) -> tuple[Tensor, list[LaunchGroup], Tensor]:
        keys: dict[LaunchKey, list[int]] = {}
        for i, slot in enumerate(self.slots):
            keys.setdefault(LaunchKey.of(slot, self.rule), []).append(i)
        keys = dict(sorted(keys.items(), key=lambda item: item[0].norm_class))
        table = np.zeros((len(self.slots), COLUMNS), np.int64)
        found = []
        for key, indices in keys.items():
            counts = np.array([-(-self.slots[i].param.numel() // BLOCK) for i in indices])
            for i, first in zip(indices, np.cumsum(counts) - counts, strict=True):
                self._fill(table[i], i, int(first))
            blocks = torch.from_numpy(np.repeat(np.array(indices, np.int32), counts)).to(self.device)
            per_partial = max(1, -(-len(blocks) // MAX_PARTIALS))
            found.append((key, blocks, per_partial, -(-len(blocks) // per_partial)))
        sizes = [n_partials for *_, n_partials in found]
        partials = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        groups = [
            LaunchGroup(key, blocks, piece, per_partial, salt)
            for salt, ((key, blocks, per_partial, _), piece) in enumerate(
                zip(found, torch.split(partials, sizes), strict=True)
            )
        ]
        return torch.from_numpy(table).to(self.device), groups, partials

    def _fill(self, line: np.ndarray[Any, Any], i: int, first_block: int) -> None:
        slot = self.slots[i]
        line[FIRST_BLOCK] = first_block
        line[NUMEL] = slot.param.numel()
        line[GROUP] = slot.group
        line[PARAM] = self._copies.get(i, slot.param).data_ptr()
        line[MASTER] = 0 if slot.master is None else slot.master.data_ptr()
        line[EMA] = 0 if slot.ema is None else slot.ema.data_ptr()
        for column, name in enumerate(self.rule.scalars):
            line[SCALARS + column] = slot.scalars[name].data_ptr()
        for column, name in enumerate(self.rule.state):
            line[STATES + column] = slot.state[name].data_ptr() if name in slot.state else 0

    # ---- a step

    @property
    def captured(self) -> bool:
        return self._coefficients.captured

    def set_grads(self, grads: Grads, addresses: list[int], unordered: frozenset[int]) -> None:
        """Take one gradient per slot. Those in `unordered` differ from their parameter in element order."""
        # Copies must live until the kernels have read them.
        copies = {i: in_order(self.slots[i].param, cast(Tensor, grads[i])) for i in unordered}
        self._ordered = list(copies.values())
        if copies or self._empty:
            addresses = list(addresses)
        for i, copy in copies.items():
            addresses[i] = copy.data_ptr()
        for i in self._empty:
            # An empty gradient has no address. Kernels only test that there is one.
            addresses[i] = 0 if grads[i] is None else self._table.data_ptr()
        self._coefficients.upload_addresses(addresses)

    def squares(self, options: StepOptions) -> dict[int, Tensor]:
        if self.whole_grads is not None:
            return squares_of(self.slots, self.whole_grads)
        launches = self._squares
        if not launches or self._coefficients.capturing:
            launches = self._bind_squares()
        for launch in launches:
            launch()
        return self._squares_by_class

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        self._coefficients.prepare(options, scaling, squares)
        for i, copy in self._copies.items():
            copy.copy_(self.slots[i].param)
        launches = self._updates
        if not launches or self._coefficients.capturing:
            launches = self._bind_updates(options)
        for launch in launches:
            launch()
        for i, copy in self._copies.items():
            self.slots[i].param.copy_(copy)
        self._ordered = []

    # A captured step has tables of its own, so that its launches are not kept.

    def _bind_squares(self) -> list[Launch]:
        launches = []
        for group in self._groups:
            grad = group.key.grad
            kernel = shared_kernel(squares_kernel, TYPES[grad], 16 // grad.itemsize, BLOCK, num_warps=2)
            memory = self._table, self._coefficients.arguments.grads, group.blocks, group.partials
            sizes = len(group.blocks), group.blocks_per_partial
            launches.append(kernel.bind(len(group.partials), (*memory, *sizes)))
        if not self._coefficients.capturing:
            self._squares = launches
        return launches

    def _bind_updates(self, options: StepOptions) -> list[Launch]:
        launches, coefficients = [], self._coefficients
        for group in self._groups:
            key = group.key
            stochastic = options.stochastic_rounding and key.param == torch.bfloat16 and not key.master
            stochastic_state = options.stochastic_state and key.state == torch.bfloat16
            types = (TYPES[dtype] for dtype in (key.param, key.grad, key.state, key.compute))
            flags = key.master, key.ema, stochastic, stochastic_state
            constants = (element(self.rule.update), key.has, *types, *flags, key.vector, BLOCK)
            memory = self._table, coefficients.arguments.grads, coefficients.values, coefficients.step_stats
            numbers = 1.0 - (options.ema_decay or 0.0), group.salt
            kernel = shared_kernel(update_kernel, *constants)
            launches.append(kernel.bind(len(group.blocks), (*memory, group.blocks, *numbers)))
        if not coefficients.capturing:
            self._updates = launches
        return launches


def _dense(param: Tensor) -> Tensor:
    return torch.empty_strided(tuple(param.shape), stride_of(param), dtype=param.dtype, device=param.device)
