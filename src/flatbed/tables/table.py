"""The table: a parameter whose rows are in host memory, on disk or on the device."""

from __future__ import annotations

import multiprocessing.context
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from flatbed.distributed.ranks import world_size
from flatbed.distributed.row_shards import RowShards
from flatbed.errors import FlatbedError
from flatbed.progress import note
from flatbed.tables import copying, retrieval, saving
from flatbed.tables.cache.base import CacheStats, LookupBatch
from flatbed.tables.config import Config, as_integer, device_of
from flatbed.tables.factory import warm as warm_cache
from flatbed.tables.files import as_path
from flatbed.tables.grad_exchange import exchange_grads
from flatbed.tables.grads import GradAccumulator, RowGrads, TableGrad
from flatbed.tables.ids import DeferredIdChecks, as_floats, as_ids, check_range, most_used, to_device
from flatbed.tables.parameter import TableParameter
from flatbed.tables.record import Field
from flatbed.tables.row_io import READ, WRITE, RowIO, ShardedRowIO, last_of_each
from flatbed.tables.row_store import RowStore
from flatbed.tables.storage.disk.format import is_disk_table
from flatbed.tables.weight_view import WeightView


class Table(TableParameter):
    """The weights of an `Embedding` as a parameter.

    It is one of the module's `parameters()`, has the shape (num_embeddings, embedding_dim), and holds no
    memory of its own: torch's C++ code sees an empty tensor. Rows are read and written by `read_rows` and
    `write_rows`. `grad` is the gradient of the rows that were looked up, `grad_rows` says which they are.
    Optimizers of `flatbed.optim` update it (`flatbed.optim.from_torch` takes any elementwise class of torch).

    >>> import flatbed, torch
    >>> table = flatbed.Embedding(1000, 8, init="zeros").table
    >>> table.write_rows([3], torch.ones(1, 8))
    >>> table.read_rows([3, 4]).sum(dim=1)
    tensor([8., 0.])
    """

    _store: RowStore  # rows of this rank: all of them, unless the table is sharded
    _shards: RowShards | None  # division of rows among ranks; None if this rank holds all of them
    _local_io: RowIO  # access to the rows of this rank
    _row_io: RowIO | ShardedRowIO  # access to all rows: with several ranks of a sharded table, a collective
    _grads: GradAccumulator
    _deferred_checks: DeferredIdChecks
    _prefetched: list[LookupBatch]  # prefetched lookups of the current batch
    replicate: bool
    _exchanges: int  # comparisons with other replicas so far: each one takes other rows as its sample
    _agreed: weakref.ref[Any] | None  # the optimizer that the ranks of a sharded table have compared
    _owner_ref: weakref.ref[Any] | None
    _last_training: bool  # mode of the last lookup with gradient: True for training, False for evaluation
    _orphaned: bool | None  # mode of a lookup whose gradients were recorded while no optimizer had the table

    def __new__(
        cls,
        config: Config,
        *,
        device: Any,
        replicate: bool = True,
        shards: RowShards | None = None,
    ) -> Table:
        """Use `flatbed.Embedding(rows, dim).table` or `flatbed.load_table(path)`."""
        device = device_of(device)
        empty = torch.empty(0, dtype=config.dtype, device=device)
        table = torch.Tensor._make_subclass(cls, empty, True)
        table._store = RowStore(config, device)
        table._shards = shards
        table._local_io = RowIO(table._store)
        table._row_io = table._local_io if shards is None else ShardedRowIO(table._local_io, shards)
        table._grads = GradAccumulator(table.num_embeddings)
        table._deferred_checks = DeferredIdChecks()
        table._prefetched = []
        table.replicate = replicate
        table._exchanges = 0
        table._agreed = table._owner_ref = None
        table._last_training = True
        table._orphaned = None
        return table

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: `__new__` has built the table, as for tensors."""

    # ---- attributes

    @property
    def num_embeddings(self) -> int:
        """The number of rows, of all ranks together if the table is sharded."""
        return self._store.config.n_rows if self._shards is None else self._shards.n_rows

    @property
    def embedding_dim(self) -> int:
        return self._store.config.dim

    @property
    def storage(self) -> str:  # type: ignore[override,unused-ignore]
        """Where the rows are kept: "host", "disk" or "device"."""
        return self._store.config.storage

    @property
    def nbytes(self) -> int:  # type: ignore[override,unused-ignore]
        """Size of all records in bytes, padding included; of all ranks together if the table is sharded."""
        return self.num_embeddings * self._store.record.nbytes

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer state that rows have besides their weight.

        Empty for a table of ``load_table(path, read_only=True)``, which reads weights alone.
        """
        return tuple(field.name for field in self._store.record.state)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override,unused-ignore]
        state = f", state {', '.join(self.state_names)}" if self.state_names else ""
        where = f'"{self._store.config.path}"' if self._store.config.path else self.storage
        config = self._store.config
        part = f", rank {config.shard_rank} of {config.n_shards}" if config.n_shards > 1 else ""
        return f"Table({self.num_embeddings} × {config.dim}, {config.dtype}, {where}{part}{state})"

    # ---- gradients

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override,unused-ignore]
        """The gradient of the rows in `grad_rows`, (n, dim); with several ranks, the mean over them.

        If the table is sharded, `grad_rows` are those of its rows that this rank holds.
        """
        # With several ranks all of them must take part in an exchange, also those without a gradient.
        return TableGrad.of(self) if self._grads.parts or self._n_ranks > 1 else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            with self._grads.lock:  # ids that are still to be checked stay: a bad batch raises all the same
                self._grads.parts = []
                self._grads.n_cleared += 1
            return
        if isinstance(value, TableGrad) and value._table is self:  # table.grad *= 0.5 has taken effect
            value.check()
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"a table's gradient is set to None or to a tensor; found {value!r}")
        grads = self._row_grads()
        if value.shape != grads.grads.shape:
            raise FlatbedError(
                f"a table's gradient comes from backward passes: it can be set to None, or replaced by one "
                f"of the same shape {tuple(grads.grads.shape)}; found {tuple(value.shape)}"
            )
        grads.grads = value.detach().to(grads.grads.device)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def _n_ranks(self) -> int:
        """Number of ranks that take part in an exchange of gradients."""
        if self._shards is not None:
            return self._shards.n_ranks
        return world_size() if self.replicate else 1

    @property
    def grad_rows(self) -> Tensor | None:
        """The rows that `grad` is the gradient of."""
        if self.grad is None:
            return None
        rows = self._row_grads().rows
        return rows if self._shards is None else self._shards.to_global(rows)

    def _row_grads(self, *, compact: bool = True) -> RowGrads:
        """Return all recorded gradients, each row once; without the row -1 if `compact`, which waits."""
        self._raise_bad_ids()
        exchange_grads(self)
        grads = self._grads.total(compact=compact)
        return RowGrads.empty(self._store) if grads is None else grads

    def _record_grads(self, rows: Tensor, grads: Tensor, batch: LookupBatch | None = None) -> None:
        """Record the gradients of a lookup. Called in backward, in any thread."""
        if not self._needs_grad:  # frozen since the lookup: as in torch, there is no gradient
            return
        if self._owner_ref is None or self._owner_ref() is None:
            self._orphaned = self._last_training
        self._grads.record(rows, grads, batch)

    def _raise_bad_ids(self, *, wait: bool = True) -> None:
        """Raise if ids of a lookup were out of range, as far as is known; all gradients are dropped then."""
        error = self._deferred_checks.error(wait=wait)
        if error is not None:
            self.grad = None
            raise error

    def _move(self, device: torch.device) -> None:
        """Compute on another device. Rows move at the next use, where needed."""
        self._store.move(device)
        with torch._C.DisableTorchFunctionSubclass():  # so that next(model.parameters()).device is right
            self.data = torch.empty(0, dtype=self.dtype, device=device)

    # ---- the optimizer

    @property
    def _owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that the table was given to, as long as that lives."""
        return None if self._owner_ref is None else self._owner_ref()

    def _check_attach(self, owner: torch.optim.Optimizer, state: tuple[Field, ...]) -> None:
        """Raise if the table is read-only, or holds state that the optimizer cannot continue.

        State of another optimizer in memory is replaced. In a file, replacing it would lose what was saved.
        """
        store = self._store
        if store.config.read_only:
            raise FlatbedError(
                f"{store.config.path} was loaded with read_only=True, and {type(owner).__name__} would "
                f"change it: load it without, to train it, or leave it out of the optimizer"
            )
        has_file = store.config.storage == "disk" and store.is_allocated
        in_file = has_file and bool(store.record.state) and not store.relayout_pending
        if store.state_owned and not in_file:
            return
        held, kept = ([(f.name, f.dtype, f.count) for f in some] for some in (store.record.state, state))
        if held != kept:
            found, wanted = (", ".join(name for name, *_ in some) or "none" for some in (held, kept))
            raise FlatbedError(
                f"{self!r} holds optimizer state of its own ({found}), and {type(owner).__name__} keeps "
                f"other ({wanted}): give it to the optimizer it was trained with, or call table.drop_state() "
                f"first to start again"
            )

    def _attach(self, owner: torch.optim.Optimizer, state: tuple[Field, ...]) -> None:
        """Make an optimizer with these fields of state the owner. Loaded or copied state is continued."""
        self._check_attach(owner, state)
        if self._store.state_owned:
            self._store.set_state_fields(state)
        self._store.state_owned = True
        self._owner_ref = weakref.ref(owner)
        self._orphaned = None

    def drop_state(self) -> None:
        """Drop all optimizer state, and keep the weights."""
        self._store.set_state_fields(())
        self._owner_ref = None

    @property
    def _needs_grad(self) -> bool:
        """`requires_grad`, without the cost of `__torch_function__` at every lookup."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def _records_grad(self, *, training: bool) -> bool:
        """Return True if a lookup records gradients.

        Raises if the lookups before it trained the table, and no optimizer has it. A model that is trained in
        training mode may be evaluated in between, also where gradients are enabled.
        """
        if not (torch.is_grad_enabled() and self._needs_grad):
            return False
        was_trained = self._orphaned is not None and (training or not self._orphaned)
        if was_trained and self._owner is None:
            raise FlatbedError(
                f"{self!r}, the table of this lookup, receives gradients, but no optimizer has it: give its "
                "parameters to an optimizer (flatbed.optim.Adam(model.parameters())), or freeze it "
                "(emb.requires_grad_(False))"
            )
        self._last_training = training
        return True

    # ---- rows

    @property
    def weight(self) -> Tensor:
        """All weights as one tensor, without a copy, for reading and for initialization."""
        self._check_whole("emb.weight")
        self._deferred_checks.check_graphs()
        return WeightView.of(self)

    def read_rows(self, ids: Any) -> Tensor:
        """Copy the weights of some rows to the computing device: ids of any shape → (*shape, dim)."""
        self._deferred_checks.check_graphs()
        wanted = self._checked(ids, READ)
        found = self._row_io.weights(wanted.flatten())
        return found.reshape(*wanted.shape, self.embedding_dim)

    def read_state(self, name: str, ids: Any) -> Tensor:
        """Copy the optimizer state of some rows: ids of any shape → (*shape, dim)."""
        if name not in self.state_names:
            found = ", ".join(self.state_names) or "none (an optimizer that has the table adds it)"
            found = "none (read_only=True reads weights alone)" if self._store.config.read_only else found
            raise KeyError(f"there is no state {name!r}; found {found}")
        wanted = self._checked(ids, READ)
        taken = self._row_io.read_fields(wanted.flatten())[name]
        return taken.reshape(*wanted.shape, taken.shape[1])

    @torch.no_grad()
    def write_rows(self, ids: Any, values: Any) -> None:
        """Replace the weights of some rows: ids of any shape, values (*shape, dim). State stays as it is."""
        wanted = self._checked(ids, WRITE)
        with self._failing_together(WRITE):
            shape = (*wanted.shape, self.embedding_dim)
            given = as_floats(values, "values")
            if given.shape != shape:
                raise ValueError(f"values for these ids must have shape {shape}; found {tuple(given.shape)}")
        rows, values = last_of_each(wanted.flatten(), given.reshape(-1, self.embedding_dim))
        self._row_io.write_weights_(rows, values.to(self._store.device, self._store.config.dtype))
        self._orphaned = None  # the caller trains the rows

    def topk(  # type: ignore[override,unused-ignore]
        self, queries: Any, k: int, *, metric: str = "dot", chunk_rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the k rows with the greatest scores, over all rows: queries (*shape, dim) → (*shape, k).

        - `metric`: "dot", the product with a query, or "cosine".
        - `chunk_rows`: rows that are compared at once, rounded up to a multiple of 1,024. The result does
          not depend on it.

        Returns values, in fp32 at least, and ids, as torch.topk does. Of equal scores the lowest id is the
        first. The row `padding_idx` is left out. If the table is sharded, all ranks call this, each with
        queries of its own, and `k`, `metric` and the dtype of queries are the same.

        >>> import flatbed, torch
        >>> rows = torch.tensor([[0.0, 1.0], [2.0, 0.0], [3.0, 3.0]])
        >>> emb = flatbed.Embedding.from_pretrained(rows)
        >>> emb.table.topk([[1.0, 0.0]], k=2)
        (tensor([[3., 2.]]), tensor([[2, 1]]))
        """
        self._deferred_checks.check_graphs()
        search = retrieval.topk if self._shards is None else partial(retrieval.sharded_topk, self._shards)
        return search(self._store, queries, k, metric=metric, chunk_rows=chunk_rows)

    def _checked(self, ids: Any, doing: str) -> Tensor:
        with self._failing_together(doing):
            wanted = as_ids(ids)
            check_range(wanted, self.num_embeddings)
            return to_device(wanted, self._store.device)

    def _check_whole(self, what: str) -> None:
        """Raise if the table is sharded."""
        if self._shards is not None:
            raise FlatbedError(
                f"{what} needs all rows of a table, and {self._shards.n_ranks} ranks share this one: use "
                f"flatbed.save_checkpoint, table.export, read_rows or write_rows, which all ranks call"
            )

    def _failing_together(self, doing: str) -> AbstractContextManager[None]:
        """Tell the ranks of a sharded table of an exception in the body of a `with` statement."""
        return nullcontext() if self._shards is None else self._shards.failing_together(doing)

    # ---- the cache

    def warm(self, ids: Any, counts: Any = None) -> None:
        """Fill the cache with the most frequent rows.

        `ids` are ids as they occur, with repeats, or unique ids with `counts` of how often each occurs. A
        cache of no given size stays as large as it is.
        """
        given = as_ids(ids).cpu().flatten()
        check_range(given, self.num_embeddings)
        rows, counts = most_used(given, counts)
        if self._shards is not None:
            is_own = self._shards.is_own(rows)
            rows, counts = self._shards.to_local(rows[is_own]), counts[is_own]
        sized = self._store.config.is_cache_sized
        cache = self._store.ensure_cache(len(rows)) if sized else self._store.cache
        if cache is not None:
            n = min(len(rows), cache.n_slots)
            warm_cache(cache, rows[:n].flip(0), counts[:n].flip(0))

    def cache_stats(self) -> CacheStats:
        """Return counts of the cache so far: hits, misses, evictions, bytes moved. Waits for the GPU."""
        self._deferred_checks.check_graphs()
        cache = self._store.cache
        if cache is None:
            return CacheStats.of([0] * 5, rows=0, nbytes=0)
        return CacheStats.of(cache.index.counts.tolist(), rows=cache.n_slots, nbytes=cache.records.shape[1])

    def set_cache(
        self, cache_rows: int | None = None, cache_bytes: int | None = None, *, policy: str | None = None
    ) -> None:
        """Use an empty cache of another size or policy: 0 for none, the default size if none is given."""
        config = self._store.config
        policy = config.cache_policy if policy is None else policy
        self._store.change_cache(
            replace(config, cache_rows=cache_rows, cache_bytes=cache_bytes, cache_policy=policy)
        )

    def resize(self, num_embeddings: int) -> None:
        """Grow to so many rows. Rows, state and gradients stay; new rows are drawn from (seed, row).

        For a table on disk this is also a checkpoint: save the model that belongs to it right after.
        """
        n_rows = as_integer("num_embeddings", num_embeddings)
        if n_rows > self.num_embeddings:
            self._store.warn_of_loss("resize(): use flatbed.save_checkpoint again right after it")
        if self._shards is None:
            self._store.resize(n_rows)
        else:
            self._shards.resize(n_rows, self._store.resize)
        self._grads.n_rows = self.num_embeddings

    def scalars(self) -> dict[str, float]:
        """Return the optimizer state that is one number per table, such as the step count."""
        return {name: float(value) for name, value in self._store.scalars.items()}

    # ---- files

    def checkpoint(self) -> None:
        """Make a disk table's rows and state durable, all or nothing: a crash leads back to here."""
        self._check_whole("table.checkpoint")
        self._deferred_checks.check_graphs()
        self._store.warn_of_loss("table.checkpoint(): use flatbed.save_checkpoint again instead")
        self._store.checkpoint()

    def save(self, path: str | Path) -> None:
        """Write weights and optimizer state to a safetensors file, block by block.

        If the table is sharded, all ranks call this, and write one file that any number of ranks loads.
        """
        path = as_path(path)
        if is_disk_table(path):
            raise FlatbedError(
                f'{path} is the file of a table with storage="disk", which may be in use: save to another '
                f"path, items.safetensors for example"
            )
        saving.save(self, path)

    def load(self, path: str | Path) -> None:
        """Read a file of `save`, from a table of any storage. Nothing changes if it does not fit.

        If the table is sharded, all ranks call this, and each one reads its rows.
        """
        saving.load(self, as_path(path))

    def export(self, path: str | Path, *, shard_bytes: int | None = None) -> None:
        """Write the weights alone for other programs, block by block.

        - ``"items.npy"``: a numpy array. ``"items.safetensors"``: a file with the tensor "weight".
        - ``"items"``, without a suffix: a new folder as Hugging Face writes it. It holds `model.safetensors`,
          or shards of at most `shard_bytes` (5 GB) with consecutive rows and `model.safetensors.index.json`.
        - Other suffixes raise.

        If the table is sharded, all ranks call this, and the first rank writes.
        """
        self._deferred_checks.check_graphs()
        copying.export(self, as_path(path), shard_bytes=shard_bytes)

    def close(self, *, discard: bool = False) -> None:
        """Release memory and files. A disk table whose rows changed is checkpointed first.

        ``discard=True`` drops changes since the last checkpoint instead. A table that was last saved by
        `flatbed.save_checkpoint` raises if rows changed since: a checkpoint of its own would make that folder
        unloadable. So does a sharded table, since a crash might leave ranks at different
        checkpoints. If the checkpoint fails, the table stays open.
        """
        if not discard and self._store.has_unsaved_changes():
            if self._store.belongs_to_folder or self._shards is not None:
                raise FlatbedError(
                    f"rows of {self._store.config.path} changed since flatbed.save_checkpoint: save again, "
                    f"or call table.close(discard=True) to keep what the folder has"
                )
            self.checkpoint()
        self._store.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the table, as `close` does.

        After an exception, rows may be those of half a step. They are dropped with a line on stderr, and the
        file stays at its last checkpoint.
        """
        if kind is not None and self._store.unsaved_rows:
            note(
                f"{self._store.unsaved_rows} rows of {self._store.config.path} changed since its last "
                f"checkpoint and are dropped, since the `with` block ended by {kind.__name__}: call "
                f"table.checkpoint() within the block where rows are complete"
            )
        self.close(discard=kind is not None)

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        if id(self) not in memo:
            self._check_whole("a copy")
            memo[id(self)] = copying.copy(self)
        return cast(Table, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if multiprocessing.context.get_spawning_popen() is not None:
            raise FlatbedError(
                "a table cannot be sent to another process (a spawned DataLoader worker, for example): look "
                "rows up in the training process, and let workers hand out ids"
            )
        self._check_whole("a pickle")
        return type(self)._rebuild, copying.pickled_parts(self)

    @classmethod
    def _rebuild(cls, *parts: Any) -> Table:
        return copying.rebuild(cls, *parts)
