"""Embedding tables under Adam, trained by flatbed or with torch's sparse gradients, and batches of ids."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from benchmarks.harness import SEED, Options, Readings, Steps, each, free_memory, same_bits
from benchmarks.rows import percentiles

Ids = np.ndarray[Any, np.dtype[np.int64]]
AT_ONCE = 64  # batches per search in the cumulative distribution
DISTRIBUTIONS: dict[str, float | None] = {"uniform": None, "zipf 1.05": 1.05, "zipf 1.2": 1.2}
"""Names, and the exponent of Zipf's law."""
LR = 1e-3
TOLERANCE = 1e-5  # steps have the size of the learning rate
SPARSE = "torch sparse"
Beside = Callable[[Tensor], Tensor | None]
"""A model beside a table: computes a loss of the rows, or nothing that the rows depend on."""


# ---- ids


class IdSource:
    """Draws batches over all rows of a table, none of them twice, the same for the same seed.

    Ranks are scattered over the table, so that frequent rows are not neighbours. The law is inverted on the
    device, since a host would take minutes.
    """

    def __init__(
        self, distribution: str, n_rows: int, n_ids: int, *, device: torch.device, seed: int = 21
    ) -> None:
        self.n_rows, self.n_ids, self.device = n_rows, n_ids, device
        self._generator = np.random.default_rng(seed)
        self._factor = scatter_factor(n_rows)
        exponent = DISTRIBUTIONS[distribution]
        self._cumulative = None if exponent is None else cumulative(n_rows, exponent).to(device)

    def draw(self, n_batches: int) -> list[Ids]:
        """Draw the next batches, in host memory."""
        if self._cumulative is None:
            return list(self._generator.integers(self.n_rows, size=(n_batches, self.n_ids)))
        batches = np.empty((n_batches, self.n_ids), np.int64)
        for start in range(0, n_batches, AT_ONCE):
            some = batches[start : start + AT_ONCE]
            numbers = torch.from_numpy(self._generator.random(some.shape)).to(self.device)
            ranks = torch.searchsorted(self._cumulative, numbers, right=True)
            some[...] = ranks.mul_(self._factor).remainder_(self.n_rows).cpu().numpy()
        return list(batches)


@cache
def cumulative(n_rows: int, exponent: float) -> torch.Tensor:
    """Return the cumulative shares of ranks under Zipf's law; the last is 1."""
    shares = np.cumsum(np.arange(1, n_rows + 1, dtype=np.float64) ** -exponent)
    return torch.from_numpy(shares / shares[-1])


def scatter_factor(n_rows: int) -> int:
    """Return a factor that maps ranks, modulo the rows, one to one to rows far from each other."""
    factor = max(1, round(n_rows * (math.sqrt(5) - 1) / 2))
    while math.gcd(factor, n_rows) != 1:
        factor += 1
    return factor


# ---- tables


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Size of a table and of its batches."""

    n_rows: int
    dim: int
    n_ids: int

    @property
    def setting(self) -> dict[str, Any]:
        """The part of a row's setting that describes the table."""
        return {"optimizer": "adam", "rows": self.n_rows, "dim": self.dim, "ids": self.n_ids}

    @property
    def nbytes(self) -> int:
        """Bytes of weight and Adam's state."""
        return 3 * 4 * self.n_rows * self.dim


