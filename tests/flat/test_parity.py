"""Flat training against per-parameter training: every optimizer, every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from tests.cases import (
    BOTH,
    DEVICES,
    MODELS,
    OPTIMIZERS,
    OptimizerCase,
    assert_same,
    batches,
    build,
    loss_of,
    two_groups,
)
from tests.flat.twins import assert_twins, twins

STEPS = 8  # RAdam rectifies from the sixth on


def train(
    case: OptimizerCase,
    model: nn.Module,
    *,
    flat_grads: Any,
    grouped: bool = False,
    clip: bool = True,
    accumulate: int = 1,
    device: str = "cpu",
    **options: Any,
) -> None:
    source: Any = two_groups(model) if grouped else list(model.parameters())
    flat = None if flat_grads is None else flatbed.FlatParams(source, grads=flat_grads)
    optimizer = case(source if flat is None else flat.groups(), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    params = [p for group in source for p in group["params"]] if grouped else source
    for i, x in enumerate(batches(STEPS * accumulate, device)):
        loss_of(model, x).backward()
        if (i + 1) % accumulate:
            continue
        # On a GPU flat.clip_grad_norm_ sums in another order, and RMSprop's first steps magnify the last bit
        # of a gradient near zero.
        if clip and (flat is None or device == "cuda"):
            nn.utils.clip_grad_norm_(params, 0.1, foreach=False)
        elif clip and flat is not None:
            flat.clip_grad_norm_(0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if flat is not None:
        flat.assert_valid()
        assert_padding_is_zero(flat)


def assert_padding_is_zero(flat: flatbed.FlatParams) -> None:
    rest = [buffer.clone() for buffer in flat.buffers]
    for segment in flat.segments:
        rest[segment.buffer][segment.offset : segment.end] = 0
    assert not any(buffer.any() for buffer in rest)


@pytest.mark.parametrize(
    ("model", "grads"),
    [*((model, "follow") for model in MODELS), ("mixed", "bound"), ("tied", "bound"), ("frozen", "bound")],
)
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda c: c.name)
def test_bitwise_with_the_loop(case: OptimizerCase, model: str, grads: str) -> None:
    """Grouping, clipping and accumulation are paired with the models and modes rather than crossed."""
    more: dict[str, Any] = {
        "grouped": model in ("mixed", "conv", "rnn") and grads == "follow",
        "clip": model != "tied",
        "accumulate": 3 if model == "mixed" else 1,
        "foreach": False,
    }
    reference, flat = build(model), build(model)
    train(case, reference, flat_grads=None, **more)
    train(case, flat, flat_grads=grads, **more)
    assert_same(reference, flat)


@DEVICES
@pytest.mark.parametrize(
    ("case", "option"),
    [(c, o) for c in OPTIMIZERS for o in ("foreach", "fused") if o == "foreach" or c.fused],
    ids=lambda v: getattr(v, "name", v),
)
def test_foreach_and_fused_are_close(case: OptimizerCase, option: str, device: str) -> None:
    model, grads = ("mixed", "follow") if option == "foreach" else ("conv", "bound")
    if device == "cuda" and case.kind is torch.optim.Adagrad:
        option = "foreach"  # torch has no fused kernel for it on a GPU
    reference, flat = build(model, device), build(model, device)
    more: dict[str, Any] = {"grouped": True, option: True, "device": device}
    with torch.backends.cudnn.flags(deterministic=True):
        train(case, reference, flat_grads=None, **more)
        train(case, flat, flat_grads=grads, **more)
    assert_same(reference, flat, 1e-6)


@BOTH
@pytest.mark.parametrize(
    "case", [c for c in OPTIMIZERS if c.name in ("sgd-momentum", "adamw")], ids=lambda c: c.name
)
@DEVICES
def test_autocast_and_grad_scaler(device: str, case: OptimizerCase, grads: str) -> None:
    pair = twins(grads, case, model="mixed", device=device)
    for one in pair:
        model, optimizer, _ = one
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
        for i, x in enumerate(batches(STEPS, device)):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_of(model, x)
            scaler.scale(loss).backward()
            if i == 4:  # an overflow: this step is skipped
                next(model.parameters()).grad.fill_(float("inf"))
            scaler.unscale_(optimizer)
            one.clip()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_twins(pair, 0.0 if device == "cpu" else 1e-3)


def test_lbfgs() -> None:
    def run(model: nn.Module, params: Any) -> list[float]:
        optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
        losses = []
        for x in batches(4):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    reference, model = build("tied").double(), build("tied").double()
    torch.set_default_dtype(torch.float64)
    try:
        expected = run(reference, list(reference.parameters()))
        got = run(model, flatbed.FlatParams(model).parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    assert got == pytest.approx(expected, rel=1e-8)
    assert_same(reference, model, 1e-6)
