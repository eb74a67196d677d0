"""Batches of ids from the host, through a cache by graphs that read them from the host's memory."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import flatbed
from flatbed.tables.cache import DeviceCache
from flatbed.tables.cache.admission_graph import AT_ONCE

pytestmark = pytest.mark.gpu
ROWS, DIM = 5000, 24
A_WHILE = 20_000_000  # cycles of the GPU, about 10 ms


def table(n_slots: int = 2000, **options: Any) -> tuple[flatbed.Embedding, Any]:
    emb = flatbed.Embedding(ROWS, DIM, device="cuda", cache_rows=n_slots, **options)
    return emb, flatbed.optim.SGD(emb, lr=0.5)


def batches(n: int, size: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(size)
    return [generator.integers(0, ROWS, size) for _ in range(n)]


def passages(emb: flatbed.Embedding) -> list[Any]:
    cache = emb.table.store.cache
    assert isinstance(cache, DeviceCache)
    return [one for kind in cache.passages.free.values() for one in kind]


def n_made(emb: flatbed.Embedding) -> int:
    cache = emb.table.store.cache
    assert isinstance(cache, DeviceCache)
    return sum(cache.passages.n_made.values())


@pytest.mark.parametrize("size", [1, 2, 333, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_lookups_before_the_gpu_begins(size: int, dtype: torch.dtype) -> None:
    """More than there is memory for: the host waits until what it has given was taken."""
    emb, _ = table(dtype=dtype)
    given = batches(5 + 3 * AT_ONCE, size)
    expected = emb.read_rows(np.arange(ROWS)).clone()
    for ids in given[:5]:  # from the third on, by a graph
        emb(ids)
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE)  # type: ignore[no-untyped-call,unused-ignore]
    found = [emb(ids).detach() for ids in given]
    for ids, rows in zip(given, found, strict=True):
        assert torch.equal(rows.cpu(), expected[torch.from_numpy(ids)].cpu())
    assert 1 < len(passages(emb)) <= AT_ONCE


def test_training_far_ahead_of_the_gpu() -> None:
    """The same numbers as without a cache, however late the GPU is."""
    (emb, optimizer), (plain, other) = table(seed=3), table(0, seed=3)
    for number, ids in enumerate(batches(40, 500)):
        if number % 10 == 5:
            torch.cuda._sleep(A_WHILE)  # type: ignore[no-untyped-call,unused-ignore]
        for module, one in ((emb, optimizer), (plain, other)):
            module(ids).square().sum().backward()
            one.step()
    every = np.arange(ROWS)
    assert torch.equal(emb.read_rows(every), plain.read_rows(every))


@pytest.mark.parametrize("value", [ROWS, -1, 1 << 40, -(1 << 32)])
def test_ids_out_of_range(value: int) -> None:
    """They are said before anything comes through, even if they look right in 32 bits."""
    emb, optimizer = table()
    given = [ids.reshape(20, 10) for ids in batches(6 + 2 * AT_ONCE, 200)]
    for ids in given[:5]:
        emb(ids)
    bad = given[5].copy()
    bad[5, 7] = value
    before, weights = emb.table.cache_stats(), emb.read_rows(np.arange(ROWS))
    for _ in range(2 * AT_ONCE):
        with pytest.raises(IndexError, match=rf"id {value} at position \(5, 7\) is out of range"):
            emb(bad)
    optimizer.step()
    assert emb.table.cache_stats() == before
    gc.collect()
    assert len(passages(emb)) == n_made(emb) > 0  # none is lost
    for ids in given:
        assert torch.equal(emb(ids).detach().cpu(), weights[torch.from_numpy(ids)].cpu())


def test_a_launch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is used again, and nobody waits for what was never launched."""
    from flatbed.kernels._triton import passage

    emb, _ = table()
    first, *given = batches(6 + 2 * AT_ONCE, 200)
    for _ in range(5):
        emb(first)

    def fail(self: Any) -> None:
        raise RuntimeError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(passage.Graph, "launch", fail)
        for ids in given[: 2 * AT_ONCE]:
            with pytest.raises(RuntimeError, match="no launch"):
                emb(ids)
    expected = emb.read_rows(np.arange(ROWS))
    for ids in given:
        assert torch.equal(emb(ids).detach().cpu(), expected[torch.from_numpy(ids)].cpu())


def test_a_table_that_goes_while_the_gpu_is_at_work() -> None:
    """What its graphs read and write on the host stays until they are done."""
    emb, _ = table()
    given = batches(8, 300)
    for ids in given:
        emb(ids)
    torch.cuda.synchronize()
    staged = [one.staged for one in passages(emb)]
    torch.cuda._sleep(A_WHILE)  # type: ignore[no-untyped-call,unused-ignore]
    rows = emb(given[0])
    assert not all(one.taken for one in staged)
    del emb, rows
    gc.collect()
    left = [torch.zeros(300, dtype=torch.int32, pin_memory=True) for _ in range(20)]
    del staged
    gc.collect()
    torch.cuda.synchronize()
    assert not any(bool(one.any()) for one in left)


def test_a_capture_that_fails() -> None:
    """Torch is as it was: random numbers can be drawn, memory is used again, and others can be captured."""
    from flatbed.kernels._triton.passage import Graph

    device = torch.device("cuda", 0)
    held = torch.zeros(5, device=device)

    def spoil() -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    for spoils in (True, False, True, True, False):
        pool = torch.cuda.graph_pool_handle()
        if spoils:
            with pytest.raises(RuntimeError):
                Graph([lambda: held.add_(1), spoil, lambda: held.add_(1)], device, pool)  # type: ignore[list-item,return-value]
        else:
            graph = Graph([lambda: held.add_(1)], device, pool)  # type: ignore[list-item,return-value]
            graph.launch()
        torch.rand(3, device=device)
        many = [torch.empty(1 << 20, device=device) for _ in range(3)]
        before = torch.cuda.memory_allocated()
        del many
        assert torch.cuda.memory_allocated() < before
    assert held.tolist() == [2.0] * 5
    emb, _ = table()
    expected = emb.read_rows(np.arange(ROWS)).clone()
    for ids in batches(6, 100):
        assert torch.equal(emb(ids).detach().cpu(), expected[torch.from_numpy(ids)].cpu())
    assert passages(emb)


def test_garbage_is_not_collected_during_a_capture() -> None:
    from flatbed.kernels._triton.passage import Graph

    seen: list[bool] = []
    parts: list[Any] = [lambda: seen.append(gc.isenabled()), lambda: held.add_(1)]
    held = torch.zeros(5, device="cuda")
    Graph(parts, torch.device("cuda", 0), torch.cuda.graph_pool_handle())
    assert seen == [False]
    assert gc.isenabled()
