"""Parameters that left their buffer: how they are noticed, named and brought back.

The values of the model's own parameters count, wherever they are now. Only when the flat parameter alone
was given other memory (by an optimizer that does not work in place) do its values count, since the
originals cannot have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import Buffer, get_requires_grad
from flatbed.flat.inputs import Entry, unfit
from flatbed.layout import Spec, plan

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams

REBUILD = "build a new FlatParams and a new optimizer"
REBIND = "call rebind(), or leave it to the next step"


@dataclass(frozen=True, slots=True)
class Problem:
    """One parameter out of place: its name, what was found, the likely cause, and what to do."""

    name: str
    what: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}. Likely cause: {self.cause}. Remedy: {self.remedy}"


def check(flat: FlatParams) -> list[Problem]:
    """List every problem, without changing anything."""
    problems = [*_replaced(flat), *removed(flat)]
    for index, buffer in enumerate(flat._buffers):
        problems += _misplaced(buffer)
        if flat_is_relocated(flat, index):
            cause = "an optimizer that replaces p.data instead of updating it in place"
            name = f"the flat parameter over {buffer.segments[0].name} … {buffer.segments[-1].name}"
            problems.append(Problem(name, "its values lie outside the buffer", cause, REBIND))
    for entry in unfrozen(flat):
        cause = "it was frozen when the model was flattened"
        remedy = "flatten while it is trainable and freeze it afterwards, or add it to the optimizer"
        problems.append(Problem(entry.name, "is trained now, but lies in no buffer", cause, remedy))
    return problems


def _replaced(flat: FlatParams) -> Iterator[Problem]:
    for entry, _ in _replacements(flat):
        what = "the module holds another Parameter object in its place"
        cause = "load_state_dict(assign=True), or an assignment of a new Parameter"
        yield Problem(entry.name, what, cause, REBIND)


def removed(flat: FlatParams) -> list[Problem]:
    """Parameters that the module no longer has, under any attribute that held them."""
    if flat._inputs.module is None:
        return []
    present = {id(p) for p in flat._inputs.module.parameters()}
    replaced = {id(entry) for entry, _ in _replacements(flat)}
    return [
        Problem(e.name, "is no longer part of the module", "its layer was replaced or removed", REBUILD)
        for e in flat._entries
        if id(e.parameter) not in present and id(e) not in replaced
    ]


def _misplaced(buffer: Buffer) -> Iterator[Problem]:
    here = buffer.data
    for i in sorted({*buffer.relocated(), *buffer.reshaped()}):
        p, segment = buffer.originals[i], buffer.segments[i]
        if tuple(p.shape) != segment.shape:
            what = f"its shape is {tuple(p.shape)} and was {segment.shape}"
            yield Problem(segment.name, what, "p.data = … of another size", REBUILD)
        elif (p.device, p.dtype) != (here.device, here.dtype):
            what = f"its values are {p.dtype} on {p.device}, its buffer is {here.dtype} on {here.device}"
            cause = "the model was moved or cast (.to(), .cuda(), .half()) after flattening"
            yield Problem(segment.name, what, cause, REBIND)
        else:
            cause = "p.data = …, an update that is not in place, or an RNN's flatten_parameters()"
            yield Problem(segment.name, "its values lie outside the buffer", cause, REBIND)


def unfrozen(flat: FlatParams) -> list[Entry]:
    """Parameters that were frozen when the model was flattened and are trainable now."""
    if not any(map(get_requires_grad, (entry.parameter for entry in flat._frozen))):
        return []
    return [entry for entry in flat._frozen if entry.parameter.requires_grad]


# ---- bringing back


def rebind(flat: FlatParams, indices: Iterable[int]) -> None:
    """Bring back what left these buffers; raise where that cannot be right."""
    for entry, held in _replacements(flat):
        _adopt(flat, entry, held)
    for index in indices:
        relocated = flat._buffers[index].relocated()
        if relocated:
            bring_back(flat, index, relocated)
        elif flat_is_relocated(flat, index):
            take_flat_values(flat, index)


def flat_is_relocated(flat: FlatParams, index: int) -> bool:
    """Return whether the flat parameter itself was given other memory."""
    parameter, data = flat._live(index), flat._buffers[index].data
    return parameter is not None and (
        parameter.data_ptr() != data.data_ptr() or parameter.dtype != data.dtype
    )


@torch.no_grad()
def take_flat_values(flat: FlatParams, index: int) -> None:
    """Copy the values of a flat parameter that was given other memory into its buffer."""
    parameter, data = flat._live(index), flat._buffers[index].data
    assert parameter is not None
    data.copy_(parameter.data)
    parameter.data = data


def _replacements(flat: FlatParams) -> list[tuple[Entry, list[torch.Tensor]]]:
    """Entries whose module attributes now hold other Parameter objects, and those objects."""
    if flat._slots.unchanged():
        return []
    found = []
    for entry in flat._entries:
        held: list[torch.Tensor] = [
            p for owner, name in entry.slots if (p := owner._parameters.get(name)) is not None
        ]
        if any(p is not entry.parameter for p in held):
            found.append((entry, held))
    return found


def _adopt(flat: FlatParams, entry: Entry, held: list[torch.Tensor]) -> None:
    """Let a Parameter object that replaced another take over its segment."""
    new = held[0]
    if any(p is not new for p in held):
        raise FlatbedError(
            f"the tied weight '{entry.name}' has come apart: {len(entry.slots)} module attributes held one "
            f"Parameter and now hold different ones (load_state_dict(assign=True) does that). Tie them "
            f"again by assigning one Parameter to all of them"
        )
    reason = unfit(new)
    if reason is not None or not new.requires_grad or new.shape != entry.parameter.shape:
        found = reason or (f"has shape {tuple(new.shape)}" if new.requires_grad else "is frozen")
        raise FlatbedError(
            f"the Parameter that replaced '{entry.name}' (shape {tuple(entry.parameter.shape)}) cannot take "
            f"its place: it {found}; {REBUILD}"
        )
    flat._replace(entry, new)


def bring_back(flat: FlatParams, index: int, positions: list[int]) -> None:
    """Copy originals that lie elsewhere into the buffer, which moves to their device and dtype if needed."""
    buffer = flat._buffers[index]
    for i in positions:
        p, segment = buffer.originals[i], buffer.segments[i]
        if tuple(p.shape) != segment.shape:
            raise FlatbedError(
                f"'{segment.name}' had shape {segment.shape} and was given {tuple(p.shape)}; {REBUILD}"
            )
    kinds = {(p.device, p.dtype): s.name for p, s in zip(buffer.originals, buffer.segments, strict=True)}
    if len(kinds) > 1:
        found = ", ".join(f"'{name}' is {dtype} on {device}" for (device, dtype), name in kinds.items())
        raise FlatbedError(
            f"parameters of one buffer no longer share a device and dtype: {found}. Move or cast the whole "
            f"model, or {REBUILD}"
        )
    if next(iter(kinds)) == (buffer.data.device, buffer.data.dtype):
        buffer.adopt(positions)
    else:
        _move(buffer, *next(iter(kinds)))
        parameter = flat._live(index)
        if parameter is not None:
            parameter.data = buffer.data
    buffer.remake_grads()


def _move(buffer: Buffer, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate the buffer where its originals are; offsets depend on the size of an element."""
    number = buffer.segments[0].buffer
    specs = [Spec(s.name, s.shape, s.stride, dtype.itemsize) for s in buffer.segments]
    layout = plan(specs, max_bytes=1 << 62)
    buffer.segments = tuple(replace(s, buffer=number) for s in layout.segments_of(0))
    buffer.allocate(layout.buffers[0].numel, dtype, device)
