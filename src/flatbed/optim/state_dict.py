"""State dicts in torch's format: the state of dense parameters, and that of tables under their keys."""

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
from flatbed.kernels.step import StepOptions
from flatbed.optim.options import Groups, check_group
from flatbed.optim.state import EMA, MASTER, TORCH_KEYS
from flatbed.optim.table_step import OwnedTable
from flatbed.rule import Rule
from flatbed.tables.table import Table
from flatbed.tables.whole_fields import whole_field, write_field

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

StateDict = dict[str, Any]

ROUNDS = "rounding_steps"
"""A key that torch does not have: the steps so far, which choose the noise of stochastic rounding.

It is in every group, too: `torch.distributed.checkpoint` only saves groups and state.
"""


def build_state_dict(optimizer: Optimizer, state_dict: StateDict, *, with_tables: bool) -> StateDict:
    """Return torch's state dict with the state of tables under their keys."""
    if with_tables:
        optimizer._tables.check_owned(optimizer)
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


# ---- loading


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
    optimizer._tables.check_owned(optimizer)
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
