"""Low precision: masters, stochastic rounding, state of another dtype, gradients of another dtype."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import flatbed
from tests.cases import build
from tests.optim.devices import assert_equal
from tests.optim.test_dropin import give_grads, train_both

LOW = [torch.bfloat16, torch.float16]


def low_pair(where: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model in low precision, and the same weights in fp32."""
    ours = build("mixed", where).to(dtype)
    return ours, copy.deepcopy(ours).float()


def give_low_grads(ours: nn.Module, wide: nn.Module, seed: int) -> None:
    give_grads(ours, seed=seed)
    for p, q in zip(ours.parameters(), wide.parameters(), strict=True):
        q.grad = p.grad.float()


def rounds_to_nearest(dtype: torch.dtype) -> bool:
    """Triton's interpreter cuts fp32 off where a GPU would round it to the nearest bf16."""
    return dtype != torch.bfloat16 or os.environ.get("TRITON_INTERPRET") != "1"


def low(where: str) -> torch.dtype:
    """A dtype of half precision that rounds as it should there."""
    return torch.bfloat16 if rounds_to_nearest(torch.bfloat16) else torch.float16


def assert_rounded(low: Tensor, wide: Tensor) -> None:
    if rounds_to_nearest(low.dtype):
        assert torch.equal(low, wide.to(low.dtype))
    else:
        torch.testing.assert_close(low.float(), wide, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", ["NAdam", "SGD"])
def test_with_a_master_it_is_fp32_training_rounded_once(where: str, name: str, dtype: torch.dtype) -> None:
    ours, wide = low_pair(where, dtype)
    options: dict[str, Any] = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {})}
    a = getattr(flatbed.optim, name)(ours.parameters(), master_weights=True, max_norm=1.0, **options)
    b = getattr(flatbed.optim, name)(wide.parameters(), max_norm=1.0, **options)
    for step in range(3):
        give_low_grads(ours, wide, step)
        a.step()
        b.step()
    for p, q in zip(ours.parameters(), wide.parameters(), strict=True):
        assert a.state[p]["master_weight"].dtype == torch.float32
        assert torch.equal(a.state[p]["master_weight"], q)
        assert_rounded(p.detach(), q.detach())


def test_fp32_parameters_need_no_master(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), master_weights=True)
    give_grads(model)
    optimizer.step()
    assert list(optimizer.state[next(model.parameters())]) == ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_state_dtype(where: str, state_dtype: torch.dtype) -> None:
    """Computed in fp32 and rounded when it is written."""
    ours, theirs = build("mixed", where), build("mixed", where)
    a = flatbed.optim.Adam(ours.parameters(), lr=0.01, state_dtype=state_dtype)
    b = optim.Adam(theirs.parameters(), lr=0.01, fused=True)
    for step in range(4):
        train_both(ours, theirs, a, b, [step])
        for q in theirs.parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                b.state[q][key].copy_(b.state[q][key].to(state_dtype))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.state[p]["exp_avg"].dtype == state_dtype
        cut_off = state_dtype == torch.bfloat16  # or rounded stochastically
        torch.testing.assert_close(p, q, rtol=1e-3 if cut_off else 1e-5, atol=1e-3 if cut_off else 1e-6)


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_without_a_master_is_close_to_torch(where: str, dtype: torch.dtype) -> None:
    ours, theirs = (build("mixed", where).to(dtype) for _ in range(2))
    a = flatbed.optim.AdamW(ours.parameters(), lr=0.01, eps=1e-4)
    b = optim.AdamW(theirs.parameters(), lr=0.01, eps=1e-4, fused=True)
    train_both(ours, theirs, a, b, range(3))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if rounds_to_nearest(dtype):
            assert_equal(p.detach(), q.detach(), where)
        else:
            torch.testing.assert_close(p, q, rtol=4 * 2.0**-7, atol=1e-2)
        assert a.state[p]["exp_avg"].dtype == dtype


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_of_another_dtype(where: str) -> None:
    ours, theirs = (
        nn.Parameter(torch.randn(70, generator=torch.Generator().manual_seed(1)).to(where)) for _ in range(2)
    )
    ours.grad_dtype = torch.bfloat16
    a, b = flatbed.optim.Adam([ours], lr=0.1), optim.Adam([theirs], lr=0.1, fused=True)
    for _ in range(3):
        ours.grad = torch.randn(70, device=where).bfloat16()
        theirs.grad = ours.grad.float()
        a.step()
        b.step()
    assert_equal(ours.detach(), theirs.detach(), where)


