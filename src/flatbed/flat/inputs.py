"""What the user handed over, read once into plain records, and refused here if it cannot be flattened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatbed.layout import is_dense, overlaps_itself
from flatbed.tables.table import Table

Source: TypeAlias = (
    "nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]"
)

_NEEDS = (
    "FlatParams needs a module, an iterable of parameters or of (name, parameter), or a list of param groups"
)


@dataclass(slots=True)
class Entry:
    """One parameter: its name, its group, and the module attributes that must go on pointing at it."""

    name: str
    parameter: torch.Tensor
    group: int
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(slots=True)
class Given:
    """Everything in the source, in its own order; `named` says that torch would have got names too."""

    entries: list[Entry]
    options: list[dict[str, Any]]
    module: nn.Module | None = None
    named: bool = False
    grouped: bool = False


def read(source: Source) -> Given:
    """Read a module, parameters, (name, parameter) pairs or param-group dicts."""
    if isinstance(source, nn.Module):
        slots = _slots(source)
        entries = [Entry(n, p, 0, slots[id(p)]) for n, p in source.named_parameters()]
        given = Given(entries, [{}], module=source)
    elif isinstance(source, torch.Tensor) or (isinstance(source, Mapping) and "params" in source):
        raise TypeError(f"{_NEEDS}; found a single {type(source).__name__}: put it in a list")
    elif not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        raise TypeError(f"{_NEEDS}; found {type(source).__name__}: give the module itself")
    else:
        given = _read_items(list(source))
    _refuse_unfit(given.entries)
    if not any(entry.parameter.requires_grad for entry in given.entries):
        raise ValueError(
            f"FlatParams found no trainable parameter among {len(given.entries)}, so there is nothing to "
            f"flatten: frozen parameters are left alone, tables are not among a module's parameters, and an "
            f"iterator such as model.parameters() can be read once"
        )
    return given


def _read_items(items: list[Any]) -> Given:
    grouped = any(isinstance(item, dict) for item in items)
    groups: list[dict[str, Any]] = items if grouped else [{"params": items}]
    entries: list[Entry] = []
    named = False
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(
                f"param group {number} must be a dict with a 'params' key, as torch.optim takes it; "
                f"found {type(group).__name__}"
            )
        for name, parameter in _named(group["params"], first=len(entries)):
            named = named or name is not None
            entries.append(Entry(name or _nameless(len(entries), parameter), parameter, number))
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return Given(_once_each(entries), options, named=named, grouped=grouped)


def _named(params: Any, *, first: int) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Torch's own reading of `params`: one tensor, or an iterable of tensors or of (name, tensor)."""
    items = [params] if isinstance(params, torch.Tensor) else list(params)
    kinds = {isinstance(item, tuple) for item in items}
    if len(kinds) > 1:
        raise TypeError("parameters must be all named or all unnamed, as torch.optim demands; found both")
    for position, item in enumerate(items, first):
        name, parameter = item if isinstance(item, tuple) else (None, item)
        if not isinstance(parameter, torch.Tensor):
            remedy = "its .parameters()" if isinstance(parameter, nn.Module) else "parameters, or the module"
            raise TypeError(
                f"item {position} of the source is a {type(parameter).__name__}, not a parameter: give "
                f"{remedy}"
            )
        if isinstance(parameter, Table):
            raise TypeError(
                f"item {position} of the source is {parameter!r}, whose rows have a home of their own: give "
                f"it to an optimizer of flatbed.optim, and the other parameters to FlatParams"
            )
        yield name, parameter


def _nameless(position: int, parameter: torch.Tensor) -> str:
    return f"param {position} {tuple(parameter.shape)}" if not _is_lazy(parameter) else f"param {position}"


def _once_each(entries: list[Entry]) -> list[Entry]:
    """Drop repeats within a group (tied weights named twice); a parameter in two groups is a mistake."""
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


def _is_lazy(parameter: torch.Tensor) -> bool:
    return bool(is_lazy(parameter))


def _refuse_unfit(entries: list[Entry]) -> None:
    """Raise for the first parameter that cannot live in a buffer, before anything has changed."""
    names: set[str] = set()
    for entry in entries:
        reason = unfit(entry.parameter)
        if reason is not None:
            raise ValueError(f"parameter '{entry.name}' cannot be flattened: it {reason}")
        if entry.name in names:
            raise ValueError(
                f"the name '{entry.name}' is given twice; names tell parameters apart in norms, errors and "
                f"averages: prefix them, or pass one module that holds both"
            )
        names.add(entry.name)
    _refuse_shared_memory(entries)


def _refuse_shared_memory(entries: list[Entry]) -> None:
    """Two objects over one memory would be torn apart; the spans of strided ones may interleave."""
    spans = sorted(
        (
            (
                str(p.device),
                p.data_ptr(),
                p.data_ptr() + p.numel() * p.element_size(),
                e.name,
                p.requires_grad,
            )
            for e in entries
            for p in (e.parameter,)
            if p.layout == torch.strided
            and p.device.type != "meta"
            and not any(map(is_traceable_wrapper_subclass, (p,)))
            and p.numel()
            and is_dense(tuple(p.shape), p.stride())
        ),
        key=lambda span: span[:3],
    )
    for (device, _, stop, name, trained), after in pairwise(spans):
        if device == after[0] and after[1] < stop and (trained or after[4]):
            raise ValueError(
                f"parameters '{name}' and '{after[3]}' are two objects over the same memory; tie them by "
                f"assigning one Parameter to both places, or give each its own memory"
            )


def unfit(p: torch.Tensor) -> str | None:
    """Why this parameter cannot live in a buffer, or None."""
    if _is_lazy(p):
        return "is an uninitialized lazy parameter; run one forward pass first"
    if not p.requires_grad:
        return None  # frozen parameters are left alone, whatever they are
    kind = type(p).__name__
    if kind == "DTensor" or type(p.data).__name__ == "DTensor":
        return (
            "is a DTensor (FSDP2 shards it); FSDP2 already lays its shards out for the optimizer: "
            "use torch.optim over the sharded parameters"
        )
    if any(map(is_traceable_wrapper_subclass, (p, p.data))):
        return f"is a {kind}, which stores its values in its own way; keep it out of the source"
    if kind == "FlatParameter":
        return "is a flat parameter already; pass the model's own parameters"
    if p.layout != torch.strided:
        return f"is sparse ({p.layout}); keep it out of the source and give it to its own optimizer"
    if p.is_complex():
        return (
            "is complex; store it as two real parameters (torch.view_as_real), or keep it out of the source"
        )
    if p.device.type == "meta":
        return "is on the meta device and has no values yet; materialize the model first"
    if not p.is_leaf:
        return "is not a leaf tensor: optimizers update leaves, pass the parameter it was computed from"
    if overlaps_itself(tuple(p.shape), p.stride()):
        return f"overlaps itself (shape {tuple(p.shape)}, stride {p.stride()}); make it .contiguous() first"
    return None
