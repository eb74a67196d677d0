"""Which of its two forms an operation takes on a device: Triton's, or torch's."""

from __future__ import annotations

import functools
import os
import warnings

import torch


def use_triton(device: torch.device) -> bool:
    """Triton for GPUs, and for the CPU under its interpreter; torch operations for the rest."""
    if device.type == "cuda":
        return _triton_is_there()
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_is_there() -> bool:
    try:
        import flatbed.kernels._triton.launch  # noqa: F401
    except ImportError:
        warnings.warn(
            "Triton is not installed, so that flatbed runs many small kernels instead of one", stacklevel=3
        )
        return False
    return True


def is_capturing(device: torch.device) -> bool:
    """Tell if the current CUDA stream is being captured into a graph; never true for other devices."""
    started = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call,unused-ignore]
    return started and torch.cuda.is_current_stream_capturing()
