"""The state of dense parameters and of tables: made, shown in `optimizer.state`, saved and loaded."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined,unused-ignore]

from flatbed.distributed.dense_shards import Sharding, is_dtensor, local_of, whole
from flatbed.distributed.state_shards import OwnRows, own_part
from flatbed.errors import FlatbedError
from flatbed.kernels.step import ParamSlot, StepOptions, stride_of
from flatbed.layout import overlaps_itself
from flatbed.optim.options import LOW, Groups, check_grad, check_group, check_param, named_params
from flatbed.optim.table_step import OwnedTable
from flatbed.rule import Group, Rule
from flatbed.tables.embedding import whole_field, write_field
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

MASTER, EMA = "master_weight", "ema"  # keys of state that torch does not have
TORCH_KEYS = frozenset(
    (
        "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "square_avg", "acc_delta",
        "grad_avg", "momentum_buffer", "sum", "prev", "step_size", "ax", "eta", "mu", "row_var", "col_var",
        "variance",
    )
)  # fmt: skip
"""The state of torch's optimizers. Keys that no optimizer of torch has belong to a wrapper, and are kept."""


def lacks_state(optimizer: Optimizer, group: Group, param: Tensor, *, copies_weights: bool) -> bool:
    """Return whether a parameter lacks state; `copies_weights`: a master weight and an average count, too."""
    rule, options = optimizer._rule, optimizer._options
    needed = [*rule.state_names(group), *rule.shown_scalars]
    if copies_weights and options.ema_decay is not None:
        needed.append(EMA)
    if copies_weights and options.master_weights and param.dtype in LOW:
        needed.append(MASTER)
    return not optimizer.state.get(param, {}).keys() >= set(needed)


@dataclass(frozen=True, slots=True)
class SlotBuilder:
    """Completes slots: state that fits is kept, all other state is made or copied."""

    optimizer: Optimizer
    loaded: bool
    copies_weights: bool
    """True: master weights and averages that are missing start at the present weights."""
    hidden: dict[int, dict[str, Tensor]]
    """Scalars that torch does not have, by the id of their parameter's entry of `optimizer.state`."""

    def complete(self, slot: ParamSlot, group: Group, held: dict[str, Any]) -> None:
        """Give a slot its state, from its parameter's present entry of `optimizer.state`."""
        name, param, rule, options = slot.name, slot.param, self.optimizer._rule, self.optimizer._options
        if overlaps_itself(param.shape, param.stride()):
            raise FlatbedError(f"parameter {name} is expanded: several of its elements share memory")
        if options.stochastic_rounding and param.dtype == torch.float16:
            raise FlatbedError(
                f"stochastic_rounding is for bf16; parameter {name} is fp16: use master_weights=True for it"
            )
        names = rule.state_names(group)
        self._refuse_foreign(slot, held, names)
        dtype = self._state_dtype(slot, [held[name] for name in names if isinstance(held.get(name), Tensor)])
        for key in names:
            slot.state[key] = self._tensor(
                slot, key, held, dtype, rule.first_value(self.optimizer.defaults, key)
            )
        for key in rule.scalars:
            slot.scalars[key] = self._scalar(slot, key, held)
        if options.master_weights and param.dtype in LOW and (MASTER in held or self.copies_weights):
            slot.master = self._tensor(slot, MASTER, held, torch.float32, param)
        if options.ema_decay is not None and (EMA in held or self.copies_weights):
            wide = torch.promote_types(param.dtype, torch.float32)
            slot.ema = self._tensor(slot, EMA, held, wide, param)

    def _refuse_foreign(self, slot: ParamSlot, held: dict[str, Any], names: Sequence[str]) -> None:
        """Raise for state of another optimizer: its keys, missing tensors, missing scalars."""
        rule = self.optimizer._rule
        needed = [name for name in names if rule.state[name] is None]
        needed += rule.shown_scalars if self.loaded else ()
        foreign = TORCH_KEYS - {*rule.state, *rule.shown_scalars} if self.loaded else ()
        odd = [key for key in held if key in foreign]
        has_some = any(held.get(key) is not None for key in (*rule.state, *rule.scalars))
        lacking = [name for name in needed if has_some and held.get(name) is None]
        if odd or lacking:
            found = f"has {', '.join(map(repr, odd))}" if odd else f"lacks {', '.join(map(repr, lacking))}"
            raise FlatbedError(
                f"the state of parameter {slot.name} {found}: it belongs to another optimizer than "
                f"{type(self.optimizer).__name__}. Build that one, or clear the state to start again"
            )

    def _state_dtype(self, slot: ParamSlot, held: list[Tensor]) -> torch.dtype:
        """Return the dtype asked for, or else the wider one of the present state's and the parameter's."""
        if self.optimizer._options.state_dtype is not None:
            return self.optimizer._options.state_dtype
        if self.optimizer._options.master_weights and slot.param.dtype in LOW:
            return torch.float32
        return reduce(torch.promote_types, [tensor.dtype for tensor in held], slot.param.dtype)

    def _scalar(self, slot: ParamSlot, key: str, held: dict[str, Any]) -> Tensor:
        rule, device = self.optimizer._rule, slot.param.device
        is_hidden = key in rule.hidden_scalars
        value: Any = (self.hidden.get(id(held), {}) if is_hidden else held).get(key)
        if value is None and is_hidden:  # state of a torch optimizer, mostly after a step
            is_new = "step" in held and float(held["step"]) == 0
            tensors = [held[name] for name in rule.state if isinstance(held.get(name), Tensor)]
            value = float(not is_new and not all(map(_is_negative_zero, tensors)))
        if value is None:
            value = rule.first_value(self.optimizer.defaults, key)
        kind = (value.dim(), value.dtype, value.device) if isinstance(value, Tensor) else None
        if isinstance(value, Tensor) and kind == (0, torch.float32, device) and not self.loaded:
            return value
        return _filled(torch.empty((), dtype=torch.float32, device=device), value)

    def _tensor(
        self, slot: ParamSlot, key: str, held: dict[str, Any], dtype: torch.dtype, first: Tensor | float
    ) -> Tensor:
        """Return the present tensor if it fits; otherwise one with its values, or with the first ones."""
        shape, stride, device = tuple(slot.param.shape), stride_of(slot.param), slot.param.device
        old: Any = held.get(key)
        if old is not None:
            is_float = isinstance(old, Tensor) and old.is_floating_point()
            if not is_float or old.shape != slot.owner.shape:
                found = f"{old.dtype} {tuple(old.shape)}" if isinstance(old, Tensor) else repr(old)
                raise FlatbedError(
                    f"state '{key}' of parameter {slot.name} is {found}; expected floats of shape "
                    f"{tuple(slot.owner.shape)}"
                )
            old = whole(old) if slot.sharding is None else slot.sharding.part_of(old)
            old = old if slot.own_rows is None else slot.own_rows.around(old)
            kind = (old.dtype, old.device, old.stride() if old.numel() > 1 else stride)
            if not self.loaded and kind == (dtype, device, stride) and old.data_ptr() % 16 == 0:
                return cast(Tensor, old)
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return _filled(made, first if old is None else old)


