"""The tables of an optimizer: ownership, state in their records, and the step of their rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.distributed.channel import Channel
from flatbed.distributed.ranks import rank, world_size
from flatbed.errors import FlatbedError
from flatbed.kernels import RecordLocation, use_triton
from flatbed.kernels.step import SKIP, STEPS, Scaling, StepOptions, Update, begin_step, update_rows
from flatbed.optim.options import LOW, named_params
from flatbed.rule import Group, Rule
from flatbed.tables.grad_exchange import exchange_grads
from flatbed.tables.grads import RowGrads, compacted
from flatbed.tables.record import Field
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.kernels._triton.row_step import TritonRows
    from flatbed.optim.optimizer import Optimizer

CHUNK_BYTES = 4 << 20  # of weights: temporaries of an update should stay in the CPU's caches


@dataclass(slots=True)
class OwnedTable:
    """A table of an optimizer. Its scalars, such as the step count, are `table._store.scalars`."""

    name: str
    table: Table
    group: int
    row_scalars: tuple[str, ...]
    """The scalars that are in the record of each row."""
    total: RowGrads | None = None
    """The gradients of the present step."""


class TableStepper:
    """Updates the rows of the tables that compute on one device."""

    def __init__(
        self,
        rule: Rule,
        groups: Sequence[Group],
        tables: list[OwnedTable],
        step_stats: Tensor,
        norm_group: Any = None,
    ) -> None:
        self.rule = rule
        self.groups = groups
        self.tables = tables
        self.step_stats = step_stats
        self.device = step_stats.device
        self._norm_ranks = {rank()} if norm_group is None else {*dist.get_process_group_ranks(norm_group)}
        for owned in tables:
            _check_fields(rule, owned, groups[owned.group])
        self._kernels: TritonRows | None = None
        if rule.update is not None and use_triton(self.device):
            from flatbed.kernels._triton.row_step import TableLayout, TritonRows

            layouts = []
            for owned in tables:
                store, has = owned.table._store, rule.has(groups[owned.group])
                layouts.append(TableLayout(owned.group, has, store.scalars, owned.row_scalars, store.record))
            self._kernels = TritonRows(rule, groups, layouts, step_stats)

    @property
    def captured(self) -> bool:
        return self._kernels is not None and self._kernels.coefficients.captured

    def squares(self) -> dict[int, Tensor]:
        """Return a vector whose sum is the squared norm. It is equal on ranks that share tables.

        The ranks of a `norm_group` add up their sums. If several of them share a table, each counts a part.
        """
        own: list[Tensor] = []
        replicas: list[Tensor] = []
        sharded: dict[Channel, list[Tensor]] = {}
        for owned in self.tables:
            shards = owned.table._shards
            if owned.total is not None:
                held = replicas if owned.table.replicate and len(self._norm_ranks) > 1 else own
                held = held if shards is None else sharded.setdefault(shards.channel, [])
                held.append(owned.total.grads)
        found = [self._squares(own)]
        if replicas:
            found.append(self._squares(replicas) / len(self._norm_ranks))
        for channel, grads in sharded.items():
            sums = channel.gather(self._squares(grads).sum(), doing="the norm of gradients").flatten()
            n_sharing = len(self._norm_ranks.intersection(channel.ranks))
            found.append(sums if n_sharing == 1 else sums / n_sharing)
        return {0: found[0] if len(found) == 1 else torch.cat(found)}

    def _squares(self, grads: list[Tensor]) -> Tensor:
        square = _squared_norm if self._kernels is None else self._kernels.sum_squares
        parts = [square(g) for g in grads if g.numel()]
        return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64, device=self.device)

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Update the rows that have a gradient."""
        kernels = self._kernels
        if kernels is None:
            self._update_in_torch(options, scaling, squares)
            return
        kernels.coefficients.begin_step([int(owned.total is not None) for owned in self.tables])
        kernels.coefficients.prepare(options, scaling, squares)
        for index, owned in enumerate(self.tables):
            total, owned.total = owned.total, None
            if total is None:
                continue
            store, row_io, batch = owned.table._store, owned.table._local_io, total.batch
            location = store.location_for(batch)
            if location is not None:
                capturing, weights = is_capturing(self.device), None
                store.has_steps_in_graphs |= capturing
                # Replays change rows, too, and the host does not count them.
                counts_all = capturing or not store.has_steps_in_graphs
                if batch is not None and batch.weights is not None and batch.generation == store.generation:
                    # Read again for the same kernel: a later capture could not load it.
                    weights = batch.weights if counts_all else row_io.weights(total.rows, batch)
                kernels.update_rows(index, total.rows, total.grads, location, options, weights=weights)
                store.writes += 1
                continue
            records = row_io.gather(total.rows).contiguous()
            kernels.update_rows(index, total.rows, total.grads, RecordLocation(records), options, staged=True)
            if not bool(self.step_stats[SKIP]):
                row_io.scatter_(total.rows, records)

    def _update_in_torch(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        norm = None if squares is None else squares.sum().sqrt().float()
        factor, skip = begin_step(options, scaling, norm, self.step_stats)
        scale = None if scaling is None else scaling.scale
        fused = self.rule.fused is not None and self.device.type == "cpu"
        # Chunks, tables and parameters all get different noise.
        seeds = count(int(self.step_stats[STEPS]) * 1_000_003 + 500_000)
        for owned in self.tables:
            total, owned.total = owned.total, None
            if total is not None and not skip:
                update = Update(self.rule, self.groups[owned.group], fused, scale, factor)
                own_seeds = seeds if options.stochastic_rounding else None
                _update_in_chunks(owned, compacted(total), update, own_seeds)


def _squared_norm(grad: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grad)
    return norm.double().square().reshape(1)


def _check_fields(rule: Rule, owned: OwnedTable, group: Group) -> None:
    """Raise if an option was changed that needs state for which the records have no room."""
    needed = (*rule.state_names(group), *rule.scalars_of_rows(group, per_row_steps=False))
    missing = [name for name in needed if name not in owned.table._store.record]
    if missing:
        raise FlatbedError(
            f"a changed option needs state ({missing[0]}) that the rows of table {owned.name} do not have: "
            f"build the optimizer with the option set"
        )


def _update_in_chunks(owned: OwnedTable, total: RowGrads, update: Update, seeds: Any) -> None:
    """Read, update and write rows in torch operations."""
    row_io = owned.table._local_io
    before = {name: float(value) for name, value in owned.table._store.scalars.items()}
    after: Mapping[str, float] = before
    # Whole vectors, so that a row's bits do not depend on where the chunks end.
    size = max(1, CHUNK_BYTES // (total.grads.shape[1] * 64)) * 16
    if not row_io.store.in_memory:  # rows of a file are written in one call: all of them, or none
        size = max(1, len(total.rows))
    for start in range(0, max(1, len(total.rows)), size):  # a step without rows counts too
        rows, grads = total.rows[start : start + size], total.grads[start : start + size]
        fields = row_io.read_fields(rows)
        if not len(rows):
            update = replace(update, fused=False)
        after = update_rows(update, fields, grads, scalars=before, row_scalars=owned.row_scalars, seeds=seeds)
        row_io.write_fields_(rows, fields)
    for name, value in owned.table._store.scalars.items():
        value.fill_(after[name])


def _refuse_mixed_grads(owned: OwnedTable) -> None:
    owned.table.grad = None
    raise FlatbedError(
        f"table {owned.name} has gradients from outside of this CUDA graph, or from inside of another: "
        f"capture lookup, backward and optimizer.step() in one CUDA graph, after optimizer.zero_grad()"
    )


def state_fields(owner: Optimizer, group: Group, table: Table) -> tuple[Field, ...]:
    """Return the fields of a record besides the weight."""
    rule, config = owner._rule, table._store.config
    dtype = torch.promote_types(config.dtype, torch.float32)
    count = 1 if rule.rowwise else config.dim
    kinds: dict[str, tuple[torch.dtype, int]] = dict.fromkeys(rule.state_names(group), (dtype, count))
    kinds |= dict.fromkeys(owner._row_scalars(group), (torch.float32, 1))
    return tuple(Field(name, *kind, float(rule.first_value(group, name))) for name, kind in kinds.items())


def check_table(owner: Optimizer, name: str, table: Table, group: Group) -> None:
    """Raise if a table cannot be trained with these options, or holds state of another optimizer."""
    options, dtype, kind = owner._options, table._store.config.dtype, type(owner).__name__
    wide = torch.promote_types(dtype, torch.float32)
    is_low, is_half = dtype in LOW, dtype == torch.float16
    for is_wrong, option, reason in (
        (options.master_weights and is_low, "master_weights", "there is no room for them: make it float32"),
        (options.ema_decay is not None, "ema_decay", "it would change rows outside the batch: leave it out"),
        (options.state_dtype not in (None, wide), "state_dtype", f"its state is {wide}"),
        (options.stochastic_rounding and is_half, "stochastic_rounding", "make it bfloat16 or float32"),
    ):
        if is_wrong:
            raise ValueError(f"{option} is not for table {name} of {dtype}: {reason}")
    table._check_attach(owner, state_fields(owner, group, table))
    had_state = any(value is None for value in owner.state.get(table, {}).values())  # None: it is in records
    if had_state and table._store.state_owned and table._owner is not owner:
        raise FlatbedError(
            f"table {name} has lost the state of this {kind} since: its rows hold that of one optimizer, and "
            f"another one took it, or drop_state() dropped it. `del optimizer.state[table]` starts again"
        )
    expected = set(owner._rule.shown_scalars) - set(owner._row_scalars(group))
    known = {scalar for scalar in table._store.scalars if not scalar.startswith("_")}
    if not table._store.state_owned and known and known != expected:
        raise FlatbedError(
            f"table {name} holds state of another optimizer than {kind}: its scalars are "
            f"{sorted(known)}, expected {sorted(expected)}. Give it to the optimizer it was trained with, or "
            f"call table.drop_state() first to start again"
        )
    trained_by = table._store.optimizer
    if not table._store.state_owned and trained_by not in (None, kind):
        warnings.warn(
            f"table {name} holds the state of {trained_by}, and {kind} goes on with it: build "
            f"{trained_by}, or call table.drop_state() first, if that is not meant",
            stacklevel=4,
        )


class OptimizerTables:
    """The tables of one optimizer, and a stepper for each of their devices."""

    def __init__(self, rule: Rule) -> None:
        self.owned: list[OwnedTable] = []
        self._switches = [name for name in (*rule.state.values(), *rule.row_scalars.values()) if name]
        """The options that decide which state there is."""
        self._steppers: list[TableStepper] = []
        self._retired: list[TableStepper] = []  # former steppers, since CUDA graphs hold their launches
        self._built_from: Any = None

    # ---- ownership

    def add(self, owner: Optimizer, name: str, table: Table, number: int) -> None:
        """Make the optimizer own a table. State and scalars from a file or a copy are continued."""
        again = [owned for owned in self.owned if owned.table is table]  # its former group was removed
        if again and table._owner is owner:
            again[0].name, again[0].group = name, number
            return
        self.owned = [owned for owned in self.owned if owned.table is not table]
        rule, group, store = owner._rule, owner.param_groups[number], table._store
        owned = OwnedTable(name, table, number, owner._row_scalars(group))
        remembered = {} if store.state_owned else dict(store.scalars)
        # State from elsewhere has been through a step.
        has_state = not store.state_owned and bool(store.record.state)
        stepped = bool(remembered) if rule.shown_scalars else has_state
        table._attach(owner, state_fields(owner, group, table))
        hidden = dict.fromkeys(rule.hidden_scalars, 1.0) if stepped else {}
        shown = {name: value for name, value in owner.state.get(table, {}).items() if value is not None}
        store.scalars, store.optimizer = hidden | remembered | shown, type(owner).__name__
        self.owned.append(owned)
        self.publish(owner, owned)

    def publish(self, owner: Optimizer, owned: OwnedTable) -> None:
        """Complete a table's scalars, as tensors on its computing device, and show them in the state.

        State in the records is shown as None: `torch.distributed.checkpoint` loads by the names of the
        present state.
        """
        rule, group, store = owner._rule, owner.param_groups[owned.group], owned.table._store
        # Kernels count in fp32, as torch does. Scalars of torch's own classes may need more.
        dtype = torch.float64 if rule.update is None else torch.float32
        scalars: dict[str, Any] = {}
        for name in rule.scalars:
            if name not in owned.row_scalars:
                value = store.scalars.get(name, rule.first_value(group, name))
                if not (isinstance(value, Tensor) and (value.device, value.dtype) == (store.device, dtype)):
                    value = torch.tensor(float(value), dtype=dtype, device=store.device)
                    self._built_from = None  # steppers have the addresses of the former scalars
                scalars[name] = value
        store.scalars = scalars
        shown = {name: scalars[name] for name in rule.shown_scalars if name in scalars}
        shown |= dict.fromkeys((*rule.state_names(group), *owned.row_scalars))
        held = owner.state.get(owned.table)
        odd = (held or {}).keys() - {*shown, *rule.state, *rule.scalars, *rule.shown_scalars}
        if odd:  # state of a wrapper, Lookahead for example
            raise FlatbedError(
                f"{sorted(odd)} in the state of {owned.table!r} would be lost: a table's rows have the "
                "state of the optimizer itself, and no other. Leave tables out of what wraps the optimizer"
            )
        if held is None or [*map(id, held.values())] != [*map(id, shown.values())]:
            owner.state[owned.table] = shown

    def sync(self, owner: Optimizer) -> None:
        """Follow edits of the groups: a table that is in none of them is no longer trained."""
        params = named_params(owner.param_groups)
        found = {id(table): number for _, table, number in params if isinstance(table, Table)}
        self.owned = [owned for owned in self.owned if id(owned.table) in found]
        self.check_owned(owner)
        for owned in self.owned:
            owned.group = found[id(owned.table)]
            self.publish(owner, owned)

    def check_owned(self, owner: Optimizer) -> None:
        """Raise if a table has another optimizer now: its rows and scalars have the state of that one."""
        for owned in self.owned:
            if owned.table._owner is not owner:
                raise FlatbedError(
                    f"table {owned.name} has been given to another optimizer since, or drop_state() dropped "
                    f"its state: use that one, or build this {type(owner).__name__} again"
                )

    # ---- a step

    def prepare_step(self, owner: Optimizer) -> list[TableStepper]:
        """Give all tables' gradients to their steppers, with several ranks the mean; return the steppers.

        Returns an empty list if no table has a gradient. Errors are raised before anything changes.
        """
        several, groups = world_size() > 1, owner.param_groups
        capturing = any(map(is_capturing, {owned.table._store.device for owned in self.owned}))
        if several:
            self._refuse_on_several_ranks(owner, capturing=capturing)
        self.check_owned(owner)
        for owned in self.owned:
            table = owned.table
            if table._deferred_checks.pending and not capturing:
                table._raise_bad_ids()
            for part in table._grads.parts:
                if part.captured != capturing:
                    _refuse_mixed_grads(owned)
        for owned in self.owned:
            if several:
                exchange_grads(owned.table)
            owned.total = owned.table._grads.total()
        for owned in self.owned:
            if owned.total is not None and owned.table._store.config.storage == "disk":
                owned.table._local_io.reserve_space(owned.total)
        if not any(owned.total for owned in self.owned):
            return []
        options = [[group[name] != 0 for name in self._switches] for group in groups]
        key: list[Any] = [id(groups), options]  # all that the launches depend on
        for owned in self.owned:
            store = owned.table._store
            key.append((id(owned), store.device, store.ensure_layout().record, owned.group))
        if key != self._built_from:
            self._build_steppers(owner)
            self._built_from = key
        return self._steppers

    def _refuse_on_several_ranks(self, owner: Optimizer, *, capturing: bool) -> None:
        """Raise if a CUDA graph would exchange gradients, or if the norm would differ between ranks.

        A table with replicate=False has its own gradient on each rank.
        """
        if capturing:
            raise FlatbedError("with several ranks, a step with tables cannot be part of a CUDA graph")
        if not owner._options.needs_norm:
            return
        local = [f"{owned.name} (replicate=False)" for owned in self.owned if not owned.table.replicate]
        found = local if len(local) < len(self.owned) else []
        for owned in self.owned if owner._norm_group is None else ():
            shards = owned.table._shards
            if shards is not None and shards.n_ranks < world_size():
                found.append(f"{owned.name} ({shards.n_ranks} of {world_size()} ranks share it)")
        if found:
            raise FlatbedError(
                f"max_norm and skip_nonfinite with table {found[0]}: the norm would differ between ranks, "
                f"and with it the replicas. Give the table an optimizer of its own, shard it among all "
                f"ranks, or pass norm_group= with the ranks that hold other parameters"
            )

    def _build_steppers(self, owner: Optimizer) -> None:
        if any(is_capturing(owned.table._store.device) for owned in self.owned):
            raise FlatbedError("take one eager step with the tables before the capture of a CUDA graph")
        self._retired += [stepper for stepper in self._steppers if stepper.captured]
        by_device: dict[torch.device, list[OwnedTable]] = {}
        for owned in self.owned:
            self.publish(owner, owned)  # scalars follow tables that moved
            by_device.setdefault(owned.table._store.device, []).append(owned)
        vectors = owner._stats.of("tables", by_device)
        self._steppers = [
            TableStepper(owner._rule, owner.param_groups, tables, vectors[device], owner._norm_group)
            for device, tables in by_device.items()
        ]
