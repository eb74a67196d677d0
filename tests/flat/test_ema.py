from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from flatbed import EMA, FlatbedError, FlatParams
from tests.cases import assert_same, batches, build, loss_of


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after: Any, n: int = 5) -> None:
    for x in batches(n):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def test_equals_torchs_averaged_model() -> None:
    reference, model = build("tied"), build("tied")
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(reference)  # torch's first update copies; ours starts as a copy
    flat = FlatParams(model)
    ema = EMA(flat, decay=0.9)
    train(
        reference,
        torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False),
        lambda: averaged.update_parameters(reference),
    )
    train(model, torch.optim.SGD(flat.parameters(), lr=0.1, foreach=False), ema.update)
    trained = {n: p.detach().clone() for n, p in model.named_parameters()}
    with ema.weights():
        assert_same(averaged.module, model)
    assert all(torch.equal(trained[n], p) for n, p in model.named_parameters())
    assert ema.n_updates == 5


def test_an_exception_inside_brings_the_weights_back() -> None:
    model = build("tied")
    flat = FlatParams(model)
    ema = EMA(flat, 0.5)
    with torch.no_grad():
        model.encoder.weight.add_(1.0)
    kept = model.encoder.weight.detach().clone()

    def evaluate() -> None:
        with ema.weights():
            assert not torch.equal(kept, model.encoder.weight)
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert torch.equal(kept, model.encoder.weight)


def test_misuse_is_refused() -> None:
    flat = FlatParams(build("tied"))
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\); found 1.5"):
        EMA(flat, 1.5)
    ema = EMA(flat)
    with ema.weights():
        with pytest.raises(FlatbedError, match="update\\(\\) inside"):
            ema.update()
        with pytest.raises(FlatbedError, match="weights\\(\\) inside"), ema.weights():
            pass
    with pytest.raises(ValueError, match="of other parameters: decoder"):
        ema.load_state_dict(EMA(FlatParams(build("rnn"))).state_dict())


def test_state_round_trip() -> None:
    model = build("conv")
    flat = FlatParams(model)
    ema = EMA(flat, 0.9)
    train(model, torch.optim.SGD(flat.parameters(), lr=0.1), ema.update, 3)
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)
    other = EMA(FlatParams(build("conv")), 0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.decay, other.n_updates) == (0.9, 3)
    for a, b in zip(
        ema.state_dict()["weights"].values(), other.state_dict()["weights"].values(), strict=True
    ):
        assert torch.equal(a, b)


def test_follows_a_cast_and_keeps_low_precision_averages_in_fp32() -> None:
    model = build("tied")
    flat = FlatParams(model)
    ema = EMA(flat, 0.999)
    model.to(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    start = ema.state_dict()["weights"]["decoder.bias"].clone()
    for _ in range(200):
        ema.update()
    average = ema.state_dict()["weights"]["decoder.bias"]
    assert average.dtype is torch.float32
    torch.testing.assert_close(average, 1 + (start - 1) * 0.999**200, rtol=1e-4, atol=1e-4)
    with ema.weights():
        assert model.decoder.bias.dtype is torch.bfloat16
        assert torch.equal(model.decoder.bias, average.to(torch.bfloat16))


def test_a_cast_inside_keeps_the_trained_weights() -> None:
    model = build("tied")
    flat = FlatParams(model)
    ema = EMA(flat, 0.5)
    with torch.no_grad():
        model.encoder.weight.add_(1.0)
    kept = model.encoder.weight.detach().clone()
    with ema.weights():
        model.to(torch.bfloat16)
    assert torch.equal(model.encoder.weight, kept.to(torch.bfloat16))
    flat.assert_valid()


def test_a_step_inside_is_refused() -> None:
    model = build("tied")
    flat = FlatParams(model)
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    loss_of(model, batches(1)[0]).backward()
    with EMA(flat).weights(), pytest.raises(FlatbedError, match="step outside of it"):
        optimizer.step()


def test_averages_follow_a_cast_that_keeps_the_layout() -> None:
    flat = FlatParams(nn.Linear(16, 8, bias=False))
    ema = EMA(flat)
    flat.originals()[0].data = flat.originals()[0].data.double()
    ema.update()
    assert ema.state_dict()["weights"]["weight"].dtype is torch.float64


def test_the_averages_are_seen_by_autograd() -> None:
    model = build("tied")
    ema = EMA(FlatParams(model))
    loss = loss_of(model, batches(1)[0])
    with ema.weights(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
