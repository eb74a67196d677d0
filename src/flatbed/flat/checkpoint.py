"""Checkpoints that know nothing of buffers: torch's own formats, readable without flatbed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flatbed.errors import FlatbedError
from flatbed.flat import probe
from flatbed.flat.parameter import FlatParameter
from flatbed.layout import Segment

if TYPE_CHECKING:
    from flatbed.flat.params import FlatParams


class StateDict(OrderedDict[str, Any]):
    """A module's state as plain tensors. It stands in for the module in `safetensors.torch.save_model`."""

    _metadata: Any

    def state_dict(self) -> OrderedDict[str, Any]:
        """What `save_model` asks of a module."""
        return OrderedDict(self)

    def __reduce__(self) -> Any:  # pickled as what it is, so that weights_only loading accepts it
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


def state_dict(module: nn.Module, *, tied: bool = True) -> StateDict:
    """`module.state_dict()` for `torch.save` and safetensors: every tensor contiguous, in its own memory.

    Tied weights stay one tensor under several names, as in torch. `safetensors.torch.save_model` takes
    that; `save_file` refuses it, so ``tied=False`` gives each name its own copy.

    >>> model = nn.Linear(2, 3)
    >>> [(name, tuple(t.shape)) for name, t in state_dict(model).items()]
    [('weight', (3, 2)), ('bias', (3,))]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"state_dict takes a torch.nn.Module; found {type(module).__name__}: give the model itself (an "
            f"optimizer has a state_dict() of its own)"
        )
    plain = StateDict()
    copies: dict[Any, torch.Tensor] = {}
    own = module.state_dict()
    plain._metadata = getattr(own, "_metadata", None)  # what versions its modules had
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            plain[name] = value
            continue
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if not tied or value.numel() == 0 or place not in copies:
            copies[place] = value.detach().clone(memory_format=torch.contiguous_format)
        plain[name] = copies[place]
    return plain


# ---- optimizer state


@dataclass(slots=True)
class Place:
    """One parameter as torch would have numbered it, and where its state is: in a segment, or its own."""

    name: str
    parameter: torch.Tensor
    flat: FlatParameter | None = None
    segment: Segment | None = None


def optimizer_state_dict(flat: FlatParams, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """See `FlatParams.optimizer_state_dict`."""
    check_optimizer(optimizer)
    packed = optimizer.state_dict()
    numbers = _numbers(optimizer, packed)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    next_number = 0
    for number, places in enumerate(_places(flat, optimizer)):
        frozen = [p.parameter for p in places if p.flat is None and id(p.parameter) not in numbers]
        fresh = probe.twin(optimizer, optimizer.param_groups[number], frozen).state if frozen else {}
        for position, place in enumerate(places, next_number):
            if place.flat is not None and place.segment is not None:
                found = packed["state"].get(numbers[id(place.flat)])
                if found is not None:
                    state[position] = {
                        k: _part(optimizer, k, v, place.segment, place.flat) for k, v in found.items()
                    }
            elif id(place.parameter) in numbers:
                if numbers[id(place.parameter)] in packed["state"]:
                    state[position] = packed["state"][numbers[id(place.parameter)]]
            elif fresh.get(place.parameter):  # Adagrad makes state at construction, frozen or not
                state[position] = dict(fresh[place.parameter])
        group = {
            k: v for k, v in packed["param_groups"][number].items() if k not in ("params", "param_names")
        }
        group["params"] = list(range(next_number, next_number + len(places)))
        if flat._given.named:
            group["param_names"] = [place.name for place in places]
        groups.append(group)
        next_number += len(places)
    return {**packed, "state": state, "param_groups": groups}


@torch.no_grad()
def load_optimizer_state_dict(
    flat: FlatParams, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """See `FlatParams.load_optimizer_state_dict`. All is checked before the optimizer changes."""
    check_optimizer(optimizer)
    flat._heal()  # a model cast meanwhile has another layout
    own = optimizer.state_dict()
    numbers = _numbers(optimizer, own)
    all_places = _places(flat, optimizer)
    _check_sizes(all_places, state)
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
        groups.append({**{k: v for k, v in given.items() if k not in ("params", "param_names")}, **kept})
    before = optimizer.state, optimizer.param_groups
    try:
        optimizer.load_state_dict({**state, "state": built, "param_groups": groups})
    except KeyError as error:  # torch replaces what it has, and then looks for what it needs
        optimizer.state, optimizer.param_groups = before
        held = ", ".join(dict.fromkeys(repr(key) for value in built.values() for key in value))
        raise FlatbedError(
            f"the state is of another optimizer than {type(optimizer).__name__}: it has "
            f"{held or 'nothing'}, and lacks {error}; load it into the optimizer that it was saved from"
        ) from error


def check_optimizer(optimizer: Any) -> None:
    """Raise for what is none, such as a state dict in its place."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise TypeError(
            f"optimizer must be one of torch's, built over flat.parameters() or flat.groups(); found "
            f"{type(optimizer).__name__}"
        )


