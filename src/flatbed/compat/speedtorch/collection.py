"""A collection: all rows of a variable, or of its optimizer state, as records in one of flatbed's tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels import rows as ops
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.rows import RecordLocation
from flatbed.tables.record import NAMES, WEIGHT, Field, Record
from flatbed.tables.storage.base import CPU
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.memory import MemoryStorage, device_storage, host_storage

BLOCK_BYTES = 1 << 26  # of rows that are handled at once, beside the collection
STAND_IN = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}
"""Records know floating point numbers; others are stored as ones of the same size, bit by bit."""

Fill = Callable[[int, int, Mapping[str, Tensor]], None]
"""fill(start, stop, columns) writes the first values of rows start to stop, on the CPU, over zeros."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a collection lives: in the computing device's memory, the host's, or a file."""

    kind: Literal["device", "host", "disk"]
    diskname: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.diskname, str | os.PathLike):
            raise TypeError(
                f"diskname must be the beginning of a file's path; found {type(self.diskname).__name__}"
            )
        folder = Path(f"{self.diskname}0.bed").absolute().parent
        if self.kind == "disk" and not folder.is_dir():
            raise FlatbedError(f"there is no folder {folder} to make a file in: make it first")

    def path(self) -> Path:
        """The first file `DISKNAME0.bed`, `DISKNAME1.bed`, … that does not exist yet."""
        number = 0
        while Path(f"{self.diskname}{number}.bed").exists():
            number += 1
        return Path(f"{self.diskname}{number}.bed")


@dataclass(frozen=True, slots=True)
class Column:
    """One of the tensors of a collection: `count` numbers of each row."""

    name: str
    dtype: torch.dtype
    count: int

    def field(self, at: int) -> Field:
        stored = self.dtype if self.dtype in NAMES else STAND_IN.get(self.dtype.itemsize)
        if stored is None:
            raise TypeError(f"rows of {self.dtype} cannot be stored: use real numbers of at most 8 bytes")
        return Field(WEIGHT if at == 0 else self.name, stored, self.count)  # files want a weight to be first


