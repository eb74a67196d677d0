"""Storage of one table: unallocated → allocated → closed, and the cache in front of it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from flatbed.cuda.streams import OrderedLock, is_capturing, synchronize
from flatbed.errors import FlatbedError
from flatbed.kernels import RecordLocation
from flatbed.tables.cache.base import Cache, LookupBatch
from flatbed.tables.cache.host_copy import HostCopyCache
from flatbed.tables.config import Config, check_device
from flatbed.tables.factory import (
    DEFAULT_BATCHES,
    build_cache,
    create_storage,
    location_of,
    open_storage,
    slots_for,
)
from flatbed.tables.record import Field, Record
from flatbed.tables.storage.base import (
    CPU,
    Fill,
    Storage,
    begins_at_zero,
    fill_state,
    in_turn,
    initial_rows,
    kept_rows,
    reported,
    row_blocks,
)
from flatbed.tables.storage.disk import DiskStorage, ReadOnlyStorage
from flatbed.tables.storage.disk.draft import Draft
from flatbed.tables.storage.disk.journal import token_in


class RowStore:
    """Records of one table, and the transitions between its states.

    unallocated  `ensure_layout` allocates at the first use, when the fields of a record are known
    allocated    `ensure_layout` also moves rows if their fields or the computing device changed since;
                 `resize` and `begin_replace` replace the storage
    closed       `close` has released memory and files; every use raises

    `record` says what rows shall hold. If the allocated rows hold something else, `relayout_pending` is True.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.record = Record((config.weight,))
        self.scalars: dict[str, Any] = {}  # optimizer state that is one number per table
        self.optimizer: str | None = None  # class of the optimizer that the state is of, if known
        # False for state that was loaded or copied: the first optimizer with the same fields continues it.
        self.state_owned = True
        self.version = 0  # changes of fields, size, device or memory: views of an earlier version are stale
        self._laid_out = -1  # the version that `ensure_layout` has seen to
        self.writes = 0  # operations that may have changed rows, but for replays of CUDA graphs
        self.has_steps_in_graphs = False  # True once a CUDA graph has captured a step
        self.cache: Cache | None = None  # hot records on the computing device; made by `ensure_cache`
        self._cache_serves = 0  # ids that the cache was found large enough for, or cannot be larger
        self._captured: list[Any] = []  # memory that CUDA graphs still use
        self._storage: Storage | None = None
        self._is_closed = False
        self._is_half_loaded = False
        self._is_unloaded = False  # True if a file was opened, and no checkpoint was loaded or saved since
        self._loaded_from: Path | None = None  # folder of the last load or save: it may have been renamed
        self._lock = OrderedLock("layout")
        self._process = os.getpid()
        if config.path is not None and config.path.exists():
            storage, self.config = open_storage(config)
            self._storage, self.record = storage, storage.record
            self.adopt_state(storage.meta.get("scalars", {}))
            self.optimizer = storage.meta.get("optimizer")
            self._is_unloaded = True

    # ---- states

    @property
    def phase(self) -> Literal["unallocated", "allocated", "closed"]:
        """The state that this table's storage is in."""
        if self._is_closed:
            return "closed"
        return "unallocated" if self._storage is None else "allocated"

    @property
    def is_allocated(self) -> bool:
        """True if rows are in memory or in a file."""
        return self._storage is not None

    @property
    def in_memory(self) -> bool:
        """True if rows are in memory, once they are allocated."""
        return self.config.storage != "disk"

    @property
    def relayout_pending(self) -> bool:
        """True if allocated rows lack fields of `record`, or have others: `ensure_layout` moves them."""
        return self._storage is not None and self._storage.record != self.record

    @property
    def generation(self) -> tuple[int, int]:
        """Changes before rows do: rows read at the same generation are equal."""
        return self.version, self.writes

    @property
    def _is_forked(self) -> bool:
        """True in a process forked from the one that made the table, such as a DataLoader worker."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise in a forked process, which does not share the memory."""
        if self._is_forked:
            raise FlatbedError(
                "a table cannot be used in a process forked from the one that made it (a DataLoader worker, "
                "for example): look rows up in the training process"
            )

    def ensure_layout(self) -> Storage:
        """Allocate or move rows if needed, and return their storage. A cache may have newer rows: `flush`."""
        storage = self._storage
        if storage is None or self._laid_out != self.version or self._is_forked:
            self.check_process()
            if self._is_half_loaded:
                raise FlatbedError(
                    "flatbed.load_checkpoint failed or was interrupted while it replaced rows, and weights, "
                    "optimizers and tables may be of different checkpoints: load one again"
                )
            with self._lock:
                storage = self._allocate_or_move()
                self._laid_out = self.version
        return storage

    def _allocate_or_move(self) -> Storage:
        if self.phase == "closed":
            name = self.config.path or "this table"
            raise FlatbedError(f"{name} is closed: make the table again, or load its file, to use it")
        if self._storage is None:
            config, record = self.config, self.record
            zero, meta = begins_at_zero(config, record), self._meta({})
            with reported("initialising the table", config.n_rows, initial_rows(config, record)) as fill:
                self._use_storage(
                    create_storage(config, record, self.device, fill=fill, zero=zero, meta=meta)
                )
        elif self.relayout_pending or not self._storage.serves(self.device):
            self.relayout(self.record)
        assert self._storage is not None
        return self._storage

    def relayout(self, record: Record) -> None:
        """Move all rows into records with these fields, on memory that the device can use."""
        self.drop_cache()
        self.flush()
        assert self._storage is not None
        # State that was to be replaced begins again.
        kept = kept_rows(self._storage, record, with_state=not self.relayout_pending)
        with reported("moving the table", self.config.n_rows, kept) as fill:
            self._use_storage(self._storage.rebuilt(record, fill=fill, device=self.device, meta=self._meta()))

    # ---- transitions

    def set_state_fields(self, state: Iterable[Field]) -> None:
        """Give rows these fields of optimizer state, at their first values, from the next use on."""
        self.record = record = Record((self.config.weight, *state))
        if self._storage is not None and not self.relayout_pending and record.state:
            self.overwrite(lambda first, last, records: fill_state(record, records))
        self.version += 1
        self.state_owned = True
        self.scalars = {}

    def adopt_state(self, scalars: Mapping[str, float]) -> None:
        """Keep loaded or copied state for the first optimizer that has the same fields."""
        self.scalars = dict(scalars)
        self.state_owned = not self.record.state

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Continue from these scalars, in place: kernels and `optimizer.state` hold the tensors."""
        held, self.scalars = self.scalars, dict(scalars)
        for name, value in held.items():
            if name in scalars and isinstance(value, Tensor):
                self.scalars[name] = value.fill_(scalars[name])

    def begin_replace(
        self,
        record: Record,
        fill: Fill,
        *,
        fields: Iterable[str],
        scalars: Mapping[str, float],
        doing: str,
        undo: ExitStack,
    ) -> Callable[[], None]:
        """Begin to replace all rows, and return the function that completes it; until then nothing changes.

        `fill` writes `fields`; rows keep what they have of others. New files and new memory are complete when
        this returns, and rows of a disk table are durable after the function. `undo` removes them, unless the
        function was called.
        """
        is_complete = {field.name for field in record.fields} <= set(fields)
        n_rows, meta = self.config.n_rows, self._meta(scalars)
        with self._lock:
            if self.phase == "unallocated":
                first = [] if is_complete else [initial_rows(self.config, record)]
                with reported(doing, n_rows, in_turn(*first, fill)) as filling:
                    new = create_storage(self.config, record, self.device, fill=filling, meta=meta)
                undo.callback(self._drop_unless_used, new)
                return lambda: self._use_storage(new)
            if self.in_memory:
                self._allocate_or_move()
                return partial(self._overwrite_as, record, fill, doing)
            self._check_on_disk()
            if self._is_half_loaded and self.is_allocated:  # perhaps its file was replaced
                self._storage = self._reopened()
            storage = cast(DiskStorage, self._allocate_or_move())
            self.drop_cache()
            kept = [] if is_complete else [kept_rows(storage, record, with_state=True)]
            with reported(doing, n_rows, in_turn(*kept, fill)) as filling:
                draft = storage.draft(record, fill=filling, meta=meta)
            undo.callback(draft.discard)
            return partial(self._use_draft, storage, draft)

    def _overwrite_as(self, record: Record, fill: Fill, doing: str) -> None:
        """Change all rows in memory, and the fields that they have."""
        with self._lock:
            if record != self.record:
                self.relayout(record)
            with reported(doing, self.config.n_rows, fill) as filling:
                self.overwrite(filling)

    def _use_draft(self, storage: DiskStorage, draft: Draft) -> None:
        """Replace the file of a disk table."""
        with self._lock:
            self.abandon_cache()  # a thread of a prefetcher may have made one since `drop_cache`
            self.writes += 1
            self._use_storage(storage.replaced_by(draft))

    def mark_half_loaded(self) -> None:
        """Let every use raise except for loads."""
        self._is_half_loaded, self._laid_out = True, -1

    def mark_loaded(self, folder: Path) -> None:
        """After a load or a save: let uses raise no more, and saves to the folder of the checkpoint."""
        self._is_half_loaded, self._is_unloaded, self._laid_out = False, False, -1
        self._loaded_from = folder

    def _use_storage(self, storage: Storage) -> None:
        self.version += 1
        self._storage, self.record = storage, storage.record

    def _drop_unless_used(self, new: Storage) -> None:
        if self._storage is not new:
            new.close()
            if self.config.path is not None:
                self.config.path.unlink()

    def overwrite(self, fill: Fill) -> None:
        """Change all rows, block by block: a second copy might not fit into memory."""
        with self._lock:
            storage = self._allocate_or_move()
            with self._cache_lock():  # no other thread may read a row before it is replaced
                self.flush(drop=True)
                self.writes += 1
                for first, last in row_blocks(0, self.config.n_rows, self.record.nbytes):
                    records = storage.read(first, last).cpu()
                    fill(first, last, records)
                    storage.write_(first, records)

    def resize(self, n_rows: int) -> None:
        """Add rows; they begin as they would have from the start."""
        if n_rows < self.config.n_rows:
            raise ValueError(f"a table can only grow; found {n_rows} rows asked of {self.config.n_rows}")
        if n_rows == self.config.n_rows:
            return
        with self._lock:  # no other thread may make a cache meanwhile
            storage = None if self._storage is None else self.ensure_layout()
            before, self.config = self.config, replace(self.config, n_rows=n_rows)
            try:
                if storage is not None:
                    self.drop_cache()
                    self.flush()
                    fill, meta = initial_rows(self.config, storage.record), self._meta()
                    self._storage = storage.resize(n_rows, fill=fill, meta=meta)
            except BaseException:
                if storage is None or storage.n_rows < n_rows:  # otherwise a file has the new rows already
                    self.config = before
                raise
            finally:
                self.version += 1

    def move(self, device: torch.device) -> None:
        """Compute on another device. `ensure_layout` moves the rows at the next use, where needed."""
        check_device(device)
        if device != self.device:
            with self._lock:
                self.drop_cache()
                self.flush()
                self.device = device
                self._laid_out = -1

    def close(self) -> None:
        """Release memory and files. Rows of a file that changed since its last checkpoint are dropped."""
        if self._is_forked:
            return
        with self._lock:  # another thread may be prefetching rows
            if self.in_memory:
                self.drop_cache(closing=True)
            else:
                self.abandon_cache()
            if self._storage is not None:
                self.flush()
                self._storage.close()
            self._storage, self._is_closed = None, True
            self.version += 1

    # ---- checkpoints of a disk table

    def _meta(self, scalars: Mapping[str, float] | None = None, **others: Any) -> dict[str, Any]:
        held = self.scalars if scalars is None else scalars
        numbers = {name: float(value) for name, value in held.items()}
        about = self.config.describe()
        return {"table": about, "scalars": numbers, "optimizer": self.optimizer, **others}

    def disk_storage(self) -> DiskStorage:
        """Return the storage of a disk table, laid out if needed."""
        self._check_on_disk()
        return cast(DiskStorage, self.ensure_layout())

    def _check_on_disk(self) -> None:
        """Raise unless this is a disk table that may change."""
        if self.in_memory:
            raise FlatbedError(
                f'this table is not on disk (storage="{self.config.storage}"): save it with table.save(path)'
            )
        if self.config.read_only:
            raise FlatbedError(
                f"{self.config.path} was loaded with read_only=True: load it without, to change or save it"
            )

    @property
    def _file(self) -> DiskStorage | None:
        """The storage of a disk table that may change; None without one."""
        is_open = not (self._storage is None or self.in_memory or self.config.read_only or self._is_forked)
        return cast(DiskStorage, self._storage) if is_open else None

    @property
    def unsaved_rows(self) -> int:
        """Rows of a file that changed since its last checkpoint."""
        file = self._file
        if file is None:
            return 0
        cache = cast("HostCopyCache | None", self.cache)
        return file.unsaved_rows if cache is None else cache.count_unsaved()

    def settle(self) -> None:
        """Complete or drop an interrupted checkpoint of `flatbed.save_checkpoint`."""
        if self._file is not None:
            self._file.settle()

    def has_unsaved_changes(self) -> bool:
        """Return True if rows of a file changed since its last checkpoint, lost their state, or made steps.

        An interrupted checkpoint of `flatbed.save_checkpoint` is completed or dropped first.
        """
        file = self._file
        if file is None:
            return False
        self.settle()
        if self.unsaved_rows > 0 or (self.relayout_pending and bool(file.record.state)):
            return True
        saved = file.meta.get("scalars", {})
        return any(float(value) != saved.get(name, 0.0) for name, value in self.scalars.items())

    def warn_of_loss(self, after: str, *, name: str = "", folder: Path | None = None) -> None:
        """Warn if a disk table holds the rows of a folder's valid checkpoint, and is about to change.

        `after` says what changes it, and what to do; a save to that `folder` itself replaces the checkpoint.
        """
        own = self.folder()
        if own is not None and (folder is None or os.path.realpath(own) != os.path.realpath(folder)):
            warnings.warn(
                f"{self.config.path}{f' (table {name})' if name else ''} has the rows of the checkpoint "
                f"in {own}, which cannot be loaded any more after {after}",
                stacklevel=3,
            )

    def folder(self) -> Path | None:
        """Return the folder whose valid checkpoint a disk table has the rows of; None if there is none."""
        if self._file is None or not {"decision", "token"} <= self._file.meta.keys():
            return None
        decision = Path(os.path.normpath(self._file.path.parent / str(self._file.meta["decision"])))
        renamed = [] if self._loaded_from is None else [self._loaded_from / decision.name]
        for candidate in (decision, *renamed):
            with suppress(FlatbedError, OSError):
                if token_in(candidate) == self._file.meta["token"]:
                    return candidate.parent
        return None

    def check_loaded(self, name: str, folder: Path) -> None:
        """Raise if a save would replace a checkpoint of which only the rows of this table go on."""
        own = self.folder() if self._is_unloaded else None
        if own is not None and os.path.realpath(own) == os.path.realpath(folder):
            raise FlatbedError(
                f"{self.config.path} (table {name}) was opened with the rows of the checkpoint in {folder}, "
                "and the rest of that checkpoint was not loaded: this save would replace it. Call "
                "flatbed.load_checkpoint before the training; or, if only the rows are to be kept, save to "
                "another folder, or delete this one"
            )

    def checkpoint(self) -> None:
        """Make rows and state of a disk table durable, all or nothing."""
        storage = self.disk_storage()
        self.flush()
        storage.checkpoint(self._meta())

    def prepare_checkpoint(self, *, decision: Path, token: str) -> None:
        """Prepare a checkpoint that holds once the file `decision` has the token."""
        storage = self.disk_storage()
        storage.release()
        self.flush()
        # Relative, so that copies of table and folder name each other.
        relative = os.path.relpath(decision, storage.path.parent)
        storage.prepare(self._meta(token=token, decision=relative), decision=decision, token=token)

    def state_at(self, token: str) -> tuple[tuple[Field, ...], dict[str, float]] | None:
        """Return fields and numbers of state in the file's checkpoint with this token; None without one."""
        if self._storage is None or self.in_memory:
            return None
        meta = cast(DiskStorage | ReadOnlyStorage, self._storage).meta_of(token)
        return None if meta is None else (self._storage.record.state, meta.get("scalars", {}))

    @property
    def belongs_to_folder(self) -> bool:
        """True if the last checkpoint of a disk table's file was made by `save_checkpoint`."""
        if self._storage is None or self.in_memory:
            return False
        return cast(DiskStorage | ReadOnlyStorage, self._storage).meta.get("token") is not None

    def check_name(self) -> None:
        """Raise if the file of a disk table was removed, renamed or replaced since it was opened."""
        cast(DiskStorage, self._storage).check_name()

    def revert(self, token: str) -> dict[str, float]:
        """Go back to the file's checkpoint with this token, and return the numbers of state that it holds."""
        with self._lock:  # no other thread may make a cache meanwhile
            before = cast(DiskStorage, self._storage)  # no layout, which would be another checkpoint
            before.check_name()  # before anything is lost: opening it again would fail
            self.version += 1
            self._storage = storage = self._reopened()  # at once: an interruption would keep its lock
            if storage.meta.get("token") != token:
                storage.close()
                self._storage = before
                raise FlatbedError(f"{storage.path} was replaced while it was closed: put it back")
        return dict(storage.meta.get("scalars", {}))

    def _reopened(self) -> DiskStorage:
        """Drop rows that changed since the file's last checkpoint, and open the file again."""
        storage = cast(DiskStorage, self._storage)
        self.abandon_cache()
        storage.close()  # if this is interrupted, the next call opens it
        return DiskStorage.open(storage.path)

    # ---- the cache

    def location_for(self, batch: LookupBatch | None = None) -> RecordLocation | None:
        """Return where kernels and operations find rows; None if the host must move the records.

        The current stream is ordered after prefetches that may move the rows. `batch` is the one that the
        rows are of, if any.
        """
        storage = self.ensure_layout()
        cache = self.cache  # after the layout, which may replace it
        if cache is None:
            return location_of(storage, self.device)
        return cache.location_for(batch)

    def flush(self, *, drop: bool = False) -> None:
        """Write cached rows back and wait for the GPU; `drop` also empties the cache, before rows change."""
        if self.cache is not None:
            self.cache.drop() if drop else self.cache.flush()
        if self.device.type == "cuda" and self._storage is not None:
            synchronize(self.device)

    def ensure_cache(self, n_ids: int, *, n_batches: int = 2) -> Cache | None:
        """Return the cache for batches of so many ids, if the table has one.

        A cache of the default size is made, or enlarged if it holds fewer than `n_batches` such batches.
        """
        self.ensure_layout()
        n_needed, config, device = n_batches * n_ids, self.config, self.device
        if self.cache is not None and n_needed <= self._cache_serves:
            return self.cache
        if not config.has_cache:
            return None
        with self._lock:
            storage, cache = self.ensure_layout(), self.cache
            if is_capturing(device) or (cache is not None and cache.in_graphs):
                return cache  # nothing can be allocated now, or CUDA graphs use this one
            n_now = 0 if cache is None else cache.n_slots
            # A cache that is enlarged gets room to spare, so that growing batches seldom enlarge it again.
            n_wanted = max(DEFAULT_BATCHES * n_ids, n_needed if cache is None else n_needed * 5 // 4)
            n_slots = slots_for(config, storage.record, device, n_wanted)
            if n_needed > n_now and n_slots > n_now and (cache is None or not config.is_cache_sized):
                self.drop_cache()
                self.cache = build_cache(storage, n_slots, policy=config.cache_policy, device=device)
                if device.type == "cuda":  # other streams use it without an event
                    # Not the whole GPU: this may be a loader thread, while the user captures a CUDA graph.
                    torch.cuda.current_stream(device).synchronize()
            self._cache_serves = sys.maxsize if config.is_cache_sized else n_needed
            return self.cache

    def _cache_lock(self) -> AbstractContextManager[Any]:
        """Return the lock of a disk table's cache; other tables need none, since one thread uses theirs."""
        cache = self.cache
        if cache is None or self.in_memory:
            return nullcontext()
        lock: AbstractContextManager[Any] = cast(HostCopyCache, cache).lock
        return lock

    def drop_cache(self, *, closing: bool = False) -> None:
        """Write all rows back; the next batch makes a new cache. After an error, this one stays."""
        cache = self.cache
        if cache is None:
            return
        cache.drop()
        self.cache = None
        cache.retire()  # last: an interruption before leaves a cache that can be used
        if cache.in_graphs:
            self._captured += [cache, self._storage]
        if cache.in_graphs and not closing:
            warnings.warn(
                "a table that CUDA graphs were captured with has other memory or another cache now: capture "
                "them again, since they use the memory from before (flatbed.capture does so by itself)",
                stacklevel=3,
            )

    def change_cache(self, config: Config) -> None:
        """Use another cache from now on."""
        with self._lock:
            self.drop_cache()
            self.config = config

    def abandon_cache(self) -> None:
        """Drop the cache of a disk table with its changed rows: the file goes back to a checkpoint."""
        cache, self.cache = self.cache, None
        if cache is not None:
            cache.abandon()

    # ---- consecutive rows

    def read_field(self, name: str, start: int, stop: int) -> Tensor:
        """Copy a field of consecutive rows to the host."""
        storage = self.ensure_layout()
        self.flush()
        if storage.memory is None:
            return storage.record.view(storage.read(start, stop), name).contiguous()
        storage.check()
        return storage.record.view(storage.memory[start:stop], name).to(CPU, copy=True).contiguous()

    def draw_again(self, seed: int) -> None:
        """Replace all weights by first weights of another seed. State stays."""
        config = replace(self.config, seed=seed)
        if not self.is_allocated and self.in_memory:
            self.config = config
        else:  # the seed stays: it is that of the file, and rows that are added later are drawn from it
            self.overwrite(initial_rows(config, Record((config.weight,))))