def test_mixed_dtypes_in_one_optimizer(where: str) -> None:
    """Clipped by one norm, which no dtype rounds: as fp64 training, up to each parameter's rounding."""
    tolerances = {
        torch.float32: 1e-6,
        torch.bfloat16: 4 * 2.0**-8,
        torch.float16: 4 * 2.0**-11,
        torch.float64: 1e-7,
    }
    ours = [nn.Parameter(torch.full((33,), 0.5, dtype=dtype, device=where)) for dtype in tolerances]
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    a = flatbed.optim.Adam(ours, lr=0.01, max_norm=1.0, state_dtype=torch.float32)
    b = optim.Adam(exact, lr=0.01)
    for step in range(3):
        grad = torch.randn(33, generator=torch.Generator().manual_seed(step)).to(where)
        for p, q in zip(ours, exact, strict=True):
            p.grad = grad.to(p.dtype, copy=True)
            q.grad = p.grad.to(torch.float64, copy=True)
        norm = nn.utils.clip_grad_norm_(exact, 1.0)
        a.step()
        b.step()
        torch.testing.assert_close(a.grad_norm.double(), norm, rtol=1e-6, atol=0)
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=tolerances[p.dtype], atol=tolerances[p.dtype])


def test_stochastic_rounding_is_unbiased(where: str) -> None:
    """A step far below half a unit in the last place: lost by rounding, kept on average if stochastic."""
    n = 4096
    p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=where))
    optimizer = flatbed.optim.SGD([p], lr=1.0, stochastic_rounding=True)
    size = 2.0**-11  # an eighth of the step from 1 down to the next bf16 number, 2⁻⁸
    p.grad = torch.full_like(p, size)
    seen = []
    for _ in range(8):
        with torch.no_grad():
            p.fill_(1.0)
        optimizer.step()
        assert set(p.detach().float().unique().tolist()) == {1.0, 1.0 - 2.0**-8}
        seen.append(1.0 - float(p.detach().float().mean()))
    mean = sum(seen) / len(seen)
    deviation = (size * (2.0**-8 - size) / (n * len(seen))) ** 0.5
    assert abs(mean - size) < 5 * deviation
    assert len(set(seen)) > 4  # other chances at every step
    if rounds_to_nearest(torch.bfloat16):
        with torch.no_grad():
            p.fill_(1.0)
        flatbed.optim.SGD([p], lr=1.0).step()
        assert (p == 1).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
def test_stochastic_rounding_keeps_what_bf16_can_hold_and_what_is_not_finite(where: str) -> None:
    values = torch.tensor([0.0, 1.0, -2.5, 3.0e38, float("inf"), float("-inf"), float("nan")])
    p = nn.Parameter(values.to(torch.bfloat16).to(where))
    before = p.detach().clone()
    optimizer = flatbed.optim.SGD([p], lr=0.1, stochastic_rounding=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


def test_stochastic_rounding_leaves_fp32_alone(where: str) -> None:
    ours, theirs = build("mixed", where), build("mixed", where)
    a = flatbed.optim.Adam(ours.parameters(), stochastic_rounding=True)
    b = flatbed.optim.Adam(theirs.parameters())
    train_both(ours, theirs, a, b)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_state_in_bf16_still_moves(where: str) -> None:
    """Rounded to nearest, a second moment that decays by a thousandth a step would stand still."""
    p = nn.Parameter(torch.zeros(600, device=where))
    optimizer = flatbed.optim.Adam([p], lr=0.0, state_dtype=torch.bfloat16)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    p.grad = torch.zeros_like(p)
    for _ in range(30):
        optimizer.step()
    mean = float(optimizer.state[p]["exp_avg_sq"].float().mean())
    assert mean == pytest.approx(0.999**30, abs=0.01)


def test_small_gradients_survive_unscaling(where: str) -> None:
    """In fp16, gradients that needed a scale would be zero without it."""
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16, device=where))
    optimizer = flatbed.optim.SGD([p], lr=2.0**20, max_norm=1.0)
    p.grad = torch.full_like(p, 2.0**-10)
    optimizer.grad_scale = torch.tensor(2.0**16, device=where)
    optimizer.found_inf = torch.tensor(0.0, device=where)
    optimizer.step()
    assert float(optimizer.grad_norm) == 2.0**-25
    assert (p == -(2.0**-6)).all()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_no_step(default: torch.dtype, where: str) -> None:
    """Step counts beyond 256 are none in bf16; kernels read scale and overflow flag as fp32."""
    ours, theirs = (nn.Parameter(torch.linspace(-1.0, 1.0, 5, device=where)) for _ in range(2))
    torch.set_default_dtype(default)
    try:
        a, b = flatbed.optim.Adam([ours], lr=0.01), torch.optim.Adam([theirs], lr=0.01)
        for step in range(300):
            theirs.grad = torch.sin(3 * theirs.detach() + step)
            ours.grad = theirs.grad * 2.0**16
            a.grad_scale = torch.full((), 2.0**16, dtype=torch.float32, device=where)
            a.found_inf = torch.full((), float(step == 7), dtype=torch.float32, device=where)
            a.step()
            if step != 7:
                b.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(a.state[ours]["step"]) == 299
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