class Collection:
    """`n_rows` rows of some columns, side by side in one record; moved to and from `device`.

    >>> rows = Collection([Column("weight", torch.float32, 2)], 5, Home("host"), torch.device("cpu"))
    >>> rows.scatter_(torch.tensor([3]), {"weight": torch.ones(1, 2)})
    >>> rows.gather(torch.tensor([3, 0]))["weight"]
    tensor([[1., 1.],
            [0., 0.]])
    """

    def __init__(
        self,
        columns: Sequence[Column],
        n_rows: int,
        home: Home,
        device: torch.device,
        *,
        fill: Fill | None = None,
    ) -> None:
        self.columns = {column.name: column for column in columns}
        self.n_rows, self.home, self.device = n_rows, home, device
        self.record = Record(tuple(column.field(at) for at, column in enumerate(columns)))
        self.path = home.path() if home.kind == "disk" else None
        self.tier = self._make(fill)

    def _make(self, fill: Fill | None) -> MemoryStorage | DiskStorage:
        def records_(start: int, stop: int, records: Tensor) -> None:
            if fill is not None:
                fill(start, stop, self._split(records))

        if self.path is not None:
            if any(field.dtype not in NAMES for field in self.record.fields):
                raise TypeError("files hold numbers of 2, 4 or 8 bytes: use a wider datatype")
            return DiskStorage.create(self.path, self.record, self.n_rows, fill=records_)
        tier = (host_storage if self.home.kind == "host" else device_storage)(
            self.record, self.n_rows, self.device
        )
        if fill is not None:
            assert tier.memory is not None
            for start, stop in self.blocks():
                block = tier.memory[start:stop]
                records = block if tier.device == CPU else torch.zeros_like(block, device=CPU)
                records_(start, stop, records)
                if records is not block:
                    block.copy_(records)
        return tier

    def _split(self, records: Tensor) -> dict[str, Tensor]:
        """The columns of records, without a copy."""
        return {
            column.name: self.record.view(records, field.name).view(column.dtype)
            for column, field in zip(self.columns.values(), self.record.fields, strict=True)
        }

    # ---- rows of a batch

    def gather(self, rows: Tensor) -> dict[str, Tensor]:
        """The columns of rows, which are on the computing device as they are; zeros for the row -1."""
        place = self._place()
        if place is not None:
            return self._split(ops.gather(place, rows, self.record.nbytes))
        wanted = rows.to(CPU)
        present = (wanted >= 0).nonzero().flatten()
        records = torch.zeros((len(rows), self.record.nbytes), dtype=torch.uint8, device=CPU)
        records.index_copy_(0, present, self.tier.gather(wanted[present]))
        if self.device.type == "cuda":
            records = records.pin_memory().to(self.device, non_blocking=True)
        return self._split(records.to(self.device))

    def scatter_(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Replace rows, which are distinct; those of the row -1 go nowhere."""
        records = torch.zeros((len(rows), self.record.nbytes), dtype=torch.uint8, device=self.device)
        for name, column in self._split(records).items():
            column.copy_(values[name])
        place = self._place()
        if place is not None:
            ops.scatter_(place, rows, records)
            return
        wanted, records = rows.to(CPU), records.to(CPU)
        present = wanted >= 0
        self.tier.scatter_(wanted[present], records[present])

    def _place(self) -> RecordLocation | None:
        """Where operations of the computing device find all records, if they can."""
        tier = self.tier
        if isinstance(tier, DiskStorage):
            return None
        tier.check()
        if tier.device == self.device or (tier.reach == self.device and use_triton(self.device)):
            return RecordLocation(tier.memory)
        return None

    # ---- all of them

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are handled at once."""
        step = max(1, BLOCK_BYTES // self.record.nbytes)
        for start in range(0, self.n_rows, step):
            yield start, min(start + step, self.n_rows)

    def whole(self, name: str) -> Tensor | None:
        """A column of all rows where it lies, (n_rows, count); None for a file."""
        self.settle()
        if isinstance(self.tier, DiskStorage):
            return None
        self.tier.check()
        assert self.tier.memory is not None
        return self._split(self.tier.memory)[name]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of a column of consecutive rows, on the CPU."""
        whole = self.whole(name)
        if whole is not None:
            return whole[start:stop].to(CPU, copy=True).contiguous()
        return self._split(self.tier.read(start, stop))[name].contiguous()

    def write_(self, name: str, start: int, values: Tensor) -> None:
        """Replace a column of consecutive rows."""
        whole = self.whole(name)
        if whole is not None:
            whole[start : start + len(values)].copy_(values)
            return
        records = self.tier.read(start, start + len(values))
        self._split(records)[name].copy_(values)
        self.tier.write_(start, records)

    def copied(self, name: str) -> Tensor:
        """A copy of a column of all rows, on the CPU: (n_rows, count)."""
        column = self.columns[name]
        out = torch.empty((self.n_rows, column.count), dtype=column.dtype, device=CPU)
        for start, stop in self.blocks():
            out[start:stop] = self.read(name, start, stop)
        return out

    # ---- what becomes of it

    def settle(self) -> None:
        """Let kernels end that write to memory which the host is about to look at."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def move(self, device: torch.device) -> None:
        """Another device computes; rows follow, where it could not reach them."""
        if device == self.device:
            return
        self.settle()
        old, self.device = self.tier, device
        if isinstance(old, DiskStorage) or (self.home.kind == "host" and device.type == "cpu"):
            return
        new = self._make(None)
        for start, stop in self.blocks():
            new.write_(start, old.read(start, stop))
        self.tier = new
        old.close()

    def checkpoint(self) -> None:
        """Let the file hold all rows as they are now, all or nothing."""
        if not isinstance(self.tier, DiskStorage):
            raise FlatbedError("this collection is in memory: save it with saveCupy or saveTorch")
        self.tier.checkpoint()

    def close(self) -> None:
        """Give memory or the file back; rows of a file that changed since its last checkpoint are lost."""
        self.settle()
        self.tier.close()

    def discard(self) -> None:
        """Give it back with its file."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def as_dtype(given: object, *, floating: bool = False) -> torch.dtype:
    """A datatype by torch's, numpy's or its own name."""
    try:
        if isinstance(given, torch.dtype):
            found = given
        elif given == "bfloat16":
            found = torch.bfloat16
        else:
            found = getattr(torch, np.dtype(given).name)  # type: ignore[call-overload]
    except (TypeError, AttributeError):
        raise TypeError(f"datatype {given!r} is not known: use one such as 'float32'") from None
    if floating and found not in NAMES:
        raise TypeError(f"a variable is trained in {', '.join(NAMES.values())}; found datatype {given!r}")
    return found


def computing_device() -> torch.device:
    """Where data is wanted that belongs to no variable: the current GPU, if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def natural(name: str, value: object) -> int:
    """A whole number from 1 on."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer; found {value!r}")
    number = int(value.__index__())
    if number < 1:
        raise ValueError(f"{name} must be at least 1; found {number}")
    return number
