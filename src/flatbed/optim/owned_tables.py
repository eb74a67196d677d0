"""The tables that an optimizer owns."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.distributed.ranks import world_size
from flatbed.errors import FlatbedError
from flatbed.kernels.step import STEPS
from flatbed.optim import table_step as tables
from flatbed.optim.table_step import Member, TableSteps
from flatbed.tables.grads import RowGrads
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer


class OwnedTables:
    """The tables among an optimizer's parameters, their numbers of state, and the steps of each device."""

    def __init__(self, optimizer: Optimizer) -> None:
        # A cycle would keep an optimizer alive that nobody has, and its tables would look cared for.
        self._optimizer = weakref.ref(optimizer)
        self.members: list[Member] = []
        self.shared: dict[torch.device, Tensor] = {}
        self._steps: list[TableSteps] = []
        self._retired: list[TableSteps] = []  # captured graphs still read their tables
        self._built_for: Any = None
        self._known_groups: Any = None

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def __getitem__(self, table: Table) -> Member:
        return next(member for member in self.members if member.table is table)

    def check(self, name: str, table: Table, group: int) -> None:
        """Raise if a table cannot be taken over."""
        tables.check(self.optimizer, table, name)
        options = self.optimizer.param_groups[group]
        table.check_attach(self.optimizer, tables.fields(self.optimizer, options, table))
        counted = {scalar for scalar in self.optimizer.rule.scalars if not scalar.startswith("_")}
        known = {scalar for scalar in table.store.scalars if not scalar.startswith("_")}
        in_rows = self.optimizer.rule.scalars_of_rows(options, per_row_steps=self.optimizer.per_row_steps)
        if not table.store.state_owned and known and known != counted - set(in_rows):
            raise FlatbedError(
                f"table {name} comes with state of another optimizer than {type(self.optimizer).__name__}: "
                f"its numbers are {sorted(known)}, expected {sorted(counted)}. Give it to the one it was "
                f"trained with, or call table.drop_state() first to begin anew"
            )

    def add(self, name: str, table: Table, group: int) -> None:
        """Take a table over; what it remembers of its numbers of state counts."""
        optimizer, rule = self.optimizer, self.optimizer.rule
        options, held = optimizer.param_groups[group], optimizer.state.get(table, {})
        remembered = {} if table.store.state_owned else dict(table.store.scalars)
        counts = any(not scalar.startswith("_") for scalar in rule.scalars)
        adopted = not table.store.state_owned and bool(table.store.record.state)
        stepped = bool(remembered) if counts else adopted  # what has state has been through a step
        table.attach(optimizer, tables.fields(optimizer, options, table))
        in_rows = rule.scalars_of_rows(options, per_row_steps=optimizer.per_row_steps)
        member = Member(name, table, group, {}, in_rows)
        for scalar in rule.scalars:
            if scalar not in in_rows:
                first = rule.first_value(options, scalar)
                if stepped and scalar.startswith("_"):
                    first = 1.0
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
        held = self.optimizer.state.get(member.table, {})
        if shown and not (held.keys() == shown.keys() and all(held[n] is v for n, v in shown.items())):
            self.optimizer.state[member.table] = shown  # which has all places looked up anew

    def restore(self, member: Member, scalars: Mapping[str, float]) -> None:
        """Go on from these numbers of state."""
        options = self.optimizer.param_groups[member.group]
        for name, value in member.scalars.items():
            value.fill_(scalars.get(name, self.optimizer.rule.first_value(options, name)))
        self.show(member)

    # ---- a step

    def look(self) -> list[RowGrads | None]:
        """Gradients of all tables; with several ranks, the mean over them. Errors come before any change."""
        self._follow_groups()
        several, capturing = world_size() > 1, _capturing()
        if several:
            self._refuse_norms_that_differ()
            if capturing:
                raise FlatbedError("with several ranks, a step with tables cannot be part of a CUDA graph")
        for member in self.members:
            if member.table.owner is not self.optimizer:
                raise FlatbedError(
                    f"table {member.name} has been given to another optimizer since: step that one"
                )
            if member.table.deferred_checks and not capturing:
                member.table.raise_bad_ids()
        packs = []
        for member in self.members:
            table = member.table
            table.pending.check_capture(capturing)
            if several:
                table.share_gradients()
            if not table.trains:
                table.pending.clear()
            packs.append(table.pending.packed())
        for member, pack in zip(self.members, packs, strict=True):
            if pack is not None:
                member.table.access.reserve_space(pack)
        return packs

    def _follow_groups(self) -> None:
        """Groups may have been edited by hand: a table that is in none of them is not trained any more."""
        groups = self.optimizer.param_groups
        known = [[id(param) for param in group["params"] if isinstance(param, Table)] for group in groups]
        if known == self._known_groups:
            return
        held = {one: number for number, found in enumerate(known) for one in found}
        if held.keys() - {id(member.table) for member in self.members}:
            raise FlatbedError("a table was put into a param group by hand: use optimizer.add_param_group")
        self.members = [member for member in self.members if id(member.table) in held]
        for member in self.members:
            member.group = held[id(member.table)]
        self._known_groups, self._built_for = known, None

    def _refuse_norms_that_differ(self) -> None:
        """A table that is no replica has another gradient on every rank, and so would have the norm."""
        if not self.optimizer.settings.normed:
            return
        apart = [member.name for member in self.members if not member.table.replicate]
        if 0 < len(apart) < len(self.members):  # whoever replicates nothing sees to it by himself
            raise FlatbedError(
                f"max_norm and skip_nonfinite with table {apart[0]} (replicate=False): the norm would differ "
                f"from rank to rank, and with it what all of them should share. Give the table an optimizer "
                f"of its own"
            )

    def place(self, packs: list[RowGrads | None]) -> list[TableSteps]:
        """Steps for the tables of each device, given their gradients."""
        stores = [member.table.store for member in self.members]
        layout = (
            [(store.device, store.ensure_layout().record) for store in stores],
            id(self.optimizer.param_groups),
        )
        if layout != self._built_for:
            if _capturing():
                raise FlatbedError("take one eager step with the tables before the capture of a CUDA graph")
            self._retired += [steps for steps in self._steps if steps.captured]
            self._steps = self._build()
            self._built_for = layout
        given = {id(member): pack for member, pack in zip(self.members, packs, strict=True)}
        for steps in self._steps:
            steps.place([given[id(member)] for member in steps.members])
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


def _capturing() -> bool:
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call,unused-ignore]
