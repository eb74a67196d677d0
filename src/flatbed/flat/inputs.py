"""Reading the source of a `FlatParams`: plain records of its parameters, or an error before any change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatbed.flat.parameter import FlatParameter
from flatbed.layout import is_dense, overlaps_itself
from flatbed.tables.table import Table

Source: TypeAlias = (
    "nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]"
)


@dataclass(slots=True)
class SourceParam:
    """One parameter: its name, its group, and the module attributes that hold it."""

    name: str
    parameter: torch.Tensor
    group: int
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)


def module_slots(entries: list[SourceParam]) -> list[tuple[Any, ...]]:
    """Every module attribute that holds a flattened parameter, as columns that C code can compare.

    The columns are the dicts of the modules' parameters, the names in them, and the parameters.
    """
    slots = [(owner._parameters, name, e.parameter) for e in entries for owner, name in e.slots]
    return list(zip(*slots, strict=True)) or [(), (), ()]


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
        slots = _slots(source)
        entries = [SourceParam(n, p, 0, slots[id(p)]) for n, p in source.named_parameters()]
        inputs = Inputs([e for e in entries if not isinstance(e.parameter, Table)], [{}], module=source)
    elif not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping | torch.Tensor):
        raise TypeError(
            f"FlatParams takes a module, an iterable of parameters or of (name, parameter), or a list of "
            f"param groups; found a {type(source).__name__}: pass the module itself"
        )
    else:
        inputs = _read_items(list(source))
    _refuse_unfit(inputs.entries)
    if not any(entry.parameter.requires_grad for entry in inputs.entries):
        raise ValueError(
            f"FlatParams found no trainable parameter among {len(inputs.entries)}: frozen parameters and "
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


def _slots(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """For each parameter, every module attribute that holds it: tied weights have several."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((owner, name))
    return slots


def _refuse_unfit(entries: list[SourceParam]) -> None:
    """Raise for the first parameter that cannot lie in a buffer."""
    names: set[str] = set()
    for entry in entries:
        reason = unfit(entry.parameter)
        if reason is not None:
            raise ValueError(f"parameter '{entry.name}' cannot be flattened: it {reason}")
        if entry.name in names:
            raise ValueError(f"the name '{entry.name}' is given twice: use names that tell parameters apart")
        names.add(entry.name)
    _refuse_shared_memory([e for e in entries if _is_plain(e.parameter)])


def _is_plain(p: torch.Tensor) -> bool:
    """Return whether a parameter is an ordinary dense tensor with values."""
    is_wrapper = any(map(is_traceable_wrapper_subclass, (p, p.data)))
    strided = p.layout == torch.strided and not p.is_meta and not is_wrapper
    return strided and p.numel() > 0 and is_dense(tuple(p.shape), p.stride())


def _refuse_shared_memory(entries: list[SourceParam]) -> None:
    """Raise for two parameters over one memory: flattening would separate them."""
    spans = [
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name, p.requires_grad)
        for name, p in ((e.name, e.parameter) for e in entries)
    ]
    for (device, _, stop, name, trained), after in pairwise(sorted(spans)):
        if device == after[0] and after[1] < stop and (trained or after[4]):
            raise ValueError(
                f"parameters '{name}' and '{after[3]}' are two objects over the same memory; tie them by "
                f"assigning one Parameter to both attributes, or copy one of them"
            )


def unfit(p: torch.Tensor) -> str | None:
    """The reason why a parameter cannot lie in a buffer, or None."""
    if is_lazy(p):
        return "is an uninitialized lazy parameter; run one forward pass first"
    if not p.requires_grad:
        return None  # frozen parameters are left alone
    if any(map(is_traceable_wrapper_subclass, (p, p.data))):
        return (
            f"is a {type(p.data).__name__}, which stores its values in its own way; keep it out of the "
            f"source (FSDP2's DTensors: use torch.optim or flatbed.optim over the sharded parameters)"
        )
    reasons = {
        "is a flat parameter already; pass the model's own parameters": isinstance(p, FlatParameter),
        "is sparse; keep it out of the source": p.layout != torch.strided,
        "is complex; store it as two real parameters (torch.view_as_real)": p.is_complex(),
        "is on the meta device and has no values yet; materialize the model first": p.is_meta,
        "is not a leaf tensor; pass the parameter that it was computed from": not p.is_leaf,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if not found and overlaps_itself(tuple(p.shape), p.stride()):
        found = [f"overlaps itself (stride {p.stride()}); make it contiguous first"]
    return found[0] if found else None
