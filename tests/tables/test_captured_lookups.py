"""Captured steps of prefetched batches: the same bits as eager steps, and rows that are prefetched."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flatbed
from flatbed.capture import CapturedStep
from flatbed.tables import lookup
from flatbed.tables.captured_lookups import (
    CaptureContext,
    NotedLookup,
    allocate_lookups,
    capture_context,
    current_capture,
    not_prefetched,
)
from flatbed.tables.lookup import LookupFunction, prepare_lookup, prepare_replay
from flatbed.tables.prefetch import find_prefetched
from tests.recorded_graphs import NoStream, address, graph_device, record_graphs, tensors

ROWS, DIM, N_IDS, DEPTH = 1000, 8, 64, 2
LONG = 66  # equal ids: the sums of more than 64 need `rank`
__all__ = ["graph_device"]
with_another_cache = pytest.mark.filterwarnings("ignore:a table that CUDA graphs")


def drawn(n: int = 12, *, n_same: int = 0) -> list[Tensor]:
    """Skewed ids, some of them several times, and `n_same` more of one id."""
    generator = torch.Generator().manual_seed(1)
    drawn = [(torch.rand(N_IDS, generator=generator) ** 3 * ROWS).long() for _ in range(n)]
    return [torch.cat([ids, torch.full((n_same,), ROWS // 2)]) for ids in drawn]


class Allocations(TorchDispatchMode):
    """The memory of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.addresses |= set(map(address, tensors(found)))
        return found


class Model(nn.Module):
    def __init__(self, device: str, **options: Any) -> None:
        super().__init__()
        self.items = flatbed.Embedding(
            ROWS, DIM, device=device, seed=3, **{"cache_rows": 6 * N_IDS, "shard": None, **options}
        )
        self.other = flatbed.Embedding(ROWS, DIM, device=device, seed=4, cache_rows=6 * N_IDS, shard=None)
        self.optimizer = flatbed.optim.Adam(self.parameters(), lr=0.1)

    def step(self, ids: Tensor) -> Tensor:
        """Look up in two tables; in the second one twice."""
        rows = self.items(ids) * self.other(ids.view(2, -1)).view(-1, DIM) + self.other(ids)
        loss = rows.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def everything(self) -> list[Tensor]:
        tables, rows = (self.items.table, self.other.table), range(ROWS)
        state = [table.read_state(name, rows) for table in tables for name in table.state_names]
        return [table.read_rows(rows) for table in tables] + state


@cache
def expected(batches: tuple[tuple[int, ...], ...], device: str) -> tuple[list[float], list[Tensor]]:
    """Losses and rows of eager steps."""
    model = Model(device)
    losses = [float(model.step(torch.tensor(ids, device=device))) for ids in batches]
    return losses, model.everything()


def check(model: Model, losses: list[float], batches: list[Tensor], device: str) -> None:
    all_losses, everything = expected(tuple(tuple(ids.tolist()) for ids in batches), device)
    assert losses == all_losses
    for found, one in zip(model.everything(), everything, strict=True):
        assert torch.equal(found, one)


def prefetched(model: Model, batches: list[Tensor]) -> flatbed.Prefetcher:
    same = lambda ids: ids  # noqa: E731
    return flatbed.Prefetcher(batches, {model.items: same, model.other: same}, depth=DEPTH)


def prefetched_tables(step: Callable[[Any], Any]) -> list[flatbed.Table]:
    """Those in whose prefetched rows the graph of a step looks up."""
    assert isinstance(step, CapturedStep)
    assert step._graph is not None
    return [lookup.table for lookup in step._graph.lookups]


def was_prefetched(step: Callable[[Any], Any], model: Model) -> bool:
    """The graph admits no rows, and rows are prefetched."""
    caches: list[Any] = [table._store.cache for table in (model.items.table, model.other.table)]
    return len(prefetched_tables(step)) == 2 and not any(cache.has_unseen_replays for cache in caches)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_captured_steps_of_prefetched_batches(dtype: torch.dtype, graph_device: str) -> None:
    batches = [ids.to(dtype) for ids in drawn()]
    model = Model(graph_device)
    step = flatbed.capture(model.step, batches[0].to(graph_device))
    losses = [float(step(ids)) for ids in prefetched(model, batches)]
    assert was_prefetched(step, model)
    check(model, losses, batches, graph_device)