def _is_negative_zero(tensor: Tensor) -> bool:
    local = local_of(tensor)
    return bool(((local == 0) & torch.signbit(local)).all())


def _filled(tensor: Tensor, value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return tensor.copy_(value)  # waits for pinned memory, which the caller may write to again
    return tensor.fill_(value)


def own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of a dense view, with a storage object of its own.

    Pickle, `torch.save`, safetensors and Accelerate look at storages: they write a shared storage as a whole,
    or keep only one of its tensors.
    """
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda"):
        return view
    memory = view.as_strided((view.numel(),), (1,))
    # `from_dlpack(memory)` would refuse memory of a GPU that is not the current one.
    return from_dlpack(to_dlpack(memory)).as_strided(view.shape, view.stride())


def build_slots(
    optimizer: Optimizer, early: Container[int], *, loaded: bool, copies_weights: bool
) -> list[ParamSlot]:
    """Return slots for all parameters with a gradient or state. Gradients are checked first."""
    groups, state = optimizer.param_groups, optimizer.state
    dense = [found for found in named_params(groups) if not isinstance(found[1], Table)]
    grads = [param.grad for _, param, _ in dense]
    for (name, param, _), grad in zip(dense, grads, strict=True):
        if grad is not None:
            check_param(optimizer._options, param, name)  # FSDP may wrap a module later
            check_grad(param, grad, name)
    previous = () if optimizer._plan is None else optimizer._plan.slots
    hidden = {id(slot.published): slot.scalars for slot in previous if slot.published is not None}
    builder = SlotBuilder(optimizer, loaded, copies_weights, hidden)
    slots = []
    for (name, param, number), grad in zip(dense, grads, strict=True):
        held = state.get(param, {})
        if grad is not None or held or id(param) in early:
            grad_dtype = param.dtype if grad is None else grad.dtype
            sharding, rows = optimizer._sharding_of(param), None
            if sharding is not None and not is_dtensor(param):
                rows = OwnRows.of(sharding)
            slot = ParamSlot(name, own_part(param, rows), number, grad_dtype, param, sharding, rows)
            builder.complete(slot, groups[number], held)
            slots.append(slot)
    return slots


def publish_state(state: dict[Any, Any], slot: ParamSlot) -> None:
    """Show a slot's tensors in `optimizer.state`, by torch's keys and in torch's order."""
    held = state.get(slot.owner, {})
    shown: dict[str, Any] = {}
    for name, value in slot.scalars.items():
        if not name.startswith("_"):
            old = held.get(name)
            is_known = isinstance(old, Tensor) and old.data_ptr() == value.data_ptr()
            shown[name] = old if is_known else own_storage(value)
    tensors = {**slot.state, MASTER: slot.master, EMA: slot.ema}
    for key, tensor in tensors.items():
        if tensor is not None:
            shown[key] = tensor if slot.sharding is None else _wrapped(slot, tensor, held.get(key))
    # A master or an average that is no longer updated would overwrite newer weights later.
    shown.update({k: value for k, value in held.items() if k not in shown and k not in (MASTER, EMA)})
    if shown:
        held = state.setdefault(slot.owner, {})
        held.clear()
        held.update(shown)
        slot.published = held


def _wrapped(slot: ParamSlot, tensor: Tensor, old: Any) -> Tensor:
    """Return a shard of state as a DTensor: the present DTensor, if it is over the same memory."""
    if is_dtensor(old) and local_of(old) is tensor:
        return cast(Tensor, old)
    if slot.own_rows is not None:
        tensor = own_storage(slot.own_rows.rows(tensor))
    return cast(Sharding, slot.sharding).wrap(tensor)


# ---- state dicts in torch's format: saving


StateDict = dict[str, Any]

ROUNDS = "rounding_steps"
"""A key that torch does not have: the steps so far, which choose the noise of stochastic rounding.

It is in every group, too: `torch.distributed.checkpoint` only saves groups and state.
"""


def build_state_dict(optimizer: Optimizer, state_dict: StateDict, *, with_tables: bool) -> StateDict:
    """Return torch's state dict with the state of tables under their keys."""
    tables = _tables_by_key(optimizer, state_dict)
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in state_dict["state"].items()
        if key not in tables
    }
    for key, owned in tables.items() if with_tables else ():
        held = _table_state(owned)
        if any(not name.startswith("_") for name in held):  # as torch: without state, no entry
            state[key] = held
    packed = {**state_dict, "state": state}
    if ROUNDS in optimizer.defaults:
        packed[ROUNDS] = n_steps = optimizer._stats.n_steps
        packed["param_groups"] = [{**group, ROUNDS: n_steps} for group in packed["param_groups"]]
    return packed


