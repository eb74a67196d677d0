"""Clipping, loss scaling and skipping inside the step."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg

import flatbed
from flatbed.distributed.dense_shards import ShardGroups
from tests.cases import build
from tests.optim.devices import assert_models_equal, is_exact, no_waiting
from tests.optim.test_dropin import give_grads, pair


@pytest.mark.parametrize(("max_norm", "size"), [(0.1, 1.0), (math.inf, 1.0), (1e-6, 1e-7)])
def test_max_norm_is_clip_grad_norm(where: str, max_norm: float, size: float) -> None:
    """Which adds a millionth to the norm, as tiny gradients show."""
    ours, theirs = pair(where)
    a = flatbed.optim.SGD(ours.parameters(), lr=0.01 / size, max_norm=max_norm)
    b = optim.SGD(theirs.parameters(), lr=0.01 / size, fused=True)
    norms = []
    for step in range(3):
        give_grads(ours, theirs, seed=step)
        for model in (ours, theirs):
            torch._foreach_mul_([p.grad for p in model.parameters()], size)
        before = [p.grad.clone() for p in ours.parameters()]
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        a.step()
        b.step()
        assert a.grad_norm.shape == ()
        torch.testing.assert_close(a.grad_norm, norm, rtol=0 if is_exact(where) else 1e-6, atol=0)
        assert all(map(torch.equal, before, (p.grad for p in ours.parameters())))  # they stay as they are
        norms.append(a.grad_norm)
    assert_models_equal(ours, theirs, where)
    assert len({float(norm) for norm in norms}) == 3  # a norm that was read does not change later


def test_the_norm_of_shards_and_whole_parameters_on_one_rank(where: str) -> None:
    """Shards have sums of squares of their own, whether these need other ranks or not."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(where, (1,))
        values = torch.zeros(2, device=where)
        shard = DTensor.from_local(values[1:], mesh, [Shard(0)], run_check=False)
        params = nn.Parameter(values[:1]), nn.Parameter(shard)
        optimizer = flatbed.optim.SGD(params, lr=1.0, max_norm=1.0)
        (params[0] * 3 + params[1].to_local() * 4).backward()
        optimizer.step()
        assert float(optimizer.grad_norm) == 5
        torch.testing.assert_close(values.cpu(), torch.tensor([-0.6, -0.8]))
    finally:
        dist.destroy_process_group()


def test_ranks_without_gradients_use_the_backend_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group may have a backend for CPUs and one for GPUs, here in place of the device "meta"."""
    used: list[str] = []
    monkeypatch.setattr(dist, "all_gather", lambda parts, own, **_: used.append(own.device.type))
    ShardGroups([], SimpleNamespace(size=lambda: 2), device=torch.device("meta")).total([])
    assert used == ["meta"]


def test_small_parameters_between_large_ones_are_clipped_together() -> None:
    """A call for each bias costs more than its update."""
    layers = nn.Sequential(*(nn.Linear(512, 1024) for _ in range(6)))
    optimizer = flatbed.optim.AdamW(layers.parameters(), max_norm=0.1)
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    with torch.profiler.profile() as profile:
        optimizer.step()
    (updates,) = (event.count for event in profile.key_averages() if event.key == "aten::_fused_adamw_")
    assert updates == 6  # one for each weight, each with some biases


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"amsgrad": True}),
        ("SGD", {"momentum": 0.9}),
        ("RMSprop", {"centered": True, "maximize": True}),
        ("NAdam", {}),
        ("Adadelta", {}),
    ],
)
def test_large_parameters_are_updated_to_the_same_bits(
    name: str, options: dict[str, Any], max_norm: float | None
) -> None:
    """They are updated part by part where an update makes temporaries."""
    values = torch.randn(6, 7, 251, 211).to(memory_format=torch.channels_last)
    ours, theirs = (nn.Parameter(values.clone()) for _ in range(2))
    a = getattr(flatbed.optim, name)([ours], lr=0.1, max_norm=max_norm, **options)
    is_fused = getattr(flatbed.optim, name)._rule.fused is not None
    b = getattr(optim, name)([theirs], lr=0.1, **({"fused": True} if is_fused else {}), **options)
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        nn.utils.clip_grad_norm_([theirs], max_norm or float("inf"))
        a.step()
        b.step()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_temporaries_of_large_parameters_stay_in_the_caches(max_norm: float | None) -> None:
    """With those of a whole parameter, a clipped step of RMSprop took 1.5 times as long as torch's."""
    param = nn.Parameter(torch.ones(4, 1 << 20))
    optimizer = flatbed.optim.RMSprop([param], max_norm=max_norm)
    param.grad = torch.ones_like(param)
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    sizes = [event.cpu_memory_usage for event in profile.events() if "_foreach_sqrt" in event.name]
    assert 0 < max(sizes) <= 4 << 20 < param.nbytes


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.float64)]
)
def test_parameters_without_dimensions_are_clipped(
    where: str, name: str, dtype: torch.dtype, other: torch.dtype
) -> None:
    """A logit scale, for example: torch promotes its gradient by the factor's dtype."""
    values = [torch.tensor(0.5, dtype=dtype), torch.tensor([0.5] * 4, dtype=other)]
    params = [nn.Parameter(value.to(where)) for value in values]
    optimizer = getattr(flatbed.optim, name)(params, lr=0.1, max_norm=1.0)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert params[0] != 0.5
    torch.testing.assert_close(params[0].double(), params[1][0].double(), rtol=0.01, atol=0)


