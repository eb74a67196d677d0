"""SMs that a Prefetcher reserves: while rows are missing, and for as long as the loop runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flatbed
from flatbed import Prefetcher
from flatbed.data import sm_reserve
from flatbed.data.sm_reserve import BUS_BYTES, MOVER_SMS, PERIOD, SmPolicy
from tests.data.fakes import CPU, FakePrefetch, batches
from tests.data.test_prefetcher import WAYS, leave_at_once

RECORD_BYTES = 1000


class FakeReserve:
    """Writes down what is set."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.n_sms = device, 0
        self.calls: list[int] = []
        made.append(self)

    def set(self, n_sms: int) -> None:
        if n_sms != self.n_sms:
            self.n_sms = n_sms
            self.calls.append(n_sms)


made: list[FakeReserve] = []


@pytest.fixture(autouse=True)
def reserves(monkeypatch: pytest.MonkeyPatch) -> list[FakeReserve]:
    made.clear()
    monkeypatch.setattr(sm_reserve, "SmReserve", FakeReserve)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_number_is_reserved_for_the_loop(
    emb: flatbed.Embedding, prefetches: list[FakePrefetch], way: Any
) -> None:
    way(Prefetcher(batches(6), {emb: "items"}, reserve_sms=7))
    (reserve,) = made
    assert reserve.calls == ([] if way is leave_at_once else [7, 0])


def test_an_error_of_the_loader_ends_the_reservation(emb: flatbed.Embedding) -> None:
    given = [*batches(3), {"items": torch.tensor([-1])}]
    with pytest.raises(IndexError):
        list(Prefetcher(given, {emb: "items"}, reserve_sms=7))
    assert made[0].calls == [7, 0]


def test_nothing_is_reserved_without_prefetched_rows(emb: flatbed.Embedding) -> None:
    list(Prefetcher(batches(3), {emb: "items"}))
    list(Prefetcher(batches(3), {emb: "items"}, depth=0, reserve_sms=7))
    list(Prefetcher(batches(3), device="cpu", reserve_sms=7))
    assert not made


class Loop:
    """Batches of a second each, with so many rows that miss a cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.counts = torch.zeros(5, dtype=torch.int64)
        cache = SimpleNamespace(
            index=SimpleNamespace(counts=self.counts), records=torch.empty(2, RECORD_BYTES)
        )
        tables: Any = [SimpleNamespace(_store=SimpleNamespace(cache=one)) for one in (cache, None)]
        monkeypatch.setattr(sm_reserve.time, "monotonic", lambda: self.seconds)
        self.policy = SmPolicy(CPU, tables, "auto")
        self.policy._share_of_sms = 0.1  # of a GPU with 120 SMs

    def run(self, n_batches: int, *, missing: int, written: int = 0) -> int:
        """Return the SMs that are reserved in the end."""
        for _ in range(n_batches):
            self.counts += torch.tensor([5, missing, 0, written, 0])
            self.seconds += 1.0
            self.policy.adjust()
        return made[0].n_sms


SHARE = int(BUS_BYTES / RECORD_BYTES / 100)
"""Rows that take the bus a hundredth of a second."""


def test_sms_are_reserved_while_they_pay_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, enough = Loop(monkeypatch), 3 * PERIOD
    assert loop.run(enough, missing=9 * SHARE) == 0
    assert loop.run(enough, missing=11 * SHARE) == MOVER_SMS
    assert loop.run(enough, missing=6 * SHARE) == MOVER_SMS, "half as much keeps them"
    assert loop.run(enough, missing=4 * SHARE) == 0
    assert loop.run(enough, missing=0, written=11 * SHARE) == MOVER_SMS
    loop.counts.zero_()  # a new cache
    assert loop.run(1, missing=0) == MOVER_SMS
    loop.policy.reserve.set(0)
    assert made[0].calls == [MOVER_SMS, 0, MOVER_SMS, 0]


def test_the_counters_of_a_real_cache_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sm_reserve, "PERIOD", 1)
    monkeypatch.setattr(sm_reserve, "BUS_BYTES", 1e-3)
    emb = flatbed.Embedding(1000, 8, cache_rows=100)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    given = [torch.arange(20) + 20 * i for i in range(8)]
    for batch in Prefetcher(given, {emb: lambda b: b}, reserve_sms="auto"):
        emb(batch).sum().backward()
        optimizer.step()
    assert made[0].calls == [MOVER_SMS, 0]


@pytest.mark.gpu
def test_auto_reserves_for_uniform_ids_only() -> None:
    emb = flatbed.Embedding(2_000_000, 128, device="cuda", cache_rows=400_000)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    for n_rows, expected in ((2_000_000, [MOVER_SMS, 0]), (1000, [])):
        given = [torch.randint(0, n_rows, (65_536,)) for _ in range(160)]
        for batch in Prefetcher(given, {emb: lambda b: b}, reserve_sms="auto"):
            emb(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert made[-1].calls == expected
