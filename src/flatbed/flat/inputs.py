"""Reading the source of a `FlatParams`: plain records of its parameters, or an error before any change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import is_
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
class Entry:
    """One parameter: its name, its group, and the module attributes that hold it."""

    name: str
    parameter: torch.Tensor
    group: int
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(frozen=True)
class ModuleSlots:
    """Every module attribute that holds a flattened parameter, as columns that C code can compare."""

    dicts: list[dict[str, Any]]
    names: list[str]
    parameters: list[torch.Tensor]

    @staticmethod
    def of(entries: list[Entry]) -> ModuleSlots:
        slots = [(owner._parameters, name, e.parameter) for e in entries for owner, name in e.slots]
        return ModuleSlots([d for d, _, _ in slots], [n for _, n, _ in slots], [p for _, _, p in slots])

    def unchanged(self) -> bool:
        """Return whether every attribute still holds the same parameter."""
        return all(map(is_, map(dict.get, self.dicts, self.names), self.parameters))


@dataclass(slots=True)
class Inputs:
    """Everything in the source, in its order; `named` is set when torch would have received names too."""

    entries: list[Entry]
    options: list[dict[str, Any]]
    module: nn.Module | None = None
    named: bool = False
    grouped: bool = False


def read(source: Source) -> Inputs:
    """Read a module, parameters, (name, parameter) pairs or param-group dicts; tables are left out."""
    if isinstance(source, nn.Module):
        slots = _slots(source)
        entries = [Entry(n, p, 0, slots[id(p)]) for n, p in source.named_parameters()]
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
    grouped = any(isinstance(item, dict) for item in items)
    groups: list[dict[str, Any]] = items if grouped else [{"params": items}]
    entries: list[Entry] = []
    named = False
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"param group {number} must be a dict with a 'params' key; found {group!r}")
        for name, parameter in _named(group["params"], first=len(entries)):
            if not isinstance(parameter, Table):
                named = named or name is not None
                entries.append(Entry(name or f"param {len(entries)}", parameter, number))
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return Inputs(_once_each(entries), options, named=named, grouped=grouped)


def _named(params: Any, *, first: int) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Read `params` as torch does: one tensor, or an iterable of tensors or of (name, tensor)."""
    items = [params] if isinstance(params, torch.Tensor) else list(params)
    for position, item in enumerate(items, first):
        name, parameter = item if isinstance(item, tuple) else (None, item)
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"item {position} of the source is a {type(parameter).__name__}, not a parameter: pass "
                f"parameters, or one module"
            )
        yield name, parameter


def _once_each(entries: list[Entry]) -> list[Entry]:
    """Drop repeats within a group (tied weights named twice); a parameter in two groups is an error."""
    seen: dict[int, Entry] = {}
    for entry in entries:
        earlier = seen.setdefault(id(entry.parameter), entry)
        if earlier.group != entry.group:
            raise ValueError(
                f"parameter '{entry.name}' is in param group {earlier.group} and in {entry.group}: "
                f"list it once"
            )
    return list(seen.values())


def _slots(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """For each parameter, every module attribute that holds it: tied weights have several."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((owner, name))
    return slots


def _refuse_unfit(entries: list[Entry]) -> None:
    """Raise for the first parameter that cannot lie in a buffer."""
    names: set[str] = set()
    for entry in entries:
        reason = unfit(entry.parameter)
        if reason is not None:
            raise ValueError(f"parameter '{entry.name}' cannot be flattened: it {reason}")
        if entry.name in names:
            raise ValueError(f"the name '{entry.name}' is given twice: use names that tell parameters apart")
        names.add(entry.name)
    _refuse_shared_memory(entries)


def _refuse_shared_memory(entries: list[Entry]) -> None:
    """Raise for two parameters over one memory: flattening would separate them."""
    spans = [
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), e.name, p.requires_grad)
        for e in entries
        for p in [e.parameter]
        if p.layout == torch.strided and not p.is_meta and not any(map(is_traceable_wrapper_subclass, [p]))
        if p.numel() and is_dense(tuple(p.shape), p.stride())
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
    if isinstance(p, FlatParameter):
        return "is a flat parameter already; pass the model's own parameters"
    if p.layout != torch.strided:
        return f"is sparse ({p.layout}); keep it out of the source and use an optimizer for sparse gradients"
    if p.is_complex():
        return "is complex; store it as two real parameters (torch.view_as_real)"
    if p.is_meta:
        return "is on the meta device and has no values yet; materialize the model first"
    if not p.is_leaf:
        return "is not a leaf tensor; pass the parameter that it was computed from"
    if overlaps_itself(tuple(p.shape), p.stride()):
        return f"overlaps itself (shape {tuple(p.shape)}, stride {p.stride()}); make it contiguous first"
    return None
