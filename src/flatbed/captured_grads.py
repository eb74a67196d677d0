"""Gradients that a captured step shares with other code.

A graph reads and writes gradients where they were at its capture. Those that the step uses from before must
keep their memory. Those that the step makes are in the memory of the graph: once code outside has dropped
one, replays still write it there, and an optimizer outside does not get it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import FlatParameter
from flatbed.tables.table import Table

DROPS = (
    "it uses gradients from outside, and drops them: the graph would go on with the memory of the first "
    "ones. Call zero_grad() at its start, or zero_grad(set_to_none=False) at its end, or accumulate "
    "gradients inside of it"
)
LEAVES = (
    "it leaves gradients of {} parameters that no optimizer in it updates: the graph would write them to "
    "memory that zero_grad() outside of it drops. Call step() and zero_grad() of their optimizer in it, or "
    "zero_grad(set_to_none=False) outside. If nothing needs them, call zero_grad() of these parameters at "
    "its start and end, or freeze them"
)
GRAD: Any = Tensor.grad
"""The descriptor itself: tables and flat parameters have properties, which compute."""


class Leaf(NamedTuple):
    """A parameter, and the gradient that it has before a capture."""

    param: Tensor
    grad: Tensor | None
    version: int


def leaves(objects: Iterable[object]) -> list[Leaf]:
    """Return those objects that are tensors with a gradient, or may get one, apart from tables."""
    found: dict[int, Leaf] = {}
    objects = list(objects)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    with torch._C.DisableTorchFunctionSubclass():
        tensors: Any = (one for one in objects if type(one) in kinds and not isinstance(one, Table))
        for one in tensors:
            with suppress(RuntimeError):  # of views whose base was changed in a way that torch refuses
                grad = GRAD.__get__(one) if one.is_leaf else None
                if grad is not None or (one.is_leaf and one.requires_grad):
                    found[id(one)] = Leaf(one, grad, _version(grad))
    return [*found.values()]


def _version(grad: Tensor | None) -> int:
    """Return the number of writes to a gradient. A DTensor and its local tensor count separately."""
    return -1 if grad is None else grad._version + getattr(grad, "_local_tensor", grad)._version


class SharedGrad(NamedTuple):
    """A parameter whose gradient a graph uses, and that code outside of the step must keep."""

    param: Tensor
    grad: Tensor

    def is_kept(self) -> bool:
        return GRAD.__get__(self.param) is self.grad


@contextmanager
def sharing_grads(optimizers: list[torch.optim.Optimizer]) -> Iterator[list[SharedGrad]]:
    """Find the gradients that the body, a captured step of these optimizers, shares with other code.

    Raises if the step drops one of them, or leaves new ones in parameters that no optimizer in it has. All
    living objects are searched, except for those that `gc.freeze` hides: the step does not say which
    parameters it uses. If the body fails, gradients are put back: those that it made were never computed.
    """
    own, stepped, shared = params_of(optimizers), set[int](), list[SharedGrad]()
    rows = [(p, [*p._grads.parts]) for p in own if isinstance(p, Table)]

    def note_grads(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped.update(id(grad) for grad in map(GRAD.__get__, params_of([optimizer])) if grad is not None)

    def note_given(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) == 1 and not kwargs:  # a closure may drop them first
            note_grads(optimizer)

    before = leaves(chain(own, gc.get_objects()))  # no list, which would be among these objects itself
    hooks = [register_optimizer_step_pre_hook(note_given), register_optimizer_step_post_hook(note_grads)]
    # First of all hooks: another one gathers the gradients of flat parameters.
    _global_optimizer_pre_hooks.move_to_end(hooks[0].id, last=False)  # type: ignore[attr-defined]
    try:
        yield shared
        n_left, ours = 0, set(map(id, own))
        for leaf in before:
            grad = GRAD.__get__(leaf.param)
            n_left += id(leaf.param) not in ours and grad is not None and grad is not leaf.grad
            is_used = id(leaf.grad) in stepped or _version(leaf.grad) != leaf.version
            if leaf.grad is not None and is_used:
                shared.append(SharedGrad(leaf.param, leaf.grad))
        if not all(one.is_kept() for one in shared):
            raise FlatbedError(DROPS)
        if n_left:
            raise FlatbedError(LEAVES.format(n_left))
    except BaseException:
        for leaf in before:
            if GRAD.__get__(leaf.param) is not leaf.grad:
                GRAD.__set__(leaf.param, leaf.grad)
        for table, parts in rows:
            with table._grads.lock:
                table._grads.parts = parts
        raise
    finally:
        for hook in hooks:
            hook.remove()


def params_of(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the parameters of all groups. Those in the memory of a flat parameter follow it."""
    found = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return found + [p for flat in found if isinstance(flat, FlatParameter) for p in flat.buffer.originals]
