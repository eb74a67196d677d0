"""The step of the tables of one device: their rows, updated by kernels or in torch operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.distributed.channel import Channel
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.locations import RecordLocation
from flatbed.kernels.step import SKIP, STEPS, Scaling, StepOptions, Update, begin_step, update_rows
from flatbed.rule import Group, Rule
from flatbed.tables.grads import RowGrads, compacted
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.kernels._triton.row_step import TableLayout, TritonRows

CHUNK_BYTES = 4 << 20  # of weights: temporaries of an update should stay in the CPU's caches


@dataclass(slots=True)
class TableSlot:
    """A table as the step sees it. Its scalars, such as the step count, are `table._store.scalars`."""

    name: str
    table: Table
    group: int
    row_scalars: tuple[str, ...]
    """The scalars that are in the record of each row."""


class TableStepper:
    """Updates the rows of the tables that compute on one device."""

    def __init__(
        self, rule: Rule, groups: Sequence[Group], slots: list[TableSlot], step_stats: Tensor
    ) -> None:
        self.rule = rule
        self.groups = groups
        self.slots = slots
        self.step_stats = step_stats
        self.device = step_stats.device
        self.packs: list[RowGrads | None] = []
        for slot in slots:
            _check_fields(rule, slot, groups[slot.group])
        self._kernels: TritonRows | None = None
        if rule.update is not None and use_triton(self.device):
            from flatbed.kernels._triton.row_step import TritonRows

            layouts = [_table_layout(rule, slot, groups[slot.group]) for slot in slots]
            self._kernels = TritonRows(rule, groups, layouts, step_stats)

    @property
    def captured(self) -> bool:
        return self._kernels is not None and self._kernels.coefficients.captured

    def squares(self, options: StepOptions) -> dict[int, Tensor]:
        """Return a vector whose sum is the squared norm, the same on ranks of sharded tables."""
        whole: list[Tensor] = []
        sharded: dict[Channel, list[Tensor]] = {}
        for slot, pack in zip(self.slots, self.packs, strict=True):
            shards = slot.table._shards
            if pack is not None:
                (whole if shards is None else sharded.setdefault(shards.channel, [])).append(pack.grads)
        found = [self._squares(whole)]
        for channel, grads in sharded.items():
            own = self._squares(grads).sum()
            found.append(channel.gather(own, doing="the norm of gradients").flatten())
        return {0: torch.cat(found) if sharded else found[0]}

    def _squares(self, grads: list[Tensor]) -> Tensor:
        if self._kernels is not None and grads:
            return self._kernels.squares(grads)
        squares = [torch.linalg.vector_norm(g).double().square() for g in grads if g.numel()]
        zero = torch.zeros(1, dtype=torch.float64, device=self.device)
        return torch.stack(squares) if squares else zero

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Update the rows that have a gradient."""
        if self._kernels is not None:
            present = [pack is not None for pack in self.packs]
            self._kernels.prepare_coefficients(present, options, scaling, squares)
            skip, factor = False, None
        else:
            norm = None if squares is None else squares.sum().sqrt().float()
            factor, skip = begin_step(options, scaling, norm, self.step_stats)
        scale = None if scaling is None else scaling.scale
        # Noise differs between chunks and tables, and from that of parameters.
        seeds = count(int(self.step_stats[STEPS]) * 1_000_003 + 500_000) if self._kernels is None else None
        for index, (slot, pack) in enumerate(zip(self.slots, self.packs, strict=True)):
            if pack is None:
                continue
            if self._kernels is not None:
                self._launch(self._kernels, index, pack, options)
            elif not skip:
                fused = self.rule.fused is not None and self.device.type == "cpu"
                update = Update(self.rule, self.groups[slot.group], fused, scale, factor)
                _update_in_chunks(
                    slot, compacted(pack), update, seeds if options.stochastic_rounding else None
                )
        self.packs = []

    def _launch(self, kernels: TritonRows, index: int, pack: RowGrads, options: StepOptions) -> None:
        store, access = self.slots[index].table._store, self.slots[index].table._local_rows
        location, batch = access.location_for(pack.batch, update=True), pack.batch
        if location is not None:
            weights = None if batch is None else batch.weights
            if batch is not None and weights is not None and batch.generation != store.generation:
                weights = None  # rows have changed since the lookup
            kernels.update(index, pack.rows, pack.grads, location, options, weights=weights)
            store.writes += 1
            return
        records = access.gather(pack.rows).contiguous()
        kernels.update(index, pack.rows, pack.grads, RecordLocation(records), options, staged=True)
        if not bool(self.step_stats[SKIP]):
            access.scatter_(pack.rows, records)


def _check_fields(rule: Rule, slot: TableSlot, group: Group) -> None:
    """Raise if an option was changed that needs state for which the records have no room."""
    needed = (*rule.state_names(group), *rule.scalars_of_rows(group, per_row_steps=False))
    missing = [name for name in needed if name not in slot.table._store.record]
    if missing:
        raise FlatbedError(
            f"a changed option needs state ({missing[0]}) that the rows of table {slot.name} do not have: "
            f"build the optimizer with the option set"
        )


def _table_layout(rule: Rule, slot: TableSlot, group: Group) -> TableLayout:
    from flatbed.kernels._triton.row_step import TableLayout

    record = slot.table._store.record
    names = [name for name in rule.state if name in record]
    return TableLayout(
        group=slot.group,
        scalars=slot.table._store.scalars,
        dim=record.weight.count,
        weight=record.weight.dtype,
        state=record[names[0]].dtype if names else record.weight.dtype,
        stride=record.nbytes,
        state_offsets=tuple(record.offsets.get(name, 0) for name in rule.state),
        scalar_offsets=tuple(record.offsets[name] for name in slot.row_scalars),
        has=rule.has(group),
    )


def _update_in_chunks(slot: TableSlot, pack: RowGrads, update: Update, seeds: Any) -> None:
    """Read, update and write rows in torch operations."""
    access = slot.table._local_rows
    before = {name: float(value) for name, value in slot.table._store.scalars.items()}
    after: Mapping[str, float] = before
    # Whole vectors, so that a row's bits do not depend on where the chunks end.
    size = max(1, CHUNK_BYTES // (pack.grads.shape[1] * 64)) * 16
    if not access.store.in_memory:  # a file's rows are written all or none
        size = max(1, len(pack.rows))
    for start in range(0, max(1, len(pack.rows)), size):  # a step without rows counts too
        rows, grads = pack.rows[start : start + size], pack.grads[start : start + size]
        fields = access.read_fields(rows)
        if not len(rows):
            update = Update(update.rule, update.group, False, update.scale, update.factor)
        after = update_rows(update, fields, grads, scalars=before, row_scalars=slot.row_scalars, seeds=seeds)
        access.write_fields_(rows, fields)
    for name, value in slot.table._store.scalars.items():
        value.fill_(after[name])
