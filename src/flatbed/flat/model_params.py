"""The source of a `FlatParams`: reading its parameters, and following what happens to them later.

A parameter that left its buffer is noticed, named and brought back. The values of the model's own parameters
count, wherever they are now. Only when the flat parameter alone was given other memory (by an optimizer that
does not work in place) do its values count, since the originals cannot have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import Buffer, FlatParameter
from flatbed.layout import is_dense, overlaps_itself
from flatbed.optim.options import is_fsdp_shard
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams

Source: TypeAlias = (
    "nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]"
)
REBUILD = "flatten the parameters again, and build a new optimizer"
REBIND = "rebind() or the next step brings it back"


@dataclass(slots=True)
class SourceParam:
    """One parameter: its name and its group."""

    name: str
    parameter: torch.Tensor
    group: int


@dataclass(slots=True)
class Inputs:
    """Everything in the source, in its order; `named` is set when torch would have received names too."""

    entries: list[SourceParam]
    options: list[dict[str, Any]]
    module: nn.Module | None = None
    named: bool = False
    grouped: bool = False


def read(source: Source) -> Inputs:
    """Read a module, parameters, (name, parameter) pairs or param-group dicts; tables are left out."""
    if isinstance(source, nn.Module):
        entries = [SourceParam(n, p, 0) for n, p in source.named_parameters()]
        inputs = Inputs([e for e in entries if not isinstance(e.parameter, Table)], [{}], module=source)
    elif not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping | torch.Tensor):
        raise TypeError(
            f"expected a module, an iterable of parameters or of (name, parameter), or a list of param "
            f"groups; found a {type(source).__name__}: pass the module itself"
        )
    else:
        inputs = _read_items(list(source))
    _refuse_unfit(inputs.entries)
    if not any(entry.parameter.requires_grad for entry in inputs.entries):
        raise ValueError(
            f"there is no trainable parameter among {len(inputs.entries)}: frozen parameters and "
            f"tables are left alone, and an iterator such as model.parameters() can be read once"
        )
    return inputs


def _read_items(items: list[Any]) -> Inputs:
    """Read params as torch does; a parameter that is listed twice in a group (tied weights) counts once."""
    grouped = any(isinstance(item, dict) for item in items)
    groups: list[dict[str, Any]] = items if grouped else [{"params": items}]
    entries: dict[int, SourceParam] = {}
    named = False
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"param group {number} must be a dict with a 'params' key; found {group!r}")
        params = group["params"]
        for item in [params] if isinstance(params, torch.Tensor) else params:
            name, parameter = item if isinstance(item, tuple) else (f"param {len(entries)}", item)
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(
                    f"item {len(entries)} of the source is a {type(parameter).__name__}, not a parameter: "
                    f"pass parameters, or one module"
                )
            if isinstance(parameter, Table):
                continue
            named = named or isinstance(item, tuple)
            earlier = entries.setdefault(id(parameter), SourceParam(name, parameter, number))
            if earlier.group != number:
                raise ValueError(
                    f"parameter '{name}' is in param group {earlier.group} and in {number}: list it once"
                )
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return Inputs(list(entries.values()), options, named=named, grouped=grouped)


def _refuse_unfit(entries: list[SourceParam]) -> None:
    """Raise for the first parameter that cannot lie in a buffer."""
    names: set[str] = set()
    spans: list[tuple[str, int, int, str, bool]] = []
    for name, p in ((entry.name, entry.parameter) for entry in entries):
        reason = unfit(p)
        if reason is not None:
            raise ValueError(f"parameter '{name}' cannot be flattened: it {reason}")
        if name in names:
            raise ValueError(f"the name '{name}' is given twice: use names that tell parameters apart")
        names.add(name)
        is_plain = type(p.data) is torch.Tensor and not p.is_meta and p.layout == torch.strided
        if is_plain and p.numel() and is_dense(p.shape, p.stride()):
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, name, p.requires_grad))
    for (device, _, stop, name, trained), after in pairwise(sorted(spans)):
        if device == after[0] and after[1] < stop and (trained or after[4]):
            raise ValueError(
                f"parameters '{name}' and '{after[3]}' are two objects over the same memory; tie them by "
                f"assigning one Parameter to both attributes, or copy one of them"
            )


def unfit(p: torch.Tensor) -> str | None:
    """The reason why a parameter cannot lie in a buffer, or None; frozen ones are left alone."""
    if not p.requires_grad:
        return None
    reasons = {
        "is an uninitialized lazy parameter; run one forward pass first": is_lazy(p),
        "is a shard of FSDP, which moves it in every step; give the optimizer the shards": is_fsdp_shard(p),
        "is a flat parameter already; pass the model's own parameters": isinstance(p, FlatParameter),
        "is sparse; keep it out of the source": p.layout != torch.strided,
        "is complex; store it as two real parameters (torch.view_as_real)": p.is_complex(),
        "is on the meta device and has no values yet; materialize the model first": p.is_meta,
        "is not a leaf tensor; pass the parameter that it was computed from": not p.is_leaf,
        f"is a {type(p.data).__name__}, which stores its values in its own way; keep it out of the source "
        f"(FSDP2's DTensors: use torch.optim or flatbed.optim over the sharded parameters)": (
            type(p.data) is not torch.Tensor
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    overlaps = overlaps_itself(p.shape, p.stride())
    return f"overlaps itself (stride {p.stride()}); make it contiguous first" if overlaps else None


# ---- parameters that left their buffer


def find_problems(flat: FlatParams) -> list[str]:
    """Describe every problem, without changing anything."""
    replaced = [entry for entry, _ in _replacements(flat)]
    problems = [
        f"'{entry.name}': the module holds another Parameter object in its place, as after "
        f"load_state_dict(assign=True); {REBIND}"
        for entry in replaced
    ]
    if flat._inputs.module is not None:
        present = {id(p) for p in (*flat._inputs.module.parameters(), *(e.parameter for e in replaced))}
        problems += [
            f"'{entry.name}' is no longer part of the module: its layer was replaced; {REBUILD}"
            for entry in flat._entries
            if id(entry.parameter) not in present
        ]
    for buffer in flat._buffers:
        problems += [_describe(buffer, i) for i in buffer.relocated()]
        if buffer.flat_is_relocated():
            problems.append(
                f"the flat parameter over '{buffer.segments[0].name}' … '{buffer.segments[-1].name}' lies "
                f"outside the buffer, as after an optimizer that replaces p.data; {REBIND}"
            )
    late = [entry.name for entry in unfrozen(flat)]
    return [*problems, describe_unfrozen(late)] if late else problems


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
    has_shape = tuple(p.shape) == segment.shape
    return (
        f"'{segment.name}' ({p.dtype} of shape {tuple(p.shape)} on {p.device}) lies outside its buffer "
        f"({here.dtype} of shape {segment.shape} on {here.device}), as after .to(), .cuda(), .half(), "
        f"p.data = …, an update that is not in place, or an RNN's flatten_parameters(); "
        f"{REBIND if has_shape else REBUILD}"
    )


def listed(names: list[str], most: int = 8) -> str:
    """Names in quotes for an error message, cut off after `most`."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


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
        if not relocated:
            buffer.bring_flat_back()
            continue
        for i in relocated:
            if tuple(buffer.originals[i].shape) != buffer.segments[i].shape:
                raise FlatbedError(_describe(buffer, i))
        kinds = {(p.device, p.dtype): s.name for p, s in zip(buffer.originals, buffer.segments, strict=True)}
        if len(kinds) > 1:
            found = ", ".join(f"'{name}' is {dtype} on {device}" for (device, dtype), name in kinds.items())
            raise FlatbedError(
                f"parameters of one buffer no longer share a device and dtype: {found}. Move or cast the "
                f"whole model, or {REBUILD}"
            )
        buffer.bring_back(relocated, *next(iter(kinds)))


