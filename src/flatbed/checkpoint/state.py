"""State of models and optimizers without their tables, as JSON and named tensors.

Only plain data is saved, and loading runs no code. Tables are saved as files of their own.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.distributed.dense_shards import Sharding, is_dtensor, local_of
from flatbed.errors import FlatbedError
from flatbed.flat.buffer import FlatParameter
from flatbed.kernels.step import StepOptions
from flatbed.optim.optimizer import Optimizer as FlatbedOptimizer
from flatbed.tables.embedding import DenseStateDict
from flatbed.tables.table import Table
from flatbed.tables.tensor_file import RESERVED

MARK = "$"  # first character of JSON keys that encode a type
WORD = 8  # bytes


class Packer:
    """Encodes values as JSON, and collects their tensors in `tensors`, named by the path to them."""

    def __init__(self, *, tied: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ties: dict[str, str] = {}
        """Maps the name of a tensor to the name of an earlier one that shares its memory."""
        self._tied = tied
        self._places: dict[Any, str] = {}

    def pack(self, value: Any, name: str) -> Any:
        """Encode a value."""
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{name}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, Mapping):
            return self._mapping(value, name)
        raise FlatbedError(
            f"'{name}' is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold: "
            "numbers, strings, tensors, and lists, tuples and dicts of them can be saved"
        )

    def _mapping(self, value: Mapping[Any, Any], name: str) -> Any:
        items = [(key, self.pack(item, f"{name}.{key}")) for key, item in value.items()]
        if isinstance(value, Counter):  # the milestones of MultiStepLR
            return {"$counter": [[self.pack(key, f"{name}.key"), item] for key, item in items]}
        if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return dict(items)
        return {"$dict": [[self.pack(key, f"{name}.key"), item] for key, item in items]}

    def _tensor(self, value: Tensor, name: str) -> Any:
        _check_plain(value, name)
        place = place_of(value)
        if self._tied and value.numel() and place in self._places:
            self.ties[name] = self._places[place]
            return {"$tensor": self._places[place]}
        while name in self.tensors or name == RESERVED:
            name += "'"
        self._places[place] = name
        self.tensors[name] = value
        # Kernels need state with the strides of its parameter, for example channels_last.
        is_whole = not is_dtensor(value)
        dense = is_whole and not value.is_contiguous() and torch.empty_like(value).stride() == value.stride()
        return {"$tensor": name, "stride": list(value.stride())} if dense else {"$tensor": name}


def _check_plain(tensor: Tensor, name: str) -> None:
    """Raise unless a tensor is dense and initialized."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        raise FlatbedError(f"'{name}' has no values yet: run the model once, then save it")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise FlatbedError(
            f"'{name}' is sparse or quantized, which safetensors cannot hold: save it by other means"
        )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$float": float,
    "$dtype": _dtype,
}


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode what `Packer.pack` encoded. Raises any kind of error for wrong values."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        found = tensors[value["$tensor"]]
        if "stride" not in value:
            return found
        made = torch.empty_strided(found.shape, value["stride"], dtype=found.dtype, device="meta")
        if made.untyped_storage().nbytes() != found.nbytes:
            raise ValueError(f"the strides {value['stride']} of '{value['$tensor']}' leave gaps")
        return torch.empty_strided(found.shape, value["stride"], dtype=found.dtype).copy_(found)
    for mark, decode in DECODERS.items():
        if mark in value:
            return decode(unpack(value[mark], tensors))
    return {key: unpack(item, tensors) for key, item in value.items()}


# ---- models and optimizers


