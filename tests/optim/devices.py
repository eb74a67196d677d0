"""Equality for each of the places where a step runs; waits for the GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def is_exact(where: str) -> bool:
    """Tell if the step is bitwise equal to torch's fused kernel."""
    return where == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


def assert_equal(ours: Tensor, theirs: Tensor, where: str, message: str = "") -> None:
    """Assert bitwise equality where torch's own kernel runs, otherwise to a few units in the last place."""
    if is_exact(where):
        assert torch.equal(ours, theirs), f"{message}: {(ours - theirs).abs().max()}"
    else:
        low = ours.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(
            ours, theirs, rtol=1e-2 if low else 1e-5, atol=1e-3 if low else 1e-6, msg=message or None
        )


def assert_models_equal(ours: nn.Module, theirs: nn.Module, where: str) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_equal(p.detach(), q.detach(), where, name)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Every wait for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