def test_the_norm_is_only_there_when_asked_for(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters())
    give_grads(model)
    optimizer.step()
    assert optimizer.grad_norm is None
    optimizer.max_norm = 0.5
    optimizer.step()
    assert float(optimizer.grad_norm) > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_do_what_they_do_in_torch(where: str, bad: float) -> None:
    ours, theirs = pair(where)
    a = flatbed.optim.SGD(ours.parameters(), lr=0.1, max_norm=1.0)
    b = optim.SGD(theirs.parameters(), lr=0.1, fused=True)
    give_grads(ours, theirs)
    for model in (ours, theirs):
        next(model.parameters()).grad.view(-1)[0] = bad
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    a.step()
    b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


def test_skip_nonfinite(where: str) -> None:
    model, twin = pair(where)
    options = {"lr": 0.01, "amsgrad": True}
    optimizer = flatbed.optim.Adam(model.named_parameters(), skip_nonfinite=True, max_norm=1.0, **options)
    plain = flatbed.optim.Adam(twin.parameters(), max_norm=1.0, **options)
    for step in range(6):
        give_grads(model, twin, seed=step)
        poisoned = step in (0, 3)
        if poisoned:
            bias = dict(model.named_parameters())["inner.0.bias"]
            bias.grad[2] = math.inf if step else math.nan
            assert optimizer.nonfinite() == ["inner.0.bias"]
            before = [p.clone() for p in model.parameters()]
        optimizer.step()
        if poisoned:
            assert all(map(torch.equal, before, model.parameters()))
        else:
            plain.step()
    assert int(optimizer.skipped_steps) == 2
    assert optimizer.nonfinite() == []
    assert_models_equal(model, twin, where)
    p = next(model.parameters())
    assert float(optimizer.state[p]["step"]) == 4


@pytest.mark.parametrize("kind", ["unnamed", "flat"])
def test_names_of_nonfinite_gradients(where: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(where)
    groups: Any = [{"params": [p]} for p in model.parameters()]
    optimizer = flatbed.optim.Adam(flatbed.FlatParams(model) if kind == "flat" else groups)
    model(torch.ones(2, 3, device=where)).sum().backward()
    model[1].bias.grad[0] = math.nan
    assert optimizer.nonfinite() == ["1.bias" if kind == "flat" else "0 of group 3"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler(where: str, max_norm: float | None, unscale_first: bool, fused: bool | None) -> None:
    """Unscaling, clipping by the unscaled norm, and skipping when there was an inf.

    With fused=True the step does all of that, otherwise the scaler does, as with torch's optimizers.
    """
    ours, theirs = pair(where)
    device = "cuda" if where == "cuda" else "cpu"
    scaler, reference = (torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2) for _ in "12")
    a = flatbed.optim.Adam(ours.parameters(), lr=0.01, fused=fused, max_norm=max_norm)
    b = optim.Adam(theirs.parameters(), lr=0.01)
    for step in range(6):
        give_grads(ours, theirs, seed=step)
        for model, s in ((ours, scaler), (theirs, reference)):
            s.scale(torch.ones((), device=where))  # makes the scale
            for p in model.parameters():
                p.grad.mul_(s.get_scale())
            if step in (1, 4):
                next(model.parameters()).grad.view(-1)[0] = math.inf
        if unscale_first:
            scaler.unscale_(a)
        reference.unscale_(b)
        unscaled = [p.grad.clone() for p in theirs.parameters()]
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        never_waits = where == "cuda" and fused and not unscale_first and step
        with no_waiting() if never_waits else nullcontext():
            scaler.step(a)
        reference.step(b)
        if step not in (1, 4):
            assert all(map(torch.equal, unscaled, (p.grad for p in ours.parameters())))
        if max_norm is not None and step not in (1, 4):
            torch.testing.assert_close(a.grad_norm, norm)
        scaler.update()
        reference.update()
        assert scaler.get_scale() == reference.get_scale()
        a.zero_grad()
        b.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-7)
    assert float(a.state[next(ours.parameters())]["step"]) == 4
    assert int(a.skipped_steps) == (2 if fused else 0)


def test_gradients_stay_scaled_after_an_overflow(where: str) -> None:
    """As after torch's fused steps."""
    outcomes = []
    for make in (flatbed.optim.Adam, optim.Adam):
        model = build("mixed", where)
        optimizer = make(model.parameters(), fused=True)
        give_grads(model)
        optimizer.grad_scale = torch.tensor(4.0, device=where)
        optimizer.found_inf = torch.ones((), device=where)
        optimizer.step()
        outcomes.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("fused", [None, True])
def test_row_gradients_are_unscaled_too(fused: bool | None) -> None:
    emb = flatbed.Embedding(10, 4)
    optimizer = flatbed.optim.Adam(emb, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(emb([1, 2, 2]).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(emb.table.grad.clone(), torch.tensor([[1.0] * 4, [2.0] * 4]))


def test_the_step_unscales_where_a_scaler_cannot() -> None:
    """A scaler refuses gradients in fp16. Otherwise it unscales: Lightning clips then, Accelerate counts."""
    model = nn.Linear(3, 3)
    assert not flatbed.optim.AdamW(model)._step_supports_amp_scaling
    assert not flatbed.optim.AdamW(model, max_norm=1.0)._step_supports_amp_scaling
    assert flatbed.optim.AdamW(model, fused=True)._step_supports_amp_scaling
    assert flatbed.optim.AdamW(model.half(), master_weights=True)._step_supports_amp_scaling
