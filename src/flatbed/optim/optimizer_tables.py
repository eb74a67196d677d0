"""The tables among an optimizer's parameters: ownership, their state, and their gradients in a step."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.distributed.ranks import world_size
from flatbed.errors import FlatbedError
from flatbed.kernels.step import StepOptions
from flatbed.optim.spec import LOW, Groups, OptimizerSpec, named_tables
from flatbed.optim.table_step import TableSlot, TableStepper
from flatbed.rule import Group, Rule
from flatbed.tables.grads import RowGrads
from flatbed.tables.record import Field
from flatbed.tables.sharding import exchange_grads
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.plan import StepStats


def state_fields(spec: OptimizerSpec, group: Group, table: Table) -> tuple[Field, ...]:
    """The fields of a record besides the weight."""
    rule, config = spec.rule, table._store.config
    dtype = torch.promote_types(config.dtype, torch.float32)
    count = 1 if rule.rowwise else config.dim
    scalars = rule.scalars_of_rows(group, per_row_steps=spec.options.per_row_steps)
    kinds: dict[str, tuple[torch.dtype, int]] = dict.fromkeys(rule.state_names(group), (dtype, count))
    kinds |= dict.fromkeys(scalars, (torch.float32, 1))
    return tuple(Field(name, *kind, float(rule.first_value(group, name))) for name, kind in kinds.items())


def check_table(spec: OptimizerSpec, owner: Any, name: str, table: Table, group: Group) -> None:
    """Raise if a table cannot be trained with these options, or holds state of another optimizer."""
    options, dtype = spec.options, table._store.config.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if options.master_weights and dtype in LOW:
        raise ValueError(
            f"table {name} is {dtype} and has no room for master weights: make it float32, or use "
            f"stochastic_rounding=True with bfloat16"
        )
    if options.ema_decay is not None:
        raise ValueError(
            f"ema_decay is not for tables (found {name}): it would have to change rows outside the batch"
        )
    if options.state_dtype not in (None, wide):
        raise ValueError(f"the state of table {name} is {wide}; found state_dtype={options.state_dtype}")
    if options.stochastic_rounding and dtype == torch.float16:
        raise FlatbedError(f"stochastic_rounding is for bf16; table {name} is fp16: make it bf16 or fp32")
    table._check_attach(owner, state_fields(spec, group, table))
    in_rows = spec.rule.scalars_of_rows(group, per_row_steps=options.per_row_steps)
    expected = set(spec.rule.shown_scalars) - set(in_rows)
    known = {scalar for scalar in table._store.scalars if not scalar.startswith("_")}
    if not table._store.state_owned and known and known != expected:
        raise FlatbedError(
            f"table {name} holds state of another optimizer than {spec.name}: its scalars are "
            f"{sorted(known)}, expected {sorted(expected)}. Give it to the optimizer it was trained with, or "
            f"call table.drop_state() first to start again"
        )
    trained_by = table._store.optimizer
    if not table._store.state_owned and trained_by not in (None, spec.name):
        warnings.warn(
            f"table {name} holds the state of {trained_by}, and {spec.name} goes on with it: build "
            f"{trained_by}, or call table.drop_state() first, if that is not meant",
            stacklevel=4,
        )


class OptimizerTables:
    """The tables of one optimizer, and a stepper for each of their devices."""

    def __init__(self) -> None:
        self.slots: list[TableSlot] = []
        self._steppers: list[TableStepper] = []
        self._retired: list[TableStepper] = []  # CUDA graphs hold launches of these
        self._built_from: Any = None

    # ---- ownership

    def add(
        self, spec: OptimizerSpec, owner: Any, state: dict[Any, Any], slot: TableSlot, group: Group
    ) -> None:
        """Make the optimizer own a table. State and scalars from a file or a copy are continued."""
        rule, store = spec.rule, slot.table._store
        remembered = {} if store.state_owned else dict(store.scalars)
        # State from elsewhere has been through a step.
        has_state = not store.state_owned and bool(store.record.state)
        stepped = bool(remembered) if rule.shown_scalars else has_state
        slot.table._attach(owner, state_fields(spec, group, slot.table))
        hidden = dict.fromkeys(rule.hidden_scalars, 1.0) if stepped else {}
        shown = {name: value for name, value in state.get(slot.table, {}).items() if value is not None}
        store.scalars, store.optimizer = hidden | remembered | shown, spec.name
        self.slots.append(slot)
        self.publish(spec, slot, group, state)

    def publish(self, spec: OptimizerSpec, slot: TableSlot, group: Group, state: dict[Any, Any]) -> None:
        """Complete a table's scalars, as tensors on its computing device, and show them in the state.

        State in the records is shown as None: `torch.distributed.checkpoint` loads by the names of the
        present state.
        """
        rule, store = spec.rule, slot.table._store
        # Kernels count in fp32, as torch does. Scalars of torch's own classes may need more.
        dtype = torch.float64 if rule.update is None else torch.float32
        scalars: dict[str, Any] = {}
        for name in rule.scalars:
            if name not in slot.row_scalars:
                value = store.scalars.get(name, rule.first_value(group, name))
                if not (isinstance(value, Tensor) and (value.device, value.dtype) == (store.device, dtype)):
                    value = torch.tensor(float(value), dtype=dtype, device=store.device)
                scalars[name] = value
        store.scalars = scalars
        shown = {name: scalars[name] for name in rule.shown_scalars if name in scalars}
        shown |= dict.fromkeys((*rule.state_names(group), *slot.row_scalars))
        held = state.get(slot.table)
        if held is None or [*map(id, held.values())] != [*map(id, shown.values())]:
            state[slot.table] = shown

    def sync(self, spec: OptimizerSpec, groups: Groups, state: dict[Any, Any]) -> None:
        """Follow edits of the groups: a table that is in none of them is no longer trained."""
        found = {id(table): number for _, table, number in named_tables(groups)}
        if found.keys() - {id(slot.table) for slot in self.slots}:
            raise FlatbedError("a table was put into a param group by hand: use optimizer.add_param_group")
        self.slots = [slot for slot in self.slots if id(slot.table) in found]
        for slot in self.slots:
            slot.group = found[id(slot.table)]
            self.publish(spec, slot, groups[slot.group], state)

    # ---- a step

    def collect_grads(self, owner: Any, options: StepOptions) -> list[RowGrads | None]:
        """The gradients of all tables; with several ranks, their mean. Errors precede any change."""
        several = world_size() > 1
        capturing = any(is_capturing(slot.table._store.device) for slot in self.slots)
        if several:
            self._refuse_local_norms(owner, options)
            if capturing:
                raise FlatbedError("with several ranks, a step with tables cannot be part of a CUDA graph")
        for slot in self.slots:
            owner_ref = slot.table._owner_ref
            if owner_ref is None or owner_ref() is not owner:
                raise FlatbedError(
                    f"table {slot.name} has been given to another optimizer since: step that one"
                )
            if slot.table._deferred_checks.pending and not capturing:
                slot.table._raise_bad_ids()
        packs = []
        for slot in self.slots:
            table = slot.table
            table._grads.check_capture(capturing)
            if several:
                exchange_grads(table)
            if not table._needs_grad:
                table._grads.clear()
            packs.append(table._grads.packed())
        for slot, pack in zip(self.slots, packs, strict=True):
            if pack is not None and slot.table._store.config.storage == "disk":
                slot.table._local_rows.reserve_space(pack)
        return packs

    def _refuse_local_norms(self, owner: Any, options: StepOptions) -> None:
        """Raise if the norm would differ between ranks: a table that is no replica has its own gradient."""
        local = [slot.name for slot in self.slots if not slot.table.replicate]
        if options.needs_norm and 0 < len(local) < len(self.slots):
            raise FlatbedError(
                f"max_norm and skip_nonfinite with table {local[0]} (replicate=False): the norm would differ "
                f"between ranks, and with it the replicas. Give the table an optimizer of its own"
            )
        if not options.needs_norm or owner._norm_group is not None:
            return
        for slot in self.slots:
            shards = slot.table._shards
            if shards is not None and shards.n_ranks < world_size():
                raise FlatbedError(
                    f"max_norm and skip_nonfinite with table {slot.name}, which {shards.n_ranks} of "
                    f"{world_size()} ranks share: the norm would differ between ranks. Shard the table "
                    f"among all ranks, or pass norm_group= with the ranks that hold other parameters"
                )

    def set_grads(
        self,
        spec: OptimizerSpec,
        groups: Groups,
        packs: list[RowGrads | None],
        *,
        state: dict[Any, Any],
        stats: StepStats,
    ) -> list[TableStepper]:
        """Return the steppers of all devices, given their gradients. Scalars follow tables that moved."""
        for slot in self.slots:
            if any(value.device != slot.table._store.device for value in slot.table._store.scalars.values()):
                self.publish(spec, slot, groups[slot.group], state)
        key = id(groups), [_layout_key(spec.rule, slot, groups[slot.group]) for slot in self.slots]
        if key != self._built_from:
            if any(is_capturing(slot.table._store.device) for slot in self.slots):
                raise FlatbedError("take one eager step with the tables before the capture of a CUDA graph")
            self._retired += [stepper for stepper in self._steppers if stepper.captured]
            by_device: dict[torch.device, list[TableSlot]] = {}
            for slot in self.slots:
                by_device.setdefault(slot.table._store.device, []).append(slot)
            vectors = stats.of("tables", by_device)
            self._steppers = [
                TableStepper(spec.rule, groups, slots, vectors[device]) for device, slots in by_device.items()
            ]
            self._built_from = key
        given = {id(slot): pack for slot, pack in zip(self.slots, packs, strict=True)}
        for stepper in self._steppers:
            stepper.packs = [given[id(slot)] for slot in stepper.slots]
        return self._steppers


def _layout_key(rule: Rule, slot: TableSlot, group: Group) -> tuple[Any, ...]:
    """All that the launches of a table depend on."""
    store = slot.table._store
    layout = store.device, store.ensure_layout().record, slot.group, [*map(id, store.scalars.values())]
    options = [group[option] for option in rule.row_scalars.values() if option is not None]
    return (*layout, rule.has(group), options)
