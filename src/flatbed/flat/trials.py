"""Trials of an optimizer on small parameters: does it read shapes or norms, and which state does it keep?"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import OrderedDict, defaultdict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.optim.from_torch import LARGE, cloned, quietly

STEPS = 16  # some optimizers collect gradients for ten steps before they move anything
# Parameters of different shapes, scales and norms, apart and in one buffer with as much padding.
SPANS = (-2.0, 3.0, 5), (0.5, 0.6, 8), (0.3, 0.9, 16), (-0.3, 0.2, math.prod(LARGE))
PARTS = tuple(torch.linspace(*span, device="cpu") for span in SPANS)
APART = ((5,), (2, 2, 2), (2, 2, 2, 2), LARGE)
JOINED = ((2 * math.prod(LARGE),),)
NORMS = 1.0, 0.2, 0.6, 0.01, 0.1  # norms of gradients rise and fall, for each parameter at another step


def refuse_shape_readers(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device
) -> None:
    """Raise if an optimizer would update one flat parameter differently from the parameters inside it.

    Elementwise optimizers pass, and so does LBFGS, which joins its parameters itself.
    """
    name = type(optimizer).__name__
    try:
        apart, joined, again = (
            _solve(optimizer, group, device, shapes=shapes, seed=seed)
            for shapes, seed in ((APART, 0), (JOINED, 0), (APART, 1))
        )
        if all(map(torch.equal, apart, PARTS)) or not torch.cat(apart).isfinite().all():
            raise FlatbedError(f"{STEPS} steps on a small problem moved nothing, or to NaN")
        reason = ""
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    differs = not reason and any(
        (a - b).abs().max() > 1e-3 * (a - part).abs().max() + 4 * torch.finfo(a.dtype).eps * part.abs().max()
        for a, b, part in zip(apart, joined, PARTS, strict=True)
    )
    if differs and not all(map(torch.equal, apart, again)):
        reason = "its updates are random"
    if reason:
        warnings.warn(
            f"flatbed could not find out whether {name} reads the shape of its parameters ({reason}); on a "
            f"flat parameter it must not",
            stacklevel=8,
        )
    elif differs:
        raise FlatbedError(
            f"{name} updates a flat parameter differently from the parameters it consists of: it reads their "
            f"shape, norm or mean. Give it model.parameters() (flat.originals()), or use an elementwise "
            f"optimizer such as torch.optim.AdamW. No parameter was changed"
        )


def _solve(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    device: torch.device,
    *,
    shapes: tuple[tuple[int, ...], ...],
    seed: int,
) -> list[Tensor]:
    """Train on a small quadratic problem and return the values of `PARTS` after it."""
    params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    for value, start in zip(_pieces([p.detach() for p in params]), PARTS, strict=True):
        value.copy_(start)

    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty

    def evaluate(step: int) -> Tensor:
        """Compute loss and gradients; each step has another goal and other gradients."""
        loss = torch.zeros((), device=device)
        for p in params:
            p.grad = torch.zeros_like(p)
        values, grads = _pieces([p.detach() for p in params]), _pieces([p.grad for p in params])
        for k, (value, grad, start) in enumerate(zip(values, grads, PARTS, strict=True)):
            error = value - (start.flip(0) * (0.7 - 0.4 * step) + 0.1).to(device)
            weight = torch.linspace(0.5, 2.0 + step, len(start), device=device)
            grad.copy_(weight * error)
            loss += (0.5 * weight * error**2).sum()
            if not needs_closure:  # a line search needs the gradients of its loss
                if step % 4 == 3:
                    grad.copy_(_rotated(value))
                grad.mul_(NORMS[(step + k) % len(NORMS)])
        return loss

    with quietly(seed, device):
        small = twin(optimizer, _with_lr(group), list(params))
        for step in range(2 if needs_closure else STEPS):  # it calls a closure many times
            first = [evaluate(step)]  # before the step, since an optimizer may ignore its closure

            def again(step: int = step, first: list[Tensor] = first) -> Tensor:
                return first.pop() if first else evaluate(step)

            small.step() if closure is None else small.step(again)  # type: ignore[arg-type]
    return [value.cpu() for value in _pieces([p.detach() for p in params])]


def _rotated(value: Tensor) -> Tensor:
    """A gradient that is orthogonal to its parameter, and to each of the parameter's rows."""
    even = len(value) // 2 * 2
    pairs = value[:even].view(-1, 2)
    turned = torch.stack([-pairs[:, 1], pairs[:, 0]], dim=1).flatten()
    return torch.cat([turned, torch.zeros_like(value[even:])])


def _pieces(tensors: list[Any]) -> list[Tensor]:
    """Views of `PARTS` in separate tensors, or in one buffer."""
    if len(tensors) > 1:
        return [tensor.view(-1) for tensor in tensors]
    return [tensors[0][16 * i : 16 * i + len(part)] for i, part in enumerate(PARTS)]


def _with_lr(group: dict[str, Any]) -> dict[str, Any]:
    """The group's options with a learning rate that shows something: a warm-up may begin at 0."""
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        return {**group, "lr": torch.full_like(lr, 0.02)}
    return {**group, "lr": 0.02} if isinstance(lr, (int, float)) else group


def twin(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], params: list[Tensor]
) -> torch.optim.Optimizer:
    """A new optimizer of the same class, with one group of these options over `params`.

    Arguments of the constructor are known from the optimizer's attributes and defaults. Where they are not,
    the optimizer is copied, unless it may hold another one: its real parameters must not be touched.
    """
    kind = type(optimizer)
    group = {k: v for k, v in cloned(options).items() if k not in ("params", "param_names")}
    accepted = inspect.signature(kind.__init__).parameters
    known = {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float | str | tuple | None)}
    given = {**known, "defaults": optimizer.defaults, **optimizer.defaults}
    attempts = [{k: v for k, v in given.items() if k in accepted}]
    if any(argument.kind is argument.VAR_KEYWORD for argument in accepted.values()):
        attempts.insert(0, {**attempts[0], **optimizer.defaults})
    for arguments in attempts:
        with suppress(TypeError, KeyError):
            return kind([{**group, "params": params}], **cloned(arguments))
    own = {k for k in vars(optimizer) if not k.startswith("_")} - {"defaults", "state", "param_groups"}
    if not own <= known.keys():
        raise FlatbedError(f"{kind.__name__} takes more than its attributes tell")
    made = object.__new__(kind)
    made.__dict__.update(optimizer.__dict__, state=defaultdict(dict))
    made.__dict__["param_groups"] = [{**group, "params": params}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        made.__dict__[hooks] = OrderedDict()
    return made


def element_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> set[str]:
    """The names of the state that holds one value per element, seen on a small parameter after a step."""
    p = nn.Parameter(torch.tensor([0.5, -0.5], device="cpu"))
    p.grad = torch.tensor([0.1, 0.2], device="cpu")
    with quietly():
        small = twin(optimizer, {**_with_lr(group), "capturable": False}, [p])
        small.step()
    return {k for k, v in small.state[p].items() if isinstance(v, Tensor) and v.shape == p.shape}
