"""Sharded tables (`shard="row"`): what one machine can measure, beside a model of the rest.

- world: one rank (NCCL, or gloo on a CPU) against the same table without `shard`.
- share: the work of one rank of 8 and of 64. The others are a stand-in: it hands over the rows and gradients
  that they would send, drawn from the same distribution, at once. Time on wires is a model, and not measured.
- host: the same with batches so small that the time of the host is left, of one rank and of 8 to 512.
- balance: rows that the busiest owner is asked for, against the mean; expected numbers, computed.

The cost model is that of `flatbed doctor --rows --ranks`, with the hit rate of the measured cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.cases.cache import counted
from benchmarks.cases.fsdp import one_rank
from benchmarks.harness import Options, Plan, Steps, each, time_in_turns
from benchmarks.rows import Row, percentiles, value_of
from benchmarks.trained_tables import DISTRIBUTIONS, Checker, FlatbedTable, Ids, IdSource, TableSpec, scaled
from flatbed import cost_model

CASES = ("world", "share", "host", "balance")
WORLD_SPEC = TableSpec(8_000_000, 128, 65_536)
SHARE_SPEC = TableSpec(20_000_000, 128, 65_536)
HOST_SPEC = TableSpec(500_000, 128, 64)
WORLD_PLAN = Plan(warm_up=60, turns=10, settle=4, blocks=2, block_steps=20)
SHARE_PLAN = Plan(warm_up=12, turns=3, settle=2, blocks=2, block_steps=6)
SMALL_PLAN = Plan(warm_up=2, turns=2, settle=1, blocks=1, block_steps=2)
SHARES, HOSTS, OWNERS = (8, 64), (1, 8, 64, 512), (8, 64, 512)
WHOLE, SHARDED = "flatbed", "flatbed, shard=row"
MODES = ("", ", prefetched")
CYCLIC, RANGES = "flatbed, row % ranks", "contiguous ranges"


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for."""
    options.report(f"constants of the model: {cost_model.constants()}")
    cases = {"world": run_world, "share": run_share, "host": run_host, "balance": run_balance}
    for case, measure in cases.items():
        if options.wants(case):
            yield from measure(options)
            harness.free_memory(options.device)


# ---- one rank


def run_world(options: Options) -> Iterator[Row]:
    """Compare a table with `shard="row"` in a world of one with an ordinary one, in turns."""
    spec, device = scaled(WORLD_SPEC, options), options.device
    cache_rows = 8 * spec.n_ids if options.is_small else spec.n_rows // 8
    plan = SMALL_PLAN if options.is_small else WORLD_PLAN
    with one_rank(device), ExitStack() as tables:
        made = {}
        for name, shard in ((WHOLE, None), (SHARDED, "row")):
            options.report(f"making a table of {spec.nbytes / 1e9:.1f} GB: {name}")
            made[name] = FlatbedTable(spec, device, cache_rows=cache_rows, shard=shard)
            tables.callback(made[name].close)
        checker = Checker(options, spec.dim)
        counts: dict[str, list[Any]] = {name + mode: [] for name in made for mode in MODES}
        known = {
            name + mode: counted(steps_of(table, mode), table, counts[name + mode])
            for name, table in made.items()
            for mode in MODES
        }
        chosen = options.choose(known)
        results = {
            name + mode: checker.check(FlatbedTable, partial(steps_of, mode=mode), shard=shard)
            for name, shard in ((WHOLE, None), (SHARDED, "row"))
            for mode in MODES
            if name + mode in chosen
        }
        for distribution in DISTRIBUTIONS:
            source = IdSource(distribution, spec.n_rows, spec.n_ids, device=device)
            for listed in counts.values():
                listed.clear()
            found = time_in_turns(chosen, source.draw, plan, options)
            setting = {"distribution": distribution, **spec.setting, "cache_rows": cache_rows}
            times = {name: percentiles(readings.back_to_back) for name, readings in found.items()}
            for name, spread in times.items():
                metrics: dict[str, Any] = {"back_to_back_ms": spread, "hit_rate": hit_rate(counts[name])}
                if name in made:  # eager
                    metrics["model_ms"] = modelled(spec, 1, metrics["hit_rate"])["model_ms"]
                plain = times.get(name.replace(SHARDED, WHOLE))
                if plain is not None and name.startswith(SHARDED):
                    metrics["unsharded_ratio"] = value_of(spread) / value_of(plain)
                n = len(found[name].back_to_back)
                yield options.row("shards world", name, setting, metrics, n_samples=n, ok=results[name].ok)


def steps_of(table: FlatbedTable, mode: str) -> Steps:
    """Return eager or prefetched steps of a table."""
    return table.prefetched(depth=2) if mode else each(table.step)


# ---- one rank's share of many


