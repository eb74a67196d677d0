"""What surrounds a step of any torch optimizer that holds flat parameters.

Torch offers hooks for all optimizers at once; they are installed with the first `FlatParams` and return
at once for optimizers without flat parameters. Before the step: everything is at home, every gradient is
gathered, none is missing. After it: frozen parameters are as they were, and autograd knows of the change.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatbed.errors import FlatbedError
from flatbed.flat import probe
from flatbed.flat import repair as health
from flatbed.flat.buffer import Buffer, capturing, view
from flatbed.flat.parameter import FlatParameter

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams


@dataclass
class Whole:
    """What `FlatParams.step` asks for beside the step, and the norm it found."""

    owner: FlatParams
    max_norm: float | None
    norm_type: float
    total_norm: torch.Tensor | None = None


@dataclass
class Step:
    """One step under way: the buffers it updates, and the frozen values to put back afterwards.

    `alone` says that nobody else's hook runs between ours; `whole` is set when `FlatParams.step` runs
    clipping, step and zero_grad as one.
    """

    optimizer: int  # its id
    flats: list[FlatParameter]
    alone: bool
    whole: Whole | None = None
    buffers: list[Buffer] = field(default_factory=list)
    frozen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def restore_frozen(self) -> None:
        """Put the frozen values back where they were."""
        if self.frozen:
            torch._foreach_copy_([home for home, _ in self.frozen], [kept for _, kept in self.frozen])


# A stack, since a subclass's step may call its parent's, and torch then runs the hooks twice.
_under_way: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Step]] = weakref.WeakKeyDictionary()


_met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def whole_step(optimizer: torch.optim.Optimizer, whole: Whole) -> None:
    """Step with one look at the originals, since no code of the user's runs in between.

    The owner carries the wish: `optimizer` may be a wrapper (Accelerate's) around the one that steps.
    """
    whole.owner._asked = whole
    try:
        optimizer.step()
    finally:
        whole.owner._asked = None


@functools.cache
def install() -> None:
    """Register with torch.optim, once in a process."""
    # Torch marks its own optimizer bookkeeping the same way: a compiled step must not trace through it.
    register_optimizer_step_pre_hook(torch._disable_dynamo(_before_step))  # type: ignore[attr-defined]
    register_optimizer_step_post_hook(torch._disable_dynamo(_after_step))  # type: ignore[attr-defined]


def flat_parameters(optimizer: torch.optim.Optimizer) -> list[FlatParameter]:
    """The flat parameters among an optimizer's."""
    return [p for group in optimizer.param_groups for p in group["params"] if type(p) is FlatParameter]


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    flats = flat_parameters(optimizer)
    if not flats:
        return None
    probe.refuse_shape_readers(optimizer)
    owners = list({id(p._owner): p._owner for p in flats}.values())
    if optimizer not in _met:
        for owner in owners:
            _look_at_groups(owner, optimizer)
        _met.add(optimizer)
    for p in flats:
        p._owner._buffers[p._index].trusted_by = 0  # should an earlier step have ended in an exception
    for owner in owners:
        if owner._on_loan:
            raise FlatbedError("the model holds averaged weights (`with ema.weights()`): step outside of it")
        owner._heal()
        _refuse_unfrozen(owner, optimizer)
    _refuse_old_state(optimizer, flats)
    others = bool(optimizer._optimizer_step_pre_hooks) or len(_global_optimizer_pre_hooks) > 1
    step = Step(id(optimizer), flats, alone=not others)
    for owner in owners:
        step.whole, owner._asked = step.whole or owner._asked, None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _collect(step)
        _under_way.setdefault(optimizer, []).append(step)
        return None
    for p in flats:  # a closure is called when values may have moved already
        _keep_frozen(step, p._owner._buffers[p._index])
    _under_way.setdefault(optimizer, []).append(step)
    wrapped = _collecting(closure, step)
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _collecting(closure: Callable[[], Any], step: Step) -> Callable[[], Any]:
    """The closure computes the gradients, so they are collected after it, as often as it is called."""

    @functools.wraps(closure)
    def wrapped() -> Any:
        step.restore_frozen()
        loss = closure()
        _collect(step)
        return loss

    return wrapped


def _collect(step: Step) -> None:
    """Gather every gradient, refuse missing ones, keep a copy of what is frozen."""
    active: list[Buffer] = []
    kept = bool(step.frozen)
    for p in step.flats:
        buffer = p._owner._buffers[p._index]
        if p.grad is not None:
            absent, frozen = buffer.census()
            _refuse_missing(p._owner, buffer, absent)
            active.append(buffer)
            if frozen and not kept:
                _keep_frozen(step, buffer)
    if all(buffer.unmoved for buffer in active):
        for owner in {id(p._owner): p._owner for p in step.flats}.values():
            _explain_absence(owner)
    if step.whole is not None and step.whole.max_norm is not None:
        owner = step.whole.owner
        mine = [buffer for buffer in owner._buffers if buffer in active]
        step.whole.total_norm = owner._clip(mine, step.whole.max_norm, step.whole.norm_type)
    for p in step.flats:
        buffer = p._owner._buffers[p._index]
        buffer.trusted_by = step.optimizer if step.alone and buffer in active else 0
        p.show_grad(buffer.grad if buffer in active else None)
    step.buffers = active


def _keep_frozen(step: Step, buffer: Buffer) -> None:
    with torch.no_grad():
        for p, segment in zip(buffer.originals, buffer.segments, strict=True):
            if not p.requires_grad:
                home = view(buffer.data, segment)
                step.frozen.append((home, home.clone()))


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    steps = _under_way.get(optimizer)
    if not steps:
        return
    step = steps.pop()
    for p in step.flats:
        p.show_grad(None)
    for buffer in step.buffers:
        if buffer.flat_strayed():
            health.take_flat_back(buffer)
        if any(group.get("eps") == 0 for group in optimizer.param_groups):
            buffer.zero_padding_(buffer.data)  # where 0 / 0 has left NaN
    step.restore_frozen()
    for buffer in step.buffers:
        buffer.trusted_by, buffer.touched = 0, False
        buffer.bump_versions(frozen_too=not step.frozen)
    if step.whole is not None:
        for buffer in step.whole.owner._buffers:
            buffer.drop_grads(in_place=step.alone and not optimizer._optimizer_step_post_hooks)


def _look_at_groups(owner: FlatParams, optimizer: torch.optim.Optimizer) -> None:
    """At an optimizer's first step: nothing held twice, and no group's options lost on the way."""
    originals = {id(entry.parameter): entry.name for entry in owner._entries}
    twice = [originals[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in originals]
    if twice:
        raise FlatbedError(
            f"{_listed(twice)} is in this optimizer as a parameter of its own and inside a flat parameter, "
            f"and would be updated twice; give the optimizer flat.parameters() alone"
        )
    for p, source in zip(owner.parameters(), owner._group_of_buffer, strict=True):
        for key, value in owner._given.options[source].items():
            group = next((g for g in optimizer.param_groups if any(p is q for q in g["params"])), None)
            found = None if group is None else group.get(f"initial_{key}", group.get(key))
            if group is not None and found != value:
                warnings.warn(
                    f"the FlatParams was given a param group with {key}={value!r}, the optimizer has "
                    f"{found!r} there: flat.parameters() leaves the options behind, flat.groups() keeps them",
                    stacklevel=6,
                )
                return


def _explain_absence(owner: FlatParams) -> None:
    """No gradient anywhere: torch would do nothing and say nothing. Often the model is another one by now."""
    if owner._absence_explained or capturing():
        return
    owner._absence_explained = True  # once: it waits for the GPU
    if any(b.unmoved and b.grad is not None and bool(b.grad.any()) for b in owner._buffers):
        return  # written past autograd, by a replayed CUDA graph
    gone = [problem for problem in owner.check() if "no longer part" in problem.what]
    if gone:
        raise FlatbedError(
            "no parameter of this FlatParams has a gradient:\n" + "\n".join(map(str, gone[:8]))
        )
    warnings.warn(
        "no parameter of this FlatParams has a gradient, so the step trains nothing. If the model's "
        "parameters were replaced (load_state_dict(assign=True), new layers), build FlatParams from the "
        "module itself, which finds their successors, or build it anew",
        stacklevel=6,
    )


def _refuse_missing(owner: FlatParams, buffer: Buffer, absent: list[int]) -> None:
    if owner.missing == "zero":
        return
    names = [buffer.segments[i].name for i in absent if buffer.originals[i].requires_grad]
    if names:
        gone = [str(p) for p in owner.check() if p.name in names and "no longer part" in p.what]
        if gone:
            raise FlatbedError("\n".join(gone))
        raise FlatbedError(
            f"{_listed(names)} got no gradient while others did. Torch would skip "
            f"{'it' if len(names) == 1 else 'them'} and let the step count fall behind, which one flat "
            f"state cannot express. Freeze (requires_grad_(False)) what is not trained, leave it out of the "
            f"FlatParams, or ask for missing='zero' to take such gradients as zero (weight decay and "
            f"momentum then still act)"
        )


def _refuse_unfrozen(owner: FlatParams, optimizer: torch.optim.Optimizer) -> None:
    late = [entry for entry in health.unfrozen(owner) if entry.parameter.grad is not None]
    if late:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [entry.name for entry in late if id(entry.parameter) not in held]
        if names:
            raise FlatbedError(
                f"{_listed(names)} was frozen when the model was flattened and is trained now, but no "
                f"buffer holds it. Flatten while it is trainable and freeze it afterwards (it then stays "
                f"as it is, to the bit), or add it to the optimizer with add_param_group"
            )


def _refuse_old_state(optimizer: torch.optim.Optimizer, flats: list[FlatParameter]) -> None:
    for p in flats:
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() not in (1, p.numel()):
                raise FlatbedError(
                    f"the optimizer's '{key}' has {value.numel()} elements and its flat parameter has "
                    f"{p.numel()}: the model was cast after training began. Take optimizer_state_dict() "
                    f"before the cast, and load it into a new optimizer over flat.parameters() after it"
                )


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
