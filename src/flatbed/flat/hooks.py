"""Hooks around a step of any torch optimizer that holds flat parameters.

Torch calls them for every optimizer; for one without flat parameters they return at once. Before the step,
every parameter lies in its buffer, every gradient is gathered and none is missing. After it, frozen
parameters have their old values and autograd knows of the change.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.flat import model_params
from flatbed.flat.buffer import Buffer, FlatParameter, clip, view
from flatbed.flat.trials import refuse_shape_readers
from flatbed.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams


class Step:
    """One step of one optimizer: the buffers it updates, and the frozen values to restore after it."""

    def __init__(self, optimizer: torch.optim.Optimizer, flats: list[FlatParameter]) -> None:
        self.flats = flats
        self.owners: list[FlatParams] = list({id(p._owner): p._owner for p in flats}.values())
        own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        # No other hook can replace a gradient between the two hooks of this module.
        self.is_only_hook = not own_hooks and len(_global_optimizer_pre_hooks) == 1
        self.buffers: list[Buffer] = []
        self.frozen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set_in_step(self, active: bool) -> None:
        """Let the optimizer read the gathered gradients without another look at the originals."""
        for p in self.flats:
            is_gathered = active and p.buffer in self.buffers
            p.buffer.in_step = is_gathered and self.is_only_hook
            p.show_grad(is_gathered)

    def refuse_missing(self) -> None:
        """Gather every gradient, and raise if some parameters have none."""
        self.buffers = [p.buffer for p in self.flats if p.gather_grad() is not None]
        for p in self.flats:
            if p.buffer in self.buffers:
                _refuse_missing(p._owner, p.buffer)

    def collect(self) -> None:
        """Gather every gradient, refuse missing ones, and clip if `FlatParams.step` asks for it."""
        self.refuse_missing()
        for owner in self.owners:
            if all(buffer.no_backward for buffer in self.buffers):
                _report_no_grads(owner)
            if owner._pending_clip is not None:
                gathered = [buffer for buffer in owner._buffers if buffer in self.buffers]
                owner._total_norm = clip(owner, gathered, *owner._pending_clip)
                owner._pending_clip = None
        self.set_in_step(True)

    def keep_frozen(self) -> None:
        """Copy the values of frozen parameters, which weight decay and momentum would move."""
        for buffer in (p.buffer for p in self.flats):
            for original, segment in zip(buffer.originals, buffer.segments, strict=True):
                if not original.requires_grad:
                    own = view(buffer.data, segment)
                    self.frozen.append((own, own.clone()))

    def restore_frozen(self) -> None:
        if self.frozen:  # none of these tensors requires grad
            torch._foreach_copy_([own for own, _ in self.frozen], [kept for _, kept in self.frozen])


# A stack, since a subclass's step may call its parent's, and torch then runs the hooks twice.
_active: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Step]] = weakref.WeakKeyDictionary()
# The number of param groups when an optimizer was last checked.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


@functools.cache
def install() -> None:
    """Register the hooks with torch.optim, once per process."""
    # Torch marks its own bookkeeping the same way: a compiled step must not trace through it.
    register_optimizer_step_pre_hook(torch._disable_dynamo(_before_step))  # type: ignore[attr-defined]
    register_optimizer_step_post_hook(torch._disable_dynamo(_after_step))  # type: ignore[attr-defined]


def flat_parameters(optimizer: torch.optim.Optimizer) -> list[FlatParameter]:
    """The flat parameters that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"] if type(p) is FlatParameter]


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    flats = flat_parameters(optimizer)
    if not flats:
        return None
    step = Step(optimizer, flats)
    step.set_in_step(False)  # an earlier step may have ended in an exception
    for owner in step.owners:
        owner.rebind()
    _check_first_step(optimizer, step)
    _refuse_unfrozen(step.owners, optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    closure = closure if callable(closure) else None  # some optimizers take other arguments
    if closure is None:
        step.collect()
    else:
        step.refuse_missing()  # the optimizer may not call it
    step.keep_frozen()
    _active.setdefault(optimizer, []).append(step)
    if closure is None:
        return None
    wrapped = _collecting(closure, step)
    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}