def test_batches_that_were_not_prefetched_between_those_that_were(graph_device: str) -> None:
    batches = drawn()
    model, losses = Model(graph_device), []
    step = flatbed.capture(model.step, batches[0].to(graph_device))
    for first in (0, 6):
        losses += [float(step(ids)) for ids in prefetched(model, batches[first : first + 4])]
        losses.append(float(step(batches[first + 4].to(graph_device))))  # on the GPU, and on the host
        losses.append(float(step(batches[first + 5])))
    assert was_prefetched(step, model)
    check(model, losses, batches, graph_device)


@pytest.mark.filterwarnings("ignore:the training step looks up rows")
def test_a_loop_that_is_left_and_ids_that_change(graph_device: str) -> None:
    batches = drawn()
    model, losses = Model(graph_device), []
    step = flatbed.capture(model.step, batches[0].to(graph_device))
    for n, ids in enumerate(prefetched(model, batches)):
        if n == 8:
            break
        if n in (3, 6):  # captured, and replayed
            ids.copy_(batches[n + 1])
            batches[n] = batches[n + 1]
        losses.append(float(step(ids)))
    with torch.cuda.stream(torch.cuda.Stream()):
        losses += [float(step(ids)) for ids in prefetched(model, batches[8:])]
    check(model, losses, batches, graph_device)


@with_another_cache
@pytest.mark.parametrize("changed_at", [3, 6])  # the call that would capture, and one that would replay
def test_another_cache_is_captured_after_another_warm_up(changed_at: int, graph_device: str) -> None:
    """In which batches of the former cache end. The graph would use other rows than eager lookups."""
    batches = drawn()
    model, losses = Model(graph_device), []
    step = flatbed.capture(model.step)
    for n, ids in enumerate(prefetched(model, batches)):
        if n == changed_at:
            assert n == 3 or was_prefetched(step, model)
            model.items.table.set_cache(cache_rows=8 * N_IDS)
        losses.append(float(step(ids)))
    assert was_prefetched(step, model)
    check(model, losses, batches, graph_device)


CHANGES: dict[str, Callable[[Model], object]] = {
    "frozen": lambda model: model.items.requires_grad_(False),
    "resized": lambda model: model.items.table.resize(ROWS + 5),
    "another optimizer": lambda model: setattr(
        model, "optimizer", flatbed.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ),
}


