from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from flatbed.bench.shadow import N_ELEMENTS, Shadow
from flatbed.bench.ways import OPTIMIZERS

ADAM = OPTIMIZERS["adam"]
MAX_NORM = 3.0


def make_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in (5, 2 * N_ELEMENTS, *range(1, 30))]


def set_gradients(params: Sequence[Tensor], norm: float) -> None:
    for param in params:
        param.grad = torch.randn_like(param)
    total = torch.stack([p.grad.float().norm() for p in params]).norm()
    for param in params:
        param.grad.mul_(norm / total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_steps_are_right(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    shadow = Shadow(params, ADAM, max_norm=MAX_NORM)
    optimizer = ADAM.make_flatbed(params, max_norm=MAX_NORM, master_weights=dtype == torch.bfloat16)
    for n_steps, norm in ((4, 10.0), (1, 1.0), (1, 5.0)):
        set_gradients(params, norm)
        shadow.see_gradients()
        for _ in range(n_steps):
            optimizer.step()
        shadow.step(n_steps)
        # Torch rounds the norm of bf16 gradients to bf16.
        assert shadow.compare(optimizer).max_rel_error < max(1e-4, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("max_norm", [None, MAX_NORM * 1.1])
def test_missing_or_other_clipping_is_found_out(max_norm: float | None) -> None:
    params = make_params()
    shadow = Shadow(params, ADAM, max_norm=MAX_NORM)
    optimizer = ADAM.make_flatbed(params, max_norm=max_norm)
    worst = 0.0
    for n_steps, norm in ((200, 10.0), (1, 2.0)):
        set_gradients(params, norm)
        shadow.see_gradients()
        for _ in range(n_steps):
            optimizer.step()
        shadow.step(n_steps)
        worst = max(worst, shadow.compare(optimizer).max_rel_error)
    assert worst > 1e-3


def test_a_step_left_out_is_found_out() -> None:
    params = make_params()
    shadow = Shadow(params, ADAM, max_norm=MAX_NORM)
    optimizer = ADAM.make_torch(params)
    set_gradients(params, 1.0)
    shadow.see_gradients()
    optimizer.step()
    shadow.step(2)
    assert not shadow.compare(optimizer).ok


def test_a_parameter_that_is_not_its_master_weight_is_found_out() -> None:
    params = make_params(torch.bfloat16)
    shadow = Shadow(params, ADAM, max_norm=MAX_NORM)
    optimizer = ADAM.make_flatbed(params, max_norm=MAX_NORM, master_weights=True)
    set_gradients(params, 1.0)
    shadow.see_gradients()
    optimizer.step()
    shadow.step()
    params[-1].data[-1] += 1
    assert not shadow.compare(optimizer).ok


def test_first_and_last_parameter_are_among_the_watched() -> None:
    for wrong in (0, -1):
        params = make_params()
        shadow = Shadow(params, ADAM, max_norm=MAX_NORM)
        optimizer = ADAM.make_torch(params)
        set_gradients(params, 1.0)
        shadow.see_gradients()
        shadow.step()
        optimizer.step()
        params[wrong].data[-1] += 1e-3
        assert not shadow.compare(optimizer).ok
