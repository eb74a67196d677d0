"""Norms and clipping of flat gradients against torch's, bitwise on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from flatbed import FlatbedError, FlatParams
from flatbed.layout import plan
from tests.cases import BOTH, DEVICES, batches, build, loss_of


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
    with pytest.raises(FlatbedError, match=r"nan.*inner\.2\.bias"):
        flat.clip_grad_norm_(1.0, error_if_nonfinite=True)


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[::2]}, {"params": params[1::2]}]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("grouped", [False, True])
def test_clipping_is_bitwise_equal_to_torch(norm_type: float, grouped: bool) -> None:
    """The parameters have odd sizes and strides, and one of them is absent from the graph."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (1_000_003, 64, 64, 1, 0, 4097, *range(5, 45), 9)]
    params.append(nn.Parameter(torch.randn(17, 9, 3, 3).to(memory_format=torch.channels_last)))
    order = params[::2] + params[1::2] if grouped else params
    flat = FlatParams(groups_of(params) if grouped else params)
    assert flat.grad_norm() == flat.clip_grad_norm_(1.0) == 0
    grads = [torch.randn_like(p) for p in order]
    given = [(p, g) for p, g in zip(order, grads, strict=True) if p is not params[1]]
    for p, g in given:
        p.grad = g.clone()
    # torch has no largest element of an empty tensor
    expected = nn.utils.clip_grad_norm_([p for p, _ in given if p.numel()], 0.01, norm_type)
    clipped = [p.grad for p, _ in given]
    for p, g in given:
        p.grad = g
    by_name = flat.grad_norms()
    assert list(by_name.values()) == [0.0 if p is params[1] else p.grad.norm().item() for p in order]
    assert torch.equal(flat.grad_norm(norm_type), expected)
    assert torch.equal(flat.clip_grad_norm_(0.01, norm_type), expected)
    assert all(torch.equal(p.grad, c) for (p, _), c in zip(given, clipped, strict=True))


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


@DEVICES
@pytest.mark.parametrize("zero", ["optimizer", "model", "in place"])
@BOTH
def test_a_norm_of_nan_ends_with_its_batch(device: str, grads: Any, zero: str) -> None:
    """As a GradScaler skips it: the norms of later batches are theirs."""
    model = build("mixed", device)
    flat = FlatParams(model, grads=grads)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    for factor in (1.0, float("nan"), 1.0):
        (loss_of(model, batches(1, device)[0]) * factor).backward()
        norms = [nn.utils.clip_grad_norm_(flat.parameters(), 1e9), flat.clip_grad_norm_(1e9)]
        assert all(bool(norm.isfinite()) == (factor == 1.0) for norm in norms)
        optimizer.zero_grad() if zero == "optimizer" else model.zero_grad(set_to_none=zero == "model")
