"""Optimizer state in torch's per-parameter format, which torch reads without flatbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flatbed.errors import FlatbedError
from flatbed.flat.parameter import FlatParameter
from flatbed.layout import Segment
from flatbed.optim.probe import element_state, twin

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams


@dataclass(slots=True)
class Place:
    """One parameter as torch would have numbered it, and its share of a flat state if it has one."""

    name: str
    parameter: torch.Tensor
    flat: FlatParameter | None = None
    segment: Segment | None = None


def optimizer_state_dict(flat: FlatParams, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """See `FlatParams.optimizer_state_dict`."""
    all_places = _places(flat, optimizer)
    packed = optimizer.state_dict()
    numbers = _numbers(optimizer, packed)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, places in enumerate(all_places):
        first = sum(len(group["params"]) for group in groups)
        frozen = [p.parameter for p in places if p.flat is None and id(p.parameter) not in numbers]
        # Adagrad creates state at construction, for frozen parameters as well.
        initial = twin(optimizer, optimizer.param_groups[number], frozen).state if frozen else {}
        group = _without_params(packed["param_groups"][number])
        group["params"] = list(range(first, first + len(places)))
        if flat._inputs.named:
            group["param_names"] = [place.name for place in places]
        groups.append(group)
        for position, place in enumerate(places, first):
            holder = place.parameter if place.flat is None else place.flat
            found = packed["state"].get(numbers.get(id(holder)), initial.get(holder))
            if found:
                state[position] = {key: _part(optimizer, key, v, place) for key, v in found.items()}
    return {**packed, "state": state, "param_groups": groups}


@torch.no_grad()
def load_optimizer_state_dict(
    flat: FlatParams, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """See `FlatParams.load_optimizer_state_dict`. Everything is checked before the optimizer changes."""
    flat._repair()  # a model that was cast has another layout
    all_places = _places(flat, optimizer)
    _check_sizes(all_places, state)
    own = optimizer.state_dict()
    numbers = _numbers(optimizer, own)
    built: dict[int, Any] = {}
    groups = []
    for number, places in enumerate(all_places):
        given = state["param_groups"][number]
        by_flat: dict[int, list[tuple[Place, Any]]] = {}
        for place, position in zip(places, given["params"], strict=True):
            found = state["state"].get(position)
            if place.flat is not None:
                by_flat.setdefault(id(place.flat), []).append((place, found))
            elif found is not None and id(place.parameter) in numbers:
                built[numbers[id(place.parameter)]] = found
        for key, parts in by_flat.items():
            joined = _join(optimizer, optimizer.param_groups[number], parts)
            if joined is not None:
                built[numbers[key]] = joined
        kept = {k: v for k, v in own["param_groups"][number].items() if k in ("params", "param_names")}
        groups.append({**_without_params(given), **kept})
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


def _numbers(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[int, int]:
    """Torch's number of each parameter that the optimizer holds, by identity."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    return {id(p): number for p, number in zip(held, numbers, strict=True)}


def _places(flat: FlatParams, optimizer: torch.optim.Optimizer) -> list[list[Place]]:
    """For each group of the optimizer, the original parameters torch would have there, in order."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {type(optimizer).__name__}")
    groups = [group["params"] for group in optimizer.param_groups]
    group_of = {id(p): number for number, params in enumerate(groups) for p in params}
    flats = flat.parameters()
    n_held = sum(id(f) in group_of for f in flats)
    n_other = sum(isinstance(p, FlatParameter) for params in groups for p in params) - n_held
    if n_held < len(flats) or n_other:
        raise ValueError(
            f"this optimizer holds {n_held} of {len(flats)} flat parameters of this FlatParams and {n_other} "
            f"of another FlatParams: build it over flat.parameters() or flat.groups()"
        )
    buffers = zip(flats, flat._group_of_buffer, strict=True)
    target = {source: group_of[id(f)] for f, source in reversed(list(buffers))}
    segments = {id(e): s for e, s in zip(flat._entries, flat.segments, strict=True)}
    inside: list[list[Place]] = [[] for _ in groups]
    for entry in flat._inputs.entries:
        segment = segments.get(id(entry))
        if segment is not None:
            f = flats[segment.buffer]
            inside[group_of[id(f)]].append(Place(entry.name, entry.parameter, f, segment))
        elif id(entry.parameter) not in group_of:  # frozen: with the parameters of its source group
            number = target.get(entry.group, min(entry.group, len(groups) - 1))
            inside[number].append(Place(entry.name, entry.parameter))
    places = []
    for params, own in zip(groups, inside, strict=True):
        first = next((i for i, p in enumerate(params) if isinstance(p, FlatParameter)), len(params))
        others = [(i, Place("", p)) for i, p in enumerate(params) if not isinstance(p, FlatParameter)]
        before, after = [o for i, o in others if i < first], [o for i, o in others if i > first]
        places.append([*before, *own, *after])
    return places


def _part(optimizer: torch.optim.Optimizer, key: str, value: Any, place: Place) -> Any:
    """One original's share of a state value: a view of per-element state, a copy of a scalar."""
    segment = place.segment
    if place.flat is None or segment is None:
        return value
    if isinstance(value, torch.Tensor):
        if value.shape == place.flat.shape:
            return value.as_strided(segment.shape, segment.stride, value.storage_offset() + segment.offset)
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


def _check_sizes(places: list[list[Place]], state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            f"expected a dict with 'state' and 'param_groups', as optimizer.state_dict() returns; found "
            f"{list(state)[:4] if isinstance(state, dict) else type(state).__name__}"
        )
    n_found = [len(group.get("params", ())) for group in state["param_groups"]]
    expected = [len(group) for group in places]
    if n_found != expected:
        raise ValueError(
            f"the state is of groups with {n_found} parameters, the optimizer's groups have {expected}; "
            f"load it into an optimizer over the same parameters in the same groups"
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
                f"steps out of the FlatParams"
            )
    return {key: _join_key(optimizer, group, key, present) for key in keys}


def _join_key(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], key: str, parts: list[tuple[Place, Any]]
) -> Any:
    values = [found[key] for _, found in parts]
    names = [place.name for place, _ in parts]
    if all(isinstance(v, torch.Tensor) for v in values):
        unlike = [
            n for n, (p, _), v in zip(names, parts, values, strict=True) if v.shape != p.parameter.shape
        ]
        scalar = all(v.dim() == 0 for v in values)
        if not unlike and not (scalar and key not in element_state(optimizer, group)):
            return _join_elements([place for place, _ in parts], values)
        if not scalar:
            raise FlatbedError(
                f"the state '{key}' of '{unlike[0]}' has neither the shape of its parameter nor is it a "
                f"scalar; load a state of the same model"
            )
    plain = [v.item() if isinstance(v, torch.Tensor) else v for v in values]
    for name, value in zip(names, plain, strict=True):
        if value != plain[0]:
            raise FlatbedError(
                f"'{key}' is {plain[0]} for '{names[0]}' and {value} for '{name}'. One flat state holds one "
                f"value for all; leave parameters that skipped steps out of the FlatParams"
            )
    return values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]


def _join_elements(places: list[Place], values: list[torch.Tensor]) -> torch.Tensor:
    flat = places[0].flat
    assert flat is not None
    joined = torch.zeros(flat.shape, dtype=values[0].dtype, device=flat.device)
    for place, value in zip(places, values, strict=True):
        assert place.segment is not None
        joined.as_strided(place.segment.shape, place.segment.stride, place.segment.offset).copy_(value)
    return joined
