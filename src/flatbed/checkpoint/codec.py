"""State dicts as JSON and named tensors: plain data only, and loading runs no code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.tables.tensor_file import check_plain

MARK = "$"  # first character of JSON keys that encode a type
DAMAGE = (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError)
"""Errors that reading a damaged description may raise."""


class Packer:
    """Encodes values as JSON, and collects their tensors in `tensors`, named by the path to them."""

    def __init__(self, *, tied: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.ties: dict[str, str] = {}
        """Names of tensors that share memory with an earlier one, and the name of that one."""
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
        if all(isinstance(key, str) and not key.startswith(MARK) for key in value):
            return dict(items)
        return {"$dict": [[self.pack(key, f"{name}.key"), item] for key, item in items]}

    def _tensor(self, value: Tensor, name: str) -> Any:
        check_plain(value, name)
        place = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if self._tied and value.numel() and place in self._places:
            self.ties[name] = self._places[place]
            return {"$tensor": self._places[place]}
        while name in self.tensors:
            name += "'"
        self._places[place] = name
        self.tensors[name] = value
        # Kernels need state with the strides of its parameter, for example channels_last.
        dense = not value.is_contiguous() and torch.empty_like(value).stride() == value.stride()
        return {"$tensor": name, "stride": list(value.stride())} if dense else {"$tensor": name}


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode what `Packer.pack` encoded. Wrong values raise one of `DAMAGE`."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        found = tensors[value["$tensor"]]
        if "stride" not in value:
            return found
        return torch.empty_strided(found.shape, value["stride"], dtype=found.dtype).copy_(found)
    if "$tuple" in value:
        return tuple(unpack(item, tensors) for item in value["$tuple"])
    if "$dict" in value:
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value["$dict"]}
    if "$float" in value:
        return float(value["$float"])
    if "$dtype" in value:
        return getattr(torch, value["$dtype"])
    return {key: unpack(item, tensors) for key, item in value.items()}
