"""Operations with a torch reference and Triton kernels, and the choice between the two."""

from __future__ import annotations

import functools
import os
import warnings

import torch

from flatbed.errors import FlatbedError


def check_values_exist(doing: str) -> None:
    """Raise under FakeTensorMode, where tensors have shapes and no values."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise FlatbedError(
            f"{doing} under FakeTensorMode would read values, and fake tensors have none: call it outside of "
            f"the mode. To estimate memory, use torch.nn.Embedding and torch's optimizer of the same name"
        )


def use_triton(device: torch.device) -> bool:
    """Return True for GPUs with Triton, and for the CPU under Triton's interpreter."""
    if device.type == "cuda":
        return _has_triton()
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    try:
        import flatbed.kernels._triton.launch  # noqa: F401
    except ImportError:
        warnings.warn(
            "Triton is not installed: flatbed runs many small torch operations instead of one kernel",
            stacklevel=3,
        )
        return False
    return True
