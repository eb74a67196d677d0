"""State dicts in torch's own format, in both directions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from flatbed.errors import FlatbedError
from flatbed.kernels.step import STEPS
from flatbed.optim import checks
from flatbed.optim.state import EMA, MASTER, Flag, States
from flatbed.optim.table_step import Member
from flatbed.tables.embedding import whole_field, write_field
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer


ROUNDS = "rounding_steps"  # a key beside torch's: how often has been rounded by chance


def plain(optimizer: Optimizer, state_dict: dict[str, Any], *, with_tables: bool = True) -> dict[str, Any]:
    """The same in ordinary dicts, which `torch.load(weights_only=True)` accepts; and the state of tables."""
    state = {
        key: dict(value) if isinstance(value, dict) else value for key, value in state_dict["state"].items()
    }
    for key, member in _tables(optimizer, state_dict["param_groups"]):
        state.pop(key, None)
        if with_tables:
            state |= {key: held} if (held := _state_of_table(member)) else {}
    made = {**state_dict, "state": state}
    if optimizer.settings.stochastic_rounding or optimizer.settings.stochastic_state:
        shared = chain(optimizer._shared.values(), optimizer._tables.shared.values())
        made[ROUNDS] = max((int(vector[STEPS]) for vector in shared), default=0)
    return made


def load(optimizer: Optimizer, state_dict: dict[str, Any], *, with_tables: bool = True) -> None:
    """Take over groups and state; if anything does not fit, all stays as it was.

    Tensors are copied into the optimizer's own memory in the dtype they come in (or in `state_dtype`):
    torch's own loading would cast fp32 moments down to a bf16 parameter's dtype.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state dict is what optimizer.state_dict() returned; found {type(state_dict).__name__} (a "
            f"file is read by torch.load first)"
        )
    if missing := [key for key in ("state", "param_groups") if key not in state_dict]:
        raise ValueError(
            f"an optimizer's state dict has 'state' and 'param_groups'; found no {' and no '.join(missing)} "
            f"among {', '.join(map(repr, list(state_dict)[:6]))}"
        )
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        if replaced is not None:
            state_dict = replaced
    groups = optimizer.param_groups
    saved = [
        {**optimizer.defaults, **copy.deepcopy(group), **optimizer.fixed}
        for group in state_dict["param_groups"]
    ]
    _check_sizes(groups, saved)
    for group in saved:
        checks.check_group(group)
    params = dict(zip(_members(saved), _members(groups), strict=True))
    of_tables = [
        (member, _fitting(member, state_dict["state"].get(key)))
        for key, member in (_tables(optimizer, saved) if with_tables else ())
    ]
    states = States(Flag())
    for key, value in state_dict["state"].items():
        param = params.get(key, key)
        if not isinstance(param, Table):
            states[param] = dict(value) if isinstance(value, dict) else value
    for group, new in zip(groups, saved, strict=True):
        new["params"] = group["params"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    _warn_of_losses(optimizer, state_dict)
    before = optimizer.state, optimizer.param_groups
    optimizer.state, optimizer.param_groups = states, saved
    try:
        optimizer._rebuild(anew=True)
    except Exception:
        optimizer.state, optimizer.param_groups = before
        optimizer._watch = None
        raise
    for member, held in of_tables:
        _load_table(optimizer, member, held)
    for member in optimizer._tables.members:
        optimizer._tables.show(member)
    optimizer._watch = None  # what the checkpoint lacks is made at the next step
    optimizer._rounds = float(state_dict.get(ROUNDS, 0))
    for shared in chain(optimizer._shared.values(), optimizer._tables.shared.values()):
        shared[STEPS] = optimizer._rounds
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _tables(optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[tuple[Any, Member]]:
    """The keys by which a state dict knows the tables."""
    members = {id(member.table): member for member in optimizer._tables.members}
    keys = zip(_members(groups), _members(optimizer.param_groups), strict=True)
    return [(key, members[id(param)]) for key, param in keys if id(param) in members]


def _state_of_table(member: Member) -> dict[str, Any]:
    """As torch has it for an embedding's weight: tensors of all rows; none before the first step."""
    table = member.table
    if table.store.relayout_pending:
        return {}
    held: dict[str, Any] = {}
    for name, value in member.scalars.items():  # in fp32, as torch has them, unless that would round
        held[name] = value.float().clone() if bool(value.float() == value) else value.clone()
    for name in table.state_names:
        whole = whole_field(table, name)
        held[name] = whole.flatten() if name in member.row_scalars else whole
    return held


def _fitting(member: Member, held: Any) -> dict[str, Any]:
    """A table's state in a checkpoint, if it is of the right kind."""
    table, found = member.table, dict(held or {})
    for field in table.store.record.state:
        value = found.get(field.name)
        shape = (table.num_embeddings, field.count)
        if value is None and found and not field.name.startswith("_"):
            raise FlatbedError(
                f"the checkpoint's state of table {member.name} lacks '{field.name}' and has "
                f"{', '.join(map(repr, found))}: it is of another optimizer"
            )
        shapes = (shape, shape[:1]) if field.count == 1 else (shape,)
        if value is not None and tuple(value.shape) not in shapes:
            raise FlatbedError(
                f"state '{field.name}' of table {member.name} has shape {tuple(value.shape)} in the "
                f"checkpoint; the table's is {shape}"
            )
    return found


def _load_table(optimizer: Optimizer, member: Member, held: dict[str, Any]) -> None:
    table = member.table
    table.store.set_state_fields(table.store.record.state)  # what the checkpoint lacks begins anew
    for field in table.store.record.state:
        if field.name in held:
            write_field(table, field.name, held[field.name].reshape(-1, field.count))
        elif held and field.name.startswith("_"):  # what torch does not know of: it has been through a step
            write_field(table, field.name, torch.ones(table.num_embeddings, 1, device="cpu"))
    numbers = {name: 1.0 for name in member.scalars if held and name.startswith("_")}
    numbers |= {name: float(held[name]) for name in member.scalars if name in held}
    optimizer._tables.restore(member, numbers)


def _warn_of_losses(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """One forgotten argument on resumption would lose an average of weeks."""
    found = {key for value in state_dict["state"].values() if isinstance(value, dict) for key in value}
    kept = {MASTER: optimizer.master_weights, EMA: optimizer.settings.ema_decay is not None}
    options = {MASTER: "master_weights=True", EMA: "ema_decay=…"}
    if lost := [key for key in kept if key in found and not kept[key]]:
        warnings.warn(
            f"the checkpoint has {' and '.join(map(repr, lost))}, which this optimizer does not keep: build "
            f"it with {' and '.join(options[key] for key in lost)} to go on with it",
            stacklevel=4,
        )


def _members(groups: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(group["params"] for group in groups)


def _check_sizes(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    ours, theirs = ([len(group["params"]) for group in side] for side in (groups, saved))
    if ours != theirs:
        raise ValueError(
            f"the state dict is of another model: its param groups hold {theirs} parameters, "
            f"the optimizer's {ours}"
        )
