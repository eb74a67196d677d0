"""Norms and clipping of flat gradients against torch's, bitwise on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from flatbed.layout import plan
from tests.cases import batches, build, loss_of

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_norms_by_name(device: str) -> None:
    model = build("mixed", device)
    flat = FlatParams(model)
    loss_of(model, batches(1, device)[0]).backward()
    total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.numel()])
    torch.testing.assert_close(flat.grad_norm(), total)
    expected = {n: p.grad.norm().item() for n, p in model.named_parameters()}
    assert flat.grad_norms() == pytest.approx(expected, rel=1e-5)
    assert flat.norms() == pytest.approx({n: p.norm().item() for n, p in model.named_parameters()}, rel=1e-5)
    assert flat.nonfinite() == []
    model.scale.grad.fill_(float("nan"))
    model.inner[2].bias.grad[3] = float("inf")
    model.transposed.grad.fill_(1e30)  # finite, though its norm overflows
    assert sorted(flat.nonfinite()) == ["inner.2.bias", "scale"]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("grouped", [False, True])
def test_clipping_is_bitwise_equal_to_torch(norm_type: float, grouped: bool) -> None:
    model = nn.Sequential(*[nn.Linear(5 + i % 3, 5 + (i + 1) % 3) for i in range(40)])
    params = list(model.parameters())
    order = params[::2] + params[1::2] if grouped else params
    source: Any = [{"params": params[::2]}, {"params": params[1::2]}] if grouped else params
    flat = FlatParams(source)
    model(torch.randn(3, 5)).sum().backward()
    grads = [p.grad.clone() for p in params]
    expected = nn.utils.clip_grad_norm_(order, 0.01, norm_type)
    clipped = [p.grad.clone() for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad.copy_(g)
    assert torch.equal(flat.grad_norm(norm_type), expected)
    assert torch.equal(flat.clip_grad_norm_(0.01, norm_type), expected)
    assert all(torch.equal(p.grad, c) for p, c in zip(params, clipped, strict=True))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_norms_of_odd_sizes_are_torchs(norm_type: float) -> None:
    params = [nn.Parameter(torch.randn(n)) for n in (1_000_003, 64, 64, 1, 0, 4097)]
    params.append(nn.Parameter(torch.randn(17, 9, 3, 3).to(memory_format=torch.channels_last)))
    flat = FlatParams(params)
    for p in params:
        p.grad = torch.randn_like(p)
    filled = [p.grad for p in params if p.numel()]
    assert torch.equal(flat.grad_norm(norm_type), nn.utils.get_total_norm(filled, norm_type, foreach=False))
    assert list(flat.grad_norms().values()) == [p.grad.norm().item() for p in params]


def test_several_buffers_are_summed_in_the_sources_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter too large for a shared buffer stands between small ones in torch's sum."""
    monkeypatch.setattr("flatbed.flat.params.plan", functools.partial(plan, max_bytes=2048))
    n_different = 0
    for seed in range(20):
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.zeros(n)) for n in (3, 999, 70, 8, 1001, 5, 90)]
        for p in params:
            p.grad = torch.randn_like(p)
        grads = [p.grad.clone() for p in params]
        flat = FlatParams(params)
        assert len(flat.buffers) == 3
        assert torch.equal(flat.grad_norm(), nn.utils.get_total_norm(grads, foreach=False))
        shuffled = [grads[i] for i in (0, 2, 3, 5, 6, 1, 4)]
        n_different += not torch.equal(flat.grad_norm(), nn.utils.get_total_norm(shuffled, foreach=False))
    assert n_different, "the order must matter for this test to mean anything"


def test_absent_gradients_are_not_counted() -> None:
    model = nn.ModuleList([nn.Linear(7, 2), nn.Linear(7, 2)])
    flat = FlatParams(model)
    assert flat.grad_norm() == 0
    assert flat.clip_grad_norm_(1.0) == 0
    model[1](batches(1)[0]).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in model[1].parameters()])
    assert torch.equal(flat.grad_norm(), expected)
    assert flat.grad_norms()["0.weight"] == 0


def test_a_nonfinite_norm_names_the_parameter() -> None:
    model = build("tied")
    flat = FlatParams(model)
    loss_of(model, batches(1)[0]).backward()
    model.decoder.bias.grad.fill_(float("nan"))
    with pytest.raises(FlatbedError, match=r"decoder\.bias"):
        flat.clip_grad_norm_(1.0, error_if_nonfinite=True)


@DEVICES
@pytest.mark.parametrize("grads", ["follow", "bound"])
@pytest.mark.parametrize("zero", ["optimizer", "model", "in place"])
def test_a_norm_of_nan_ends_with_its_batch(device: str, grads: str, zero: str) -> None:
    """As a GradScaler skips it: the norms of later batches are theirs."""
    model = build("mixed", device)
    flat = FlatParams(model, grads=grads)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    for factor in (1.0, float("nan"), 1.0):
        (loss_of(model, batches(1, device)[0]) * factor).backward()
        norms = [nn.utils.clip_grad_norm_(flat.parameters(), 1e9), flat.clip_grad_norm_(1e9)]
        assert all(bool(norm.isfinite()) == (factor == 1.0) for norm in norms)
        optimizer.zero_grad() if zero == "optimizer" else model.zero_grad(set_to_none=zero == "model")
