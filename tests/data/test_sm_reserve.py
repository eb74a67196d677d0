"""SMs that are left to row movers: what cuBLAS and torch are told, and that all of it is set back."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flatbed
from flatbed.data import sm_reserve
from flatbed.data.sm_reserve import SmReserve

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
    """A GPU of 132 SMs, with the handles 10 and 11, and another one with the handles 20 and 21."""
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


def test_on_a_cpu_nothing_happens(libraries: Libraries) -> None:
    SmReserve(torch.device("cpu")).set(12)
    assert (libraries.targets, libraries.carveout) == ({}, None)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has cuBLAS")
def test_a_torch_without_cublas_has_no_such_call() -> None:
    sm_reserve.sm_count_target.cache_clear()
    assert sm_reserve.sm_count_target() is None


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
def test_matrix_multiplications_are_right_with_fewer_sms() -> None:
    a = torch.randint(-3, 4, (2048, 2048), device="cuda").float()
    want = a @ a
    reserve = SmReserve(ONE)
    reserve.set(12)
    assert torch.equal(a @ a, want)
    reserve.set(0)
