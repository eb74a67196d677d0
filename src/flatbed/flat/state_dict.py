"""Optimizer state in torch's per-parameter format, which torch reads without flatbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import FlatParameter
from flatbed.flat.trials import element_state, twin
from flatbed.layout import Segment
from flatbed.optim.state import own_storage

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams


@dataclass(slots=True)
class Place:
    """One parameter as torch would have numbered it.

    `holder` is the parameter that the optimizer holds for it, if any, and `number` is that parameter's
    number in the optimizer's own state dict. `segment` is set if the holder is a flat parameter.
    """

    name: str
    parameter: torch.Tensor
    holder: torch.Tensor | None = None
    number: int | None = None
    segment: Segment | None = None


def optimizer_state_dict(flat: FlatParams, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """See `FlatParams.optimizer_state_dict`."""
    packed = optimizer.state_dict()
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for number, places in enumerate(_places(flat, optimizer)):
        frozen = [place.parameter for place in places if place.holder is None]
        # Adagrad creates state at construction, for frozen parameters as well.
        initial = twin(optimizer, optimizer.param_groups[number], frozen).state if frozen else {}
        group = _without_params(packed["param_groups"][number])
        group["params"] = list(range(first, first + len(places)))
        if flat._inputs.named:
            group["param_names"] = [place.name for place in places]
        groups.append(group)
        for position, place in enumerate(places, first):
            found = packed["state"].get(place.number, initial.get(place.parameter))
            if found:
                state[position] = {key: _part(optimizer, key, v, place) for key, v in found.items()}
        first += len(places)
    return {**packed, "state": state, "param_groups": groups}


@torch.no_grad()
def load_optimizer_state_dict(
    flat: FlatParams, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """See `FlatParams.load_optimizer_state_dict`. Everything is checked before the optimizer changes."""
    flat.rebind()  # new state is of the model's device
    all_places = _places(flat, optimizer)
    found = [len(group["params"]) for group in state["param_groups"]]
    expected = [len(places) for places in all_places]
    if found != expected:
        raise ValueError(
            f"the state is of groups with {found} parameters, the optimizer's groups have {expected}: load "
            f"it into an optimizer over the same parameters in the same groups"
        )
    built: dict[int, Any] = {}
    for group, given, places in zip(optimizer.param_groups, state["param_groups"], all_places, strict=True):
        parts: dict[int, list[tuple[Place, Any]]] = {}
        for place, position in zip(places, given["params"], strict=True):
            if place.number is not None:
                parts.setdefault(place.number, []).append((place, state["state"].get(position)))
        for number, states in parts.items():
            is_flat = states[0][0].segment is not None
            joined = _join(optimizer, group, states) if is_flat else states[0][1]
            if joined is not None:
                built[number] = joined
    groups = [
        {**_without_params(given), **{k: group[k] for k in ("params", "param_names") if k in group}}
        for given, group in zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    ]
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict({**state, "state": built, "param_groups": groups})
    except KeyError as error:  # torch replaces its state before it looks for keys
        optimizer.state, optimizer.param_groups = before
        raise FlatbedError(
            f"the state is of another optimizer than {type(optimizer).__name__}, which needs {error}; load "
            f"it into the optimizer that it was saved from"
        ) from error


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _places(flat: FlatParams, optimizer: torch.optim.Optimizer) -> list[list[Place]]:
    """For each group of the optimizer, the original parameters torch would have there, in order."""
    groups = [group["params"] for group in optimizer.param_groups]
    group_of = {id(p): number for number, params in enumerate(groups) for p in params}
    numbers = {key: number for number, key in enumerate(group_of)}
    flats = flat.parameters()
    held = {id(p) for params in groups for p in params if isinstance(p, FlatParameter)}
    n_held = sum(id(f) in held for f in flats)
    if n_held < len(flats) or n_held < len(held):
        raise ValueError(
            f"this optimizer holds {n_held} of {len(flats)} flat parameters of this FlatParams and "
            f"{len(held) - n_held} of another FlatParams: build it over flat.parameters() or flat.groups()"
        )
    target = {f.buffer.group: group_of[id(f)] for f in reversed(flats)}
    segments = {id(e): s for e, s in zip(flat._entries, flat.segments, strict=True)}
    inside: list[list[Place]] = [[] for _ in groups]
    for entry in flat._inputs.entries:
        segment = segments.get(id(entry))
        if segment is not None:
            f = flats[segment.buffer]
            place = Place(entry.name, entry.parameter, f, numbers[id(f)], segment)
            inside[group_of[id(f)]].append(place)
        elif id(entry.parameter) not in group_of:  # frozen: with the parameters of its source group
            number = target.get(entry.group, min(entry.group, len(groups) - 1))
            inside[number].append(Place(entry.name, entry.parameter))
    places: list[list[Place]] = [[] for _ in groups]
    for params, own, merged in zip(groups, inside, places, strict=True):
        for p in params:  # all originals stand in place of the group's first flat parameter
            if isinstance(p, FlatParameter):
                merged += own
                own = []
            else:
                merged.append(Place("", p, p, numbers[id(p)]))
        merged += own
    return places


def _part(optimizer: torch.optim.Optimizer, key: str, value: Any, place: Place) -> Any:
    """One original's share of a state value: the memory of per-element state, a copy of a scalar."""
    segment, holder = place.segment, place.holder
    if segment is None or holder is None:
        return value
    if isinstance(value, torch.Tensor):
        if value.shape == holder.shape:
            offset = value.storage_offset() + segment.offset
            return own_storage(value.as_strided(segment.shape, segment.stride, offset))
        if value.numel() == 1:
            return value.clone()
    elif not isinstance(value, (list, tuple, dict)) or not value:
        return value
    found = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise FlatbedError(
        f"the state '{key}' ({found}) of {type(optimizer).__name__} is neither one value per element nor one "
        f"for all, so it cannot be split by parameter; save optimizer.state_dict() itself and load it into "
        f"the same FlatParams"
    )


