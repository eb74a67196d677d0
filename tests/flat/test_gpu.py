"""Flat parameters on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatParams
from tests.cases import BOTH, assert_same, batches, loss_of
from tests.flat.twins import assert_twins, twins

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@BOTH
def test_rnn_and_flatten_parameters(grads: str) -> None:
    pair = twins(grads, model="rnn", device="cuda", foreach=None, fused=True)
    for model, optimizer, flat in pair:
        for i, x in enumerate(batches(6, "cuda")):
            if flat is not None and i == 3:
                model.rnn.flatten_parameters()
                assert not flat.is_valid()
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_twins(pair, 1e-6)


@pytest.mark.filterwarnings(
    "ignore:This instance was constructed with capturable"
)  # torch, of the eager steps
@pytest.mark.parametrize("whole", [False, True])
def test_cuda_graph(whole: bool) -> None:
    """Capture the optimizer step alone, or the whole training step, over bound gradients."""

    def make() -> tuple[nn.Module, FlatParams, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()
        flat = FlatParams(model, grads="bound")
        return model, flat, torch.optim.AdamW(flat.parameters(), lr=1e-2, capturable=True, fused=True)

    def step(model: nn.Module, flat: FlatParams, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()
        flat.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    data = torch.randn(12, 8, 16, device="cuda")
    model, flat, optimizer = make()
    reference, reference_flat, expected = make()
    for x in data:
        step(reference, reference_flat, expected, x)

    static = data[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in data[:3]:
            static.copy_(x)
            step(model, flat, optimizer, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if whole:
        with torch.cuda.graph(graph):
            step(model, flat, optimizer, static)
        for x in data[3:]:
            static.copy_(x)
            graph.replay()
    else:
        model(static).pow(2).mean().backward()
        with torch.cuda.graph(graph):
            flat.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.zero_grad()
        for x in data[3:]:
            model(x).pow(2).mean().backward()
            graph.replay()
    torch.cuda.synchronize()
    assert_same(reference, model, 1e-6)


def test_a_graphed_backward_with_an_eager_step() -> None:
    """A replay moves no version counter: the step must take the gradients all the same."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).cuda()
    flat = FlatParams(model, grads="bound")
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    x = torch.randn(3, 8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    before = model.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        graph.replay()
        optimizer.step()
    torch.testing.assert_close(model.weight.data, before - 0.2 * x.sum(0).expand(4, 8))


@BOTH
def test_created_before_the_model_moves_to_the_gpu(grads: str) -> None:
    pair = twins(grads, model="mixed", foreach=None, fused=True)
    for one in pair:
        one.model.cuda()
        for x in batches(5, "cuda"):
            loss_of(one.model, x).backward()
            one.clip()
            one.optimizer.step()
            one.optimizer.zero_grad()
    assert pair[1].flat.buffers[0].is_cuda
    assert_twins(pair, 1e-6)


def test_peak_memory_of_flattening_is_one_buffer() -> None:
    gib = 1 << 30
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(56)])  # 3.5 GiB
    big = nn.Parameter(torch.zeros(3 * gib // 8, device="cuda"))  # 1.5 GiB: a buffer of its own
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flat = FlatParams([*model.parameters(), big])
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    print(
        f"\nflattening {before / gib:.2f} GiB: peak {peak / gib:.3f} GiB beyond, {after / 1024:.0f} KiB kept"
    )
    assert [round(b.numel() * 4 / gib, 2) for b in flat.buffers] == [1.0, 1.0, 1.0, 0.5, 1.5]
    assert peak <= 1.5 * gib + (1 << 21)
    assert after <= 1 << 21


def test_two_devices_in_one_model() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).cuda()])

    pair = twins(kind=torch.optim.SGD, model=make, lr=0.1)
    totals = []
    for one in pair:
        for _ in range(3):
            one.model[1](one.model[0](torch.ones(1, 4)).cuda()).sum().backward()
            totals.append(one.clip().item())
            one.optimizer.step()
            one.optimizer.zero_grad()
    assert {b.device.type for b in pair[1].flat.buffers} == {"cpu", "cuda"}
    assert totals[3:] == pytest.approx(totals[:3], rel=1e-6)
    assert_twins(pair, 1e-6)


@pytest.mark.filterwarnings("ignore")
@BOTH
def test_torch_compile_with_inductor(grads: str) -> None:
    pair = twins(grads, device="cuda", foreach=None, fused=True)
    for model, optimizer, flat in pair:
        forward = model if flat is None else torch.compile(model)
        step = optimizer.step if flat is None else torch.compile(optimizer.step)
        for i, x in enumerate(batches(6, "cuda")):
            loss_of(forward, x).backward()
            step() if i % 2 else optimizer.step()
            optimizer.zero_grad()
    assert_twins(pair, 1e-4)
