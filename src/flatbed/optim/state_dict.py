"""State dicts in torch's format, in both directions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from flatbed.errors import FlatbedError
from flatbed.optim.state_builder import EMA, MASTER, Groups, OptimizerSpec
from flatbed.optim.table_step import TableSlot
from flatbed.tables.embedding import whole_field, write_field
from flatbed.tables.table import Table

StateDict = dict[str, Any]

ROUNDS = "rounding_steps"  # a key that torch does not have: the steps so far, which choose the noise


# ---- saving


def pack(state_dict: StateDict, tables: Mapping[Any, TableSlot], *, with_tables: bool) -> StateDict:
    """Torch's state dict with the state of tables, by their keys."""
    state: dict[Any, Any] = {}
    for key, value in state_dict["state"].items():
        if key in tables:
            continue
        state[key] = dict(value) if isinstance(value, dict) else value
    for key, slot in tables.items() if with_tables else ():
        if held := _table_state(slot):
            state[key] = held
    return {**state_dict, "state": state}


def _table_state(slot: TableSlot) -> dict[str, Any]:
    """A table's state as torch has it for an embedding's weight; empty before the first step."""
    table = slot.table
    if table._storage.relayout_pending:
        return {}
    held: dict[str, Any] = {}
    for name, value in slot.table._storage.scalars.items():  # in fp32, as in torch, unless that would round
        held[name] = value.float().clone() if bool(value.float() == value) else value.clone()
    for name in table.state_names:
        whole = whole_field(table, name)
        held[name] = whole.flatten() if name in slot.row_scalars else whole
    return held


# ---- loading


def check_format(state_dict: Any) -> None:
    """Raise unless this is an optimizer's state dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected a state dict; found {type(state_dict).__name__}: read files by torch.load")
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"an optimizer's state dict has 'state' and 'param_groups'; found "
            f"{', '.join(map(repr, list(state_dict)[:6]))}"
        )


def loaded_groups(groups: Groups, state_dict: StateDict, defaults: Mapping[str, Any]) -> Groups:
    """The groups of a state dict with the optimizer's own parameters; `defaults` for what it lacks."""
    saved = [{**defaults, **copy.deepcopy(group)} for group in state_dict["param_groups"]]
    ours, theirs = ([len(group["params"]) for group in side] for side in (groups, saved))
    if ours != theirs:
        raise ValueError(
            f"the state dict is of another model: its param groups hold {theirs} parameters, "
            f"the optimizer's {ours}"
        )
    for group, new in zip(groups, saved, strict=True):
        new["params"] = group["params"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    return saved


def by_key(groups: Sequence[Mapping[str, Any]], packed: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """Parameters by the keys that a state dict has for them."""
    sides = (chain.from_iterable(group["params"] for group in side) for side in (packed, groups))
    return dict(zip(*sides, strict=True))


def dense_state(state_dict: StateDict, params: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of all parameters that are no tables."""
    return {
        params.get(key, key): dict(value) if isinstance(value, dict) else value
        for key, value in state_dict["state"].items()
        if not isinstance(params.get(key, key), Table)
    }


def check_table_state(slot: TableSlot, held: Any) -> dict[str, Any]:
    """A table's state in a checkpoint; raise if it does not fit the table."""
    table, found = slot.table, dict(held or {})
    missing = [name for name in table.scalars() if not name.startswith("_") and name not in found]
    if found and missing:
        raise FlatbedError(
            f"the checkpoint's state of table {slot.name} lacks '{missing[0]}' and has "
            f"{', '.join(map(repr, found))}: it belongs to another optimizer. Build that one"
        )
    for field in table._storage.record.state:
        value = found.get(field.name)
        shape = (table.num_embeddings, field.count)
        if value is None and found and not field.name.startswith("_"):
            raise FlatbedError(
                f"the checkpoint's state of table {slot.name} lacks '{field.name}' and has "
                f"{', '.join(map(repr, found))}: it belongs to another optimizer. Build that one"
            )
        shapes = (shape, shape[:1]) if field.count == 1 else (shape,)
        if value is not None and tuple(value.shape) not in shapes:
            raise FlatbedError(
                f"state '{field.name}' of table {slot.name} has shape {tuple(value.shape)} in the "
                f"checkpoint; the table's is {shape}"
            )
    return found


def load_table_state(spec: OptimizerSpec, slot: TableSlot, held: dict[str, Any]) -> None:
    """Write a table's fields and scalars; those that the checkpoint lacks get their first values."""
    table = slot.table
    table._storage.set_state_fields(table._storage.record.state)
    for field in table._storage.record.state:
        if field.name in held:
            write_field(table, field.name, held[field.name].reshape(-1, field.count))
        elif held and field.name.startswith("_"):  # torch does not know it: its state has been through a step
            write_field(table, field.name, torch.ones(table.num_embeddings, 1, device="cpu"))
    names = [name for name in spec.rule.scalars if name not in slot.row_scalars]
    hidden = {name: 1.0 for name in names if held and name.startswith("_")}
    table._storage.scalars = {**hidden, **{name: float(held[name]) for name in names if name in held}}


def warn_of_losses(spec: OptimizerSpec, state_dict: StateDict) -> None:
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