@with_another_cache
@pytest.mark.filterwarnings("ignore:the training step looks up rows")
@pytest.mark.parametrize("options", [{"storage": "device"}, {"cache_rows": 0}, {}], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_cannot_follow_is_captured_again(
    name: str, options: dict[str, Any], graph_device: str
) -> None:
    """Replays would use memory that was freed, or train a table that is frozen."""
    batches, results = drawn(14), []
    for captured in (True, False):  # no kernel is loaded by the eager steps
        model = Model(graph_device, **({"cache_rows": None} if "storage" in options else {}), **options)
        step: Any = flatbed.capture(lambda ids, model=model: model.step(ids)) if captured else model.step
        loader: Any = prefetched(model, batches) if captured else [ids.to(graph_device) for ids in batches]
        losses = []
        for n, ids in enumerate(loader):
            if n == 8:
                graph = step._graph if captured else None
                CHANGES[name](model)
            losses.append(float(step(ids)))
        assert not captured or graph is not step._graph is not None
        results.append([torch.tensor(losses), *model.everything()])
    for found, one in zip(*results, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("is_first", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_gradients_from_outside_of_a_captured_step(is_first: bool, graph_device: str) -> None:
    """The step uses them, unless it begins with `zero_grad`."""
    batches, results = drawn(14), []
    for captured in (False, True):
        model = Model(graph_device)

        def train(ids: Tensor, model: Model = model) -> Tensor:
            if is_first:
                model.optimizer.zero_grad()
            loss = model.items(ids).square().mean()
            loss.backward()
            model.optimizer.step()
            if not is_first:
                model.optimizer.zero_grad()
            return loss.detach()

        step: Any = flatbed.capture(train) if captured else train
        losses = []
        for n, ids in enumerate(batches):
            if n == 6:
                assert not captured or step._graph is not None
                model.items(ids.to(graph_device)).sum().backward()
            losses.append(float(step(ids.to(graph_device))))
        assert not captured or step._graph is not None
        results.append([torch.tensor(losses), *model.everything()])
    for found, one in zip(*results, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("options", [{"cache_rows": 0}, {"cache_rows": 0, "storage": "device"}, {}])
def test_a_replay_between_a_lookup_and_its_step(options: dict[str, Any], graph_device: str) -> None:
    """The eager step goes on from what the replay has written."""
    batches, results = drawn(6), []
    for captured in (False, True):
        model = Model(graph_device, **options)
        step: Any = flatbed.capture(model.step) if captured else model.step
        for ids in batches:
            step(ids.to(graph_device))
        assert not captured or step._graph is not None
        loss = model.items(batches[0].to(graph_device)).square().sum()
        step(batches[0].to(graph_device))
        loss.backward()
        model.optimizer.step()
        results.append(model.everything())
    for found, one in zip(*results, strict=True):
        assert torch.equal(found, one)


@pytest.mark.filterwarnings("ignore:hyperparameters of an optimizer have changed")
def test_each_capture_follows_a_step(graph_device: str) -> None:
    """Optimizers have memory for few captures between two steps; a scheduler may change the rate often."""
    batches, model, runs = drawn(24), Model(graph_device), []

    def train(ids: Tensor) -> Tensor:
        runs.append(lookup.is_capturing(ids.device))
        return model.step(ids)

    step, losses = flatbed.capture(train, batches[0].to(graph_device)), []
    expected_model, expected_losses = Model(graph_device), []
    for n, ids in enumerate(batches):
        for one in (model, expected_model) if n % 2 == 0 else ():
            one.optimizer.param_groups[0]["lr"] *= 0.9
        losses.append(float(step(ids.to(graph_device))))
        expected_losses.append(float(expected_model.step(ids.to(graph_device))))
    assert losses == expected_losses
    assert sum(runs) == 6  # of 24 calls, after three warm-ups each
    assert not any(one and other for one, other in pairwise(runs))
    for found, one in zip(model.everything(), expected_model.everything(), strict=True):
        assert torch.equal(found, one)


def test_an_error_in_a_warm_up_leaves_streams_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what is issued next would run beside a part of the step."""
    record_graphs(monkeypatch)
    waits: list[Any] = []
    monkeypatch.setattr(NoStream, "wait_stream", lambda stream, other: waits.append((stream, other)))

    def fail(batch: Tensor) -> None:
        raise KeyboardInterrupt

    step = flatbed.capture(fail, torch.zeros(2))
    with pytest.raises(KeyboardInterrupt):
        step(torch.zeros(2))
    (side, current), last = waits
    assert last == (current, side)


def test_a_step_that_is_dropped_waits_for_its_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay writes to pinned memory, which torch hands out again."""
    record_graphs(monkeypatch)
    waits: list[Any] = []
    monkeypatch.setattr(NoStream, "synchronize", lambda event: waits.append(event))
    step = flatbed.capture(lambda x: x + 1, torch.zeros(2))
    for _ in range(5):
        step(torch.zeros(2))
    last = step._graph.replayed[0]
    waits.clear()
    del step
    assert waits == [last]


class Cyclic:
    """Garbage that only the collector frees, with a graph of torch: that ends a capture when it is freed."""

    def __init__(self, graph: Any, on_free: Callable[[], object]) -> None:
        self.graph, self.on_free, self.own = graph, on_free, self

    def __del__(self) -> None:
        self.on_free()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_no_garbage_is_collected_during_a_capture(graph_device: str) -> None:
    graphs, freed = [torch.cuda.CUDAGraph()], list[bool]()
    with torch.cuda.graph(graphs[0]):
        pass

    def train(x: Tensor) -> Tensor:
        if lookup.is_capturing(x.device):
            Cyclic(graphs.pop(), lambda: freed.append(lookup.is_capturing(x.device)))
            assert [[] for _ in range(10_000)]  # a collection begins after so many containers
        return x + 1

    step, batch = flatbed.capture(train), torch.zeros(2, device=graph_device)
    found = [step(batch).tolist() for _ in range(5)]
    assert found == [[1.0, 1.0]] * 5
    assert not graphs
    assert gc.isenabled()
    gc.collect()
    assert freed == [False]


class ChangesIds(Model):
    """Changes its ids in place before the lookup."""

    def step(self, ids: Tensor) -> Tensor:
        return super().step(ids.clamp_(min=5).add_(1).remainder_(ROWS))


class LooksUpParts(Model):
    """Looks up a part of the ids, too."""

    def step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.items(ids).square().mean() + self.items(ids[:7]).mean() + self.other(ids).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_one_table_that_is_not_prefetched(graph_device: str) -> None:
    """The graph admits the rows of both."""
    batches, model = drawn(), Model(graph_device)
    step = flatbed.capture(model.step, batches[0].to(graph_device))
    loader = flatbed.Prefetcher(batches, {model.items: lambda ids: ids}, depth=DEPTH)
    with pytest.warns(UserWarning, match="no more are prefetched"):
        losses = [float(step(ids)) for ids in loader]
    assert prefetched_tables(step) == []
    check(model, losses, batches, graph_device)


@pytest.mark.parametrize("kind", [ChangesIds, LooksUpParts])
def test_lookups_of_other_ids_in_the_step(kind: type[Model], graph_device: str) -> None:
    """The graph admits their rows."""
    batches, model = drawn(), kind(graph_device)
    step = flatbed.capture(model.step, batches[0].to(graph_device))
    with pytest.warns(UserWarning, match="no more are prefetched"):
        losses = [float(step(ids)) for ids in prefetched(model, [ids.clone() for ids in batches])]
    assert prefetched_tables(step) == []
    expected = kind(graph_device)
    assert losses == [float(expected.step(ids.to(graph_device))) for ids in batches]
    for found, one in zip(model.everything(), expected.everything(), strict=True):
        assert torch.equal(found, one)


class UsesMemoryBefore(Model):
    """Frees memory of the graph before the lookup, as much as its unique rows take."""

    def step(self, ids: Tensor) -> Tensor:
        from flatbed.kernels._triton.rows import result_sizes

        torch.full((sum(result_sizes(N_IDS)),), 7, dtype=torch.int64, device=ids.device)
        return super().step(ids)


def test_ids_that_are_repeated_often(graph_device: str) -> None:
    batches, model = drawn(6, n_same=LONG), Model(graph_device)
    step = flatbed.capture(model.step)
    lookups = {emb: lambda ids: ids for emb in (model.items, model.other)}
    losses = [float(step(ids)) for ids in flatbed.Prefetcher(batches, lookups, depth=1)]
    assert was_prefetched(step, model)
    check(model, losses, batches, graph_device)


def test_temporaries_of_the_graph_do_not_overwrite_unique_rows(graph_device: str) -> None:
    batches, model = drawn(), UsesMemoryBefore(graph_device)
    step = flatbed.capture(model.step)
    losses = [float(step(ids)) for ids in prefetched(model, batches)]
    assert was_prefetched(step, model)
    check(model, losses, batches, graph_device)


class WithFrozen(Model):
    """Looks up in a table that is not trained, too."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        weights = torch.ones(ROWS, DIM)
        self.frozen = flatbed.Embedding.from_pretrained(weights, device=device)

    def step(self, ids: Tensor) -> Tensor:
        return torch.stack([super().step(ids), self.frozen(ids).sum()])


def test_a_frozen_table_beside_prefetched_ones(graph_device: str) -> None:
    batches, model = drawn(), WithFrozen(graph_device)
    step = flatbed.capture(model.step)
    found = [step(ids).tolist() for ids in prefetched(model, batches)]
    assert was_prefetched(step, model)
    assert {total for _, total in found} == {N_IDS * DIM}
    check(model, [loss for loss, _ in found], batches, graph_device)


def test_a_frozen_table_needs_no_prefetch(kernel_device: str) -> None:
    frozen = flatbed.Embedding.from_pretrained(torch.ones(ROWS, DIM), device=kernel_device)
    ids = drawn(1)[0].to(kernel_device)
    with capture_context([ids], [ids]) as found:
        frozen(ids)
    assert found.noted == [(frozen.table, None)]
    assert not_prefetched(found.noted, [ids]) == []
    assert allocate_lookups(found.noted, [ids]) == []


@pytest.mark.parametrize("options", [{"storage": "device"}, {"cache_rows": 0}], ids=str)
def test_a_table_without_a_cache_beside_one_that_is_prefetched(
    options: dict[str, Any], graph_device: str
) -> None:
    batches, model = drawn(), Model(graph_device, **{"cache_rows": None, **options})
    step = flatbed.capture(model.step)
    losses = [float(step(ids)) for ids in prefetched(model, batches)]
    assert prefetched_tables(step) == [model.other.table]
    cache: Any = model.other.table._store.cache
    assert not cache.has_unseen_replays
    check(model, losses, batches, graph_device)


def test_bad_ids_that_were_not_prefetched_raise_in_the_next_call_at_the_latest(graph_device: str) -> None:
    batches = drawn()
    model = Model(graph_device)
    step = flatbed.capture(model.step, batches[0].to(graph_device))
    for ids in prefetched(model, batches):
        step(ids)
    bad = batches[0].clone()
    bad[3] = ROWS
    with pytest.raises(IndexError, match=f"id {ROWS} at position 3"):
        step(bad)
    run = [bad.to(graph_device), batches[0].to(graph_device)]
    with pytest.raises(IndexError, match=f"id {ROWS} at position 3"):
        list(map(step, run))


@pytest.mark.filterwarnings("ignore:a table that CUDA graphs were captured with")
def test_bad_ids_after_a_resize_name_the_present_bound(graph_device: str) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device=graph_device, cache_rows=6 * N_IDS, shard=None)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)

    def train(ids: Tensor) -> Tensor:
        loss: Tensor = emb(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step: Any = flatbed.capture(train)
    good, bad = drawn(1)[0].to(graph_device), torch.full((N_IDS,), ROWS + 5, device=graph_device)
    for ids in 5 * [good]:
        step(ids)
    emb.table.resize(ROWS + 5)
    for ids in 5 * [good]:
        step(ids)
    assert step._graph is not None
    with pytest.raises(IndexError, match=f"table of {ROWS + 5} rows"):
        list(map(step, [bad, good]))


def test_bags_of_prefetched_ids(graph_device: str) -> None:
    batches, results = drawn(), []
    for captured in (False, True):
        bag = flatbed.EmbeddingBag(ROWS, DIM, mode="sum", seed=3, device=graph_device, cache_rows=6 * N_IDS)
        optimizer = flatbed.optim.SGD(bag, lr=0.1)

        def train(ids: Tensor, bag: Any = bag, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = bag(ids.view(8, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = flatbed.capture(train, batches[0].to(graph_device)) if captured else train
        loader = flatbed.Prefetcher(batches, {bag: lambda ids: ids}) if captured else batches
        results.append([float(step(ids.to(graph_device))) for ids in loader])
        if captured:
            assert prefetched_tables(step)
        results.append(bag.read_rows(range(ROWS)))
    assert results[0] == results[2]
    assert torch.equal(results[1], results[3])


# ---- interpreted: the kernels of a graph, called again for each batch


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lookups believe that they are captured, in the body of `capture_context`."""
    monkeypatch.setattr(lookup, "is_capturing", lambda device: current_capture() is not None)


@with_another_cache
@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("n_same", [0, LONG])
def test_what_a_replay_reads(n_same: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = drawn(6, n_same=n_same)
    cache_rows = 6 * (N_IDS + n_same)
    emb = flatbed.Embedding(ROWS, DIM, device=kernel_device, seed=3, cache_rows=cache_rows, shard=None)
    plain = flatbed.Embedding(ROWS, DIM, device=kernel_device, seed=3, cache_rows=0, shard=None)
    optimizers = [flatbed.optim.Adam(one, lr=0.1) for one in (emb, plain)]
    table, static, graph, n_hits = emb.table, batches[0].to(kernel_device), None, 0
    for ids in flatbed.Prefetcher(batches, {emb: lambda ids: ids}, depth=DEPTH):
        if graph is None:
            graph = allocate_lookups([NotedLookup(table, 0)], [ids])
            with capture_context([static], [ids], graph) as found, Allocations() as made:
                captured = prepare_lookup(table, static.view(2, -1), records_grad=True)
            assert captured.unique is graph[0].unique
            assert address(captured.keys) in made.addresses
            assert address(captured.unique.rows) not in made.addresses, (
                "kernels of the graph would write to it"
            )
            assert found.noted == [(table, 0)]
            assert not_prefetched(found.noted, [ids]) == []
            assert not_prefetched(found.noted, [ids.clone()]) == [table]
            assert [one.batch is None for one in graph] == [False]
            assert captured.unique.rows.data_ptr() != table._prefetched[0].unique.rows.data_ptr()
        for leaf in (ids, ids.flip(0)):  # prefetched, and not
            n_hits += find_prefetched(table, leaf, records_grad=True) is not None
            assert prepare_replay(graph, [leaf])
            captured.keys.copy_(leaf)  # a kernel of the graph
            rows = LookupFunction.apply(table, captured)  # type: ignore[no-untyped-call]
            assert rows.shape == (2, len(ids) // 2, DIM)
            assert torch.equal(rows.view(-1, DIM), plain(leaf))
            for out, optimizer in zip((rows, plain(leaf)), optimizers, strict=True):
                out.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert n_hits > 0
    assert torch.equal(emb.read_rows(range(ROWS)), plain.read_rows(range(ROWS)))
    cache, given = table._store.cache, [batches[0].to(kernel_device)]
    assert graph is not None
    assert cache is not None
    with mock.patch.object(cache, "location_for", wraps=cache.location_for) as ordered:
        assert prepare_replay(graph, given)
    assert ordered.called, "the replay would not wait for prefetches that move its rows"
    monkeypatch.setattr(cache, "has_unseen_replays", True)
    assert not prepare_replay(graph, given), "rows are no longer prefetched"
    monkeypatch.undo()
    table.set_cache(cache_rows=4 * N_IDS)
    assert not prepare_replay(graph, given), "the graph uses another cache"


def test_a_loop_over_rows_that_a_graph_admits_warns_once(kernel_device: str) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device=kernel_device, cache_rows=6 * N_IDS, shard=None)
    flatbed.optim.SGD(emb, lr=0.1)
    emb(drawn(1)[0]).sum().backward()
    cache = emb.table._store.cache
    assert cache is not None
    cache.has_unseen_replays = True  # as a capture in the middle of training does
    loader = flatbed.Prefetcher(drawn(4), {emb: lambda ids: ids}, depth=DEPTH)
    with pytest.warns(UserWarning, match=r"Table\(.*not prefetched: a captured CUDA graph") as found:
        assert not any(emb.table._prefetched for _ in loader)
    assert len(found) == 1
    assert found[0].filename == __file__
    for _ in loader:  # no second warning, which would be an error
        pass
    emb.table.set_cache(cache_rows=8 * N_IDS)
    assert all(emb.table._prefetched for _ in loader)


@pytest.mark.usefixtures("capturing")
def test_lookups_that_stay_in_the_graph(kernel_device: str) -> None:
    """Parts of the ids, ids that were not prefetched, and tables without a cache."""
    emb = flatbed.Embedding(ROWS, DIM, device=kernel_device, cache_rows=6 * N_IDS, shard=None)
    flatbed.optim.SGD(emb, lr=0.1)
    static = torch.zeros(N_IDS, dtype=torch.int64, device=kernel_device)

    def looked_up(found: CaptureContext, ids: Any) -> Any:
        return found.lookup(emb.table, ids, found.position_of(ids))

    for ids in flatbed.Prefetcher(drawn(2), {emb: lambda ids: ids}, depth=DEPTH):
        planned = partial(allocate_lookups, 2 * [NotedLookup(emb.table, 0)])
        with capture_context([static], [ids], planned([ids])) as found:
            for wrong in (static[1:], static.clone(), static.int(), [1, 2]):
                with pytest.raises(flatbed.FlatbedError, match="looks up other ids"):
                    looked_up(found, wrong)
            twice = [looked_up(found, static.view(shape)) for shape in ((2, 2, 16), (64,))]
            assert [tuple(one.shape) for one in twice] == [(2, 2, 16), (64,)]
            assert twice[0].unique is twice[1].unique
            static.add_(0)  # the step may have changed its ids
            with pytest.raises(flatbed.FlatbedError, match="looks up other ids"):
                looked_up(found, static)
        assert len(found.lookups) == 1
        with (
            capture_context([static], [ids.clone()], planned([ids])) as found,
            pytest.raises(flatbed.FlatbedError, match="looks up other ids"),
        ):
            looked_up(found, static)
        with capture_context([static], [ids]) as found:
            assert looked_up(found, static) is None
            with capture_context([], []):
                pass
            assert current_capture() is found


@pytest.mark.parametrize("n", [0, 1, 3, 1023, 1025])
def test_unique_rows_are_copied(kernel_device: str, n: int) -> None:
    from flatbed.kernels._triton.rows import copy_results_, empty_results, unique

    keys = torch.randint(50, (n,), dtype=torch.int32).to(kernel_device)
    found, copy = unique(keys, 50, None), empty_results(n, keys.device)
    copy_results_(copy, found)
    whole = [one.rows.new_empty(0).set_(one.rows.untyped_storage()) for one in (copy, found)]
    assert n == 0 or torch.equal(*whole)
    for name in ("rows", "inverse", "order", "starts", "rank"):
        views = [getattr(one, name) for one in (copy, found)]
        assert len({(view.dtype, view.shape, view.storage_offset()) for view in views}) == 1


@pytest.mark.usefixtures("capturing")
def test_a_leaf_without_ids(kernel_device: str) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device=kernel_device, cache_rows=6 * N_IDS, shard=None)
    flatbed.optim.SGD(emb, lr=0.1)
    none = torch.empty(0, dtype=torch.int64)
    static = [torch.zeros(N_IDS, dtype=torch.int64).to(kernel_device), none.to(kernel_device)]
    for ids, empty in flatbed.Prefetcher([(drawn(1)[0], none)] * 2, {emb: lambda batch: [*batch]}):
        planned = allocate_lookups([NotedLookup(emb.table, n) for n in (0, 1)], [ids, empty])
        with capture_context(static, [ids, empty], planned) as found:
            for one in static:
                prepare_lookup(emb.table, one, records_grad=True)
        assert not_prefetched(found.noted, [ids, empty]) == []
        assert prepare_replay(found.lookups, [ids, empty])


@pytest.mark.parametrize("is_other", [False, True])
def test_a_warm_up_notes_lookups_of_other_ids(kernel_device: str, is_other: bool) -> None:
    """All rows are admitted inside of the graph then."""
    emb = flatbed.Embedding(ROWS, DIM, device=kernel_device, cache_rows=6 * N_IDS, shard=None)
    flatbed.optim.SGD(emb, lr=0.1)
    static = torch.zeros(N_IDS, dtype=torch.int64, device=kernel_device)
    for ids in flatbed.Prefetcher(drawn(4), {emb: lambda ids: ids}, depth=DEPTH):
        static.copy_(ids)
        for other in (static[:7], [1, 2], static.clone()) if is_other else (static, static.view(2, -1)):
            with capture_context([static], [ids]) as found:
                batch = prepare_lookup(emb.table, other, records_grad=True)
            assert found.noted == [(emb.table, None if is_other else 0)]
            assert not_prefetched(found.noted, [ids]) == ([emb.table] if is_other else [])
            assert (batch.unique is emb.table._prefetched[0].unique) == (not is_other)
            with capture_context([static], [ids]) as found, torch.no_grad():
                emb(static)
            assert not_prefetched(found.noted, [ids]) == [emb.table]


# ---- lookups of other ids between prefetched ones


@pytest.mark.parametrize("with_others", [[4], [4, 5], range(12)], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_other_lookups_do_not_end_prefetching(kernel_device: str, depth: int, with_others: Any) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device=kernel_device, cache_rows=ROWS - 1, shard=None)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    batches, was_found = drawn(), []
    for n, ids in enumerate(flatbed.Prefetcher(batches, {emb: lambda ids: ids}, depth=depth)):
        was_found.append(find_prefetched(emb.table, ids, records_grad=True) is not None)
        loss = emb(ids).sum()
        if n in with_others:
            loss = loss + emb(batches[n].flip(0)).sum()
        cache: Any = emb.table._store.cache
        assert cache.protects(emb.table._prefetched[0]), "the step would wait for prefetches"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(was_found)
