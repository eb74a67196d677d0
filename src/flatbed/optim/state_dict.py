"""State dicts in torch's format, in both directions."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flatbed.errors import FlatbedError
from flatbed.optim.options import Groups, OptimizerSpec, check_group
from flatbed.optim.state_builder import EMA, MASTER, TORCH_KEYS
from flatbed.optim.table_step import TableSlot
from flatbed.tables.embedding import whole_field, write_field
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

StateDict = dict[str, Any]

ROUNDS = "rounding_steps"
"""A key that torch does not have: the steps so far, which choose the noise of stochastic rounding.

It is in every group, too: `torch.distributed.checkpoint` saves groups and state alone.
"""


# ---- saving


def pack(optimizer: Optimizer, state_dict: StateDict, *, with_tables: bool) -> StateDict:
    """Torch's state dict with the state of tables, by their keys."""
    tables = _tables_by_key(optimizer, state_dict)
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in state_dict["state"].items()
        if key not in tables
    }
    for key, slot in tables.items() if with_tables else ():
        held = _table_state(slot)
        if any(not name.startswith("_") for name in held):  # as torch: without state, no entry
            state[key] = held
    packed = {**state_dict, "state": state}
    if ROUNDS in optimizer.defaults:
        packed[ROUNDS] = n_steps = optimizer._stats.n_steps
        packed["param_groups"] = [{**group, ROUNDS: n_steps} for group in packed["param_groups"]]
    return packed


def _tables_by_key(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, TableSlot]:
    slots = {id(slot.table): slot for slot in optimizer._tables.slots}
    params = _params_by_key(optimizer, state_dict)
    return {key: slots[id(param)] for key, param in params.items() if id(param) in slots}


def _params_by_key(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, Tensor]:
    sides = state_dict["param_groups"], optimizer.param_groups
    keys, params = (chain.from_iterable(group["params"] for group in side) for side in sides)
    return dict(zip(keys, params, strict=True))


def _table_state(slot: TableSlot) -> dict[str, Any]:
    """A table's state as torch has it for an embedding's weight; empty before the first step."""
    table = slot.table
    if table._store.relayout_pending:
        return {}
    held: dict[str, Any] = {}
    for name, value in slot.table._store.scalars.items():  # in fp32, as in torch, unless that would round
        held[name] = value.float().clone() if bool(value.float() == value) else value.clone()
    for name in table.state_names:
        whole = whole_field(table, name)
        held[name] = whole.flatten() if name in slot.row_scalars else whole
    return held


# ---- loading


def load(optimizer: Optimizer, state_dict: StateDict, *, with_tables: bool) -> None:
    """Load groups and state; if anything does not fit, nothing changes.

    Tensors are copied into the optimizer's own memory in their own dtype, or in `state_dtype`. Torch's
    loading would cast fp32 moments down to a bf16 parameter's dtype.
    """
    _check_format(state_dict)
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    spec, groups = optimizer._spec, _loaded_groups(optimizer, state_dict)
    tables = _tables_by_key(optimizer, state_dict) if with_tables else {}
    of_tables = {
        key: _check_table_state(spec, slot, state_dict["state"].get(key)) for key, slot in tables.items()
    }
    _warn_of_losses(spec, state_dict)
    before = optimizer.state, optimizer.param_groups
    optimizer.state = defaultdict(dict, _dense_state(state_dict, _params_by_key(optimizer, state_dict)))
    optimizer.param_groups = groups
    try:
        optimizer._rebuild(loaded=True, copies_weights=False)
    except Exception:
        optimizer.state, optimizer.param_groups = before
        raise
    for key, slot in tables.items():
        _load_table_state(spec, slot, of_tables[key])
        optimizer._tables.publish(optimizer, slot)
    optimizer._drop_plan()  # what the checkpoint lacks is made at the next step
    rounds: Any = state_dict.get(ROUNDS, groups[0].get(ROUNDS, 0))
    optimizer._stats.set_steps(int(rounds))
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _check_format(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected a state dict; found {type(state_dict).__name__}: read files by torch.load")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"an optimizer's state dict has 'state' and 'param_groups'; found "
            f"{', '.join(map(repr, list(state_dict)[:6]))}"
        )


def _loaded_groups(optimizer: Optimizer, state_dict: StateDict) -> Groups:
    """The groups of a state dict with the optimizer's own parameters; defaults for what it lacks."""
    saved = [{**optimizer.defaults, **copy.deepcopy(group)} for group in state_dict["param_groups"]]
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
        check_group(new)
    return saved


def _dense_state(state_dict: StateDict, params: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of all parameters that are no tables; wrappers' own keys are copied, as in torch."""
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


def _check_table_state(spec: OptimizerSpec, slot: TableSlot, held: Any) -> dict[str, Any]:
    """A table's state in a checkpoint; raise if it does not fit the table."""
    table, found = slot.table, dict(held or {})
    known = (*spec.rule.state, *spec.rule.scalars, MASTER, EMA)
    if odd := [name for name in found if name not in known and not name.startswith("_")]:
        raise FlatbedError(
            f"the checkpoint's state of table {slot.name} has '{odd[0]}', which {spec.name} does not keep "
            f"for tables: it belongs to another optimizer or to a wrapper. Build that one, or delete the key"
        )
    fields = table._store.record.state
    needed = [name for name in (*table.scalars(), *(f.name for f in fields)) if not name.startswith("_")]
    missing = [name for name in needed if found.get(name) is None]
    if found and missing:
        raise FlatbedError(
            f"the checkpoint's state of table {slot.name} lacks '{missing[0]}' and has "
            f"{', '.join(map(repr, found))}: it belongs to another optimizer. Build that one"
        )
    for field in fields:
        value = found.get(field.name)
        shape = (table.num_embeddings, field.count)
        shapes = (shape, shape[:1]) if field.count == 1 else (shape,)
        if value is not None and tuple(value.shape) not in shapes:
            raise FlatbedError(
                f"state '{field.name}' of table {slot.name} has shape {tuple(value.shape)} in the "
                f"checkpoint; the table's is {shape}"
            )
    return found


def _load_table_state(spec: OptimizerSpec, slot: TableSlot, held: dict[str, Any]) -> None:
    """Write a table's fields and scalars; those that the checkpoint lacks get their first values."""
    table = slot.table
    table._store.set_state_fields(table._store.record.state)
    for field in table._store.record.state:
        if field.name in held:
            write_field(table, field.name, held[field.name].reshape(-1, field.count))
        elif held and field.name.startswith("_"):  # torch does not know it: its state has been through a step
            write_field(table, field.name, torch.ones(table.num_embeddings, 1, device="cpu"))
    names = [name for name in spec.rule.scalars if name not in slot.row_scalars]
    hidden = {name: 1.0 for name in names if held and name in spec.rule.hidden_scalars}
    table._store.scalars = {**hidden, **{name: float(held[name]) for name in names if name in held}}


def _warn_of_losses(spec: OptimizerSpec, state_dict: StateDict) -> None:
    """Warn of averages and masters that a forgotten option would drop."""
    found = {key for value in state_dict["state"].values() if isinstance(value, dict) for key in value}
    kept = {MASTER: spec.options.master_weights, EMA: spec.options.ema_decay is not None}
    options = {MASTER: "master_weights=True", EMA: "ema_decay=…"}
    if lost := [key for key in kept if key in found and not kept[key]]:
        warnings.warn(
            f"the checkpoint has {' and '.join(map(repr, lost))}, which this optimizer does not keep: build "
            f"it with {' and '.join(options[key] for key in lost)} to continue with it",
            stacklevel=4,
        )
