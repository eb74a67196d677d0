"""Constructors of SpeedTorch's classes: each class is a list of arguments and a place for its rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from flatbed import FlatbedError

NAMED = Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """Kind of storage ("device", "host" or "disk") and, for files, the beginning of their path."""

    kind: str
    diskname: str | os.PathLike[str] = ""

    def next_path(self, suffix: str) -> Path:
        """Return the first of `DISKNAME0.bed`, `DISKNAME1.bed`, … that does not exist yet."""
        number = 0
        while (path := Path(f"{self.diskname}{number}{suffix}")).exists():
            number += 1
        folder = path.absolute().parent
        if not folder.is_dir():
            raise FlatbedError(f"found no folder {folder} for the file {path.name}: make it first")
        return path


class Variant:
    """Base of SpeedTorch's classes. Binds arguments by the class's table and keeps them as attributes."""

    _required: ClassVar[tuple[str, ...]] = ()
    _storage: ClassVar[str]
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, *, storage: str = "", **optional: Any) -> None:
        """Set the signature: required arguments, then the optional ones of this class in SpeedTorch's order.

        `storage` is the kind of storage; without it the argument `CPUPinn` or `deviceType` decides.
        """
        super().__init_subclass__()
        parameters = [Parameter(name, NAMED, default=value) for name, value in optional.items()]
        cls.__signature__ = Signature([*(Parameter(name, NAMED) for name in cls._required), *parameters])
        cls._storage = storage

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = type(self).__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        vars(self).update(bound.arguments)
        self._spec = _spec(self._storage, bound.arguments)
        self._setup()

    def _setup(self) -> None:
        """Check the arguments and set up what depends on them."""


def _spec(kind: str, given: Mapping[str, Any]) -> StorageSpec:
    """Read where rows are stored from SpeedTorch's arguments."""
    is_pinned(given.get("CPUPinn", False))
    if kind == "disk":
        diskname = given["diskname"]
        if diskname is not None and not isinstance(diskname, str | os.PathLike):
            raise TypeError(f"diskname must begin a file's path; found {type(diskname).__name__}")
        return StorageSpec(kind, "" if diskname is None else diskname)
    if kind:
        return StorageSpec(kind)
    device = given.get("deviceType", "cpu" if given.get("CPUPinn") else "cuda")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"deviceType must be 'cuda' or 'cpu'; found {device!r}")
    if device == "cuda" and given.get("pinType"):
        raise ValueError("found pinType=True, which is for host memory: use it with deviceType='cpu'")
    return StorageSpec("device" if device == "cuda" else "host")


def is_pinned(value: object) -> bool:
    """Return `CPUPinn`, which must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"CPUPinn must be True (host memory) or False (the device's); found {value!r}")
    return value


def as_dtype(given: Any) -> torch.dtype:
    """Convert a datatype of torch or numpy, or its name, to torch's."""
    if isinstance(given, torch.dtype):
        return given
    try:
        name = given if given == "bfloat16" else np.dtype(given).name
        found: torch.dtype = getattr(torch, name)
    except (TypeError, AttributeError):
        raise TypeError(f"found datatype {given!r}; expected the name of one such as 'float32'") from None
    return found


def natural(name: str, value: Any) -> int:
    """Return an integer of at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer; found {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; found {value}")
    return int(value)


def computing_device() -> torch.device:
    """Return the current GPU or, without one, the CPU."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
