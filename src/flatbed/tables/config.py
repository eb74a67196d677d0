"""What a table is, wherever it lives, and what its rows begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.cache import POLICIES
from flatbed.tables import initializers as initial
from flatbed.tables.record import NAMES, WEIGHT, Field, Record

STORAGES = ("host", "disk", "device")


@dataclass(frozen=True, slots=True)
class Config:
    """What a table is, wherever it lives."""

    n_rows: int
    dim: int
    dtype: torch.dtype
    storage: str
    path: Path | None
    init: initial.Init
    seed: int
    padding_idx: int | None
    cache_rows: int | None = None
    """Of records on the computing device; None with no bytes either: a few batches on a GPU, else none."""
    cache_bytes: int | None = None
    cache_policy: str = "lfu"

    def __post_init__(self) -> None:
        if self.n_rows * self.dim >= 1 << 56:
            raise ValueError(f"a table of {self.n_rows} × {self.dim} is larger than any memory")
        if self.n_rows < 1 or self.dim < 1:
            raise ValueError(f"a table has at least one row and one column; found {self.n_rows} × {self.dim}")
        if self.dtype not in NAMES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, NAMES))}; found {self.dtype}")
        if self.storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}; found {self.storage!r}")
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise FlatbedError(f"there is no folder {self.path.absolute().parent}: make it first")
        if (self.storage == "disk") != (self.path is not None):
            raise ValueError(
                f"path goes with storage='disk'; found storage={self.storage!r}, path={self.path}"
            )

        self._check_cache()

    def _check_cache(self) -> None:
        if self.cache_rows is not None and self.cache_bytes is not None:
            raise ValueError(
                f"give cache_rows or cache_bytes, not both; found {self.cache_rows} and {self.cache_bytes}"
            )
        for name, value in (("cache_rows", self.cache_rows), ("cache_bytes", self.cache_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name} is 0 (no cache) or more; found {value}")
            if value and self.storage == "device":
                raise ValueError(f'{name}={value}: a table with storage="device" needs none')
        if self.cache_policy not in POLICIES:
            raise ValueError(
                f"cache_policy must be one of {', '.join(POLICIES)}; found {self.cache_policy!r}"
            )

    @property
    def sized(self) -> bool:
        """Whether it was said how large the cache is to be."""
        return self.cache_rows is not None or self.cache_bytes is not None

    @property
    def weight(self) -> Field:
        return Field(WEIGHT, self.dtype, self.dim)

    def describe(self) -> dict[str, Any]:
        """What a file tells about itself beside its records, in JSON's terms."""
        return {
            "init": initial.describe(self.init),
            "seed": self.seed,
            "padding_idx": self.padding_idx,
        }


def with_cache(config: Config, cache_rows: Any, cache_bytes: Any, cache_policy: str) -> Config:
    """The same with a cache as it was asked for, checked."""
    for name, value in (("cache_rows", cache_rows), ("cache_bytes", cache_bytes)):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise TypeError(f"{name} must be an integer or None; found {value!r}")
    rows, nbytes = (None if value is None else int(value) for value in (cache_rows, cache_bytes))
    return replace(config, cache_rows=rows, cache_bytes=nbytes, cache_policy=cache_policy)


def device_of(device: Any) -> torch.device:
    """The device that was asked for, with its number, if it is here; by default torch's default device."""
    found = torch.get_default_device() if device is None else parsed(device)
    check_device(found)
    return present(found)


def parsed(device: Any) -> torch.device:
    """A device by torch's name for it."""
    try:
        if not isinstance(device, bool):
            return torch.device(device)
    except (RuntimeError, TypeError):
        pass
    found = repr(device) if isinstance(device, str | int) else type(device).__name__
    raise FlatbedError(f'device must be "cpu", "cuda" or "cuda:1", for example; found {found}')


def present(found: torch.device) -> torch.device:
    """The same with its number, if it is here."""
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'torch sees no CUDA GPU, and "{found}" was asked for: give device="cpu"')
    index: int | None = found.index
    if index is not None and index >= torch.cuda.device_count():
        raise ValueError(
            f'there are {torch.cuda.device_count()} GPUs, from "cuda:0" on; found device "{found}"'
        )
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def check_device(device: torch.device) -> None:
    """Refuse devices that no lookup can be computed on."""
    if device.type not in ("cpu", "cuda"):
        raise FlatbedError(
            f'a table computes on "cpu" or "cuda", and its rows have a home of their own; found device '
            f'"{device}": give device="cpu", or leave the module with the table out of the move'
        )


def fill_weights(record: Record, records: Tensor, first_row: int, config: Config) -> None:
    """First weights of consecutive rows, from the seed."""
    initial.fill_(
        record.view(records, WEIGHT),
        first_row=first_row,
        init=config.init,
        seed=config.seed,
        padding_idx=config.padding_idx,
    )


def fill_state(record: Record, records: Tensor) -> None:
    """First values of state."""
    for field in record.state:
        record.view(records, field.name).fill_(field.initial)
