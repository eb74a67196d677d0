"""Properties that only a GPU has: launches, waits, graphs, streams, memory, very large tensors."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim

import flatbed
from tests.cases import batches, build, loss_of, two_groups
from tests.optim.devices import no_waiting
from tests.optim.test_dropin import give_grads

pytestmark = pytest.mark.gpu
CUDA = "cuda"


def kernels_of(call: Any) -> list[str]:
    """Names of the kernels that a call launches."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [
        event.name
        for event in profiler.events()
        if event.device_type == device and "Optimizer" not in event.name
    ]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(7, 300), nn.ReLU(), nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 3)
    return nn.Sequential(*layers).to(CUDA)


def adam_pair(ours: nn.Module, theirs: nn.Module) -> tuple[Any, Any]:
    return (
        flatbed.optim.Adam(ours.parameters(), lr=0.01, max_norm=1.0),
        optim.Adam(theirs.parameters(), lr=0.01),
    )


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(None, ["prepare", "update"]), (1.0, ["squares", "prepare", "update"])]
)
def test_one_launch_whatever_the_number_of_parameters_and_groups(max_norm: Any, expected: list[str]) -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)]).to(CUDA)
    groups = [
        {"params": [p], "lr": 0.01 * (i + 1), "weight_decay": 0.1 * (i % 2)}
        for i, p in enumerate(model.parameters())
    ]
    optimizer = flatbed.optim.AdamW(groups, max_norm=max_norm)
    give_grads(model)
    optimizer.step()
    optimizer.step()
    assert kernels_of(optimizer.step) == [f"{name}_kernel" for name in expected]


def test_a_step_never_waits_for_the_gpu() -> None:
    model = small_model()
    scheduler_lr = torch.tensor(0.01, device=CUDA)
    optimizer = flatbed.optim.AdamW(
        two_groups(model), lr=scheduler_lr, max_norm=1.0, skip_nonfinite=True, ema_decay=0.9
    )
    give_grads(model)
    optimizer.step()
    with no_waiting():
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))  # gradients that move
            optimizer.param_groups[1]["lr"] = 0.01 / (step + 1)  # and a float that changes
            scheduler_lr.mul_(0.9)
            optimizer.step()
            assert optimizer.grad_norm is not None
            assert optimizer.skipped_steps.device.type == CUDA
            optimizer.zero_grad()


