"""What the benchmarks have in common: waiting for the device, its memory, percentiles of readings."""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

Progress = Callable[[str], object]
"""Called with its name at the beginning of each stage."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Memory of the GPU that tensors hold; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """Give back what is held by nobody, to the system as well: what comes next is to find it as at first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # of other C libraries
        ctypes.CDLL(None).malloc_trim(0)


def percentiles(readings: Sequence[float]) -> tuple[float, float, float]:
    """p20, p50 and p80."""
    if len(readings) == 1:
        return readings[0], readings[0], readings[0]
    p20, _, _, p80 = statistics.quantiles(readings, n=5, method="inclusive")
    return p20, statistics.median(readings), p80
