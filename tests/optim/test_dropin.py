"""Uses of an optimizer besides `step`: schedulers, hooks, groups, copies; results equal torch's."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import flatbed
from tests.cases import batches, build, loss_of
from tests.optim.devices import assert_equal, assert_models_equal


def pair(where: str, model: str = "mixed") -> tuple[nn.Module, nn.Module]:
    return build(model, where), build(model, where)


def give_grads(*models: nn.Module, seed: int = 0, skip: tuple[int, ...] = ()) -> None:
    """The same gradients for all models."""
    for model in models:
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(model.parameters()):
            # In the order of the parameter's elements: torch's fused CPU kernel ignores strides.
            grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
            p.grad = None if i in skip else grad


def steps(model: nn.Module, optimizer: Any, seeds: Iterable[int]) -> None:
    """Step one optimizer with these gradients."""
    for seed in seeds:
        give_grads(model, seed=seed)
        optimizer.step()


def train_both(ours: nn.Module, theirs: nn.Module, a: Any, b: Any, seeds: Iterable[int] = (0,)) -> None:
    """Step both optimizers with the same gradients."""
    for seed in seeds:
        give_grads(ours, theirs, seed=seed)
        a.step()
        b.step()


def adam_pair(ours: nn.Module, theirs: nn.Module, **options: Any) -> tuple[Any, Any]:
    options.setdefault("lr", 0.01)
    return (
        flatbed.optim.Adam(ours.parameters(), **copy.deepcopy(options)),  # schedulers write into tensors
        optim.Adam(theirs.parameters(), fused=True, **copy.deepcopy(options)),
    )


def test_closure(where: str) -> None:
    ours, theirs = pair(where)
    optimizers = adam_pair(ours, theirs)
    (x,) = batches(1, where)
    losses = []
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        with torch.no_grad():  # the closure runs with gradients all the same
            losses.append(optimizer.step(closure))
    assert torch.equal(losses[0], losses[1])
    assert_models_equal(ours, theirs, where)


def test_hooks_run_in_torchs_order_and_the_profiler_names_the_step() -> None:
    model = build("mixed")
    optimizer = flatbed.optim.Adam(model.parameters())
    seen: list[str] = []
    give_grads(model)
    with torch.profiler.profile(acc_events=True) as profiler:
        optimizer.step()
    assert any("Optimizer.step#Adam.step" in event.key for event in profiler.key_averages())
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("global"))
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert seen == ["before", "after", "global"]


SCHEDULERS: list[tuple[type[Any], dict[str, Any]]] = [
    (lr_scheduler.LambdaLR, {"lr_lambda": lambda t: 0.9**t}),
    (lr_scheduler.MultiplicativeLR, {"lr_lambda": lambda t: 0.9}),
    (lr_scheduler.StepLR, {"step_size": 2}),
    (lr_scheduler.MultiStepLR, {"milestones": [1, 3]}),
    (lr_scheduler.ConstantLR, {"total_iters": 2}),
    (lr_scheduler.LinearLR, {"total_iters": 3}),
    (lr_scheduler.ExponentialLR, {"gamma": 0.8}),
    (lr_scheduler.SequentialLR, {"milestones": [2]}),
    (lr_scheduler.PolynomialLR, {"total_iters": 4}),
    (lr_scheduler.CosineAnnealingLR, {"T_max": 3}),
    (lr_scheduler.ChainedScheduler, {}),
    (lr_scheduler.ReduceLROnPlateau, {"patience": 0}),
    (lr_scheduler.CyclicLR, {"base_lr": 1e-3, "max_lr": 1e-2}),  # cycles beta1 too
    (lr_scheduler.CosineAnnealingWarmRestarts, {"T_0": 3}),
    (lr_scheduler.OneCycleLR, {"max_lr": 1e-2, "total_steps": 10}),
    (optim.swa_utils.SWALR, {"swa_lr": 0.05, "anneal_epochs": 3}),
]


def schedule(optimizer: optim.Optimizer, kind: type[Any], options: dict[str, Any]) -> Any:
    if kind in (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler):
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        options = {**options, "schedulers": parts}
        return kind(**options) if kind is lr_scheduler.ChainedScheduler else kind(optimizer, **options)
    return kind(optimizer, **options)


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS, ids=lambda value: getattr(value, "__name__", ""))
def test_schedulers(kind: type[Any], options: dict[str, Any]) -> None:
    """Every scheduler of torch, with one of the kinds of numbers that may be a learning rate."""
    ours, theirs = pair("cpu")
    rates = [0.01, torch.tensor(0.01), np.float32(0.01)]
    a, b = adam_pair(ours, theirs, lr=rates[len(kind.__name__) % 3])
    schedules = [schedule(optimizer, kind, options) for optimizer in (a, b)]
    for step in range(5):
        train_both(ours, theirs, a, b, [step])
        for one in schedules:
            one.step(1.0) if kind is lr_scheduler.ReduceLROnPlateau else one.step()
    assert_models_equal(ours, theirs, "cpu")


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_changed_learning_rates_are_used(where: str, tensor_lr: bool) -> None:
    ours, theirs = pair(where)
    rates = [torch.tensor(0.01, device=where) for _ in range(2)]
    a = flatbed.optim.Adam(ours.parameters(), lr=rates[0] if tensor_lr else 0.01)
    b = optim.Adam(theirs.parameters(), lr=rates[1], fused=True)
    for step, lr in enumerate((0.01, 0.003, 0.1)):
        for rate in rates:
            rate.fill_(lr)
        if not tensor_lr:
            a.param_groups[0]["lr"] = lr
        train_both(ours, theirs, a, b, [step])
    assert_models_equal(ours, theirs, where)


@pytest.mark.parametrize("model", ["mixed", "conv", "frozen", "tied"])
def test_parameters_come_and_go(where: str, model: str) -> None:
    """Without gradient: skipped, and the step count stays behind; frozen and unfrozen later."""
    ours, theirs = pair(where, model)
    a, b = adam_pair(ours, theirs, weight_decay=0.1)
    for step, skip in enumerate([(0, 1), (1,), (), (0, 2), (1,), ()]):
        give_grads(ours, theirs, seed=step, skip=skip)
        a.step()
        b.step()
        a.zero_grad()
    assert_models_equal(ours, theirs, where)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float(a.state[p]["step"]) == float(b.state[q]["step"])


def test_groups_that_differ_in_state_and_sign_and_come_late(where: str) -> None:
    ours, theirs = pair(where)
    optimizers = []
    for kind, model, more in ((flatbed.optim.Adam, ours, {}), (optim.Adam, theirs, {"fused": True})):
        first, second = list(model.parameters())[:3], list(model.parameters())[3:5]
        groups = [{"params": first, "amsgrad": True, "maximize": True}, {"params": second}]
        optimizers.append(kind(groups, lr=0.01, **more))
    train_both(ours, theirs, *optimizers, range(2))
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        optimizer.add_param_group({"params": list(model.parameters())[5:], "lr": 0.1})
    train_both(ours, theirs, *optimizers, range(2, 4))
    assert_models_equal(ours, theirs, where)


def test_a_group_that_comes_late_beside_a_table(where: str) -> None:
    emb, first, late = flatbed.Embedding(9, 4, device=where), *(nn.Linear(4, 4).to(where) for _ in range(2))
    optimizer = flatbed.optim.Adagrad([emb.table, *first.parameters()], lr=0.5)
    for n_steps in (1, 2):
        before = emb.read_rows([2]).clone()
        late(first(emb([2, 3]))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(emb.read_rows([2]), before)
        if n_steps == 1:
            optimizer.add_param_group({"params": late.parameters()})


def test_a_module_and_named_parameters_give_names() -> None:
    model = build("mixed")
    for source in (model, model.named_parameters()):
        optimizer = flatbed.optim.Adam(source)
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("named", [True, False])
def test_modules_in_groups(named: bool) -> None:
    body, head, late = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(1, 1)
    first = body if named else body.parameters()
    optimizer = flatbed.optim.Adam([{"params": first}, {"params": head, "lr": 0.5}])
    optimizer.add_param_group({"params": late})
    groups = optimizer.param_groups
    assert all(
        map(is_, chain(*(group["params"] for group in groups)), nn.Sequential(body, head, late).parameters())
    )
    assert [group.get("param_names") for group in groups] == [["weight", "bias"] if named else None] * 3
    assert groups[1]["lr"] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_is_cast_in_mid_training_keeps_its_state(where: str, dtype: torch.dtype) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01)
    give_grads(model)
    optimizer.step()
    p = next(model.parameters())
    moment = optimizer.state[p]["exp_avg"].clone()
    model.to(dtype)
    give_grads(model, seed=1)
    grad = p.grad.float()
    optimizer.step()
    assert p.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert optimizer.state[p]["exp_avg"].dtype == wide
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.lerp(moment, grad, 0.1).to(wide))


def test_surgery_on_parameters_and_state(where: str) -> None:
    """Parameters replaced in the group, with their state cut to size: how Gaussian splatting prunes."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(6, 3, device=where)) for _ in range(2))
    a, b = flatbed.optim.Adam([ours], lr=0.1), optim.Adam([theirs], lr=0.1, fused=True)
    grad = torch.randn(6, 3, device=where)
    results = []
    for optimizer, p in ((a, ours), (b, theirs)):
        p.grad = grad.clone()
        optimizer.step()
        stored = optimizer.state.pop(p)
        stored["exp_avg"] = stored["exp_avg"][2:].clone()
        stored["exp_avg_sq"] = stored["exp_avg_sq"][2:].clone()
        kept = nn.Parameter(p.detach()[2:].clone())
        optimizer.param_groups[0]["params"][0] = kept
        optimizer.state[kept] = stored
        kept.grad = grad[2:].clone()
        optimizer.step()
        results.append(kept.detach())
    assert_equal(results[0], results[1], where)


