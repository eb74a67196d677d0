"""Gradients that a captured step shares with other code.

A graph reads and writes gradients where they were at its capture. If the step uses a gradient from before,
every replay does, so the parameter must keep it. If the step gives a parameter a new gradient, replays do
not: an optimizer outside does not get it once code outside has dropped it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatbed.flat.buffer import FlatParameter
from flatbed.tables.table import Table

LEAVES = (
    "train_step leaves gradients, and no optimizer in it uses them: a CUDA graph would write them to memory "
    "that zero_grad() outside of it drops. Call step() and zero_grad() of their optimizer in train_step, or "
    "zero_grad(set_to_none=False) outside"
)
DROPS = (
    "train_step uses gradients from outside of it, and drops them: a CUDA graph would go on with the memory "
    "of the first ones. Call zero_grad() at its start, or zero_grad(set_to_none=False) at its end, or "
    "accumulate gradients inside of it"
)
REPLACED = (
    "gradients that train_step uses are dropped or replaced outside of it, and a CUDA graph would go on with "
    "the former ones: call zero_grad(set_to_none=False) outside of it"
)
GRAD: Any = Tensor.grad
"""The descriptor itself: tables and flat parameters have properties, which compute."""


class DroppedGradsError(Exception):
    """Gradients that a captured step shares with other code do not stay where they are."""


class Leaf(NamedTuple):
    """A parameter, and the gradient that it has before a capture."""

    param: Tensor
    grad: Tensor | None
    version: int


def leaves(objects: Iterable[object]) -> list[Leaf]:
    """Return those objects that are tensors with a gradient, or may get one, apart from tables."""
    found: list[Leaf] = []
    objects = list(objects)
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    with torch._C.DisableTorchFunctionSubclass():
        tensors: Any = (one for one in objects if type(one) in kinds and not isinstance(one, Table))
        for one in tensors:
            with suppress(RuntimeError):  # of views whose base was changed in a way that torch refuses
                grad = GRAD.__get__(one) if one.is_leaf else None
                if grad is not None or (one.is_leaf and one.requires_grad):
                    found.append(Leaf(one, grad, _version(grad)))
    return found


def _version(grad: Tensor | None) -> int:
    """Return the number of writes to a gradient. A DTensor and its local tensor count separately."""
    return -1 if grad is None else grad._version + getattr(grad, "_local_tensor", grad)._version


@dataclass(slots=True)
class CapturedGrads:
    """What a captured step does with gradients."""

    used: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parameters with gradients from before the capture that the step reads or writes."""
    n_left: int = 0
    """Parameters of no optimizer in the step that had no gradient before, and have one after it."""
    params: list[Tensor] = field(default_factory=list)
    """Parameters whose gradients the step may change."""

    def compare(self, before: list[Leaf], own: set[int], stepped: set[int]) -> None:
        """Compare with the leaves from before.

        `own` has the ids of the optimizers' parameters, and `stepped` those of gradients that they have used.
        """
        for leaf in before:
            grad, is_own = GRAD.__get__(leaf.param), id(leaf.param) in own
            is_used = id(leaf.grad) in stepped or _version(leaf.grad) != leaf.version
            if leaf.grad is not None and is_used:
                if grad is not leaf.grad:
                    raise DroppedGradsError(DROPS)
                self.used.append((leaf.param, leaf.grad))
            if leaf.grad is None and grad is not None and not is_own:
                self.n_left += 1
            if is_own or is_used or grad is not leaf.grad:
                self.params.append(leaf.param)
        if self.n_left and not own:
            raise DroppedGradsError(LEAVES)

    def replaced(self) -> list[Tensor]:
        """Return the parameters whose gradients code outside of the step has dropped or replaced."""
        return [param for param, grad in self.used if GRAD.__get__(param) is not grad]


@contextmanager
def grads_of_capture(
    optimizers: list[torch.optim.Optimizer],
    params: list[Tensor] | None = None,
    hidden: Iterable[Tensor] = (),
) -> Iterator[CapturedGrads]:
    """Find out what the body, a capture, does with gradients of `params`. Those of `hidden` are not there.

    By default all living objects are searched, except for those that `gc.freeze` hides: the step does not say
    which parameters it uses. If the body fails, gradients are put back: those that it made were never
    computed.
    """
    own, found, stepped = params_of(optimizers), CapturedGrads(), set[int]()
    rows = [(p, [*p._grads.parts]) for p in own if isinstance(p, Table)]
    of_others = [(p, GRAD.__get__(p)) for p in hidden]

    def note_grads(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped.update(id(grad) for grad in map(GRAD.__get__, params_of([optimizer])) if grad is not None)

    def note_given(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) == 1 and not kwargs:  # a closure may drop them first
            note_grads(optimizer)

    for p, _ in of_others:
        GRAD.__set__(p, None)
    before = leaves(gc.get_objects() if params is None else params)
    hooks = [register_optimizer_step_pre_hook(note_given), register_optimizer_step_post_hook(note_grads)]
    # First of all hooks: another one gathers the gradients of flat parameters.
    _global_optimizer_pre_hooks.move_to_end(hooks[0].id, last=False)  # type: ignore[attr-defined]
    try:
        yield found
        found.compare(before, set(map(id, own)), stepped)
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
        for p, grad in of_others:
            GRAD.__set__(p, grad)


def params_of(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the parameters of all groups. Those in the memory of a flat parameter follow it."""
    found = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return found + [p for flat in found if isinstance(flat, FlatParameter) for p in flat.buffer.originals]
