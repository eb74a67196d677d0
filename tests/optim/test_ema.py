"""The average that is kept in the same pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flatbed
from tests.cases import build
from tests.optim.devices import assert_models_equal
from tests.optim.test_dropin import give_grads, steps


def test_the_average_is_torchs(where: str) -> None:
    """Of parameters without gradient in some steps, too."""
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.05, ema_decay=0.8)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    reference.n_averaged += 1  # torch's first update would only copy
    give_grads(model, seed=0)
    for step, skip in enumerate([(), (1,), (0, 3), ()]):
        give_grads(model, seed=step, skip=skip)
        optimizer.step()
        reference.update_parameters(model)
    trained = [p.clone() for p in model.parameters()]
    with optimizer.ema_weights():
        assert_models_equal(model, reference.module, where)
    assert all(map(torch.equal, trained, model.parameters()))


@pytest.mark.parametrize("way", ["not finite", "overflow"])
def test_the_average_stays_when_a_step_is_skipped(where: str, way: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.05, ema_decay=0.8, skip_nonfinite=True)
    steps(model, optimizer, range(2))
    before = [optimizer.state[p]["ema"].clone() for p in model.parameters()]
    give_grads(model, seed=2)
    if way == "overflow":
        optimizer.found_inf = torch.ones((), device=where)
    else:
        model.scale.grad.fill_(torch.nan)
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1
    assert all(
        torch.equal(optimizer.state[p]["ema"], value)
        for p, value in zip(model.parameters(), before, strict=True)
    )


def test_averages_of_low_precision_are_kept_in_fp32(where: str) -> None:
    model = build("mixed", where).bfloat16()
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.05, ema_decay=0.9, master_weights=True)
    expected = [p.detach().float() for p in model.parameters()]
    for step in range(3):
        give_grads(model, seed=step)
        optimizer.step()
        masters = [optimizer.state[p]["master_weight"] for p in model.parameters()]
        expected = [torch.lerp(e, m, 0.1) for e, m in zip(expected, masters, strict=True)]
    for p, e in zip(model.parameters(), expected, strict=True):
        assert optimizer.state[p]["ema"].dtype == torch.float32
        torch.testing.assert_close(optimizer.state[p]["ema"], e)
    before = [p.clone() for p in model.parameters()]
    masters = [m.clone() for m in masters]
    with optimizer.ema_weights():
        pass
    give_grads(model, seed=9)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(map(torch.equal, masters, (optimizer.state[p]["master_weight"] for p in model.parameters())))


def test_a_state_dict_of_averages_keeps_the_masters(where: str) -> None:
    """Even if it makes the state of a new parameter."""
    found = []
    for saves in (False, True):
        model = build("mixed", where).bfloat16()
        optimizer = flatbed.optim.Adagrad(model.parameters(), ema_decay=0.9, master_weights=True)
        steps(model, optimizer, range(2))
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=where).bfloat16())]})
        with optimizer.ema_weights():
            if saves:
                optimizer.state_dict()
        steps(model, optimizer, range(1))
        found.append([optimizer.state[p]["master_weight"] for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_an_error_in_the_context_puts_the_weights_back(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), ema_decay=0.9)
    steps(model, optimizer, range(1))
    before = [p.clone() for p in model.parameters()]
    with (
        pytest.raises(flatbed.FlatbedError, match="already"),
        optimizer.ema_weights(),
        optimizer.ema_weights(),
    ):
        pass
    assert all(map(torch.equal, before, model.parameters()))


def test_masters_are_not_refreshed_from_averages(where: str) -> None:
    model = build("mixed", where).bfloat16()
    optimizer = flatbed.optim.Adam(model.parameters(), ema_decay=0.9, master_weights=True)
    steps(model, optimizer, range(2))
    with optimizer.ema_weights():
        for call in (optimizer.refresh_masters, optimizer.step):
            with pytest.raises(flatbed.FlatbedError, match=r"averaged weights .* outside of it"):
                call()
    optimizer.refresh_masters()
    assert all(torch.equal(p, optimizer.state[p]["master_weight"].bfloat16()) for p in model.parameters())


def test_checkpoints_with_the_optimizer_hold_trained_weights(tmp_path: Path) -> None:
    model = build("mixed", "cpu")
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.05, ema_decay=0.8)
    give_grads(model, seed=0)
    optimizer.step()
    flatbed.save_checkpoint(tmp_path / "trained", model, optimizer)
    with optimizer.ema_weights():
        for function in (flatbed.save_checkpoint, flatbed.load_checkpoint):
            with pytest.raises(flatbed.FlatbedError, match=r"averaged weights.*outside"):
                function(tmp_path / "trained", model, optimizer)
        flatbed.save_checkpoint(tmp_path / "averaged", model)
    flatbed.load_checkpoint(tmp_path / "trained", model, optimizer)
