"""SMs that are left to row movers: what cuBLAS and torch are told, and when a Prefetcher reserves them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

import flatbed
from flatbed import Prefetcher
from flatbed.data import sm_reserve
from flatbed.data.sm_reserve import BUS_BYTES, MOVER_SMS, PERIOD, SmPolicy, SmReserve
from tests.data.fakes import CPU, Fakes, batches
from tests.data.test_prefetcher import WAYS, leave_at_once

ONE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Libraries:
    """Stand-ins for cuBLAS and for torch's carve-out."""

    def __init__(self) -> None:
        self.targets: dict[int, int] = {}
        self.carveout: Any = None

    def set_target(self, handle: int, n_sms: int) -> int:
        self.targets[handle] = n_sms
        return 0


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Two GPUs of 132 SMs, with the handles 10 and 11, and 20 and 21."""
    made = Libraries()
    monkeypatch.setattr(sm_reserve, "sm_count_target", lambda: made.set_target)
    monkeypatch.setattr(sm_reserve, "blas_handles", lambda gpu: [10 + 10 * gpu.index, 11 + 10 * gpu.index])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: made.carveout)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", lambda n: setattr(made, "carveout", n))
    return made


@pytest.mark.parametrize("before", [None, 4])
def test_both_libraries_are_told_and_set_back(libraries: Libraries, before: int | None) -> None:
    libraries.carveout = before
    reserve = SmReserve(ONE)
    for n_sms in (12, 20, 12):
        reserve.set(n_sms)
        assert libraries.targets == {10: 132 - n_sms, 11: 132 - n_sms}
        assert libraries.carveout == n_sms
    for _ in range(2):
        reserve.set(0)
        assert libraries.targets == {10: 0, 11: 0}
        assert libraries.carveout == before


def test_the_largest_of_several_counts(libraries: Libraries) -> None:
    first, second, third = SmReserve(ONE), SmReserve(ONE), SmReserve(OTHER)
    first.set(12)
    second.set(8)
    third.set(20)
    assert libraries.targets == {10: 120, 11: 120, 20: 112, 21: 112}
    assert libraries.carveout == 20
    first.set(0)
    assert libraries.targets[10] == 124
    third.set(0)
    assert (libraries.targets[20], libraries.carveout) == (0, 8)
    second.set(0)
    assert (set(libraries.targets.values()), libraries.carveout) == ({0}, None)


def test_calls_that_are_missing_are_left_out(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm_reserve, "sm_count_target", lambda: None)
    monkeypatch.delattr(torch._C, "_set_sm_carveout_experimental")
    reserve = SmReserve(ONE)
    reserve.set(12)
    reserve.set(0)
    assert (libraries.targets, libraries.carveout) == ({}, None)


# ---- while a Prefetcher runs


RECORD_BYTES = 1000


class FakeReserve:
    """Writes down what is set."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.n_sms = device, 0
        self.calls: list[int] = []

    def set(self, n_sms: int) -> None:
        if n_sms != self.n_sms:
            self.n_sms = n_sms
            self.calls.append(n_sms)


Reserves: TypeAlias = list[FakeReserve]


@pytest.fixture
def reserves(monkeypatch: pytest.MonkeyPatch) -> Reserves:
    """All reserves that were made."""
    made: Reserves = []

    def make(device: torch.device) -> FakeReserve:
        made.append(FakeReserve(device))
        return made[-1]

    monkeypatch.setattr(sm_reserve, "SmReserve", make)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_number_is_reserved_for_the_loop(
    emb: flatbed.Embedding, prefetches: Fakes, reserves: Reserves, way: Any
) -> None:
    way(Prefetcher(batches(6), {emb: "items"}, reserve_sms=7))
    (reserve,) = reserves
    assert reserve.calls == ([] if way is leave_at_once else [7, 0])


def test_nothing_is_reserved_without_prefetched_rows(emb: flatbed.Embedding, reserves: Reserves) -> None:
    list(Prefetcher(batches(3), {emb: "items"}))
    list(Prefetcher(batches(3), {emb: "items"}, depth=0, reserve_sms=7))
    list(Prefetcher(batches(3), device="cpu", reserve_sms=7))
    assert not reserves


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
        return self.policy.reserve.n_sms


SHARE = int(BUS_BYTES / RECORD_BYTES / 100)
"""Rows that take the bus a hundredth of a second."""


def test_sms_are_reserved_while_they_pay_for_themselves(
    reserves: Reserves, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, enough = Loop(monkeypatch), 3 * PERIOD
    assert loop.run(enough, missing=9 * SHARE) == 0
    assert loop.run(enough, missing=11 * SHARE) == MOVER_SMS
    assert loop.run(enough, missing=6 * SHARE) == MOVER_SMS, "half as much keeps them"
    assert loop.run(enough, missing=4 * SHARE) == 0
    assert loop.run(enough, missing=0, written=11 * SHARE) == MOVER_SMS
    loop.counts.zero_()  # a new cache
    assert loop.run(1, missing=0) == MOVER_SMS
    loop.policy.reserve.set(0)
    assert reserves[0].calls == [MOVER_SMS, 0, MOVER_SMS, 0]


def test_the_counters_of_a_real_cache_are_read(reserves: Reserves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(sm_reserve, "PERIOD", 1)
    monkeypatch.setattr(sm_reserve, "BUS_BYTES", 1e-3)
    emb = flatbed.Embedding(1000, 8, cache_rows=100)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    given = [torch.arange(20) + 20 * i for i in range(8)]
    for batch in Prefetcher(given, {emb: lambda b: b}, reserve_sms="auto"):
        emb(batch).sum().backward()
        optimizer.step()
    assert reserves[0].calls == [MOVER_SMS, 0]


# ---- on a GPU


def targets(handles: list[int]) -> list[int]:
    library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
    found = []
    for handle in handles:
        n_sms = ctypes.c_int(-1)
        assert library.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(n_sms)) == 0
        found.append(n_sms.value)
    return found


@pytest.mark.gpu
def test_handles_of_the_training_thread_and_of_autograd() -> None:
    emb = flatbed.Embedding(1000, 8, device="cuda", cache_rows=400)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    handles = sm_reserve.blas_handles(ONE)
    assert len(set(handles)) == 2
    n_all = torch.cuda.get_device_properties(0).multi_processor_count
    given = [torch.randint(0, 1000, (50,)) for _ in range(5)]
    for batch in flatbed.Prefetcher(given, {emb: lambda b: b}, reserve_sms=12):
        emb(batch).sum().backward()
        optimizer.step()
        assert targets(handles) == [n_all - 12] * 2
        assert torch._C._get_sm_carveout_experimental() == 12
    assert targets(handles) == [0, 0]
    assert torch._C._get_sm_carveout_experimental() is None


@pytest.mark.gpu
def test_auto_reserves_for_uniform_ids_only(reserves: Reserves) -> None:
    emb = flatbed.Embedding(2_000_000, 128, device="cuda", cache_rows=400_000)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    for n_rows, expected in ((2_000_000, [MOVER_SMS, 0]), (1000, [])):
        given = [torch.randint(0, n_rows, (65_536,)) for _ in range(160)]
        for batch in Prefetcher(given, {emb: lambda b: b}, reserve_sms="auto"):
            emb(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert reserves[-1].calls == expected