def make_target(spec: TableSpec, device: torch.device) -> Tensor:
    """Draw gradients that are small integers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = torch.randint(1, 4, (spec.n_ids, spec.dim), generator=generator)
    signs = torch.randint(2, (spec.n_ids, spec.dim), generator=generator) * 2 - 1
    return (sizes * signs).float().to(device)


def pinned(ids: Ids, device: torch.device) -> Tensor:
    """Return ids as a tensor, in pinned memory if the device is a GPU."""
    host = torch.from_numpy(ids)
    return host.pin_memory() if device.type == "cuda" else host


class TrainedTable:
    """A table of zeros under Adam. `model` is computed in every step, between lookup and backward."""

    def __init__(
        self, spec: TableSpec, device: torch.device, emb: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.spec = spec
        self.model: Beside = lambda rows: None
        self._device, self._lookup, self._optimizer = device, emb, optimizer
        self._target = make_target(spec, device)

    def step(self, ids: Any) -> Tensor:
        """Look rows up, and run backward and update."""
        rows = self._lookup(ids)
        loss = self.model(rows)
        if loss is None:
            loss = torch.dot(rows.view(-1), self._target.view(-1))  # its gradient is the target
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


class FlatbedTable(TrainedTable):
    """`flatbed.Embedding`, eager, captured or prefetched."""

    def __init__(self, spec: TableSpec, device: torch.device, **arguments: Any) -> None:
        options = {"device": device, "init": "zeros", **arguments}
        self.emb = flatbed.Embedding(spec.n_rows, spec.dim, **options)
        super().__init__(spec, device, self.emb, flatbed.optim.Adam(self.emb, lr=LR))
        self._graph: Callable[[Tensor], object] | None = None
        self._prefetched_graph: Callable[[Tensor], object] | None = None

    def captured_step(self, ids: Ids) -> object:
        """Replay the step as a CUDA graph, which the fourth call captures."""
        batch = pinned(ids, self._device)
        if self._graph is None:
            self._graph = flatbed.capture(self.step, batch, device=self._device)
        return self._graph(batch)

    def prefetched(self, **arguments: Any) -> Steps:
        """Take steps whose rows a Prefetcher with these arguments loads ahead of time."""

        def steps(batches: Sequence[Ids]) -> Iterator[object]:
            for ids in flatbed.Prefetcher(batches, {self.emb: lambda batch: batch}, **arguments):
                yield self.step(ids)

        return steps

    def prefetched_and_captured(self, **arguments: Any) -> Steps:
        """Replay steps as a CUDA graph, which the fourth step captures, over prefetched rows."""

        def steps(batches: Sequence[Ids]) -> Iterator[object]:
            for ids in flatbed.Prefetcher(batches, {self.emb: lambda batch: batch}, **arguments):
                if self._prefetched_graph is None:
                    self._prefetched_graph = flatbed.capture(self.step, ids)
                yield self._prefetched_graph(ids)

        return steps

    def model_alone(self, batches: Sequence[Ids]) -> Iterator[object]:
        """Run the model, forward and backward, on the rows of the first batch.

        It takes turns with the steps, and gets rows of the table, because the clock of a GPU depends on its
        load, and on the numbers that it multiplies.
        """
        rows = self.read(batches[0]).to(self._device).requires_grad_()
        for _ in batches:
            loss = self.model(rows)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
                rows.grad = None
            yield loss

    def use_cache(self, cache_rows: int) -> None:
        """Start again with an empty cache of another size."""
        self._graph = self._prefetched_graph = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a table that CUDA graphs")  # the graph is dropped here
            self.emb.table.set_cache(cache_rows=cache_rows)

    def counts(self) -> tuple[int, int]:
        """Return hits and misses of the cache so far."""
        stats = self.emb.table.cache_stats()
        return stats.hits, stats.misses

    def survives_flush(self, rows: Ids) -> bool:
        """Tell whether trained rows are the same once the cache has written them back."""
        before = self.emb.read_rows(rows)
        self.use_cache(0)
        return bool(before.any(1).all()) and same_bits(self.emb.read_rows(rows), before)

    def read(self, rows: Ids) -> Tensor:
        return self.emb.read_rows(rows)

    def close(self) -> None:
        self._graph = self._prefetched_graph = None
        self.emb.table.close(discard=True)


class SparseTable(TrainedTable):
    """`nn.Embedding(sparse=True)` under SparseAdam, all of it on the device."""

    def __init__(self, spec: TableSpec, device: torch.device) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        weight = torch.zeros((spec.n_rows, spec.dim), device=device)
        self._emb = nn.Embedding(spec.n_rows, spec.dim, sparse=True, _weight=weight)
        super().__init__(spec, device, self._emb, torch.optim.SparseAdam(list(self._emb.parameters()), lr=LR))

    def step(self, ids: Any) -> Tensor:
        return super().step(pinned(ids, self._device).to(self._device, non_blocking=True))

    def read(self, rows: Ids) -> Tensor:
        return self._emb.weight.detach()[torch.from_numpy(rows).to(self._device)]

    def close(self) -> None:
        self._optimizer.state.clear()
        del self._emb, self._lookup, self._optimizer


@contextmanager
def made_table(spec: TableSpec, storage: str, options: Options) -> Iterator[FlatbedTable]:
    """Make a table that several settings share, at first without a cache."""
    options.report(f"making a table of {spec.nbytes / 1e9:.1f} GB, storage {storage}")
    free_memory(options.device)
    with TemporaryDirectory(dir=options.folder) as folder:
        path = {"path": Path(folder) / "rows.bed"} if storage == "disk" else {}
        table = FlatbedTable(spec, options.device, storage=storage, cache_rows=0, **path)
        try:
            yield table
        finally:
            table.close()
            free_memory(options.device)


# ---- checks


class Result(NamedTuple):
    """Difference to torch's SparseAdam, and whether it is within the tolerance."""

    ok: bool
    max_abs_error: float


