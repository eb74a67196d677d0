"""The tables among an optimizer's parameters: whose rows a step updates, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.reference import clip_factor, round_stochastically, with_number
from flatbed.kernels.rows import RecordLocation
from flatbed.kernels.step import SKIP, SKIPPED, STEPS, ParamSlot, Scaling, Settings
from flatbed.rule import Group, Rule, Tensors
from flatbed.tables.grads import RowGrads, compacted
from flatbed.tables.record import WEIGHT, Field
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

CHUNK_BYTES = 4 << 20  # of weights: what a step makes on the way should not leave the caches
LOW = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Member:
    """A table of an optimizer, and its numbers of state."""

    name: str
    table: Table
    group: int
    scalars: dict[str, Tensor] = field(default_factory=dict)
    """By the rule's names, one per table, on the computing device."""
    row_scalars: tuple[str, ...] = ()
    """Those that are in every record instead."""

    def follow(self) -> None:
        """Numbers go where the table computes."""
        device = self.table.store.device
        for name, value in self.scalars.items():  # in the same dict, which the table knows, too
            self.scalars[name] = value.to(device)


def fields(optimizer: Optimizer, group: Group, table: Table) -> tuple[Field, ...]:
    """What rows have beside their weight under this optimizer."""
    rule, config = optimizer.rule, table.store.config
    dtype = torch.promote_types(config.dtype, torch.float32)
    count = 1 if rule.rowwise else config.dim
    tensors = tuple(
        Field(name, dtype, count, float(rule.first_value(group, name))) for name in rule.state_names(group)
    )
    names = rule.scalars_of_rows(group, per_row_steps=optimizer.per_row_steps)
    numbers = tuple(Field(name, torch.float32, 1, float(rule.first_value(group, name))) for name in names)
    return tensors + numbers


def check(optimizer: Optimizer, table: Table, name: str) -> None:
    """Refuse what a table cannot have, before anything is laid out."""
    dtype = table.store.config.dtype
    if optimizer.master_weights and dtype in LOW:
        raise ValueError(
            f"table {name} is {dtype} and has no room for master weights: make it float32, or use "
            f"stochastic_rounding=True with bfloat16"
        )
    if optimizer.settings.ema_decay is not None:
        raise ValueError(
            f"ema_decay is not for tables (found {name}): rows that are not in a batch would have to move"
        )
    wide = torch.promote_types(dtype, torch.float32)
    if optimizer.state_dtype not in (None, wide):
        raise ValueError(f"the state of table {name} is {wide}; found state_dtype={optimizer.state_dtype}")
    if optimizer.settings.stochastic_rounding and dtype == torch.float16:
        raise FlatbedError(f"stochastic_rounding is for bf16; table {name} is fp16: make it bf16 or fp32")


