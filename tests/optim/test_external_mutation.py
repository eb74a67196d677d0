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
from tests.optim.test_dropin import adam_pair, give_grads, pair, steps, train_both
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


def set_between_others(model: nn.Module, optimizer: Any) -> None:
    p = model.transposed
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.3)


def replace_an_entry(model: nn.Module, optimizer: Any) -> None:
    entry = optimizer.state[second(model)]
    optimizer.state[second(model)] = {key: value.clone().zero_() for key, value in entry.items()}


def replace_a_parameter(model: nn.Module, optimizer: Any) -> None:
    """One that is neither the first nor the last."""
    params, old = optimizer.param_groups[0]["params"], model.transposed
    model.transposed = nn.Parameter(old.detach().clone())
    params[[p is old for p in params].index(True)] = model.transposed


def replace_groups(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups = [{**group, "lr": 0.5 * group["lr"]} for group in optimizer.param_groups]


CHANGES: dict[str, Change] = {
    "values moved": move_values,
    "state moved": move_state,
    "state set": set_by_hand,
    "state set between others": set_between_others,
    "state cleared": lambda model, optimizer: optimizer.state.clear(),
    "an entry replaced": replace_an_entry,
    "an entry cleared": lambda model, optimizer: optimizer.state[second(model)].clear(),
    "an entry deleted": lambda model, optimizer: optimizer.state.pop(second(model)),
    "a parameter replaced": replace_a_parameter,
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


RESHAPED: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "shrunk": (0, lambda values: values[:2]),
    "shrunk, between others": (1, lambda values: values[:2]),
    "viewed": (0, lambda values: values.view(2, 8)),
    "transposed": (2, Tensor.t),
}


@pytest.mark.parametrize("contiguous_grad", [False, True])
@pytest.mark.parametrize("change", RESHAPED)
def test_parameters_of_another_shape_in_the_same_memory(
    where: str, change: str, contiguous_grad: bool
) -> None:
    changed, reshape = RESHAPED[change]
    outcomes = []
    for make in (flatbed.optim.SGD, optim.SGD):
        generator = torch.Generator().manual_seed(0)
        memory = [torch.randn(4, 4, generator=generator).to(where) for _ in range(3)]
        params = [nn.Parameter(whole) for whole in memory]
        optimizer = make(params, lr=1.0)
        for step in range(3):
            if step == 1:
                params[changed].data = reshape(params[changed].data)
            for p in params:
                values = torch.arange(p.numel(), dtype=torch.float32, device=where).view(p.shape)
                p.grad = values if contiguous_grad else torch.empty_like(p).copy_(values)
            optimizer.step()
        outcomes.append([*memory, *params])
    assert all(map(torch.equal, *outcomes))  # nothing outside the parameter was written, too


def test_transposed_parameter_between_others(where: str) -> None:
    """Autograd gives its gradient the new strides; its state gets them, too."""
    outcomes = []
    for make in (flatbed.optim.SGD, optim.SGD):
        params = [nn.Parameter(torch.arange(16.0, device=where).view(4, 4)) for _ in range(3)]
        optimizer = make(params, lr=1.0, momentum=0.5)
        for step in range(6):
            if step in (2, 4):
                params[1].data = params[1].data.t()
            optimizer.zero_grad()
            sum((p * torch.arange(16.0, device=where).view(4, 4)).sum() for p in params).backward()
            optimizer.step()
        outcomes.append([*params, *(optimizer.state[p]["momentum_buffer"] for p in params)])
    assert all(map(torch.equal, *outcomes))


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
    steps(model, optimizer, [99])
    return [p.detach().clone() for p in model.parameters()]


def trained(where: str, **options: Any) -> tuple[nn.Module, Any]:
    model = build("mixed", where).to(low(where))
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01, **options)
    steps(model, optimizer, range(2))
    return model, optimizer


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 0.375) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("between", ["nothing", "ema", "rebuild", "checkpoint", "data"])
def test_loaded_weights_reach_the_masters(where: str, between: str) -> None:
    model, optimizer = trained(where, master_weights=True, ema_decay=0.9)
    if between != "data":
        model.load_state_dict(other_weights(model))
    if between == "data":  # autograd does not see such writes
        for p in model.parameters():
            p.data.fill_(0.375)
        optimizer.refresh_masters()
    elif between == "ema":
        with optimizer.ema_weights():
            pass
    elif between == "rebuild":
        late = nn.Parameter(torch.zeros(3, device=where))
        late.grad = torch.ones(3, device=where)
        optimizer.add_param_group({"params": [late]})
    elif between == "checkpoint":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
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
    again = build("mixed", where).to(low(where))
    for p in again.parameters():
        nn.init.constant_(p, 0.125)
    optimizer_again = flatbed.optim.Adam(again.parameters(), lr=0.01, master_weights=True, ema_decay=0.5)
    both = [(again, weights), (optimizer_again, state)]
    for target, saved in both if first == "model" else reversed(both):
        target.load_state_dict(saved)
    train_both(model, again, optimizer, optimizer_again, [7])
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
        torch._foreach_mul_([p.grad for p in model.parameters()], 4.0)
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