def _replacements(flat: FlatParams) -> list[tuple[SourceParam, list[torch.Tensor]]]:
    """Entries whose module attributes now hold other Parameter objects, and those objects."""
    dicts, names, entries = flat._slots
    if all(map(is_, map(dict.get, dicts, names), map(attrgetter("parameter"), entries))):
        return []
    held: dict[int, tuple[SourceParam, list[torch.Tensor]]] = {}
    for params, name, entry in zip(dicts, names, entries, strict=True):
        p = params.get(name)
        if p is not None:
            held.setdefault(id(entry), (entry, []))[1].append(p)
    return [(entry, found) for entry, found in held.values() if any(p is not entry.parameter for p in found)]


def _adopt(flat: FlatParams, entry: SourceParam, held: list[torch.Tensor]) -> None:
    """Let a Parameter object that replaced another take over its segment."""
    new = held[0]
    if any(p is not new for p in held):
        raise FlatbedError(
            f"the tied weight '{entry.name}' has come apart: {len(held)} module attributes held one "
            f"Parameter and now hold different ones (load_state_dict(assign=True) does that). Tie them "
            f"again by assigning one Parameter to all of them"
        )
    reason = unfit(new) if new.requires_grad else "is frozen"
    if new.shape != entry.parameter.shape:
        reason = f"has shape {tuple(new.shape)} instead of {tuple(entry.parameter.shape)}"
    if reason is not None:
        raise FlatbedError(
            f"the Parameter that replaced '{entry.name}' cannot take its place: it {reason}; {REBUILD}"
        )
    for buffer in flat._buffers:
        buffer.originals = [new if p is entry.parameter else p for p in buffer.originals]
    entry.parameter = new
