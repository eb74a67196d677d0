"""Changes of parameters, state and groups between steps: the next step uses them or raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import flatbed
from tests.cases import build
from tests.optim.devices import assert_equal, assert_models_equal
from tests.optim.test_dropin import adam_pair, give_grads, pair, train_both
from tests.optim.test_precision import low

# ---- memory of parameters and state

Change = Callable[[nn.Module, Any], object]


def second(model: nn.Module) -> nn.Parameter:
    return list(model.parameters())[1]


def move_values(model: nn.Module, optimizer: Any) -> None:
    """As averaging and weight surgery do it."""
    for p in model.parameters():
        p.data = p.data.clone() * 0.5


def move_state(model: nn.Module, optimizer: Any) -> None:
    """As offloading to other memory and back does it."""
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].data = state[key].data.clone()


def set_by_hand(model: nn.Module, optimizer: Any) -> None:
    p = next(model.parameters())
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.3)
    optimizer.state[p]["exp_avg_sq"].mul_(2)


def replace_an_entry(model: nn.Module, optimizer: Any) -> None:
    entry = optimizer.state[second(model)]
    optimizer.state[second(model)] = {key: value.clone().zero_() for key, value in entry.items()}


def replace_groups(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups = [{**group, "lr": 0.5 * group["lr"]} for group in optimizer.param_groups]


CHANGES: dict[str, Change] = {
    "values moved": move_values,
    "state moved": move_state,
    "state set": set_by_hand,
    "state cleared": lambda model, optimizer: optimizer.state.clear(),
    "an entry replaced": replace_an_entry,
    "an entry cleared": lambda model, optimizer: optimizer.state[second(model)].clear(),
    "an entry deleted": lambda model, optimizer: optimizer.state.pop(second(model)),
    "groups replaced": replace_groups,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_steps_count_as_in_torch(where: str, change: str) -> None:
    ours, theirs = pair(where)
    a, b = adam_pair(ours, theirs)
    for step in range(3):
        train_both(ours, theirs, a, b, [step])
        CHANGES[change](ours, a)
        CHANGES[change](theirs, b)
    train_both(ours, theirs, a, b, [3])
    assert_models_equal(ours, theirs, where)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_equal(a.state[p]["exp_avg"], b.state[q]["exp_avg"], where)


@pytest.mark.parametrize("change", ["shrunk", "viewed", "transposed", "transposed, contiguous gradient"])
def test_parameters_of_another_shape_in_the_same_memory(where: str, change: str) -> None:
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(where)
    outcomes = []
    for make in (flatbed.optim.SGD, optim.SGD):
        memory = whole.clone()
        p = nn.Parameter(memory)
        optimizer = make([p], lr=1.0)
        p.grad = torch.ones_like(p)
        optimizer.step()
        if change == "shrunk":
            p.data = p.data[:2]
        elif change == "viewed":
            p.data = p.data.view(2, 8)
        else:
            p.data = p.data.t()
        values = torch.arange(p.numel(), dtype=torch.float32, device=where).view(p.shape)
        p.grad = values if "contiguous" in change else torch.empty_like(p).copy_(values)
        optimizer.step()
        optimizer.step()
        outcomes.append((p.detach().clone(), memory.clone()))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])  # nothing outside the parameter was written


def test_a_parameter_cut_in_place_between_others(where: str) -> None:
    wholes = [torch.zeros(4, 4, device=where) for _ in range(3)]
    params = [nn.Parameter(whole) for whole in wholes]
    optimizer = flatbed.optim.SGD(params, lr=1.0)
    for size in (4, 2):
        params[1].data = wholes[1][:size]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert (wholes[1][:2] == -2).all()
    assert (wholes[1][2:] == -1).all()


def test_swapped_parameters_and_future_conversion(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01)
    give_grads(model)
    optimizer.step()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    give_grads(model, seed=1)
    before = [(p.detach().clone(), p._version) for p in model.parameters()]
    optimizer.step()
    for p, (value, version) in zip(model.parameters(), before, strict=True):
        assert p.dtype == torch.float64
        assert p.numel() == 0 or not torch.equal(p, value)
        assert p._version > version


def test_default_devices_do_not_matter(where: str) -> None:
    ours, theirs = pair(where)
    a, b = (flatbed.optim.Adam(m.parameters(), lr=0.01, max_norm=1.0) for m in (ours, theirs))
    c, d = (flatbed.optim.NAdam(m.parameters(), lr=0.01) for m in (ours, theirs))
    for step in range(2):
        give_grads(ours, theirs, seed=step)
        with torch.device("meta"):
            a.step()
            c.step()
        b.step()
        d.step()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


# ---- masters and averages


def step_still(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """A step with a learning rate of 0, which shows what the masters hold."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    give_grads(model, seed=99)
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def trained(where: str, **options: Any) -> tuple[nn.Module, Any]:
    model = build("mixed", where).to(low(where))
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01, **options)
    for step in range(2):
        give_grads(model, seed=step)
        optimizer.step()
    return model, optimizer


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 0.375) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("between", ["nothing", "ema", "rebuild", "checkpoint"])
def test_loaded_weights_reach_the_masters(where: str, between: str) -> None:
    model, optimizer = trained(where, master_weights=True, ema_decay=0.9)
    model.load_state_dict(other_weights(model))
    if between == "ema":
        with optimizer.ema_weights():
            pass
    elif between == "rebuild":
        late = nn.Parameter(torch.zeros(3, device=where))
        late.grad = torch.ones(3, device=where)
        optimizer.add_param_group({"params": [late]})
    elif between == "checkpoint":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all((value == 0.375).all() for value in step_still(model, optimizer))