def _tables_by_key(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, OwnedTable]:
    owned = {id(one.table): one for one in optimizer._tables.owned}
    params = _params_by_key(optimizer, state_dict)
    return {key: owned[id(param)] for key, param in params.items() if id(param) in owned}


def _params_by_key(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, Tensor]:
    sides = state_dict["param_groups"], optimizer.param_groups
    keys, params = (chain.from_iterable(group["params"] for group in side) for side in sides)
    return dict(zip(keys, params, strict=True))


def _table_state(owned: OwnedTable) -> dict[str, Any]:
    """Return a table's state as torch has it for an embedding's weight; empty before the first step."""
    table = owned.table
    if table._store.relayout_pending:
        return {}
    held: dict[str, Any] = {}
    for name, value in owned.table._store.scalars.items():  # in fp32, as in torch, unless that would round
        held[name] = value.float().clone() if bool(value.float() == value) else value.clone()
    for name in table.state_names:
        whole = whole_field(table, name)
        held[name] = whole.flatten() if name in owned.row_scalars else whole
    return held


# ---- state dicts in torch's format: loading


def load_state_dict(optimizer: Optimizer, state_dict: StateDict, *, with_tables: bool) -> None:
    """Load groups and state; if anything does not fit, nothing changes.

    Tensors are copied into the optimizer's own memory in their own dtype, or in `state_dtype`. Torch's
    loading would cast fp32 moments down to a bf16 parameter's dtype.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected a state dict; found {type(state_dict).__name__}: read files by torch.load")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"an optimizer's state dict has 'state' and 'param_groups'; found {list(state_dict)[:6]}"
        )
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    groups = _loaded_groups(optimizer, state_dict)
    tables = _tables_by_key(optimizer, state_dict) if with_tables else {}
    of_tables = {
        key: _check_table_state(optimizer, owned, state_dict["state"].get(key))
        for key, owned in tables.items()
    }
    _warn_of_losses(optimizer._options, state_dict)
    before = optimizer.state, optimizer.param_groups
    optimizer.state = defaultdict(dict, _dense_state(state_dict, _params_by_key(optimizer, state_dict)))
    optimizer.param_groups = groups
    try:
        optimizer._rebuild(loaded=True, copies_weights=False)
    except Exception:
        optimizer.state, optimizer.param_groups = before
        raise
    for key, owned in tables.items():
        _load_table_state(optimizer._rule, owned, of_tables[key])
        optimizer._tables.publish(optimizer, owned)
    optimizer._drop_plan()  # what the checkpoint lacks is made at the next step
    rounds: Any = state_dict.get(ROUNDS, groups[0].get(ROUNDS, 0))
    optimizer._stats.set_steps(int(rounds))
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _loaded_groups(optimizer: Optimizer, state_dict: StateDict) -> Groups:
    """Return the groups of a state dict with the optimizer's own parameters; missing options get defaults."""
    copied = copy.deepcopy(state_dict["param_groups"])  # together: groups may share a learning rate
    saved = [{**optimizer.defaults, **group} for group in copied]
    ours, theirs = ([len(group["params"]) for group in side] for side in (optimizer.param_groups, saved))
    if ours != theirs:
        raise ValueError(
            f"the state dict is of another model: its param groups hold {theirs} parameters, "
            f"the optimizer's {ours}"
        )
    for group, new in zip(optimizer.param_groups, saved, strict=True):
        new.update(optimizer._fixed, params=group["params"])
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
        check_group(optimizer._rule, new)
    return saved