def test_extra_memory_is_below_one_percent() -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)]).to(CUDA)
    nbytes = sum(p.nbytes for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = flatbed.optim.Adam(model.parameters(), max_norm=1.0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert torch.cuda.max_memory_allocated() - before - state < 0.01 * nbytes


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_captured_step(max_norm: float | None) -> None:
    """Learning rate and step count live on the device and go on at every replay."""
    ours, theirs = small_model(), small_model()
    rate, their_rate = (torch.tensor(0.01, device=CUDA) for _ in range(2))
    a = flatbed.optim.AdamW(ours.parameters(), lr=rate, max_norm=max_norm)
    b = optim.AdamW(theirs.parameters(), lr=their_rate, capturable=True, foreach=True)
    give_grads(ours, theirs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a.step()
    torch.cuda.current_stream().wait_stream(side)
    if max_norm is not None:
        nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    b.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for step in range(1, 6):
        for model in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad.copy_(torch.randn(p.shape, generator=generator))
        rate.fill_(0.01 / step)
        their_rate.fill_(0.01 / step)
        graph.replay()
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            torch.testing.assert_close(a.grad_norm, norm)
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float(a.state[p]["step"]) == 6
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_an_eager_step_with_the_gradients_of_a_graph() -> None:
    p = nn.Parameter(torch.zeros(600, device=CUDA))
    optimizer = flatbed.optim.SGD([p], lr=1.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = torch.full_like(p, 2.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.step()
    assert (p == -3).all()
    graph.replay()
    assert (p == -5).all()


def test_writes_before_a_capture_reach_the_masters() -> None:
    p = nn.Parameter(torch.zeros(600, dtype=torch.bfloat16, device=CUDA))
    optimizer = flatbed.optim.SGD([p], lr=2.0**-12, master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(1.0)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty graph
        with (
            pytest.raises(flatbed.FlatbedError, match="refresh_masters"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            optimizer.step()
    optimizer.refresh_masters()
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(15):
        graph.replay()
    assert (p == 1 - 2.0**-8).all()  # sixteen steps, each of them lost in bf16 alone
    with torch.no_grad():
        p.fill_(2.0)
    optimizer.refresh_masters()
    graph.replay()
    assert (optimizer.state[p]["master_weight"] == 2 - 2.0**-12).all()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_state_is_not_made_inside_a_graph() -> None:
    model = small_model()
    optimizer = flatbed.optim.Adam(model.parameters())
    give_grads(model)
    torch.cuda.synchronize()
    with (
        pytest.raises(flatbed.FlatbedError, match="one eager step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()
    assert float(optimizer.state[model[0].bias]["step"]) == 1


def test_graphs_survive_what_happens_to_the_optimizer() -> None:
    """New parameters, a loaded checkpoint: the graph keeps what it captured."""
    model, late = small_model(), nn.Linear(3, 3, device=CUDA)
    optimizer = flatbed.optim.SGD(model.parameters(), lr=0.5)
    give_grads(model)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    optimizer.add_param_group({"params": late.parameters()})
    kept = [p.grad for p in model.parameters()]
    give_grads(model, late, seed=5)
    optimizer.step()
    torch.cuda.empty_cache()
    junk = [torch.full((4096,), math.nan, device=CUDA) for _ in range(64)]
    before = [p.clone() for p in model.parameters()]
    graph.replay()
    torch.cuda.synchronize()
    del junk
    for p, q, grad in zip(model.parameters(), before, kept, strict=True):
        torch.testing.assert_close(p, q - 0.5 * grad)


def test_steps_on_two_streams() -> None:
    """Each step on the stream that is current; tables are rebuilt while the other stream may still read."""
    ours, theirs = small_model(), small_model()
    a, b = adam_pair(ours, theirs)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    previous = torch.cuda.current_stream()
    for step in range(12):
        stream = streams[step % 2]
        stream.wait_stream(previous)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            generator = torch.Generator(CUDA).manual_seed(step)
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                p.grad = torch.randn(p.shape, device=CUDA, generator=generator)
                q.grad = p.grad.clone()
            if step % 3 == 0:
                a._plan = None
            a.step()
            junk = [torch.full((256,), -1, dtype=torch.int64, device=CUDA) for _ in range(32)]
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            b.step()
            del junk
        previous = stream
    torch.cuda.synchronize()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_more_than_two_to_the_31_elements() -> None:
    n = 2**31 + 4096 + 5
    p = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=CUDA))
    p.grad = torch.zeros_like(p)
    ends = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, n - 1], device=CUDA)
    p.grad[ends] = torch.arange(1, 7, device=CUDA, dtype=torch.bfloat16)
    optimizer = flatbed.optim.SGD([p], lr=1.0, momentum=0.9, max_norm=1e9)
    optimizer.step()
    assert torch.equal(p.detach()[ends], -p.grad[ends])
    assert float(optimizer.grad_norm) == pytest.approx(91**0.5)
    assert int(torch.count_nonzero(p.detach())) == 6
    several = [nn.Parameter(torch.zeros(2**30 + 7, dtype=torch.bfloat16, device=CUDA)) for _ in range(3)]
    del p, optimizer
    for q in several:
        q.grad = torch.zeros_like(q)
        q.grad[-1] = 2.0
    optimizer = flatbed.optim.SGD(several, lr=0.5)
    optimizer.step()
    assert all(float(q.detach()[-1]) == -1 and int(torch.count_nonzero(q.detach())) == 1 for q in several)


def test_norms_and_updates_are_the_same_bits_in_two_runs() -> None:
    outcomes = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(500, 500) for _ in range(8)]).to(CUDA)
        optimizer = flatbed.optim.AdamW(model.parameters(), max_norm=0.1)
        norms = []
        for step in range(5):
            give_grads(model, seed=step)
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
        outcomes.append((norms, [p.detach().clone() for p in model.parameters()]))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(map(torch.equal, outcomes[0][1], outcomes[1][1]))


def test_a_model_on_two_devices_is_clipped_by_one_norm() -> None:
    ours, theirs = (
        [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(70, device=CUDA))] for _ in range(2)
    )
    a, b = flatbed.optim.Adam(ours, lr=0.1, max_norm=1.0), optim.Adam(theirs, lr=0.1)
    for step in range(3):
        for params in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        norm = nn.utils.clip_grad_norm_(theirs, 1.0, foreach=False)
        a.step()
        b.step()
        torch.testing.assert_close(a.grad_norm.cpu(), norm.cpu())
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_parameters_on_the_host_wait_for_the_scale() -> None:
    params = [nn.Parameter(torch.ones(8, device=device)) for device in ("cpu", CUDA)]
    optimizer = flatbed.optim.SGD(params, lr=1.0)
    for scale in (2.0, 4.0, 8.0):
        for p in params:
            p.grad = torch.full_like(p, scale)
        torch.cuda._sleep(100_000_000)
        optimizer.grad_scale = torch.full((), scale, device=CUDA)
        optimizer.found_inf = torch.zeros((), device=CUDA)
        optimizer.step()
    assert [p.tolist() for p in params] == [[-2.0] * 8] * 2


def test_a_model_that_moves_to_the_gpu_takes_its_state_along() -> None:
    ours, theirs = build("mixed"), build("mixed", CUDA)
    a, b = adam_pair(ours, theirs)
    for step in range(3):
        if step == 1:
            ours.to(CUDA)
        give_grads(ours, theirs, seed=step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        a.step()
        b.step()
        torch.testing.assert_close(a.grad_norm.cpu(), norm.cpu())
        assert a.grad_norm.device == next(ours.parameters()).device
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_compiled_model() -> None:
    ours, theirs = small_model(), small_model()
    for forward, model, optimizer in zip(
        (torch.compile(ours), theirs), (ours, theirs), adam_pair(ours, theirs), strict=True
    ):
        for x in batches(4, CUDA):
            loss_of(forward, x).backward()
            if model is theirs:
                nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_autocast_with_a_scaler_and_infs() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    ours = layers.to(CUDA, memory_format=torch.channels_last)  # type: ignore[call-overload]
    theirs = copy.deepcopy(ours)
    a = flatbed.optim.SGD(ours.parameters(), lr=0.01, momentum=0.9, fused=True, max_norm=1.0)
    b = optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9)
    for model, optimizer in ((ours, a), (theirs, b)):
        scaler = torch.amp.GradScaler(CUDA, init_scale=2.0**14)
        for step in range(6):
            x = torch.randn(4, 3, 12, 12, device=CUDA, generator=torch.Generator(CUDA).manual_seed(step))
            if step in (1, 3):
                x[0, 0, 0, 0] = math.inf
            with torch.autocast(CUDA, dtype=torch.float16):
                loss = model(x.contiguous(memory_format=torch.channels_last)).float().pow(2).mean()
            scaler.scale(loss).backward()
            if model is theirs:
                scaler.unscale_(b)
                nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            with no_waiting() if model is ours and step else nullcontext():
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**12
    assert int(a.skipped_steps) == 2
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.isfinite().all()
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("flat", [False, True])
def test_a_model_on_a_gpu_that_is_not_the_current_one(flat: bool) -> None:
    model = nn.Linear(7, 5).to("cuda:1")
    params = flatbed.FlatParams(model).parameters() if flat else model.parameters()
    optimizer = flatbed.optim.Adam(params, max_norm=1.0)
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(3, 7, device="cuda:1")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.current_device() == 0
    assert not torch.equal(model.weight, before)


def test_a_state_dict_in_pinned_memory_may_be_overwritten_once_it_is_loaded() -> None:
    p = nn.Parameter(torch.ones(1 << 20, device=CUDA))
    optimizer = flatbed.optim.Adam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    held = optimizer.state_dict()
    moment = held["state"][0]["exp_avg"] = torch.full(p.shape, 2.0).pin_memory()
    torch.cuda._sleep(100_000_000)
    optimizer.load_state_dict(held)
    moment.zero_()
    assert (optimizer.state[p]["exp_avg"] == 2.0).all()
