"""The tables that an optimizer owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.engine import tables
from flatbed.engine.tables import Member, TableSteps
from flatbed.errors import FlatbedError
from flatbed.kernels.row import STEPS
from flatbed.rows.gradient import Packed
from flatbed.rows.table import Table

if TYPE_CHECKING:
    from flatbed.engine.optimizer import Optimizer


class OwnedTables:
    """The tables among an optimizer's parameters, their numbers of state, and the steps of each device."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.members: list[Member] = []
        self.shared: dict[torch.device, Tensor] = {}
        self._steps: list[TableSteps] = []
        self._built_for: Any = None

    def __getitem__(self, table: Table) -> Member:
        return next(member for member in self.members if member.table is table)

    def check(self, name: str, table: Table, group: int) -> None:
        """Raise if a table cannot be taken over."""
        tables.check(self.optimizer, table, name)
        options = self.optimizer.param_groups[group]
        table.check_attach(self.optimizer, tables.fields(self.optimizer, options, table))

    def add(self, name: str, table: Table, group: int) -> None:
        """Take a table over; what it remembers of its numbers of state counts."""
        optimizer, rule = self.optimizer, self.optimizer.rule
        options, held = optimizer.param_groups[group], optimizer.state.get(table, {})
        remembered = {} if table.store.claimed else dict(table.store.scalars)
        table.attach(optimizer, tables.fields(optimizer, options, table))
        in_rows = rule.scalars_of_rows(options, per_row_steps=optimizer.per_row_steps)
        member = Member(name, table, group, {}, in_rows)
        for scalar in rule.scalars:
            if scalar not in in_rows:
                first = rule.first_value(options, scalar)
                value = float(held.get(scalar, remembered.get(scalar, first)))
                # Kernels count in fp32, as torch's do. What a class of its own keeps may need more.
                dtype = torch.float64 if rule.update is None else torch.float32
                member.scalars[scalar] = torch.tensor(value, dtype=dtype, device=table.store.device)
        table.numbers = member.scalars
        self.members.append(member)
        self._built_for = None
        self.show(member)

    def show(self, member: Member) -> None:
        """Numbers of state where torch's users look for them."""
        shown = {name: value for name, value in member.scalars.items() if not name.startswith("_")}
        if shown:
            self.optimizer.state[member.table] = shown

    def restore(self, member: Member, scalars: Mapping[str, float]) -> None:
        """Go on from these numbers of state."""
        options = self.optimizer.param_groups[member.group]
        for name, value in member.scalars.items():
            value.fill_(scalars.get(name, self.optimizer.rule.first_value(options, name)))
        self.show(member)

    # ---- a step

    def look(self) -> list[Packed | None]:
        """Gradients of all tables; with several ranks, the mean over them. Errors come before any change."""
        for member in self.members:
            if member.table.owner is not self.optimizer:
                raise FlatbedError(
                    f"table {member.name} has been given to another optimizer since: step that one"
                )
            member.table.raise_bad_ids()
        packs = []
        for member in self.members:
            table = member.table
            table.share_gradients()
            # `model.zero_grad()` does not reach tables: what a step has used must not be used again.
            unused = table.requires_grad and not table.pending.applied
            packs.append(table.pending.packed() if unused else None)
        return packs

    def place(self, packs: list[Packed | None]) -> list[TableSteps]:
        """Steps for the tables of each device, given their gradients."""
        stores = [member.table.store for member in self.members]
        layout = [(store.device, store.tier.record) for store in stores], id(self.optimizer.param_groups)
        if layout != self._built_for:
            self._steps = self._build()
            self._built_for = layout
        given = {id(member): pack for member, pack in zip(self.members, packs, strict=True)}
        for steps in self._steps:
            steps.place([given[id(member)] for member in steps.members])
        for member in self.members:
            member.table.pending.applied = True
        return self._steps

    def _build(self) -> list[TableSteps]:
        devices: dict[torch.device, list[Member]] = {}
        for member in self.members:
            member.follow()
            self.show(member)
            devices.setdefault(member.table.store.device, []).append(member)
        start = torch.zeros(4, dtype=torch.float64, device="cpu")
        start[STEPS] = self.optimizer._rounds
        before = next(iter(self.shared.values()), start)
        self.shared = {d: self.shared.get(d, before.to(d, copy=True)) for d in devices}
        rule, groups = self.optimizer.rule, self.optimizer.param_groups
        return [TableSteps(rule, groups, held, self.shared[d]) for d, held in devices.items()]
