"""Captured graphs as chains of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()  # whatever has to be loaded is
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return graph


def sorting(keys: Tensor, values: Tensor, order: Tensor) -> Callable[[], object]:
    return lambda: torch.sort(keys, stable=True, out=(values, order))


@pytest.mark.parametrize("n", [1, 1000, 5000, 65_536, 300_001])
def test_a_sort_is_a_chain(n: int) -> None:
    from flatbed.kernels._triton.chain import chained

    keys = torch.zeros(n, dtype=torch.int32, device="cuda")
    values, order = torch.empty_like(keys), torch.empty(n, dtype=torch.int64, device="cuda")
    graph = captured(sorting(keys, values, order))
    chain = chained(graph)
    assert chain is not None
    for seed in range(3):
        keys.copy_(torch.randint(-1, 1000, (n,), generator=torch.Generator().manual_seed(seed)))
        assert chain.launch(torch.cuda.current_stream().cuda_stream)
        expected = torch.sort(keys, stable=True)
        assert torch.equal(values, expected.values)
        assert torch.equal(order, expected.indices)


def test_memory_is_cleared_and_copied() -> None:
    from flatbed.kernels._triton.chain import chained

    source, target = (torch.arange(1000, dtype=torch.uint8, device="cuda") for _ in range(2))
    cleared = torch.ones(777, dtype=torch.int64, device="cuda")

    def call() -> None:
        cleared.zero_()
        source.add_(1)
        target.copy_(source)

    chain = chained(captured(call))
    assert chain is not None
    cleared.fill_(3)
    source.fill_(4)
    chain.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert not cleared.any()
    assert bool((target == 5).all())


def test_what_is_no_chain_is_left_alone() -> None:
    from flatbed.kernels._triton.chain import chained

    one, other = (torch.zeros(64, device="cuda") for _ in range(2))
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]

    def branches() -> None:
        here = torch.cuda.current_stream()
        one.add_(1)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            other.add_(1)
        one.add_(1)
        here.wait_stream(aside)

    host = torch.empty(64, pin_memory=True)
    assert chained(captured(branches)) is None
    assert chained(captured(lambda: host.copy_(one, non_blocking=True))) is None
    assert chained(torch.cuda.CUDAGraph()) is None


def test_a_chain_may_go_while_it_is_at_work() -> None:
    from flatbed.kernels._triton.chain import chained

    total = torch.zeros(1 << 22, device="cuda")
    chain = chained(captured(lambda: [total.add_(1) for _ in range(200)]))
    assert chain is not None
    torch.cuda.synchronize()
    total.zero_()
    chain.launch(torch.cuda.current_stream().cuda_stream)
    del chain
    torch.cuda.synchronize()
    assert bool((total == 200).all())