def dense_state(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` without the rows of tables."""
    return dict(model.state_dict(destination=DenseStateDict()))


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of any optimizer, without its tables."""
    if isinstance(optimizer, FlatbedOptimizer):
        return dict(optimizer._state_dict_without_tables())
    return dict(optimizer.state_dict())


def load_plain_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict of `plain_state`; tables stay as they are."""
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for key, value in saved.items():
            if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                saved[key] = value.to(own[key].device)  # the learning rate of a captured step
    if isinstance(optimizer, FlatbedOptimizer):
        optimizer._load_state_dict_without_tables(state)
    else:
        optimizer.load_state_dict(state)


NO_OPTIONS = asdict(StepOptions())  # the defaults: an optimizer of torch steps like this


def options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options that flatbed's optimizers have beyond torch's; {} for an optimizer of torch."""
    return asdict(optimizer._options) if isinstance(optimizer, FlatbedOptimizer) else {}


def shapes_of(optimizer: Optimizer) -> list[list[Any]]:
    """Return the shapes of parameters by group; of a flat one, the shapes of its parts."""

    def shape(param: Tensor) -> list[Any]:
        if isinstance(param, FlatParameter):
            return [list(segment.shape) for segment in param.buffer.segments]
        return list(param.shape)

    return [[shape(p) for p in group["params"]] for group in optimizer.param_groups]


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells the memory of a tensor from that of others: tied tensors have the same."""
    if isinstance(tensor, Table) or nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
        return (id(tensor),)
    local = local_of(tensor)
    # The storage object, not its address: empty shards have no address, and all ranks must find the
    # same ties.
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def names_by_place(values: Mapping[str, Any]) -> dict[Any, str]:
    """Return the names of tensors by `place_of`; of tied ones, the first in the alphabet."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {place_of(tensors[name]): name for name in sorted(tensors, reverse=True)}


def names_of(optimizer: Optimizer, known: Mapping[Any, str]) -> list[list[Any]]:
    """Return the `names_by_place` of parameters by group, and of a flat one those of its parts.

    Unknown names are "".
    """

    def name(param: Tensor) -> Any:
        if isinstance(param, FlatParameter):
            return [known.get(place_of(one), "") for one in param.buffer.originals]
        return known.get(place_of(param), "")

    return [[name(p) for p in group["params"]] for group in optimizer.param_groups]


def bit_sums(model: nn.Module, optimizers: Sequence[Optimizer], known: Mapping[Any, str]) -> dict[str, int]:
    """Return the `bit_sum` of parameters that all ranks should share, by the name in `names_by_place`.

    Without tables, DTensors and buffers. Parameters that the model's state dict does not have are left out,
    unless an optimizer has them.
    """
    found: dict[str, Tensor] = {}
    for param in model.parameters():
        if _is_plain(param) and (name := known.get(place_of(param))):
            found[name] = param
    for i, optimizer in enumerate(optimizers):
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for j, param in enumerate(params):
            if _is_plain(param):
                default = f"parameter {j} of optimizer {i} ({type(optimizer).__name__})"
                found.setdefault(known.get(place_of(param), default), param)
    return {name: bit_sum(param) for name, param in found.items()}


def _is_plain(param: Tensor) -> bool:
    """Return whether a parameter has values, the same on all ranks, and is no buffer of other parameters."""
    if isinstance(param, Table | FlatParameter) or is_dtensor(param) or nn.parameter.is_lazy(param):
        return False
    return param.layout == torch.strided and not param.is_meta


def bit_sum(tensor: Tensor) -> int:
    """Return the sum of the bits of a tensor as 64-bit words: as fast as memory, and without rounding."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if values.data_ptr() % WORD or values.storage_offset() % WORD:
        values = values.clone()
    n_whole = len(values) // WORD * WORD
    total = values[:n_whole].view(torch.int64).sum()
    return int(total + values[n_whole:].sum() if n_whole < len(values) else total)


def check_same(optimizer: Optimizer, about: Mapping[str, Any], names: list[list[Any]], *, where: str) -> None:
    """Raise unless state was saved from the same parameters in the same groups."""
    kind, advice = type(optimizer).__name__, "build it over the same parameters, in the same order"
    theirs, ours = about["shapes"], shapes_of(optimizer)
    if theirs != ours:
        raise FlatbedError(
            f"{where} holds state for parameters of the shapes {str(theirs)[:200]}; {kind} has "
            f"{str(ours)[:200]}: {advice}"
        )
    for saved, own in _known_pairs(about["names"], names):
        if saved != own:
            raise FlatbedError(
                f"{where} holds the state of '{saved}' for a parameter that is '{own}' in {kind}: {advice}"
            )


def _known_pairs(theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    """Yield what two `names_of` have for each parameter, if both know its name."""
    if isinstance(theirs, list) and isinstance(ours, list):
        for pair in zip(theirs, ours, strict=True):
            yield from _known_pairs(*pair)
    elif theirs and ours:
        yield theirs, ours


def shard_like(value: Any, like: Any) -> Any:
    """Return this rank's part of a whole tensor as a DTensor, if `like` is a DTensor of the same shape.

    Other values are returned unchanged.
    """
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.shape != like.shape:
        return value
    sharding = Sharding.of(like)
    return value if sharding is None else sharding.wrap(sharding.part_of(value))


def shard_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Shard the state of each DTensor like the DTensor itself. Optimizers of flatbed do so on their own."""
    if isinstance(optimizer, FlatbedOptimizer):
        return state
    held = {}
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for key, param in zip(saved["params"], own["params"], strict=True):
            if is_dtensor(param) and key in state["state"]:
                entry = state["state"][key].items()
                held[key] = {name: shard_like(value, param) for name, value in entry}
    return {**state, "state": {**state["state"], **held}}


# ---- random numbers


def rng_state() -> dict[str, Any]:
    """Return the states of the random generators of torch, Python and numpy in this process."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if has_cuda else [],
        "python": random.getstate(),
        "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continue from the states of `rng_state`; states of GPUs that are missing here are left out."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
