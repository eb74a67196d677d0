"""The table: what an optimizer is given, and what gradients of rows are recorded in."""

from __future__ import annotations

import multiprocessing.context
import warnings
import weakref
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.tables import replicas as exchange
from flatbed.tables.cache import CacheStats, Reservation
from flatbed.tables.cache.reservation import version_of
from flatbed.tables.config import Config, device_of, with_cache
from flatbed.tables.deferred_checks import DeferredIdChecks
from flatbed.tables.grads import CachedWeights, GradAccumulator, RowGrads
from flatbed.tables.ids import as_ids, as_values, check_range, most_used, to_device
from flatbed.tables.record import Field
from flatbed.tables.row_io import RowIO
from flatbed.tables.storage.table_storage import TableStorage
from flatbed.tables.tensor_file import as_path
from flatbed.tables.view import WeightView


class Table(nn.Parameter):
    """The rows of a `Embedding`, in the form in which optimizers take parameters.

    It is empty as a tensor: `grad` is the packed gradient of the rows that were looked up, `grad_rows` says
    which they are; rows are read and written by `read_rows` and `write_rows`. Optimizers of `flatbed.optim`
    update it (`flatbed.optim.from_torch` makes one of any class of torch's).
    """

    store: TableStorage
    access: RowIO
    pending: GradAccumulator
    replicate: bool

    def __new__(
        cls, config: Config, *others: Any, device: torch.device | None = None, replicate: bool = True
    ) -> Table:
        if others or device is None or not isinstance(config, Config):
            given = ", ".join(type(one).__name__ for one in (config, *others))
            raise TypeError(
                f"a Table is not made by hand; found Table({given}): use flatbed.Embedding(rows, "
                f"dim).table, flatbed.open_table(path) or flatbed.load_table(path)"
            )
        empty = torch.empty(0, dtype=config.dtype, device="cpu")
        table = torch.Tensor._make_subclass(cls, empty, True)
        table.store = TableStorage(config, device)
        table.access = RowIO(table.store)
        table.pending = GradAccumulator(config.n_rows)
        table.replicate = replicate
        table._owner = None
        table._orphaned = False
        table.deferred_checks = DeferredIdChecks(table.store)
        table._exchanges = 0
        table.tickets = []
        return table

    _owner: weakref.ref[Any] | None
    _orphaned: bool
    deferred_checks: DeferredIdChecks
    _exchanges: int
    tickets: list[Reservation]
    """Of batches that are at hand, and whose rows came ahead of time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done by `__new__`, as tensors have it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.type and len(args) == 1:  # torch.typename: what errors call it
            return "flatbed.Table"
        if func in _ALLOWED or getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call,unused-ignore]
        raise FlatbedError(
            f"{getattr(func, '__name__', func)} was called on a table, whose rows are no tensor: use "
            f"table.read_rows(ids) and table.write_rows(ids, values), and to train it an optimizer of "
            f"flatbed.optim, or flatbed.optim.from_torch(torch.optim.Rprop, [table])"
        )

    # ---- what it is

    @property
    def num_embeddings(self) -> int:
        return self.store.config.n_rows

    @property
    def embedding_dim(self) -> int:
        return self.store.config.dim

    @property
    def storage_kind(self) -> str:
        """Where the rows live: "host", "disk" or "device"."""
        return self.store.config.storage

    @property
    def nbytes_stored(self) -> int:
        """The size of all records, padding included."""
        return self.num_embeddings * self.store.record.nbytes

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer state that rows have beside their weight."""
        return tuple(field.name for field in self.store.record.state)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override,unused-ignore]
        state = f", state {', '.join(self.state_names)}" if self.state_names else ""
        where = f'"{self.store.config.path}"' if self.store.config.path else self.storage_kind
        config = self.store.config
        return f"Table({config.n_rows} × {config.dim}, {config.dtype}, {where}{state})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __bool__(self) -> bool:
        return True

    __hash__ = nn.Parameter.__hash__

    def __eq__(self, other: object) -> Any:
        return self is other

    # ---- gradients

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override,unused-ignore]
        """The gradient of the rows in `grad_rows`, (n, dim); with several ranks, the mean over them."""
        packed = self._whole()
        return None if packed is None else packed.grads

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.pending.clear()  # not the ids to be checked: a bad batch is raised, dropped or not
            self._orphaned = False  # whoever drops them knows of them
            return
        if not isinstance(value, Tensor):
            raise TypeError(f"a table's gradient is set to None, or to a tensor like it; found {value!r}")
        packed = self._whole()
        if packed is None or value.shape != packed.grads.shape:
            found = "none" if packed is None else tuple(packed.grads.shape)
            raise FlatbedError(
                f"a table's gradient comes from backward passes: it can be set to None, or replaced by one "
                f"of the same shape ({found}); found {tuple(value.shape)}"
            )
        packed.grads = value.to(packed.grads.device)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def grad_rows(self) -> Tensor | None:
        """The rows that `grad` is the gradient of."""
        packed = self._whole()
        return None if packed is None else packed.rows

    def _whole(self) -> RowGrads | None:
        self.raise_bad_ids()
        self.share_gradients()
        return self.pending.compact()

    def share_gradients(self) -> None:
        """With several ranks: the mean over all of them, which must all be here."""
        exchange.share(self)

    def record(
        self,
        rows: Tensor,
        grads: Tensor,
        fetched: CachedWeights | None = None,
        ticket: Reservation | None = None,
    ) -> None:
        """Called in backward."""
        if self.owner is None:
            self._orphaned = True
        self.pending.record(rows, grads, fetched, ticket)

    def suspect(self, ids: Tensor, bad: Tensor) -> None:
        """Remember a batch whose range was checked on the GPU. Without steps, too, they must not pile up."""
        self.raise_bad_ids(wait=False)
        self.deferred_checks.add(ids, bad)

    def raise_bad_ids(self, *, wait: bool = True) -> None:
        """Raise if ids of a lookup were out of range, as far as is known; all gradients are dropped then."""
        error = self.deferred_checks.error(wait=wait)
        if error is not None:
            self.pending.clear()
            raise error

    # ---- its optimizer

    @property
    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that it was given to, as long as that lives."""
        return None if self._owner is None else self._owner()

    def check_attach(self, owner: torch.optim.Optimizer, state: tuple[Field, ...]) -> None:
        """Raise if the table holds state that the optimizer cannot go on with. In memory, another one begins
        anew; a file would be made anew for it, and what was last saved would be gone.
        """
        store = self.store
        in_file = store.config.storage == "disk" and bool(store.record.state) and not store.waiting
        if self.store.claimed and not in_file:
            return
        kinds = [[(f.name, f.dtype, f.count) for f in some] for some in (self.store.record.state, state)]
        if kinds[0] != kinds[1]:
            found = ", ".join(name for name, *_ in kinds[0])
            wanted = ", ".join(name for name, *_ in kinds[1]) or "none"
            raise FlatbedError(
                f"the table holds optimizer state of its own ({found}), and {type(owner).__name__} keeps "
                f"other ({wanted}): give it to the optimizer it was trained with, or call table.drop_state() "
                f"first to begin anew"
            )

    def attach(self, owner: torch.optim.Optimizer, state: tuple[Field, ...]) -> None:
        """Belong to an optimizer that keeps this state. State from a file or a copy is taken over."""
        self.check_attach(owner, state)
        if self.store.claimed:
            self.store.want(state)
        self.store.claimed = True
        self._owner = weakref.ref(owner)
        self._orphaned = False

    def drop_state(self) -> None:
        """Forget all optimizer state, keep the weights."""
        self.store.want(())
        self._owner = None

    @property
    def trains(self) -> bool:
        """`requires_grad`, for those who ask at every lookup."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad

    def check_trained(self) -> None:
        """Raise if gradients were recorded that no optimizer will ever use."""
        if self._orphaned and self.owner is None:
            raise FlatbedError(
                f"{self!r} receives gradients, but no optimizer has it, so that it would never learn: build "
                "the optimizer with the module (flatbed.optim.Adam(model)) or with emb.table among its "
                "parameters, or freeze the table (emb.requires_grad_(False))"
            )

    # ---- rows

    @property
    def weight(self) -> Tensor:
        """All weights as one tensor, without a copy, for reading and for initialising."""
        self.deferred_checks.check_graphs()
        return WeightView.of(self)

    def read_rows(self, ids: Any) -> Tensor:
        """The weights of some rows: ids of any shape → (*shape, dim), a copy on the computing device."""
        self.deferred_checks.check_graphs()
        wanted = self._checked(ids)
        found = self.access.weights(wanted.flatten())
        return found.reshape(*wanted.shape, self.embedding_dim)

    def read_state(self, name: str, ids: Any) -> Tensor:
        """The optimizer state of some rows: ids of any shape → (*shape, dim)."""
        if name not in self.state_names:
            found = ", ".join(self.state_names) or "none (an optimizer that has the table brings it)"
            raise KeyError(f"there is no state {name!r}; found {found}")
        wanted = self._checked(ids)
        taken = self.access.take(wanted.flatten())[name]
        return taken.reshape(*wanted.shape, taken.shape[1])

    @torch.no_grad()
    def write_rows(self, ids: Any, values: Any) -> None:
        """Replace the weights of some rows: ids of any shape, values (*shape, dim). State stays as it is."""
        wanted = self._checked(ids)
        given = as_values(values, (*wanted.shape, self.embedding_dim))
        rows, values = wanted.flatten(), given.reshape(-1, self.embedding_dim)
        unique, inverse = torch.unique(rows, return_inverse=True)
        if len(unique) != len(rows):  # the last one counts
            last = torch.zeros_like(unique).scatter_reduce_(
                0, inverse, torch.arange(len(rows), device=rows.device), "amax"
            )
            rows, values = unique, values[last.to(values.device)]
        self.access.put_weights_(rows, values.to(self.store.device, self.store.config.dtype))

    def _checked(self, ids: Any) -> Tensor:
        wanted = as_ids(ids)
        check_range(wanted, self.num_embeddings)
        return to_device(wanted, self.store.device)

    # ---- its cache

    def warm(self, ids: Any, counts: Any = None) -> None:
        """Fill the cache with the rows that are used most: ids as they occur, repeats and all, or distinct
        ones with `counts` of how often each does. A cache of no given size stays as large as it is.
        """
        rows, counts = most_used(as_ids(ids).cpu().flatten(), counts, self.num_embeddings)
        sized = self.store.config.sized
        cache = self.store.cache_for(len(rows)) if sized else self.store.cache
        if cache is None:
            return
        n = min(len(rows), cache.n_slots)
        cache.warm(rows[:n].flip(0), counts[:n].flip(0))

    def cache_stats(self) -> CacheStats:
        """What the cache has done so far: hits, misses, evictions, bytes moved. Asking waits for the GPU."""
        self.deferred_checks.check_graphs()
        cache = self.store.cache
        return CacheStats.of([0] * 5, rows=0, nbytes=0) if cache is None else cache.stats()

    def set_cache(
        self, cache_rows: int | None = None, cache_bytes: int | None = None, *, policy: str | None = None
    ) -> None:
        """Another size of cache, or another policy; it begins empty. 0: none; nothing given: the default."""
        chosen = self.store.config.cache_policy if policy is None else policy
        self.store.change_cache(with_cache(self.store.config, cache_rows, cache_bytes, chosen))

    def ticket(self, ids: Tensor) -> Reservation | None:
        """What is known of these ids ahead of time, if it still holds."""
        for ticket in self.tickets:
            if ticket.matches(ids) and ticket.version == version_of(ids) and ticket.cache.covers(ticket):
                return ticket
        return None

    def resize(self, num_embeddings: int) -> None:
        """Grow to so many rows. Rows and state stay; new rows begin from (seed, row).

        For a table on disk this is a checkpoint, too: save what goes with it right after.
        """
        if isinstance(num_embeddings, bool) or not hasattr(num_embeddings, "__index__"):
            raise TypeError(f"num_embeddings must be an integer; found {num_embeddings!r}")
        if self.pending.parts:
            raise FlatbedError(
                "gradients are waiting for a step: step, or drop them (zero_grad), then resize"
            )
        self.store.resize(int(num_embeddings))
        self.pending = GradAccumulator(self.num_embeddings)

    def scalars(self) -> dict[str, float]:
        """The numbers of optimizer state that are one per table, such as the step count."""
        return {name: float(value) for name, value in self.store.scalars.items()}

    # ---- durable

    def checkpoint(self) -> None:
        """Make a disk table's rows and state durable, all or nothing: a crash leads back to here."""
        self.deferred_checks.check_graphs()
        self.store.checkpoint()

    def save(self, path: str | Path) -> None:
        """Write weights and optimizer state to a safetensors file, bit by bit."""
        from flatbed.tables import saving

        self.deferred_checks.check_graphs()
        saving.save(self, as_path(path))

    def load(self, path: str | Path) -> None:
        """Read what `save` has written, from a table of any storage; nothing changes if it does not fit."""
        from flatbed.tables import saving

        saving.load(self, as_path(path))

    def close(self, *, discard: bool = False) -> None:
        """Give memory and files back. Changes of a disk table since its last checkpoint are dropped.

        That is worth a warning, unless `discard` says that it is meant.
        """
        if not discard and self.store.n_unsaved:
            warnings.warn(
                f"{self.store.n_unsaved} rows of {self.store.config.path} changed since its last checkpoint "
                f"and are dropped: call table.checkpoint() first, or table.close(discard=True)",
                stacklevel=2,
            )
        self.store.close()

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        from flatbed.tables import copying

        if id(self) not in memo:
            memo[id(self)] = copying.copy(self)
        return cast(Table, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        from flatbed.tables import copying

        if multiprocessing.context.get_spawning_popen() is not None:
            raise FlatbedError(
                "a table cannot be sent to another process (a spawned DataLoader worker, for example): look "
                "rows up in the training process, and let workers hand out ids"
            )
        return copying.rebuild, copying.parts(self)


_ALLOWED = {
    Tensor.requires_grad_,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.size,
    Tensor.dim,
    Tensor.data_ptr,
    Tensor.register_hook,
    Tensor.__hash__,
    torch.is_complex,
    torch.is_floating_point,
    torch.autograd.backward,
}


def make(config: Config, device: Any, *, replicate: bool) -> Table:
    """A table that computes on `device`."""
    if not isinstance(replicate, bool):
        raise TypeError(f"replicate must be True or False; found {replicate!r}")
    return Table(config, device=device_of(device), replicate=replicate)