KINDS = ["contiguous", "expanded", "sliced", "shared", "misaligned", "parameter with holes"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_lie_otherwise(where: str, kind: str) -> None:
    """A gradient may have other strides and another alignment than its parameter."""
    torch.manual_seed(0)
    shape = (4, 6, 3, 5)
    values = torch.randn(shape).to(where).to(memory_format=torch.channels_last)
    big = torch.randn(4, 6, 3, 11, device=where)
    memory = torch.randn(values.numel() + 1, device=where)
    has_holes = kind == "parameter with holes"
    ours, theirs = (nn.Parameter(big.clone()[..., 1::2] if has_holes else values.clone()) for _ in range(2))
    grad = {
        "expanded": torch.randn(4, 1, 3, 1, device=where).expand(shape),
        "sliced": big[..., 1::2],
        "shared": big[..., :5],
        "misaligned": memory[1:].as_strided(shape, values.stride()),
    }.get(kind, torch.randn(shape, device=where))
    a, b = flatbed.optim.Adam([ours], lr=0.1), optim.Adam([theirs], lr=0.1, fused=not has_holes)
    for _ in range(3):
        # The reference gets its gradient in order: torch's fused CPU kernel ignores strides.
        ours.grad, theirs.grad = grad, torch.empty_like(theirs).copy_(grad)
        a.step()
        b.step()
    assert_equal(ours.detach(), theirs.detach(), "tolerant" if has_holes else where)


@pytest.mark.parametrize("grads", ["follow", "bound"])
def test_flat_params_of_whole_vectors_have_torchs_bits(where: str, grads: Any) -> None:
    """Sizes are multiples of 16: torch computes what is left over at the end of a tensor in another way."""
    ours = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)).to(where)
    theirs = copy.deepcopy(ours)
    flat = flatbed.FlatParams(ours, grads=grads)
    a = flatbed.optim.AdamW(flat, lr=0.01)
    b = optim.AdamW(theirs.parameters(), lr=0.01, fused=True)
    for _ in range(20):
        x = torch.randn(8, 16, device=where)
        for model, optimizer in ((ours, a), (theirs, b)):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert flat.is_valid()
    assert_models_equal(ours, theirs, where if where == "cpu" else "tolerant")


