"""Does an optimizer care how its elements are divided into parameters? Found out by trying.

A tiny problem is solved twice: once as two parameters, once as one. An elementwise optimizer (and LBFGS,
which joins its parameters itself) lands on the same values; one that reads shapes or norms does not.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import OrderedDict, defaultdict
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import capturing

_tried: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_SHAPES = ((4, 3), (5,))
_STEPS = 3
_OWN = ("defaults", "state", "param_groups")  # what every torch optimizer has


def refuse_shape_readers(optimizer: torch.optim.Optimizer) -> None:
    """Raise if this optimizer, given one flat parameter, would do something else than with many."""
    if _tried.get(optimizer) == len(optimizer.param_groups) or capturing():
        return
    for number, group in enumerate(optimizer.param_groups):
        if any(type(p).__name__ == "FlatParameter" for p in group["params"]):
            _try(optimizer, number)
    _tried[optimizer] = len(optimizer.param_groups)


def twin(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], params: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """A fresh optimizer of the same class, with one group of these options over `params`."""
    kind = type(optimizer)
    group = {
        "params": params,
        **{k: _own(v) for k, v in options.items() if k not in ("params", "param_names")},
    }
    accepted = inspect.signature(kind.__init__).parameters
    open_ended = any(a.kind is a.VAR_KEYWORD for a in accepted.values())
    arguments = {k: _own(v) for k, v in optimizer.defaults.items()}
    named = {k: v for k, v in arguments.items() if k in accepted}
    if open_ended:
        with suppress(TypeError):  # there may be defaults that its constructor sets by itself
            return kind([group], **arguments)
    try:
        return kind([group], **named)
    except TypeError:  # its constructor takes what `defaults` does not tell
        more = {k: v for k, v in vars(optimizer).items() if not k.startswith("_") and k not in _OWN}
        if not all(isinstance(v, (int, float, str, type(None))) for v in more.values()):
            raise  # it may wrap another optimizer, whose real parameters a trial must not touch
        made = object.__new__(kind)
        made.__dict__.update(optimizer.__dict__)
        made.state = defaultdict(dict)
        made.param_groups = [group]
        made._optimizer_step_pre_hooks = OrderedDict()
        made._optimizer_step_post_hooks = OrderedDict()
        return made


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _try(optimizer: torch.optim.Optimizer, number: int) -> None:
    group = optimizer.param_groups[number]
    device = next(p.device for p in group["params"] if type(p).__name__ == "FlatParameter")
    name = type(optimizer).__name__
    try:
        apart = _solve(optimizer, group, device, joined=False)
        joined = _solve(optimizer, group, device, joined=True)
        again = _solve(optimizer, group, device, joined=False, seed=1)
    except Exception as error:
        warnings.warn(
            f"flatbed could not find out whether {name} reads the shape of its parameters "
            f"({type(error).__name__}: {error}); on a flat parameter it must not",
            stacklevel=5,
        )
        return
    start = _start(device)
    moved = (apart - start).abs().max()
    tolerance = 1e-3 * moved + 4 * torch.finfo(torch.float32).eps * start.abs().max()
    random = not torch.equal(apart, again)
    if not random and bool((apart - joined).abs().max() > tolerance):
        raise FlatbedError(
            f"{name} updates a flat parameter differently from the parameters it is made of: it reads "
            f"their shape or their norm. Give it model.parameters() (flat.originals()), or use an "
            f"elementwise optimizer such as torch.optim.AdamW over the flat parameters. "
            f"No parameter was changed"
        )


def _start(device: torch.device) -> torch.Tensor:
    """Small values first, large ones after: norms of the two parameters then differ from the joint one."""
    n_small = _SHAPES[0][0] * _SHAPES[0][1]
    return torch.cat([torch.linspace(-0.3, 0.2, n_small), torch.linspace(-2.0, 3.0, _SHAPES[1][0])]).to(
        device
    )


def _solve(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    *,
    joined: bool,
    seed: int = 0,
) -> torch.Tensor:
    start = _start(device)
    if joined:
        params = [nn.Parameter(start.clone())]
    else:
        sizes = [torch.Size(shape).numel() for shape in _SHAPES]
        params = [
            nn.Parameter(part.clone().view(shape))
            for part, shape in zip(torch.split(start, sizes), _SHAPES, strict=True)
        ]
    goal = start.flip(0) * 0.7 + 0.1
    weight = torch.linspace(0.5, 2.0, start.numel(), device=device)

    def closure() -> torch.Tensor:
        with torch.no_grad():
            difference = torch.cat([p.reshape(-1) for p in params]) - goal
            parts = torch.split(weight * difference, [p.numel() for p in params])
            for p, g in zip(params, parts, strict=True):
                p.grad = g.view_as(p).clone()
            return (0.5 * weight * difference**2).sum()

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        small = twin(optimizer, _with_lr(group), list(params))
        for _ in range(_STEPS):
            _step(small, closure)
    return torch.cat([p.detach().reshape(-1) for p in params])


def _with_lr(group: dict[str, Any]) -> dict[str, Any]:
    """A warm-up's first learning rate may be 0, which would show nothing."""
    lr = group.get("lr")
    if isinstance(lr, torch.Tensor):
        return {**group, "lr": torch.full_like(lr, 0.02)}
    return {**group, "lr": 0.02} if isinstance(lr, (int, float)) else group


def _step(optimizer: torch.optim.Optimizer, closure: Any) -> None:
    if "closure" in inspect.signature(type(optimizer).step).parameters:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def element_keys(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """The names of the state that holds one value per element, seen on a tiny parameter after a step."""
    p = nn.Parameter(torch.tensor([0.5, -0.5]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = twin(optimizer, {**_with_lr(group), "capturable": False}, [p])
        p.grad = torch.tensor([0.1, 0.2])
        small.step()
    return {k for k, v in small.state[p].items() if isinstance(v, torch.Tensor) and v.shape == p.shape}
