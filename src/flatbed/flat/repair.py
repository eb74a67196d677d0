"""What can leave a buffer, how it is noticed, and how it is brought back.

The model's own parameters are the truth: wherever their values are now, they are copied home. Only when
the flat parameter alone was given other memory (an optimizer that does not work in place) do its values
win, since the originals cannot have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import Buffer, get_requires_grad, unfit_grad
from flatbed.flat.inputs import Entry, unfit
from flatbed.layout import Spec, plan

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing out of place: whose, what left the buffer, the likely cause, and what to do."""

    name: str
    what: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}. Likely cause: {self.cause}. Remedy: {self.remedy}"


HEALS = "call rebind(), or leave it to the next step, which does so by itself"


def check(flat: FlatParams) -> list[Problem]:
    """Every problem, without changing anything."""
    problems = list(_replaced_problems(flat))
    for buffer in flat._buffers:
        problems += _stray_problems(buffer)
        problems += _grad_problems(buffer)
    for entry in unfrozen(flat):
        problems.append(
            Problem(
                entry.name,
                "is trained now, but lies in no buffer",
                "it was frozen when the model was flattened",
                "flatten while it is trainable and freeze it afterwards, or give it to the optimizer "
                "as an ordinary parameter",
            )
        )
    return problems


def _replaced_problems(flat: FlatParams) -> Iterator[Problem]:
    replaced = {id(entry) for entry, _ in _replacements(flat)}
    module = flat._given.module
    present = set() if module is None else {id(p) for p in module.parameters()}
    for entry in flat._entries:
        if id(entry) in replaced:
            yield Problem(
                entry.name,
                "the module holds another Parameter object in its place",
                "load_state_dict(assign=True), or an assignment of a new Parameter",
                HEALS,
            )
        elif module is not None and id(entry.parameter) not in present:
            yield Problem(
                entry.name,
                "is no longer part of the module",
                "its layer was replaced or removed",
                "build a new FlatParams and a new optimizer",
            )


def _stray_problems(buffer: Buffer) -> Iterator[Problem]:
    for i in buffer.strayed(closely=True):
        p, segment = buffer.originals[i], buffer.segments[i]
        if tuple(p.shape) != segment.shape:
            what, cause = (
                f"its shape is {tuple(p.shape)} and was {segment.shape}",
                "p.data = … of another size",
            )
            remedy = "build a new FlatParams and a new optimizer"
        elif (p.device, p.dtype) != (buffer.data.device, buffer.data.dtype):
            what = f"its values are {p.dtype} on {p.device}, its buffer is {buffer.data.dtype} on "
            what += f"{buffer.data.device}"
            cause, remedy = "the model was moved or cast (.to(), .cuda(), .half()) after flattening", HEALS
        else:
            what = "its values lie outside the buffer"
            cause = "p.data = …, an update that is not in place, or an RNN's flatten_parameters()"
            remedy = HEALS
        yield Problem(segment.name, what, cause, remedy)
    if buffer.flat_strayed():
        yield Problem(
            f"the flat parameter over {buffer.segments[0].name} … {buffer.segments[-1].name}",
            "its values lie outside the buffer",
            "an optimizer that replaces p.data instead of updating it in place",
            HEALS,
        )


def _grad_problems(buffer: Buffer) -> Iterator[Problem]:
    for p, segment in zip(buffer.originals, buffer.segments, strict=True):
        if p.grad is not None:
            reason = unfit_grad(p, p.grad)
            if reason is not None:
                yield Problem(segment.name, "its gradient cannot be gathered", f"it {reason}", "as said")


def unfrozen(flat: FlatParams) -> list[Entry]:
    """Parameters that were frozen when the model was flattened and are not any more."""
    frozen = flat._frozen
    if not any(map(get_requires_grad, (entry.parameter for entry in frozen))):
        return []
    return [entry for entry in frozen if entry.parameter.requires_grad]


# ---- bringing back


def rebind(flat: FlatParams, *, by_hand: bool) -> None:
    """Bring everything home that has left; raise where that cannot be right.

    `by_hand`: the user asked, and so vouches for the gradients as they are.
    """
    for entry, new in _replacements(flat):
        _adopt(flat, entry, new)
    for buffer in flat._buffers:
        strayed = buffer.strayed(closely=by_hand)
        if strayed:
            _heal(buffer, strayed, by_hand=by_hand)
        elif buffer.flat_strayed():
            take_flat_back(buffer)
        buffer.touched = False