class Checker:
    """Trains small tables of the same dim on the same skewed ids by every variant.

    Weights must be those of SparseAdam within rounding. All variants of flatbed must agree bitwise.
    """

    N_STEPS = 8

    def __init__(self, options: Options, dim: int) -> None:
        n_rows, n_ids = (500, 48) if options.is_small else (20_000, 2048)
        self.spec, self.device, self.on_gpu = TableSpec(n_rows, dim, n_ids), options.device, options.on_gpu
        self.batches = IdSource("zipf 1.05", n_rows, n_ids, device=self.device).draw(self.N_STEPS)
        self.rows = np.unique(np.concatenate(self.batches))
        self.cache_rows = 4 * n_ids
        """Room for what a prefetcher has in flight, but not for all rows."""
        sparse = SparseTable(self.spec, self.device)
        self.expected = self._train(sparse, each(sparse.step))
        self.bits: Tensor | None = None

    def check(
        self, make: Callable[..., Any], steps: Callable[[Any], Steps] | None = None, **arguments: Any
    ) -> Result:
        """Train a table that `make` makes; `steps` chooses how, by default one eager step after another."""
        with TemporaryDirectory() as folder:
            if arguments.get("storage") == "disk":
                arguments["path"] = Path(folder) / "checked.bed"
            table = make(self.spec, self.device, **arguments)
            found = self._train(table, each(table.step) if steps is None else steps(table))
        error = float((found - self.expected).abs().max())
        ok = error <= TOLERANCE  # nan is wrong
        if isinstance(table, FlatbedTable):
            self.bits = found if self.bits is None else self.bits
            ok = ok and same_bits(found, self.bits)
        return Result(ok, error)

    def _train(self, table: FlatbedTable | SparseTable, steps: Steps) -> Tensor:
        for _ in steps(self.batches):
            pass
        found = table.read(self.rows).cpu()
        table.close()
        return found

    def metrics(self, readings: Readings, kept: int, result: Result) -> dict[str, Any]:
        """Return times, GPU memory and error of a variant; `kept` is memory that it holds between steps."""
        return {
            "back_to_back_ms": percentiles(readings.back_to_back),
            "synchronized_ms": percentiles(readings.synchronized) if readings.synchronized else None,
            "peak_memory_bytes": kept + readings.step_bytes if self.on_gpu else None,
            "max_abs_error": result.max_abs_error,
        }


def scaled(spec: TableSpec, options: Options) -> TableSpec:
    """Return a table of tiny size where sizes are small."""
    return replace(spec, n_rows=2000, dim=8, n_ids=64) if options.is_small else spec
