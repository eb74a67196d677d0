"""Every optimizer's kernels, on a GPU or interpreted: as close to exact arithmetic as torch's own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from tests.optim.mutants import WRONG, Wrong, broken
from tests.optim.optimizers import CASES, Case

SHAPES = [(5,), (3, 7), (600,)]  # the last is one full block and a bit
KINDS = list({case.kind: case for case in CASES}.values())
ON_GPU = torch.cuda.is_available()

# The interpreter computes with numpy, which remarks on log(0); exp(-inf) is 0, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


def gradients(step: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Of many sizes, some zero; the second parameter has none now and then."""
    generator = torch.Generator().manual_seed(step)
    grads: list[Tensor | None] = []
    for shape in SHAPES:
        sizes = 10 ** torch.linspace(-3, 0, shape[-1])
        grads.append(
            (torch.randn(shape, generator=generator) * sizes).index_fill(-1, torch.tensor([1]), 0.0).to(dtype)
        )
    return [None if i == 1 and step % 5 == 3 else grad for i, grad in enumerate(grads)]


def train(
    make: Callable[..., Any],
    device: str,
    *,
    steps: int,
    dtype: torch.dtype,
    given: torch.dtype,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Parameters and state after steps in `dtype` with parameters and gradients that are exact in `given`."""
    generator = torch.Generator().manual_seed(100)
    start = [torch.randn(shape, generator=generator).to(given) for shape in SHAPES]
    params = [nn.Parameter(p.to(device, dtype)) for p in start]
    optimizer = make(params, **options)
    for step in range(steps):
        for p, grad in zip(params, gradients(step, given), strict=True):
            p.grad = None if grad is None else grad.to(device, dtype)
        optimizer.step()
    results = {
        "parameters": params,
        **{k: [optimizer.state[p][k] for p in params] for k in optimizer.state[params[0]]},
    }
    tensors = {
        k: torch.cat([t.detach().flatten() for t in held]).cpu()
        for k, held in results.items()
        if held[0].dim()
    }
    numbers = {k: [t.cpu() for t in held] for k, held in results.items() if not held[0].dim()}
    return tensors, numbers


def check(case: Case, device: str, *, steps: int, dtype: torch.dtype = torch.float32, floor: int = 1) -> None:
    """No worse than one and a half times the error of torch's loop.

    State, and parameters in other dtypes than fp32, may be off by `floor` ulp of the largest element more:
    torch's own error is zero in places.
    """
    exact_lr = {"lr": float(case.options["lr"])} if "lr" in case.options else {}
    exact, exact_numbers = train(
        case.theirs, device, steps=steps, dtype=torch.float64, given=dtype, foreach=False, **exact_lr
    )
    loop, _ = train(case.theirs, device, steps=steps, dtype=dtype, given=dtype, foreach=False)
    ours, numbers = train(case.ours, device, steps=steps, dtype=dtype, given=dtype)
    assert numbers == exact_numbers
    assert list(ours) == list(exact)
    for name, value in exact.items():
        error, allowed = ((side[name].double() - value).abs().max().item() for side in (ours, loop))
        ulp = torch.finfo(dtype).eps * value.abs().max().item()
        slack = 0 if name == "parameters" and dtype == torch.float32 else floor
        assert error <= 1.5 * allowed + slack * ulp, (
            f"{name}: {error / ulp:.2f} ulp, torch {allowed / ulp:.2f}"
        )


def runs() -> list[Any]:
    """Cases with their dtype and steps, and the error that is allowed. The interpreter takes long."""
    single, half = (CASES, KINDS) if ON_GPU else (KINDS, KINDS[:2])
    # Mistakes that fp32 hides show in fp64. The interpreter cuts bits off where a GPU rounds to bf16.
    found = [
        *((case, torch.float32, 50 if ON_GPU else 12, 1) for case in single),
        *((case, torch.float64, 8, 32) for case in CASES),
        *((case, torch.bfloat16, *((8, 1) if ON_GPU else (4, 8))) for case in half),
    ]
    return [pytest.param(*run, id=f"{run[0].name}-{run[1]}") for run in found]


@pytest.mark.parametrize(("case", "dtype", "steps", "floor"), runs())
def test_as_exact_as_torch(
    case: Case, dtype: torch.dtype, steps: int, floor: int, kernel_device: str
) -> None:
    check(case, kernel_device, steps=steps, dtype=dtype, floor=floor)


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.part == "kernel"], ids=str)
def test_wrong_rules_are_caught(wrong: Wrong, kernel_device: str, tmp_path: Path) -> None:
    case = broken(wrong, tmp_path)
    with pytest.raises(AssertionError, match="ulp"):
        check(case, kernel_device, steps=12)


class OnGpu(torch.Tensor):
    """A tensor that the optimizer takes for one on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = SimpleNamespace(type="cuda")


def test_learning_rates_on_the_device_and_numbers_replace_each_other(kernel_device: str) -> None:
    param = nn.Parameter(torch.zeros(4, device=kernel_device))
    optimizer = flatbed.optim.SGD([param], lr=0.5)
    expected = 0.0
    for lr, on_device in ((1.0, True), (0.0, False), (2.0, True), (4.0, True), (0.5, False), (0.0, True)):
        there = torch.tensor(lr, device=kernel_device)
        if kernel_device == "cpu":
            there = there.as_subclass(OnGpu)  # type: ignore[no-untyped-call,unused-ignore]
        optimizer.param_groups[0]["lr"] = there if on_device else lr
        param.grad = torch.ones_like(param)
        optimizer.step()
        expected -= lr
        assert param.tolist() == [expected] * 4
