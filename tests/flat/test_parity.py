"""Flat training against per-parameter training: every optimizer, every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from tests.cases import (
    BOTH,
    MODELS,
    OPTIMIZERS,
    OptimizerCase,
    assert_same,
    batches,
    build,
    loss_of,
    two_groups,
)

STEPS = 8  # RAdam rectifies from the sixth on
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def train(
    case: OptimizerCase,
    model: nn.Module,
    *,
    flat_grads: str | None,
    grouped: bool,
    clip: bool,
    options: dict[str, Any],
    accumulate: int = 1,
    schedule: bool = False,
    device: str = "cpu",
) -> None:
    source: Any = two_groups(model) if grouped else model
    if flat_grads is None:
        flat = None
        optimizer = case(source if grouped else list(model.parameters()), **options)
    else:
        flat = flatbed.FlatParams(source, grads=flat_grads)  # type: ignore[arg-type]
        optimizer = case(flat.groups(), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if schedule else None
    in_groups = [p for group in two_groups(model) for p in group["params"]]
    params = in_groups if grouped else list(model.parameters())
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
        if scheduler is not None:
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
    """Grouping and clipping are paired with the models and modes rather than crossed."""
    grouped = model in ("mixed", "conv", "rnn") and grads == "follow"
    clip = model != "tied"
    reference, flat = build(model), build(model)
    train(case, reference, flat_grads=None, grouped=grouped, clip=clip, options={"foreach": False})
    train(case, flat, flat_grads=grads, grouped=grouped, clip=clip, options={"foreach": False})
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
    more: dict[str, Any] = {"grouped": True, "clip": True, "options": {option: True}, "device": device}
    with torch.backends.cudnn.flags(deterministic=True):
        train(case, reference, flat_grads=None, **more)
        train(case, flat, flat_grads=grads, **more)
    assert_same(reference, flat, 1e-6)


@BOTH
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda c: c.name)
def test_accumulation_and_scheduler(case: OptimizerCase, grads: str) -> None:
    reference, flat = build("mixed"), build("mixed")
    more: dict[str, Any] = {"accumulate": 3, "schedule": True, "grouped": False, "clip": True}
    train(case, reference, flat_grads=None, options={"foreach": False}, **more)
    train(case, flat, flat_grads=grads, options={"foreach": False}, **more)
    assert_same(reference, flat)


@BOTH
@pytest.mark.parametrize(
    "case", [c for c in OPTIMIZERS if c.name in ("sgd-momentum", "adamw")], ids=lambda c: c.name
)
@DEVICES
def test_autocast_and_grad_scaler(device: str, case: OptimizerCase, grads: str) -> None:
    def run(model: nn.Module, flat_mode: str | None) -> None:
        flat = None if flat_mode is None else flatbed.FlatParams(model, grads=flat_mode)  # type: ignore[arg-type]
        optimizer = case(model.parameters() if flat is None else flat.parameters(), foreach=False)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
        for i, x in enumerate(batches(STEPS, device)):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_of(model, x)
            scaler.scale(loss).backward()
            if i == 4:  # an overflow: this step is skipped
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.unscale_(optimizer)
            if flat is None:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            else:
                flat.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    reference, model = build("mixed", device), build("mixed", device)
    run(reference, None)
    run(model, grads)
    assert_same(reference, model, 0.0 if device == "cpu" else 1e-3)


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


def test_activation_checkpointing() -> None:
    def run(model: nn.Module, flat: flatbed.FlatParams | None) -> None:
        optimizer = torch.optim.AdamW(
            model.parameters() if flat is None else flat.parameters(), lr=0.01, foreach=False
        )
        for x in batches(STEPS):
            hidden = torch.utils.checkpoint.checkpoint(model.encoder, x, use_reentrant=False)
            model.decoder(hidden).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    reference, model = build("tied"), build("tied")
    run(reference, None)
    run(model, flatbed.FlatParams(model))
    assert_same(reference, model)
