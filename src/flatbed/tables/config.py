"""The configuration of a table, and argument validation for the embedding modules."""

from __future__ import annotations

import glob
import operator
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.cache import POLICIES
from flatbed.tables import initializers
from flatbed.tables.files import as_path
from flatbed.tables.record import NAMES, WEIGHT, Field

STORAGES = ("host", "disk", "device")


@dataclass(frozen=True, slots=True)
class Config:
    """Size, dtype, storage, first weights and cache of a table."""

    n_rows: int
    dim: int
    dtype: torch.dtype
    storage: str
    path: Path | None
    init: initializers.Init
    seed: int
    padding_idx: int | None
    # Records in the cache. None without `cache_bytes`: a few batches on a GPU, no cache on a CPU.
    cache_rows: int | None = None
    cache_bytes: int | None = None
    cache_policy: str = "lfu"
    # Names in `describe` that a file at `path` must agree with, since the user gave them.
    given: frozenset[str] = field(default=frozenset(), compare=False)
    read_only: bool = False  # the file of a disk table is neither locked nor changed
    # `n_rows` and `path` are those of the rank `shard_rank`, which holds every n-th row; `padding_idx` and
    # first weights are those of the row in the whole table.
    shard_rank: int = 0
    n_shards: int = 1

    def __post_init__(self) -> None:
        if self.n_rows < 1 or self.dim < 1:
            raise ValueError(f"a table has at least one row and one column; found {self.n_rows} × {self.dim}")
        if self.dtype not in NAMES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, NAMES))}; found {self.dtype!r}")
        if self.storage not in STORAGES:
            raise ValueError(f"storage must be one of {', '.join(STORAGES)}; found {self.storage!r}")
        if (self.storage == "disk") != (self.path is not None):
            raise ValueError(
                f'storage="disk" needs a path, path="items.bed" for example, and other storages take none; '
                f"found storage={self.storage!r}, path={self.path}"
            )
        if self.path is not None and self.path.suffix == ".journal":
            raise ValueError(f".journal is the ending of files of flatbed; found path={self.path}")
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise FlatbedError(f"there is no folder {self.path.absolute().parent}: make it first")
        if self.cache_rows is not None and self.cache_bytes is not None:
            raise ValueError(
                f"give cache_rows or cache_bytes, not both; found {self.cache_rows} and {self.cache_bytes}"
            )
        for name, value in (("cache_rows", self.cache_rows), ("cache_bytes", self.cache_bytes)):
            if value is not None and as_integer(name, value) < 0:
                raise ValueError(f"{name} is 0 (no cache) or more; found {value}")
            if value and self.storage == "device":
                raise ValueError(f'{name}={value}: a table with storage="device" needs no cache')
        if self.cache_policy not in POLICIES:
            raise ValueError(
                f"cache_policy must be one of {', '.join(POLICIES)}; found {self.cache_policy!r}"
            )

    @property
    def has_cache(self) -> bool:
        """False if rows are never cached. (On a CPU, a table has a cache only if its size is given.)"""
        return 0 not in (self.cache_rows, self.cache_bytes) and self.storage != "device"

    @property
    def is_cache_sized(self) -> bool:
        """True if the user gave the size of the cache."""
        return self.cache_rows is not None or self.cache_bytes is not None

    @property
    def local_padding_idx(self) -> int | None:
        """The position of the padding row among the rows that are held here, if it is one of them."""
        if self.padding_idx is None or self.padding_idx % self.n_shards != self.shard_rank:
            return None
        return self.padding_idx // self.n_shards

    @property
    def weight(self) -> Field:
        return Field(WEIGHT, self.dtype, self.dim)

    def describe(self) -> dict[str, Any]:
        """Return what a file stores besides records, as JSON values."""
        shard = {} if self.n_shards == 1 else {"shard": [self.shard_rank, self.n_shards]}
        return {
            "init": initializers.describe(self.init),
            "seed": self.seed,
            "padding_idx": self.padding_idx,
            **shard,
        }


