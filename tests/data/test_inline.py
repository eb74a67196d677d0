"""Batches that are loaded quickly are loaded by the training thread; nothing else differs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import flatbed
from flatbed.data import Prefetcher, pipeline
from flatbed.data.pipeline import N_QUICK
from tests.data.fakes import FakePrefetch, batches, collect, first

pytestmark = pytest.mark.usefixtures("inline")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_training_thread_loads_after_some_quick_loads(
    depth: int, emb: flatbed.Embedding, prefetches: list[FakePrefetch]
) -> None:
    found = [first(batch) for batch in Prefetcher(batches(20), {emb: "items"}, depth=depth)]
    assert found == list(range(20))
    (prefetch,) = prefetches
    for call in ("check", "admit", "begin", "finish"):
        assert prefetch.numbers(call) == list(range(20))
    main = threading.get_ident()
    assert (main in prefetch.threads["check"]) == (not prefetch.reads_disk)
    assert prefetch.n_open == 0


def test_depth_counts_batches_ahead(emb: flatbed.Embedding, prefetches: list[FakePrefetch]) -> None:
    prefetched = iter(Prefetcher(batches(30), {emb: "items"}, depth=3))
    for _ in range(N_QUICK + 8):
        next(prefetched)
    (prefetch,) = prefetches
    if not prefetch.reads_disk:
        assert len(prefetch.numbers("check")) == N_QUICK + 8 + 3
        assert len(prefetch.numbers("admit")) == N_QUICK + 8 + 3
    prefetched.close()
    assert prefetch.n_open == 0


def test_a_slow_load_goes_back_to_the_thread(
    emb: flatbed.Embedding, prefetches: list[FakePrefetch], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetched = iter(Prefetcher(batches(40), {emb: "items"}))
    found = [first(next(prefetched)) for _ in range(15)]
    monkeypatch.setattr(pipeline, "QUICK_SECONDS", 0.0)
    found += [first(next(prefetched)) for _ in range(10)]
    prefetches[0].threads["check"].clear()
    monkeypatch.setattr(pipeline, "QUICK_SECONDS", 0.0)
    found += [first(batch) for batch in prefetched]
    assert found == list(range(40))
    assert threading.get_ident() not in prefetches[0].threads["check"]


class Failing(list[Any]):
    """A list whose 13th batch raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise OSError("no more disk")


def test_an_error_is_raised_when_its_turn_comes(emb: flatbed.Embedding) -> None:
    found: list[int] = []
    with pytest.raises(OSError, match="no more disk"):
        collect(Prefetcher(Failing(batches(12)), {emb: "items"}, depth=4), found)
    assert found == list(range(12))


def test_ids_out_of_range_raise_with_their_batch(emb: flatbed.Embedding) -> None:
    given = batches(12)
    given[9] = {"items": torch.tensor([10**6])}
    found: list[int] = []
    with pytest.raises(IndexError, match="1000000"):
        collect(Prefetcher(given, {emb: "items"}), found)
    assert found == list(range(9))


def test_code_of_the_user_stays_in_one_thread(emb: flatbed.Embedding) -> None:
    used = set()

    def load() -> Iterator[Any]:
        for batch in batches(20):
            used.add(threading.get_ident())
            yield batch

    assert len(list(Prefetcher(load(), {emb: "items"}))) == 20
    assert len(used) == 1
    assert threading.get_ident() not in used


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataloaders(num_workers: int) -> None:
    loader: DataLoader[Any] = DataLoader(list(range(40)), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    for _ in range(2):
        assert [batch.tolist() for batch in Prefetcher(loader)] == [[i, i + 1] for i in range(0, 40, 2)]


def test_training_is_the_same(interpreted: None) -> None:
    def train(depth: int | None) -> torch.Tensor:
        torch.manual_seed(3)
        emb = flatbed.Embedding(60, 4, seed=1, cache_rows=30)
        optimizer = flatbed.optim.Adam(emb, lr=0.1)
        given = [torch.randint(0, 60, (6,)) for _ in range(15)]
        loader: Any = given if depth is None else Prefetcher(given, {emb: lambda batch: batch}, depth=depth)
        for ids in loader:
            emb(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return emb.read_rows(range(60))

    expected = train(None)
    for depth in (1, 2, 3):
        assert torch.equal(train(depth), expected)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