def take_flat_back(buffer: Buffer) -> None:
    """Copy the values of a flat parameter that was given other memory into the buffer."""
    flat = buffer.flat
    assert flat is not None
    if flat.numel() != buffer.data.numel():
        raise FlatbedError(
            f"the flat parameter over '{buffer.segments[0].name}' … was given {flat.numel()} elements and "
            f"had {buffer.data.numel()}; its originals are as they were: build a new FlatParams"
        )
    with torch.no_grad():
        buffer.data.copy_(flat.data)
    flat.data = buffer.data


def _replacements(flat: FlatParams) -> list[tuple[Entry, list[torch.Tensor]]]:
    """Entries whose module attributes now hold other Parameter objects, and those objects."""
    if flat._places.unchanged():
        return []
    found = []
    for entry in flat._entries:
        held: list[torch.Tensor | None] = [owner._parameters.get(name) for owner, name in entry.slots]
        if any(p is not entry.parameter and p is not None for p in held):
            found.append((entry, [p for p in held if p is not None]))
    return found


def _adopt(flat: FlatParams, entry: Entry, held: list[torch.Tensor]) -> None:
    """Let a Parameter object that replaced another take over its segment."""
    new = held[0]
    if any(p is not new for p in held):
        raise FlatbedError(
            f"the tied weight '{entry.name}' has come apart: {len(entry.slots)} module attributes held one "
            f"Parameter and now hold different ones (load_state_dict(assign=True) does that). Tie them "
            f"again by assigning one Parameter to all of them, then go on"
        )
    reason = unfit(new)
    if reason is not None or not new.requires_grad or new.shape != entry.parameter.shape:
        found = reason or (f"has shape {tuple(new.shape)}" if new.requires_grad else "is frozen")
        raise FlatbedError(
            f"the Parameter that replaced '{entry.name}' (shape {tuple(entry.parameter.shape)}) cannot take "
            f"its place: it {found}; build a new FlatParams and a new optimizer"
        )
    flat._replace(entry, new)


def _heal(buffer: Buffer, strayed: list[int], *, by_hand: bool) -> None:
    for i in strayed:
        p, segment = buffer.originals[i], buffer.segments[i]
        if tuple(p.shape) != segment.shape:
            raise FlatbedError(
                f"'{segment.name}' had shape {segment.shape} and was given {tuple(p.shape)}; "
                f"build a new FlatParams and a new optimizer"
            )
    here = (buffer.data.device, buffer.data.dtype)
    where = {(p.device, p.dtype) for p in buffer.originals}
    if len(where) > 1:
        raise FlatbedError(
            f"parameters of one buffer no longer share a device and dtype: {_split(buffer)}. Move or cast "
            f"the whole model, or build a new FlatParams"
        )
    moved_grads = any(not buffer.owns_grad(i) for i in strayed)
    if moved_grads and buffer.touched and buffer.spot_check() and not by_hand:
        # A model moved as a whole is noticed at the first touch. A part of it was not, and its gradient,
        # which Module.to() moves along, may have been left out when the flat one was clipped or zeroed.
        raise FlatbedError(
            f"'{buffer.segments[strayed[0]].name}' was moved while other parameters of its buffer were not, "
            f"and gradients were read or zeroed in the meantime: call zero_grad() and rebind(), and compute "
            f"them again. Call rebind() right after moving a part of a model"
        )
    if where == {here}:
        buffer.take_back(strayed)
    else:
        ((device, dtype),) = where
        _move(buffer, device, dtype)
    if moved_grads or where != {here}:
        buffer.remake_grads()


def _move(buffer: Buffer, device: torch.device, dtype: torch.dtype) -> None:
    """Lay the buffer out anew where its originals now are; offsets depend on the size of an element."""
    number = buffer.segments[0].buffer
    layout = plan(
        (Spec(s.name, s.shape, s.stride, dtype.itemsize) for s in buffer.segments), max_bytes=1 << 62
    )
    buffer.segments = tuple(
        type(s)(s.name, s.shape, s.stride, s.offset, number) for s in layout.segments_of(0)
    )
    buffer.fill(layout.buffers[0].numel, dtype, device)


def _split(buffer: Buffer) -> str:
    first: dict[tuple[torch.device, torch.dtype], str] = {}
    for p, segment in zip(buffer.originals, buffer.segments, strict=True):
        first.setdefault((p.device, p.dtype), segment.name)
    return ", ".join(f"'{name}' is {dtype} on {device}" for (device, dtype), name in first.items())
