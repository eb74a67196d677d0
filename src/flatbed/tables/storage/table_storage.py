"""A table's rows: what they are made of, where they live, and how they move from one home to another."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.progress import progress
from flatbed.tables import initializers as initial
from flatbed.tables.cache import Cache, DeviceCache, HostCache, build, slots_for
from flatbed.tables.config import Config, check_device, fill_state, fill_weights
from flatbed.tables.record import Field, Record
from flatbed.tables.storage.base import Storage
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.memory import CPU, MemoryStorage, device_tier, host_tier

CHUNK_BYTES = 1 << 26  # of rows in memory beside the table
IN_PLACE_BYTES = 1 << 30  # of rows that are filled where they are, between two signs of progress


class TableStorage:
    """The rows of one table. Memory is laid out at the first use, when it is known what a row holds."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.record = Record((config.weight,))
        self.scalars: dict[str, float | Tensor] = {}  # optimizer state that is one number per table
        """The table's numbers of optimizer state as they were saved."""
        self.claimed = True
        """Whether the state is that of an optimizer of this process. If it came from a file or was copied,
        the first optimizer that fits may go on with it."""
        self.version = 0
        """Counts layouts: views of an earlier one are stale."""
        self.writes = 0
        """Counts whatever may have changed rows."""
        self._tier: Storage | None = None
        self.cache: Cache | None = None
        self._fits = 0  # ids of the largest batch that the cache was made for
        """Hot records on the computing device, once a batch has come through: `cache_for`."""
        self._retired: list[Any] = []  # CUDA graphs still use their memory
        self._begins_anew = False  # the next layout keeps weights alone
        self._laying_out = threading.RLock()
        self._process = os.getpid()
        if config.path is not None and config.path.exists():
            self._open()

    # ---- layout

    @property
    def tier(self) -> Storage:
        """The home of all records, laid out if they are not yet. A cache may have newer ones: `settle`."""
        self.check_process()
        tier = self._tier
        if tier is None or self.waiting or not self._in_reach(tier):
            with self._laying_out:  # threads may come at the same time
                tier = self._ready()
        return tier

    def _ready(self) -> Storage:
        tier = self._tier
        if tier is None:
            tier = self._make(self.record)
            self._fill(tier, 0, self.config.n_rows)  # an interruption leaves nothing that looks complete
            self._tier = tier
            self._begins_anew = False
            self.version += 1
        elif self.waiting or not self._in_reach(tier):
            self.lay_out(self.record)
        assert self._tier is not None
        return self._tier

    @property
    def laid_out(self) -> bool:
        """Whether rows are in memory or in a file."""
        return self._tier is not None

    @property
    def in_memory(self) -> bool:
        return isinstance(self.tier, MemoryStorage)

    @property
    def waiting(self) -> bool:
        """Whether rows do not yet hold what they shall: state begins with the next layout."""
        held = None if self._tier is None else self._tier.record
        return held is not self.record and held != self.record

    @property
    def edition(self) -> tuple[int, int]:
        """Rows that were read in the same edition are as they were."""
        return self.version, self.writes

    def check_process(self) -> None:
        """Forked workers of a DataLoader share this object, but not the memory."""
        if os.getpid() != self._process:
            raise FlatbedError(
                "a table cannot be used in a process forked from the one that made it (a DataLoader worker, "
                "for example): look rows up in the training process"
            )

    def _in_reach(self, tier: Storage) -> bool:
        if not isinstance(tier, MemoryStorage):
            return True
        if self.config.storage == "device":
            return tier.device == self.device
        return self.device.type == "cpu" or tier.made_for == self.device

    def _make(self, record: Record) -> Storage:
        if self.config.storage == "disk":
            assert self.config.path is not None
            meta = self._meta()
            return DiskStorage.create(
                self.config.path, record, self.config.n_rows, fill=self._filler(record), meta=meta
            )
        make = host_tier if self.config.storage == "host" else device_tier
        with torch.inference_mode(False):  # memory of inference mode could not be trained later
            return make(record, self.config.n_rows, self.device)

    def _filler(self, record: Record) -> Any:
        def fill(start: int, stop: int, records: Tensor) -> None:
            fill_weights(record, records, start, self.config)
            fill_state(record, records)

        return fill

    def _fill(self, tier: Storage, start: int, stop: int) -> None:
        """First values of rows in memory, which holds zeros."""
        if not isinstance(tier, MemoryStorage):
            return
        assert tier.memory is not None
        blank = isinstance(self.config.init, initial.Zeros) and not any(f.initial for f in tier.record.state)
        if blank:
            return
        with progress("initialising the table", stop - start, "rows") as advance:
            in_place = tier.device.type == "cpu"
            at_once = IN_PLACE_BYTES if in_place else CHUNK_BYTES
            for first, last in self.blocks(start, stop, tier.record.nbytes, at_once=at_once):
                block = tier.memory[first:last]
                records = block if in_place else torch.zeros_like(block, device="cpu")
                self._filler(tier.record)(first, last, records)
                if not in_place:
                    block.copy_(records)
                advance(last - first)

    def blocks(
        self, start: int, stop: int, row_bytes: int, *, at_once: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are handled at once."""
        step = max(1, (at_once or CHUNK_BYTES) // row_bytes)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def want(self, state: Iterable[Field]) -> None:
        """Rows shall have these fields of state, with their first values. Laid out at the next use."""
        record = Record((self.config.weight, *state))
        self.version += 1
        if self._tier is not None and self._tier.record == record:
            self._reset_state(self._tier)
            self._begins_anew = False
        else:
            self._begins_anew = True
        self.record = record
        self.claimed = True
        self.scalars = {}

    def _reset_state(self, tier: Storage) -> None:
        if not tier.record.state:
            return
        self.settle(changing=True)
        for first, last in self.blocks(0, self.config.n_rows, tier.record.nbytes):
            records = tier.read(first, last).cpu()
            fill_state(tier.record, records)
            tier.write_(first, records)

    def lay_out(self, record: Record) -> None:
        """Move all rows into records of this kind, within reach of the device."""
        old = self._tier
        if old is None:
            self.record = record
            self.version += 1
            return
        self.forget_cache()
        self.settle()
        kept = [f.name for f in record.fields if f.name in old.record]
        kept = kept[:1] if self._begins_anew else kept

        def carry(start: int, stop: int, records: Tensor) -> None:
            fill_state(record, records)
            before = old.read(start, stop).cpu()
            for name in kept:
                record.view(records, name).copy_(old.record.view(before, name))

        if isinstance(old, DiskStorage):
            self._tier = old.rebuilt(record, fill=carry, meta=self._meta())
        else:
            self._tier = self._moved(old, record, carry)
        self.record = record
        self.version += 1
        self._begins_anew = False

    def _moved(self, old: Storage, record: Record, carry: Any) -> Storage:
        """Other memory with what was in the old one."""
        new = self._make(record)
        with progress("moving the table", self.config.n_rows, "rows") as advance:
            for first, last in self.blocks(0, self.config.n_rows, record.nbytes):
                records = torch.zeros((last - first, record.nbytes), dtype=torch.uint8, device=CPU)
                carry(first, last, records)
                new.write_(first, records)
                advance(last - first)
        _let_go(old)
        return new

    def resize(self, n_rows: int) -> None:
        """More rows; the new ones begin as they would have from the start."""
        if n_rows < self.config.n_rows:
            raise ValueError(f"a table can only grow; found {n_rows} rows asked of {self.config.n_rows}")
        if n_rows == self.config.n_rows:
            return
        with self._laying_out:  # no thread may make a cache for what is about to go
            old = None if self._tier is None else self.tier  # laid out anew now, if that was due
            before, self.config = self.config, replace(self.config, n_rows=n_rows)
            try:
                if old is not None:
                    self._grow(old, before.n_rows)
            except BaseException:
                self.config = before
                raise
            self.version += 1

    def _grow(self, old: Storage, n_before: int) -> None:
        self.forget_cache()
        if isinstance(old, DiskStorage):
            old.resize(self.config.n_rows, fill=self._filler(old.record), meta=self._meta())
            return
        self.settle()
        new = self._make(old.record)
        self._fill(new, n_before, self.config.n_rows)
        for first, last in self.blocks(0, n_before, old.record.nbytes):
            new.write_(first, old.read(first, last))
        _let_go(old)
        self._tier = new

    def move(self, device: torch.device) -> None:
        """Another device computes; the rows follow at the next use, if they must."""
        check_device(device)
        if device != self.device:
            with self._laying_out:
                self.forget_cache()
                self.settle()
                self.device = device

    # ---- files

    def _open(self) -> None:
        assert self.config.path is not None
        tier = DiskStorage.open(self.config.path)
        weight, found = self.config.weight, tier.record.weight
        if (tier.n_rows, found.count, found.dtype) != (self.config.n_rows, weight.count, weight.dtype):
            tier.close()
            raise FlatbedError(
                f"{self.config.path} holds a table of {tier.n_rows} × {found.count} in {found.dtype}; asked "
                f"for {self.config.n_rows} × {weight.count} in {weight.dtype}. Ask for what it holds "
                f"(flatbed.open_table reads it from the file), or choose another path"
            )
        about = tier.meta.get("table", {})
        if "init" in about:  # new rows are to come from what the old ones came from
            init, seed = initial.described(about["init"]), int(about["seed"])
            self.config = replace(self.config, init=init, seed=seed)
        self._tier, self.record = tier, tier.record
        self.scalars = dict(tier.meta.get("scalars", {}))
        self.claimed = not tier.record.state

    def _meta(self) -> dict[str, Any]:
        scalars = {name: float(value) for name, value in self.scalars.items()}
        return {"table": self.config.describe(), "scalars": scalars}

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Continue from these scalars: in place, since kernels and `optimizer.state` hold the tensors."""
        held, self.scalars = self.scalars, dict(scalars)
        for name, value in held.items():
            if name in scalars and isinstance(value, Tensor):
                self.scalars[name] = value.fill_(scalars[name])

    @property
    def disk(self) -> DiskStorage:
        """The file's tier."""
        tier = self.tier
        if not isinstance(tier, DiskStorage):
            raise FlatbedError(
                f'this table is not on disk (storage="{self.config.storage}"): save it with table.save(path)'
            )
        return tier

    def checkpoint(self) -> None:
        """Make rows and numbers of state durable, all or nothing."""
        self.settle()
        self.disk.checkpoint(self._meta())

    @property
    def n_unsaved(self) -> int:
        """How many rows of a file have changed since its last checkpoint."""
        waiting = self.cache.n_waiting if isinstance(self.cache, HostCache) else 0
        return self._tier.dirty_rows + waiting if isinstance(self._tier, DiskStorage) else 0

    def close(self) -> None:
        """Give memory and files back. Rows of a file that changed since its last checkpoint are dropped."""
        if self._tier is not None and os.getpid() == self._process:
            with self._laying_out:  # a thread may be fetching rows ahead of time
                if isinstance(self._tier, DiskStorage):
                    self.abandon_cache()
                else:
                    self.forget_cache()
                self.settle()
                _let_go(self._tier)
                self.version += 1

    # ---- the cache in front of them

    def settle(self, *, changing: bool = False) -> None:
        """Let all rows be at home, since the host is about to look, or to change them."""
        if self.cache is not None:
            if changing:
                self.cache.drop()
            else:
                self.cache.flush()
        if self.device.type == "cuda" and self._tier is not None:
            torch.cuda.synchronize(self.device)

    def cache_for(self, n_ids: int) -> Cache | None:
        """The cache that a batch of so many ids comes through, if the table has one."""
        _ = self.tier  # rows may be laid out anew, and then there is no cache
        cache = self.cache
        if cache is not None and self._need_not_grow(n_ids):
            return cache
        if self.config.cache_rows == 0 or self.config.storage == "device":
            return None
        return self._fit_cache(n_ids)

    def has_cache_for(self, n_ids: int) -> bool:
        """Whether a cache on the GPU is there that so many ids come through: nothing is to be made first."""
        return isinstance(self.cache, DeviceCache) and self._need_not_grow(n_ids) and not self.waiting

    def _need_not_grow(self, n_ids: int) -> bool:
        """Whether a cache that is there will do for so many."""
        return n_ids <= self._fits or self.config.sized

    def _fit_cache(self, n_ids: int) -> Cache | None:
        with self._laying_out:
            tier, cache = self.tier, self.cache
            if _capturing(self.device) or (isinstance(cache, DeviceCache) and cache.graphs):
                return cache  # nothing can be made now, or graphs have this one
            n_slots = slots_for(self.config, tier.record, self.device, n_ids)
            n_now = 0 if cache is None else cache.n_slots
            if 2 * n_ids > n_now and n_slots > n_now:
                self.forget_cache()
                self.cache = build(tier, n_slots, policy=self.config.cache_policy, device=self.device)
                if self.device.type == "cuda":  # other streams are to find it made
                    torch.cuda.synchronize(self.device)
            self._fits = n_ids if self.cache is not None else 0
            return self.cache

    def forget_cache(self) -> None:
        """Bring all rows home; the next batch finds a new cache. If that fails, this one stays."""
        cache = self.cache
        if cache is None:
            return
        if isinstance(cache, HostCache):
            cache.retire()
        else:
            cache.drop()
        self.cache = None
        if isinstance(cache, DeviceCache) and cache.graphs:
            self._retired += [cache, self._tier]
            warnings.warn(
                "a table that CUDA graphs were captured with has got another place or another cache: capture "
                "them again, since they would go on with what it was",
                stacklevel=3,
            )

    def change_cache(self, config: Config) -> None:
        """Another cache from now on."""
        with self._laying_out:
            self.forget_cache()
            self.config = config

    def abandon_cache(self) -> None:
        """Drop what is in the cache of a table on disk: its rows are to be those of a checkpoint."""
        cache, self.cache = self.cache, None
        if isinstance(cache, HostCache):
            cache.abandon()

    # ---- consecutive rows

    def read_field(self, name: str, start: int, stop: int) -> Tensor:
        """A field of consecutive rows, in host memory."""
        tier = self.tier
        self.settle()
        if isinstance(tier, MemoryStorage):
            tier.check()
            assert tier.memory is not None
            return tier.record.view(tier.memory[start:stop], name).to(CPU, copy=True).contiguous()
        return tier.record.view(tier.read(start, stop), name).contiguous()

    def write_field(self, name: str, start: int, values: Tensor) -> None:
        """Replace a field of consecutive rows."""
        self.writes += 1
        tier = self.tier
        self.settle(changing=True)
        stop = start + len(values)
        if isinstance(tier, MemoryStorage):
            tier.check()
            assert tier.memory is not None
            tier.record.view(tier.memory[start:stop], name).copy_(values)
            return
        records = tier.read(start, stop)
        tier.record.view(records, name).copy_(values)
        tier.write_(start, records)

    def field_blocks(self, name: str) -> Iterator[tuple[int, int]]:
        """Ranges of rows for reading or writing a field bit by bit."""
        return self.blocks(0, self.config.n_rows, max(self.record[name].nbytes, self.record.nbytes))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _let_go(tier: Storage) -> None:
    """Files are closed; memory is freed as soon as no view of it is left."""
    if isinstance(tier, MemoryStorage):
        tier.release()
    else:
        tier.close()
