"""State dicts in torch's own format, in both directions."""

from __future__ import annotations

import copy
import warnings
from itertools import chain
from typing import TYPE_CHECKING, Any

from flatbed.engine import checks
from flatbed.engine.state import EMA, MASTER, Flag, States
from flatbed.kernels.row import STEPS

if TYPE_CHECKING:
    from flatbed.engine.optimizer import Optimizer


ROUNDS = "rounding_steps"  # a key beside torch's: how often has been rounded by chance


def plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same with ordinary dicts, which `torch.load(weights_only=True)` accepts."""
    state = {
        key: dict(value) if isinstance(value, dict) else value for key, value in state_dict["state"].items()
    }
    made = {**state_dict, "state": state}
    if optimizer.settings.stochastic_rounding or optimizer.settings.stochastic_state:
        made[ROUNDS] = max((int(shared[STEPS]) for shared in optimizer._shared.values()), default=0)
    return made


def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Take over groups and state; if anything does not fit, all stays as it was.

    Tensors are copied into the optimizer's own memory in the dtype they come in (or in `state_dtype`):
    torch's own loading would cast fp32 moments down to a bf16 parameter's dtype.
    """
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
    states = States(Flag())
    for key, value in state_dict["state"].items():
        states[params.get(key, key)] = dict(value) if isinstance(value, dict) else value
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
    optimizer._watch = None  # what the checkpoint lacks is made at the next step
    optimizer._rounds = float(state_dict.get(ROUNDS, 0))
    for shared in optimizer._shared.values():
        shared[STEPS] = optimizer._rounds
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


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