def _join(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parts: list[tuple[Place, Any]]
) -> dict[str, Any] | None:
    """The flat state of one buffer from the states of its originals."""
    present = [(place, found) for place, found in parts if found]
    if not present:
        return None
    first, keys = present[0][0].name, present[0][1].keys()
    for place, found in parts:
        if (found or {}).keys() != keys and (found or place.parameter.requires_grad):
            raise FlatbedError(
                f"the states of '{first}' and '{place.name}' differ in their keys: {sorted(keys)} and "
                f"{sorted(found or ())}. One flat state cannot express that; leave parameters that skipped "
                f"steps out of the flat parameters"
            )
    joined = {}
    for key in keys:
        values = [(place, found[key]) for place, found in present]
        is_per_element = all(
            isinstance(v, torch.Tensor) and v.shape == place.parameter.shape for place, v in values
        )
        if is_per_element and not any(v.dim() for _, v in values):
            # All parameters are scalars, and so is a step count.
            is_per_element = key in element_state(optimizer, group)
        joined[key] = _join_elements(values) if is_per_element else _common_value(key, values)
    return joined


def _join_elements(values: list[tuple[Place, torch.Tensor]]) -> torch.Tensor:
    place, first = values[0]
    assert place.holder is not None
    joined = torch.zeros(place.holder.shape, dtype=first.dtype, device=place.holder.device)
    for place, value in values:
        assert place.segment is not None
        joined.as_strided(place.segment.shape, place.segment.stride, place.segment.offset).copy_(value)
    return joined


def _common_value(key: str, values: list[tuple[Place, Any]]) -> Any:
    """The value of a state that all parameters of a buffer share."""
    first, kept = values[0]
    for place, value in values:
        has_shape = isinstance(value, torch.Tensor) and value.dim()
        if has_shape or value != kept:
            raise FlatbedError(
                f"the state '{key}' of '{place.name}' ({tuple(value.shape) if has_shape else value}) has "
                f"neither the shape of the parameter nor the value that '{first.name}' has. One flat state "
                f"holds one value for all: load a state of the same model, and leave parameters that skipped "
                f"steps out of the flat parameters"
            )
    return kept.clone() if isinstance(kept, torch.Tensor) else kept
