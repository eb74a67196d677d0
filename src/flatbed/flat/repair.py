"""Parameters that left their buffer: how they are noticed, named and brought back.

The values of the model's own parameters count, wherever they are now. Only when the flat parameter alone
was given other memory (by an optimizer that does not work in place) do its values count, since the
originals cannot have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import TYPE_CHECKING

import torch

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import Buffer
from flatbed.flat.inputs import SourceParam, module_slots, unfit

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams

REBUILD = "build a new FlatParams and a new optimizer"
REBIND = "rebind() or the next step brings it back"


def check(flat: FlatParams) -> list[str]:
    """Describe every problem, without changing anything."""
    problems = [
        f"'{entry.name}': the module holds another Parameter object in its place, as after "
        f"load_state_dict(assign=True); {REBIND}"
        for entry, _ in _replacements(flat)
    ]
    problems += [describe_removed([name]) for name in removed(flat)]
    for buffer in flat._buffers:
        problems += [_describe(buffer, i) for i in buffer.relocated()]
        if buffer.flat_is_relocated():
            problems.append(
                f"the flat parameter over '{buffer.segments[0].name}' … '{buffer.segments[-1].name}' lies "
                f"outside the buffer, as after an optimizer that replaces p.data; {REBIND}"
            )
    late = [entry.name for entry in unfrozen(flat)]
    return [*problems, describe_unfrozen(late)] if late else problems


def describe_removed(names: list[str]) -> str:
    """Describe parameters that the module no longer has."""
    return f"{listed(names)} is no longer part of the module: its layer was replaced or removed; {REBUILD}"


def describe_unfrozen(names: list[str]) -> str:
    """Describe parameters that lie in no buffer and are trained."""
    return (
        f"{listed(names)} was frozen when the model was flattened and is trained now, but lies in no buffer. "
        f"Flatten while it is trainable and freeze it afterwards, or add it to the optimizer with "
        f"add_param_group"
    )


def _describe(buffer: Buffer, i: int) -> str:
    """Describe an original that lies outside its segment or has another shape."""
    here, p, segment = buffer.data, buffer.originals[i], buffer.segments[i]
    if tuple(p.shape) != segment.shape:
        return f"'{segment.name}' had shape {segment.shape} and was given {tuple(p.shape)}; {REBUILD}"
    if (p.device, p.dtype) != (here.device, here.dtype):
        return (
            f"'{segment.name}' is {p.dtype} on {p.device}, its buffer is {here.dtype} on {here.device}: the "
            f"model was moved or cast (.to(), .cuda(), .half()) after flattening; {REBIND}"
        )
    return (
        f"'{segment.name}' lies outside its buffer, as after p.data = …, an update that is not in place, or "
        f"an RNN's flatten_parameters(); {REBIND}"
    )


def listed(names: list[str], most: int = 8) -> str:
    """Names in quotes for an error message, cut off after `most`."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def removed(flat: FlatParams) -> list[str]:
    """Names of the parameters that the module no longer has, under any attribute that held them."""
    if flat._inputs.module is None:
        return []
    present = {id(p) for p in flat._inputs.module.parameters()}
    present |= {id(entry.parameter) for entry, _ in _replacements(flat)}
    return [entry.name for entry in flat._entries if id(entry.parameter) not in present]


def unfrozen(flat: FlatParams) -> list[SourceParam]:
    """Parameters that were frozen when the model was flattened and are trainable now."""
    return [entry for entry in flat._frozen if entry.parameter.requires_grad]


# ---- bringing back


def rebind(flat: FlatParams, buffers: Iterable[Buffer]) -> None:
    """Bring back what left these buffers; raise where that cannot be right."""
    for entry, held in _replacements(flat):
        _adopt(flat, entry, held)
    for buffer in buffers:
        relocated = buffer.relocated()
        if relocated:
            _bring_back(buffer, relocated)
        else:
            buffer.bring_flat_back()


def _bring_back(buffer: Buffer, positions: list[int]) -> None:
    """Copy originals that lie elsewhere into the buffer; raise if they do not fit into one any more."""
    for i in positions:
        if tuple(buffer.originals[i].shape) != buffer.segments[i].shape:
            raise FlatbedError(_describe(buffer, i))
    kinds = {(p.device, p.dtype): s.name for p, s in zip(buffer.originals, buffer.segments, strict=True)}
    if len(kinds) > 1:
        found = ", ".join(f"'{name}' is {dtype} on {device}" for (device, dtype), name in kinds.items())
        raise FlatbedError(
            f"parameters of one buffer no longer share a device and dtype: {found}. Move or cast the whole "
            f"model, or {REBUILD}"
        )
    buffer.bring_back(positions, *next(iter(kinds)))


def _replacements(flat: FlatParams) -> list[tuple[SourceParam, list[torch.Tensor]]]:
    """Entries whose module attributes now hold other Parameter objects, and those objects."""
    dicts, names, parameters = flat._slots
    if all(map(is_, map(dict.get, dicts, names), parameters)):
        return []
    found = []
    for entry in flat._entries:
        held: list[torch.Tensor] = [
            p for owner, name in entry.slots if (p := owner._parameters.get(name)) is not None
        ]
        if any(p is not entry.parameter for p in held):
            found.append((entry, held))
    return found


def _adopt(flat: FlatParams, entry: SourceParam, held: list[torch.Tensor]) -> None:
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
    for buffer in flat._buffers:
        buffer.originals = [new if p is entry.parameter else p for p in buffer.originals]
    entry.parameter = new
    flat._slots = module_slots(flat._entries)