def _dense_state(state_dict: StateDict, params: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of all parameters that are not tables. Keys of wrappers are copied, as in torch."""
    found: dict[Any, Any] = {}
    for key, value in state_dict["state"].items():
        param = params.get(key, key)
        if isinstance(param, Table):
            continue
        found[param] = dict(value) if isinstance(value, dict) else value
        for name in found[param] if isinstance(value, dict) and isinstance(param, Tensor) else ():
            if name not in (*TORCH_KEYS, MASTER, EMA):
                copied = partial(torch.Tensor.to, device=param.device, copy=True)
                found[param][name] = tree_map_only(Tensor, copied, value[name])
    return found


def _check_table_state(optimizer: Optimizer, owned: OwnedTable, held: Any) -> dict[str, Any]:
    """Return a table's state in a checkpoint; raise if it does not fit the table."""
    table, rule, found = owned.table, optimizer._rule, dict(held or {})
    fields = table._store.record.state
    known = (*rule.state, *rule.scalars, MASTER, EMA)
    odd = [name for name in found if name not in known and not name.startswith("_")]
    needed = [name for name in (*table.scalars(), *(f.name for f in fields)) if not name.startswith("_")]
    missing = [name for name in needed if found and found.get(name) is None]
    if odd or missing:
        differs = f"has '{odd[0]}'" if odd else f"lacks '{missing[0]}'"
        raise FlatbedError(
            f"the checkpoint's state of table {owned.name} {differs}: it belongs to another optimizer than "
            f"{type(optimizer).__name__}, or to a wrapper. Build that one, or delete the key"
        )
    for field in fields:
        value, shape = found.get(field.name), (table.num_embeddings, field.count)
        is_vector = value is not None and field.count == 1 and tuple(value.shape) == shape[:1]
        if value is not None and tuple(value.shape) != shape and not is_vector:
            raise FlatbedError(
                f"state '{field.name}' of table {owned.name} has shape {tuple(value.shape)} in the "
                f"checkpoint; the table's is {shape}"
            )
    return found


def _load_table_state(rule: Rule, owned: OwnedTable, held: dict[str, Any]) -> None:
    """Write a table's fields and scalars. If the checkpoint lacks one, it gets its first value."""
    table = owned.table
    table._store.set_state_fields(table._store.record.state)
    for field in table._store.record.state:
        if field.name in held:
            write_field(table, field.name, held[field.name].reshape(-1, field.count))
        elif held and field.name.startswith("_"):  # torch's state dicts lack it, and are made after a step
            write_field(table, field.name, torch.ones(table.num_embeddings, 1, device="cpu"))
    names = [name for name in rule.scalars if name not in owned.row_scalars]
    hidden = {name: 1.0 for name in names if held and name in rule.hidden_scalars}
    table._store.scalars = {**hidden, **{name: float(held[name]) for name in names if name in held}}


def _warn_of_losses(options: StepOptions, state_dict: StateDict) -> None:
    """Warn of averages and masters that a forgotten option would drop."""
    found = {key for value in state_dict["state"].values() if isinstance(value, dict) for key in value}
    kept = {MASTER: options.master_weights, EMA: options.ema_decay is not None}
    if lost := [key for key in kept if key in found and not kept[key]]:
        warnings.warn(
            f"the checkpoint has {' and '.join(map(repr, lost))}, which this optimizer does not keep: build "
            f"it with master_weights=True or ema_decay=… to continue with it",
            stacklevel=4,
        )