def _collecting(closure: Callable[[], Any], step: Step) -> Callable[[], Any]:
    """Wrap a closure, which computes gradients, so that they are collected after every call."""

    @functools.wraps(closure)
    def wrapped() -> Any:
        step.set_in_step(False)
        step.restore_frozen()
        loss = closure()
        for owner in step.owners:
            owner.rebind()
        step.collect()
        return loss

    return wrapped


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    steps = _active.get(optimizer)
    if not steps:
        return
    step = steps.pop()
    step.set_in_step(False)
    for p in step.flats:
        p.buffer.bring_flat_back()
    step.restore_frozen()
    for buffer in step.buffers:  # the originals' version counters miss writes through the buffer
        torch.autograd.graph.increment_version([p for p in buffer.originals if p.requires_grad])


# ---- checks


def _check_first_step(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Check what depends on the optimizer's class and groups alone, once for each set of groups."""
    if _seen.get(optimizer) == len(optimizer.param_groups) or is_capturing(step.flats[0].device):
        return
    originals = {id(entry.parameter): entry.name for owner in step.owners for entry in owner._entries}
    is_elementwise = isinstance(optimizer, Optimizer) and optimizer._rule.update is not None
    for group in optimizer.param_groups:
        twice = [originals[id(p)] for p in group["params"] if id(p) in originals]
        if twice:
            raise FlatbedError(
                f"{model_params.listed(twice)} is in this optimizer as a parameter of its own and inside a "
                f"flat parameter, and would be updated twice; give the optimizer flat.parameters() alone"
            )
        flats = [p for p in group["params"] if type(p) is FlatParameter]
        if flats and not is_elementwise:
            refuse_shape_readers(optimizer, group, flats[0].device)
        for p in flats:
            _warn_of_lost_options(group, p._owner._inputs.options[p.buffer.group])
    _seen[optimizer] = len(optimizer.param_groups)


def _warn_of_lost_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        found = group.get(f"initial_{key}", group.get(key))
        if found != value:
            warnings.warn(
                f"the flat parameters came from a param group with {key}={value!r}, the optimizer has "
                f"{found!r} there: flat.groups() keeps the options, flat.parameters() does not",
                stacklevel=7,
            )


def _report_no_grads(owner: FlatParams) -> None:
    """Warn once, since it waits for the GPU, of a step without any gradient."""
    if owner._no_grads_reported or is_capturing(owner._buffers[0].data.device):
        return
    owner._no_grads_reported = True
    if any(b.no_backward and b.grad is not None and bool(b.grad.any()) for b in owner._buffers):
        return  # a replayed CUDA graph wrote the gradients
    warnings.warn(
        "none of the flattened parameters has a gradient, so the step trains nothing. If the model's "
        "parameters were replaced (load_state_dict(assign=True), new layers), flatten the "
        "module itself, which finds their replacements, or flatten them again",
        stacklevel=7,
    )


def _refuse_missing(owner: FlatParams, buffer: Buffer) -> None:
    missing = buffer.missing_grads()
    names = [buffer.segments[i].name for i in missing if buffer.originals[i].requires_grad]
    if names and owner.missing == "raise":
        raise FlatbedError(
            f"{model_params.listed(names)} received no gradient while others did. Torch would skip them and "
            f"their step counts, which one flat state cannot express. Freeze (requires_grad_(False)) what is "
            f"not trained, leave it out of the flat parameters, or use missing='zero' (weight decay and "
            f"momentum still move it). If a layer was replaced, {model_params.REBUILD}"
        )


def _refuse_unfrozen(owners: list[FlatParams], optimizer: torch.optim.Optimizer) -> None:
    late = [e for owner in owners for e in model_params.unfrozen(owner) if e.parameter.grad is not None]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if late else set()
    names = [entry.name for entry in late if id(entry.parameter) not in held]
    if names:
        raise FlatbedError(model_params.describe_unfrozen(names))