def test_writes_that_autograd_does_not_see_need_a_word(where: str) -> None:
    model, optimizer = trained(where, master_weights=True)
    for p in model.parameters():
        p.data.fill_(0.375)
    optimizer.refresh_masters()
    assert all((value == 0.375).all() for value in step_still(model, optimizer))


def test_masters_keep_what_rounding_hides(where: str) -> None:
    """Weights that are the masters, rounded, do not round the masters."""
    model, optimizer = trained(where, master_weights=True)
    masters = [optimizer.state[p]["master_weight"].clone() for p in model.parameters()]
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer.refresh_masters()
    step_still(model, optimizer)
    for p, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(optimizer.state[p]["master_weight"], master)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_the_order_of_loading_does_not_matter(where: str, first: str) -> None:
    model, optimizer = trained(where, master_weights=True)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(5)
    again = build("mixed", where).to(low(where))
    for p in again.parameters():
        nn.init.constant_(p, 0.125)
    optimizer_again = flatbed.optim.Adam(again.parameters(), lr=0.01, master_weights=True, ema_decay=0.5)
    if first == "model":
        again.load_state_dict(weights)
        optimizer_again.load_state_dict(state)
    else:
        optimizer_again.load_state_dict(state)
        again.load_state_dict(weights)
    give_grads(model, again, seed=7)
    optimizer.step()
    optimizer_again.step()
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["master_weight"], optimizer_again.state[q]["master_weight"])
        # The average, which the checkpoint lacks, begins at the loaded weights.
        assert (optimizer_again.state[q]["ema"] - q.float()).abs().max() < 0.05 if q.numel() else True


def test_masters_that_are_no_longer_kept_are_forgotten(where: str) -> None:
    model, optimizer = trained(where, master_weights=True)
    model.float()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.375)
    give_grads(model)
    step_still(model, optimizer)
    assert not any("master_weight" in state for state in optimizer.state.values())
    model.to(low(where))
    assert all((value == 0.375).all() for value in step_still(model, optimizer))
    plain = flatbed.optim.Adam(model.parameters(), lr=0.01)
    saved = copy.deepcopy(trained(where, master_weights=True, ema_decay=0.5)[1].state_dict())
    with pytest.warns(UserWarning, match="'master_weight' and 'ema', which this optimizer does not keep"):
        plain.load_state_dict(saved)
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in plain.state_dict()["state"].values())


def test_flat_parameters_with_masters_follow_their_model(where: str) -> None:
    model = nn.Linear(5, 3, device=where).to(low(where))
    flat = flatbed.FlatParams(model)
    optimizer = flatbed.optim.Adam(flat, lr=0.01, master_weights=True)
    model(torch.ones(2, 5, device=where, dtype=low(where))).sum().backward()
    optimizer.step()
    model.load_state_dict(other_weights(model))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all((p == 0.375).all() for p in model.parameters())


# ---- state and hyperparameters


def test_a_checkpoint_in_low_precision_does_not_lower_the_state(where: str) -> None:
    model = build("mixed", where).bfloat16()
    theirs = optim.Adam(model.parameters())
    give_grads(model)
    theirs.step()
    wide = build("mixed", where)
    ours = flatbed.optim.Adam(wide.parameters())
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[next(wide.parameters())]["exp_avg"].dtype == torch.float32


def test_adamw_stays_adamw(where: str) -> None:
    ours, theirs = pair(where)
    source = optim.Adam(build("mixed", where).parameters(), lr=0.01, weight_decay=0.5, fused=True)
    a, b = flatbed.optim.AdamW(ours.parameters()), optim.AdamW(theirs.parameters())
    for optimizer, model in ((a, ours), (b, theirs)):
        optimizer.load_state_dict(source.state_dict())
        give_grads(model)
        optimizer.step()
    assert a.param_groups[0]["decoupled_weight_decay"] is True
    assert_models_equal(ours, theirs, where)


def test_a_scale_without_a_verdict(where: str) -> None:
    ours, theirs = pair(where)
    a, b = adam_pair(ours, theirs)
    give_grads(ours, theirs)
    for model, optimizer in ((ours, a), (theirs, b)):
        for p in model.parameters():
            p.grad.mul_(4.0)
        optimizer.grad_scale = torch.tensor(4.0, device=where)
        optimizer.step()
    assert_models_equal(ours, theirs, where)


def test_steps_without_gradients_change_nothing(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), max_norm=1.0)
    optimizer.step()
    give_grads(model)
    optimizer.step()
    before = [p.clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert float(optimizer.grad_norm) == 0
    assert all(map(torch.equal, before, model.parameters()))
    assert float(optimizer.state[next(model.parameters())]["step"]) == 1


def test_names_inside_flat_parameters(where: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(where)
    optimizer = flatbed.optim.Adam(flatbed.FlatParams(model))
    model(torch.ones(2, 3, device=where)).sum().backward()
    model[1].bias.grad[0] = float("nan")
    assert optimizer.nonfinite() == ["1.bias"]