def build_config(
    num_embeddings: Any,
    embedding_dim: Any,
    padding_idx: int | None,
    *,
    path: str | Path | None,
    dtype: torch.dtype | None,
    init: Any,
    seed: int | None,
    **others: Any,
) -> Config:
    """Validate the arguments of an embedding module."""
    if isinstance(num_embeddings, Tensor):
        raise TypeError(
            f"num_embeddings must be an integer; found a tensor of shape {tuple(num_embeddings.shape)}: "
            f"from_pretrained takes weights"
        )
    n_rows = as_integer("num_embeddings", num_embeddings)
    if padding_idx is not None:
        padding_idx = as_integer("padding_idx", padding_idx)
        if not -n_rows <= padding_idx < n_rows:
            raise ValueError(f"padding_idx must be within the {n_rows} rows; found {padding_idx}")
        padding_idx %= n_rows
    given = {"init": init, "seed": seed}
    config = Config(
        n_rows=n_rows,
        dim=as_integer("embedding_dim", embedding_dim),
        dtype=torch.get_default_dtype() if dtype is None else dtype,
        path=None if path is None else as_path(path).absolute(),
        init=initializers.parse("normal" if init is None else init),
        # Drawn as torch draws first weights: repeatable with torch.manual_seed, different for every table.
        seed=int(torch.randint(1 << 62, (), device="cpu")) if seed is None else as_integer("seed", seed),
        padding_idx=padding_idx,
        given=frozenset(name for name, value in given.items() if value is not None) | {"padding_idx"},
        **others,
    )
    initializers.check_fits(config.init, config.dtype)
    return config


def part_of(config: Config, rank: int, n_ranks: int, n_rows: int) -> Config:
    """Return the config of a rank's part of a table, whose file has the rank in its name.

    Raises if the table was made with another number of ranks: its rows would begin again.
    """
    if config.path is None:
        return replace(config, n_rows=n_rows, shard_rank=rank, n_shards=n_ranks)
    name = config.path.name
    path = config.path if n_ranks == 1 else config.path.with_name(f"{name}.{rank}-of-{n_ranks}")
    found = re.compile(rf"{re.escape(name)}(\.\d+-of-(?P<n>\d+))?")
    for file in config.path.parent.glob(f"{glob.escape(name)}*"):
        match = found.fullmatch(file.name)
        if match is not None and int(match["n"] or 1) != n_ranks:
            raise FlatbedError(
                f"{file.name} is the file of a table on {match['n'] or 1} ranks, and there are {n_ranks}: "
                f"start as many, or choose another path. To keep the rows, let as many ranks save them with "
                f"flatbed.save_checkpoint(..., copy_disk_tables=True), and load that"
            )
    return replace(config, n_rows=n_rows, path=path, shard_rank=rank, n_shards=n_ranks)


WITHOUT = {
    "sparse": "gradients of a table have the rows of the batch alone: leave it out",
    "max_norm": "rows are not renormalised at lookup: leave it out; an optimizer's max_norm clips gradients",
    "norm_type": "rows are not renormalised at lookup: leave it out",
    "scale_grad_by_freq": "gradients of repeated ids are summed: leave it out",
    "_weight": "from_pretrained takes weights",
    "_freeze": "use emb.requires_grad_(False)",
}
"""Arguments of torch's embeddings that tables do not have, and the remedy."""


def as_integer(name: str, value: Any) -> int:
    """Return the argument `name` as an int, or raise."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; found {value!r}") from None


def device_of(device: Any) -> torch.device:
    """Return the device with its index, if a table can compute on it; None: torch's default device."""
    try:
        found = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:1"; found {device!r}') from None
    check_device(found)
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'torch sees no CUDA GPU; found device "{found}": use device="cpu"')
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def check_device(device: torch.device) -> None:
    """Raise for devices that no lookup can compute on."""
    if device.type not in ("cpu", "cuda"):
        raise FlatbedError(
            f'a table computes on "cpu" or "cuda"; found device "{device}": build the table with '
            f'device="cpu", or leave its module out of the move'
        )