class TableSteps:
    """Steps of the tables that compute on one device."""

    def __init__(self, rule: Rule, groups: Sequence[Group], members: list[Member], shared: Tensor) -> None:
        self.rule = rule
        self.groups = groups
        self.members = members
        self.device = members[0].table.store.device
        self.shared = shared
        self.packs: list[RowGrads | None] = []
        self._kinds: list[Any] = []
        self._kernels: Any = None

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs hold launches of these steps."""
        return self._kernels is not None and bool(self._kernels.heads.captured)

    def _build(self) -> Any:
        from flatbed.kernels._triton.row_stepper import TritonRows

        heads = []
        for member in self.members:
            empty = torch.empty(0, dtype=torch.float32, device=self.device)
            nowhere = torch.zeros((), device=self.device)
            scalars = {name: member.scalars.get(name, nowhere) for name in self.rule.scalars}
            heads.append(ParamSlot(member.name, empty, member.group, torch.float32, {}, scalars))
        plans = [self._plan(member) for member in self.members]
        return TritonRows(self.rule, self.groups, heads, plans=plans, shared=self.shared)

    def _plan(self, member: Member) -> Any:
        from flatbed.kernels._triton.row_stepper import Plan

        record = member.table.store.record
        names = [name for name in self.rule.state if name in record]
        return Plan(
            dim=record.weight.count,
            weight=record.weight.dtype,
            state=record[names[0]].dtype if names else record.weight.dtype,
            stride=record.nbytes,
            offsets=tuple(record.offsets.get(name, 0) for name in self.rule.state),
            numbers=tuple(record.offsets[name] for name in member.row_scalars),
            has=self.rule.has(self.groups[member.group]),
        )

    # ---- a step

    def place(self, packs: list[RowGrads | None]) -> None:
        """Take gradients, one per table or none."""
        groups = [self.groups[member.group] for member in self.members]
        kinds = [(self.rule.has(g), self.rule.scalars_of_rows(g, per_row_steps=False)) for g in groups]
        if kinds != self._kinds:
            self._follow(kinds)
        self.packs = packs

    def _follow(self, kinds: list[Any]) -> None:
        """Options have changed which state is used. Rows must have had it from the start."""
        for member, (_, of_rows) in zip(self.members, kinds, strict=True):
            wanted = (*self.rule.state_names(self.groups[member.group]), *of_rows)
            missing = [name for name in wanted if name not in member.table.store.record]
            if missing:
                raise FlatbedError(
                    f"an option was changed that needs state of its own ({missing[0]}), for which the rows "
                    f"of table {member.name} have no room: build the optimizer with the option set"
                )
        if self.rule.update is not None and use_triton(self.device):
            self._kernels = self._build()
        self._kinds = kinds

    def squares(self, settings: Settings, scaling: Scaling | None) -> Tensor:
        """A vector whose sum is the squared norm of all gradients as they are."""
        grads = [pack.grads for pack in self.packs if pack is not None]
        if self._kernels is not None:
            partials: Tensor = self._kernels.squares(grads)
            return partials
        squares = [torch.linalg.vector_norm(g).double().square() for g in grads if g.numel()]
        return torch.stack(squares) if squares else torch.zeros(1, dtype=torch.float64, device=self.device)

    def update(self, settings: Settings, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Step."""
        if self._kernels is None:
            self._update(settings, scaling, squares)
        else:
            self._kernels.prepare([pack is not None for pack in self.packs], settings, scaling, squares)
            for index, pack in enumerate(self.packs):
                if pack is not None:
                    self._launch(index, pack, settings)
                    self.members[index].table.pending.clear()
        self.packs = []

    def _launch(self, index: int, pack: RowGrads, settings: Settings) -> None:
        table = self.members[index].table
        store, access = table.store, table.access
        place = access.location_for_update(pack)
        if place is not None:
            weights = pack.weights(store.generation)
            self._kernels.update(index, pack.rows, pack.grads, place, settings, weights=weights)
            store.writes += 1
            return
        records = access.gather(pack.rows).contiguous()
        self._kernels.update(index, pack.rows, pack.grads, RecordLocation(records), settings, staged=True)
        if not bool(self.shared[SKIP]):
            access.scatter_(pack.rows, records)

    # ---- as torch operations

    def _update(self, settings: Settings, scaling: Scaling | None, squares: Tensor | None) -> None:
        norm = None if squares is None else squares.sum().sqrt().float()
        factor, skip = clip_factor(settings, scaling, norm, self.shared)
        self.shared[STEPS] += 1
        self.shared[SKIP] = float(skip)
        self.shared[SKIPPED] += float(skip)
        scale = None if scaling is None else scaling.scale
        # Other noise for every piece of every table, and other than that of parameters.
        self._seeds = count(int(self.shared[STEPS]) * 1_000_003 + 500_000)
        for member, pack in zip(self.members, self.packs, strict=True):
            if pack is None:
                continue
            if skip:
                member.table.pending.clear()
                continue
            pack = compacted(pack)
            grads = pack.grads if scale is None else pack.grads / scale
            grads = grads if factor is None else grads * factor
            self._step(member, RowGrads(pack.rows, grads), settings)
            # Used up: `model.zero_grad()`, which does not reach tables, need not drop it.
            member.table.pending.clear()

    def _step(self, member: Member, pack: RowGrads, settings: Settings) -> None:
        access = member.table.access
        before = {name: float(value) for name, value in member.scalars.items()}
        after = before
        # Whole vectors, so that a row's bits do not depend on where the chunks end.
        size = max(1, CHUNK_BYTES // (pack.grads.shape[1] * 64)) * 16
        if not access.store.in_memory:  # all or nothing
            size = max(1, len(pack.rows))
        for start in range(0, max(1, len(pack.rows)), size):  # a step without rows counts as well
            rows, grads = pack.rows[start : start + size], pack.grads[start : start + size]
            taken = access.read_fields(rows)
            for part, numbers in _alike(taken, member.row_scalars):
                seed = next(self._seeds) if settings.stochastic_rounding else None
                after = self._run(member, taken, part, grads=grads, numbers=before | numbers, seed=seed)
            access.write_fields_(rows, taken)
        for name, value in member.scalars.items():
            value.fill_(after[name])

    def _run(
        self,
        member: Member,
        taken: dict[str, Tensor],
        part: Tensor | None,
        *,
        grads: Tensor,
        numbers: dict[str, float],
        seed: int | None,
    ) -> dict[str, float]:
        """One step of the rule on some of the rows that were taken; returns the numbers after it."""
        rule, group = self.rule, with_number(self.groups[member.group])
        held = taken if part is None else {name: value[part] for name, value in taken.items()}
        weight, grad = held[WEIGHT], grads if part is None else grads[part]
        wide = torch.promote_types(weight.dtype, torch.float32)
        p, grad = weight.to(wide), grad.to(wide)
        fused = rule.fused if self.device.type == "cpu" and len(p) else None
        if group.get("maximize") and fused is None and not rule.sees_to_maximize:
            grad = -grad
        state = {name: [held[name]] for name in rule.state_names(group)}
        scalars = tuple(numbers[name] for name in rule.scalars)
        after = (fused or rule.reference)(group, Tensors([p], [grad], state), scalars)
        if seed is not None and weight.dtype == torch.bfloat16:
            p = round_stochastically(p, seed=seed)
        held[WEIGHT] = p.to(weight.dtype)
        found = dict(zip(rule.scalars, after, strict=True))
        for name in member.row_scalars:
            held[name] = torch.full_like(held[name], found[name])
        if part is not None:
            for name, value in held.items():
                taken[name][part] = value
        return found


def _alike(
    taken: dict[str, Tensor], names: tuple[str, ...]
) -> Iterator[tuple[Tensor | None, dict[str, float]]]:
    """Rows whose own numbers are equal, together; None stands for all of them."""
    if not names or not len(taken[names[0]]):
        yield None, dict.fromkeys(names, 0.0)
        return
    numbers = torch.cat([taken[name] for name in names], dim=1)
    kinds, which = torch.unique(numbers, dim=0, return_inverse=True)
    for i, kind in enumerate(kinds.tolist()):
        part = None if len(kinds) == 1 else (which == i).nonzero().flatten()
        yield part, dict(zip(names, kind, strict=True))