def _numbers(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[int, int]:
    """Torch's number of each parameter the optimizer holds, by identity."""
    return {
        id(p): number
        for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for p, number in zip(group["params"], packed_group["params"], strict=True)
    }


def _places(flat: FlatParams, optimizer: torch.optim.Optimizer) -> list[list[Place]]:
    """For each group of the optimizer, the original parameters torch would have had there, in order."""
    segments = flat.segments
    flats = flat.parameters()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    home = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [f for f in flats if id(f) not in held]
    if missing:
        raise ValueError(
            f"this optimizer holds {len(flats) - len(missing)} of {len(flats)} flat parameters: build it "
            f"over flat.parameters() or flat.groups() of this very FlatParams"
        )
    group_home = {
        source: home[id(f)] for f, source in reversed(list(zip(flats, flat._group_of_buffer, strict=True)))
    }
    aligned = len(optimizer.param_groups) >= len(flat._given.options)
    by_group: list[list[Place]] = [[] for _ in optimizer.param_groups]
    segment_of = {id(e): s for e, s in zip(flat._entries, segments, strict=True)}
    for entry in flat._given.entries:
        if id(entry) in segment_of:
            segment = segment_of[id(entry)]
            f = flats[segment.buffer]
            by_group[home[id(f)]].append(Place(entry.name, entry.parameter, f, segment))
        elif id(entry.parameter) not in held:
            number = group_home.get(entry.group, entry.group if aligned else 0)
            by_group[number].append(Place(entry.name, entry.parameter))
    for number, group in enumerate(optimizer.param_groups):
        before: list[Place] = []
        after: list[Place] = []
        for p in group["params"]:
            if not isinstance(p, FlatParameter):
                (before if not after and not _seen_flat(group, p) else after).append(Place("", p))
            elif p._owner is not flat:
                raise ValueError("this optimizer holds flat parameters of another FlatParams as well")
        by_group[number] = [*before, *by_group[number], *after]
    return by_group


def _seen_flat(group: dict[str, Any], p: torch.Tensor) -> bool:
    """Whether a flat parameter stands before `p` in its group."""
    for other in group["params"]:
        if other is p:
            return False
        if isinstance(other, FlatParameter):
            return True
    return False


def _part(
    optimizer: torch.optim.Optimizer, key: str, value: Any, segment: Segment, flat: FlatParameter
) -> Any:
    """One original's share of a flat state value: a view of per-element state, a copy of a scalar."""
    if isinstance(value, torch.Tensor):
        if value.shape == flat.shape:
            return value.as_strided(segment.shape, segment.stride, value.storage_offset() + segment.offset)
        if value.numel() == 1:
            return value.clone()
        found = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, (list, tuple, dict)) and len(value):
        found = f"a {type(value).__name__}"
    else:
        return value
    raise FlatbedError(
        f"the state '{key}' of {type(optimizer).__name__} is {found}, neither one value per element nor one "
        f"for all, and cannot be told apart by parameter; save optimizer.state_dict() as it is and load it "
        f"into the same FlatParams"
    )


def _check_sizes(places: list[list[Place]], state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        found = ", ".join(map(repr, list(state)[:4])) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"expected a dict with 'state' and 'param_groups', as optimizer.state_dict() returns; found "
            f"{found}"
        )
    n_found = [len(group.get("params", ())) for group in state["param_groups"]]
    expected = [len(group) for group in places]
    if n_found != expected:
        raise ValueError(
            f"the state is of groups with {n_found} parameters, the optimizer's groups have {expected}; "
            f"it must come from the same parameters in the same groups"
        )


def _join(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parts: list[tuple[Place, Any]]
) -> dict[str, Any] | None:
    """The flat state of one buffer from the states of its originals."""
    present = [(place, found) for place, found in parts if found]
    if not present:
        return None
    absent = [place.name for place, found in parts if not found and place.parameter.requires_grad]
    if absent:
        raise FlatbedError(
            f"the state holds nothing for '{absent[0]}' while '{present[0][0].name}' has some: torch skipped "
            f"it in training. One flat state cannot express that; leave such parameters out of the FlatParams"
        )
    keys = present[0][1].keys()
    for place, found in present:
        if found.keys() != keys:
            raise FlatbedError(
                f"the states of '{present[0][0].name}' and '{place.name}' differ in their keys: "
                f"{sorted(keys)} and {sorted(found.keys())}"
            )
    return {key: _join_key(optimizer, group, key, present) for key in keys}


def _join_key(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], key: str, parts: list[tuple[Place, Any]]
) -> Any:
    values = [found[key] for _, found in parts]
    if all(isinstance(v, torch.Tensor) for v in values):
        fits = all(v.shape == place.parameter.shape for (place, _), v in zip(parts, values, strict=True))
        scalar = all(v.dim() == 0 for v in values)
        if fits and not (scalar and key not in probe.element_keys(optimizer, group)):
            return _join_elements(parts, values)
        if not scalar:
            place = next(p for (p, _), v in zip(parts, values, strict=True) if v.shape != p.parameter.shape)
            raise FlatbedError(
                f"the state '{key}' of '{place.name}' is neither of its shape {tuple(place.parameter.shape)} "
                f"nor a scalar, so it has no place in a flat state"
            )
    plain = [v.item() if isinstance(v, torch.Tensor) else v for v in values]
    for (place, _), value in zip(parts, plain, strict=True):
        if value != plain[0]:
            raise FlatbedError(
                f"'{key}' is {plain[0]} for '{parts[0][0].name}' and {value} for '{place.name}'; one flat "
                f"state holds one value for all. Train parameters that skipped steps outside the FlatParams"
            )
    return values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]


def _join_elements(parts: list[tuple[Place, Any]], values: list[torch.Tensor]) -> torch.Tensor:
    flat = parts[0][0].flat
    assert flat is not None
    joined = torch.zeros(flat.shape, dtype=values[0].dtype, device=flat.device)
    for (place, _), value in zip(parts, values, strict=True):
        segment = place.segment
        assert segment is not None
        joined.as_strided(segment.shape, segment.stride, segment.offset).copy_(value)
    return joined