@dataclass(frozen=True, slots=True)
class Batch:
    """Ids of this rank, and the rows that each rank, this one included, asks this rank for."""

    ids: Ids
    rows: Tensor
    """Rows within this rank's part, in the order of the ranks that ask."""
    n_asked: Tensor
    """Number of rows that each rank asks for."""
    n_repeats: Tensor
    """How often a row is in the batch of the rank that asks: its gradient, if the loss is a sum."""


class Share:
    """Draws batches for one rank of many."""

    def __init__(self, source: IdSource, rank: int, n_ranks: int) -> None:
        self.source, self.rank, self.n_ranks = source, rank, n_ranks

    def draw(self, n: int) -> list[Batch]:
        """Draw the batches of all ranks, and keep what this rank sees of them."""
        return [self._draw_one() for _ in range(n)]

    def _draw_one(self) -> Batch:
        of_ranks = self.source.draw(self.n_ranks)
        asked = [self._asked_of_us(torch.from_numpy(ids).to(self.source.device)) for ids in of_ranks]
        rows, repeats = zip(*asked, strict=True)
        n_asked = torch.tensor([len(one) for one in rows])
        return Batch(of_ranks[self.rank], torch.cat(rows), n_asked, torch.cat(repeats).float())

    def _asked_of_us(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows, repeats = torch.unique(ids, return_counts=True)
        is_ours = rows % self.n_ranks == self.rank
        return rows[is_ours] // self.n_ranks, repeats[is_ours]


class StandIn:
    """Stands in for the other ranks in exchanges of torch.distributed and of gloo.

    The exchanges of a step are those of its lookup (a header, rows, weights) and of its gradients (a header,
    rows, gradients). Weights of other owners are zeros: the gradient of a sum does not depend on them.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.answer: Tensor | None = None
        """The weights that this rank has sent last."""
        self._n_values = 0

    def take(self, batch: Batch) -> Ids:
        """Begin a step; returns the ids of this rank."""
        self.batch, self._n_values = batch, 0
        return batch.ids

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, received: Any = None, counts: Any = None, group: Any = None
    ) -> StandIn:
        """Fill in what the other ranks would send."""
        if not received:  # a header: state, digest and count for each rank
            output.copy_(sent)
            if self.batch is not None:
                output[:, 2] = self.batch.n_asked
        elif self.batch is not None and output.dim() == 1:
            output.copy_(self.batch.rows)
        elif self.batch is not None:
            self._n_values += 1
            if self._n_values == 1:
                self.answer = sent
                output.zero_()
            else:
                output.view(torch.float32).copy_(self.batch.n_repeats.unsqueeze(1))
        return self

    alltoall_base = all_to_all_single

    def allgather(self, outputs: Any, sent: Any) -> StandIn:
        """Fill in what this rank sends: all ranks have the same."""
        return self

    def wait(self, *_: Any) -> None:
        """Do nothing, since the exchange is done."""


@contextmanager
def one_of_many(rank: int, n_ranks: int) -> Iterator[StandIn]:
    """Begin a process group of which this process is one rank, and the others are a stand-in."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stand_in = StandIn()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
    try:
        with (
            patch.object(dist, "all_to_all_single", stand_in.all_to_all_single),
            patch.object(dist, "ProcessGroupGloo", lambda *_: stand_in),
        ):
            yield stand_in
    finally:
        dist.destroy_process_group()


def take_step(table: FlatbedTable, others: StandIn, batch: Batch) -> Tensor:
    """Take this rank's part of a step."""
    return table.step(others.take(batch))


def sum_of(rows: Tensor) -> Tensor:
    """Return a loss whose gradient is one."""
    return rows.sum()


def run_share(options: Options) -> Iterator[Row]:
    """Time the steps of one rank of many."""
    spec = scaled(SHARE_SPEC, options)
    for n_ranks in SHARES:
        ok = share_is_right(n_ranks, options)
        for distribution in DISTRIBUTIONS:
            yield from time_share(options, "share", spec, (distribution, n_ranks), ok=ok)


def run_host(options: Options) -> Iterator[Row]:
    """Time steps of few ids, which are those of the host."""
    spec = scaled(HOST_SPEC, options)
    for n_ranks in HOSTS:
        ok = n_ranks == 1 or share_is_right(n_ranks, options)  # one rank: see `run_world`
        yield from time_share(options, "host", spec, ("uniform", n_ranks), ok=ok)


def time_share(
    options: Options, case: str, spec: TableSpec, drawn: tuple[str, int], *, ok: bool | None
) -> Iterator[Row]:
    """Time the steps of one rank, given the distribution of ids and the number of ranks."""
    distribution, n_ranks = drawn
    source = IdSource(distribution, spec.n_rows, spec.n_ids, device=options.device)
    share = Share(source, n_ranks // 2, n_ranks)
    plan = SMALL_PLAN if options.is_small else SHARE_PLAN
    with one_of_many(share.rank, n_ranks) as others:
        table = FlatbedTable(spec, options.device, shard="row")
        table.model = sum_of
        counts: list[Any] = []
        steps = counted(each(partial(take_step, table, others)), table, counts)
        found = time_in_turns(options.choose({SHARDED: steps}), share.draw, plan, options)
        table.close()
    harness.free_memory(options.device)
    setting = {"distribution": distribution, "ranks": n_ranks, **spec.setting}
    for name, readings in found.items():
        spread, rate = percentiles(readings.back_to_back), hit_rate(counts)
        metrics = {"back_to_back_ms": spread, "hit_rate": rate, **modelled(spec, n_ranks, rate)}
        n = len(readings.back_to_back)
        yield options.row(f"shards {case}", name, setting, metrics, n_samples=n, ok=ok)


def hit_rate(counts: list[Any]) -> float:
    """Return the share of hits, given hits and misses of each turn; the first one warms up."""
    hits, misses = sum(counts[1:])
    return float(hits / max(1, hits + misses))


def modelled(spec: TableSpec, n_ranks: int, hit_rate: float) -> dict[str, float]:
    """Return times of the cost model: of the part that is measured here, of wires, and of the whole step."""
    nbytes = 4 * spec.dim
    cost = cost_model.sharded_step(
        spec.n_rows, nbytes, 3 * nbytes, n_ranks=n_ranks, n_ids=spec.n_ids, hit_rate=hit_rate
    )
    names = ("the host", "kernels", "GPU memory")
    own = cost.bus_bytes / cost_model.BUS + sum(cost.seconds.get(name, 0.0) for name in names)
    wires = sum(cost.seconds.get(name, 0.0) for name in ("NVLink", "the network", "headers", "messages"))
    return {
        "model_ms": 1e3 * own,
        "not_measured_wire_ms": 1e3 * wires,
        "not_measured_step_ms": 1e3 * cost.step_seconds,
    }


def share_is_right(n_ranks: int, options: Options) -> bool:
    """Train one rank's rows, and all rows in one process on the batches of all ranks: the same bits."""
    device, rank, n_steps = options.device, n_ranks // 2, 4
    spec = TableSpec(16 * n_ranks, 8, 32)
    share = Share(IdSource("zipf 1.05", spec.n_rows, spec.n_ids, device=device, seed=3), rank, n_ranks)
    batches = share.draw(n_steps)
    with one_of_many(rank, n_ranks) as others:
        table = FlatbedTable(spec, device, shard="row")
        table.model = sum_of
        for batch in batches:
            take_step(table, others, batch)
        local = torch.arange(spec.n_rows // n_ranks)
        n_asked = torch.zeros(n_ranks, dtype=torch.int64)
        n_asked[0] = len(local)  # by the first rank, and by no other
        others.take(Batch(batches[0].ids, local.to(device), n_asked, local))
        table.emb.read_rows([])
        assert others.answer is not None
        found = others.answer.view(torch.float32)
        table.close()
    whole = FlatbedTable(spec, device)
    whole.model = lambda rows: rows.sum() / n_ranks
    share.source = IdSource("zipf 1.05", spec.n_rows, spec.n_ids, device=device, seed=3)
    for _ in range(n_steps):
        whole.step(np.concatenate(share.source.draw(n_ranks)))
    expected = whole.read(local.numpy() * n_ranks + rank)
    whole.close()
    return harness.same_bits(found, expected)


# ---- balance of owners


def run_balance(options: Options) -> Iterator[Row]:
    """Compute how many rows the busiest owner is asked for. The first rows of the table are most frequent."""
    n_rows, n_ids = (200_000, 2048) if options.is_small else (SHARE_SPEC.n_rows, SHARE_SPEC.n_ids)
    for distribution, exponent in DISTRIBUTIONS.items():
        asked = rows_asked(n_rows, n_ids, exponent)
        for n_ranks in OWNERS:
            found = {
                CYCLIC: owners_ratio(asked, np.arange(n_rows) % n_ranks),
                RANGES: owners_ratio(asked, np.arange(n_rows) * n_ranks // n_rows),
            }
            setting = {"distribution": distribution, "rows": n_rows, "ids": n_ids, "ranks": n_ranks}
            for name, ratio in found.items():
                ok = name != CYCLIC or ratio <= max(1.05, found[RANGES])
                yield options.row(
                    "shards balance", name, setting, {"busiest_ratio": ratio}, n_samples=1, ok=ok
                )


def rows_asked(n_rows: int, n_ids: int, exponent: float | None) -> Any:
    """Return the share of batches that have each row: an owner is asked once per batch and row."""
    weights = np.arange(1, n_rows + 1, dtype=np.float64) ** -(exponent or 0.0)
    return -np.expm1(n_ids * np.log1p(-weights / weights.sum()))


def owners_ratio(asked: Any, owners: Any) -> float:
    """Return the rows of the busiest owner over those of the mean one."""
    of_owners = np.bincount(owners, weights=asked)
    return float(of_owners.max() / of_owners.mean())
