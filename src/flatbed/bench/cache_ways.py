"""Ways to take steps on a table: as they come, prefetched, captured in a CUDA graph; and torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from flatbed.bench.cache_ids import Batch
from flatbed.bench.cache_rows import FLATBED, TORCH
from flatbed.bench.capture import Captured
from flatbed.bench.tables_measure import SEED, same_bits
from flatbed.data import Prefetcher
from flatbed.tables.cache import CacheStats

LR = 1e-3
CAPTURE_STEPS = 3  # until a graph has been replayed: one as it is, one that is captured, one more


@dataclass(frozen=True, slots=True)
class Way:
    """How steps are taken. `depth` is the prefetcher's; 0: none."""

    name: str
    depth: int = 0
    captured: bool = False


EAGER = Way(FLATBED)
PREFETCHED = Way(f"{FLATBED}, prefetched", depth=2)
CAPTURED = Way(f"{FLATBED}, captured", captured=True)
CAPTURED_PREFETCHED = Way(f"{FLATBED}, captured, prefetched", depth=2, captured=True)
SPARSE = Way(f"{TORCH} sparse")


def loss_of(rows: Tensor, target: Tensor) -> Tensor:
    """A loss with few operations, whose gradient is the target."""
    return torch.dot(rows.view(-1), target.view(-1))


def make_target(n_ids: int, dim: int, device: torch.device) -> Tensor:
    """Small integers: sums of gradients are exact, in whatever order they are taken."""
    generator = torch.Generator().manual_seed(SEED)
    numbers = torch.randint(1, 4, (n_ids, dim), generator=generator)
    signs = torch.randint(2, (n_ids, dim), generator=generator) * 2 - 1
    return (numbers * signs).float().to(device)


Model: TypeAlias = Callable[[], object]
"""A step of what is computed beside a table."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a table is, where it lives, and how many ids come at once."""

    n_rows: int
    dim: int
    n_ids: int
    storage: str = "host"
    path: Path | None = None


class Trainee(Protocol):
    """A table with an optimizer."""

    record_bytes: int

    def use(self, cache_rows: int, policy: str) -> None:
        """Begin with another cache, which is empty."""

    def steps(self, way: Way, batches: Sequence[Batch]) -> Generator[None, None, None]:
        """Take a step for each batch, whenever it is asked for the next one."""

    def stats(self) -> CacheStats | None:
        """Counts of the cache, if it has one."""

    def read(self, rows: Batch) -> Tensor:
        """Weights of some rows."""

    def at_home(self, rows: Batch) -> bool:
        """Whether these rows, which were trained, are the same once the cache has let go of them."""

    def close(self) -> None:
        """Give memory back."""


class CachedTable:
    """`Embedding` with a cache, under Adam; `model` is computed beside it in every step."""

    def __init__(self, shape: Shape, *, device: torch.device, model: Model | None = None) -> None:
        self.emb = flatbed.Embedding(
            shape.n_rows,
            shape.dim,
            storage=shape.storage,
            path=shape.path,
            device=device,
            init="zeros",
            cache_rows=0,
        )
        self._optimizer = flatbed.optim.Adam(self.emb, lr=LR)
        self._target = make_target(shape.n_ids, shape.dim, device)
        self._device, self._model = device, model
        self._graph: Captured | None = None
        self._ids: Tensor | None = None  # what the graph reads
        self._n_captured = 0
        self.record_bytes = self.emb.table.store.record.nbytes

    def use(self, cache_rows: int, policy: str) -> None:
        self._graph, self._n_captured = None, 0
        self._optimizer.zero_grad()  # if a step was interrupted
        with warnings.catch_warnings():  # of the graph that nobody will replay any more
            warnings.simplefilter("ignore")
            self.emb.table.set_cache(cache_rows=cache_rows, policy=policy)

    def steps(self, way: Way, batches: Sequence[Batch]) -> Generator[None, None, None]:
        if way.captured:
            n_first = max(0, min(len(batches), CAPTURE_STEPS - self._n_captured))
            for ids in batches[:n_first]:  # nobody else may be at work while a graph is captured
                self._replay(pinned(ids))
                yield
            batches = batches[n_first:]
        if way.depth == 0:
            for ids in batches:
                if way.captured:
                    self._replay(pinned(ids))
                else:
                    self._step(ids)
                yield
            return
        step = self._replay if way.captured else self._step
        with iter(Prefetcher(batches, {self.emb: lambda batch: batch}, depth=way.depth)) as fetched:
            for there in fetched:
                step(there)
                yield

    def _step(self, ids: Tensor | Batch) -> None:
        rows = self.emb(ids)
        if self._model is not None:
            self._model()
        torch.autograd.backward(loss_of(rows, self._target))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _replay(self, ids: Tensor) -> None:
        """Copy ids to where the graph reads them, in the order of the stream, and replay it."""
        if self._ids is None:
            self._ids = torch.empty(ids.shape, dtype=torch.int64, device=self._device)
        self._ids.copy_(ids, non_blocking=True)
        if self._graph is None:
            held = self._ids
            self._graph = Captured(lambda: self._step(held))
        self._graph()
        self._n_captured += 1

    def stats(self) -> CacheStats | None:
        return None if self.emb.table.store.cache is None else self.emb.table.cache_stats()

    def read(self, rows: Batch) -> Tensor:
        return self.emb.read_rows(rows)

    def at_home(self, rows: Batch) -> bool:
        before = self.emb.read_rows(rows)
        if not bool(before.any(1).all()):
            return False  # rows that no step has reached
        self.use(0, "lru")
        return same_bits(self.emb.read_rows(rows), before)

    def close(self) -> None:
        self.use(0, "lru")
        self.emb.table.close(discard=True)


class SparseTable:
    """`nn.Embedding(sparse=True)` under SparseAdam, all of it where it computes."""

    def __init__(self, shape: Shape, *, device: torch.device) -> None:
        # Off by default; torch warns of it where it was not said.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        weight = torch.zeros((shape.n_rows, shape.dim), device=device)
        self._emb = nn.Embedding(shape.n_rows, shape.dim, sparse=True, _weight=weight)
        self._optimizer = torch.optim.SparseAdam(list(self._emb.parameters()), lr=LR)
        self._target = make_target(shape.n_ids, shape.dim, device)
        self._device = device
        self.record_bytes = 3 * 4 * shape.dim

    def use(self, cache_rows: int, policy: str) -> None:
        """It has none."""

    def steps(self, way: Way, batches: Sequence[Batch]) -> Generator[None, None, None]:
        for ids in batches:
            there = (pinned(ids) if self._device.type == "cuda" else torch.from_numpy(ids)).to(
                self._device, non_blocking=True
            )
            torch.autograd.backward(loss_of(self._emb(there), self._target))
            self._optimizer.step()  # type: ignore[no-untyped-call]
            self._optimizer.zero_grad()
            yield

    def stats(self) -> CacheStats | None:
        return None

    def read(self, rows: Batch) -> Tensor:
        return self._emb.weight.detach()[torch.from_numpy(rows).to(self._device)]

    def at_home(self, rows: Batch) -> bool:
        return bool(self.read(rows).any(1).all())

    def close(self) -> None:
        self._optimizer.state.clear()


def pinned(ids: Batch) -> Tensor:
    """In pinned memory of its own, which torch does not reuse before copies from it are done.

    Copied by this thread alone: torch would wake others, and wait for them where a core is shared.
    """
    made = torch.empty(ids.shape, dtype=torch.int64, pin_memory=True)
    made.numpy()[...] = ids
    return made