def test_an_update_between_forward_and_backward_is_noticed(where: str) -> None:
    layer = nn.Linear(3, 3, device=where)
    optimizer = flatbed.optim.Adam(layer.parameters())
    x = torch.ones(2, 3, device=where, requires_grad=True)
    layer(x).sum().backward()
    late = layer(x).pow(2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_zero_grad(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters())
    give_grads(model)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_freed_by_zero_grad(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), max_norm=1.0)
    give_grads(model)
    optimizer.step()
    held = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    assert all(one() is None for one in held)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_by_themselves(where: str, copied: Callable[[Any], Any]) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, max_norm=1.0)
    give_grads(model)
    optimizer.step()
    twin, twin_optimizer = copied((model, optimizer))
    train_both(model, twin, optimizer, twin_optimizer, range(2))
    assert_models_equal(twin, model, where)
    assert float(twin_optimizer.grad_norm) > 1
    assert optimizer.state[next(model.parameters())] is not twin_optimizer.state[next(twin.parameters())]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_round_as_the_original_does(where: str, copied: Callable[[Any], Any]) -> None:
    model = build("mixed", where).bfloat16()
    optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1, stochastic_rounding=True)
    give_grads(model)
    optimizer.step()
    twin, twin_optimizer = copied((model, optimizer))
    train_both(model, twin, optimizer, twin_optimizer, range(2))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_keeps_a_dropped_optimizer_alive(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters())
    give_grads(model)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
