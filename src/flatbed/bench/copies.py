"""How fast this machine copies memory: within the host's, within the GPU's, and between them."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

MIB = 1 << 20
WAYS = ("host", "device", "pinned to device", "device to pinned", "pageable to device")


class Speed(NamedTuple):
    """Bytes a second, and whether what arrived is what was sent."""

    rate: float
    ok: bool


def copied(way: str) -> Speed:
    """The best of a few copies, in one of `WAYS`. Within one memory, bytes read and written are counted."""
    source, target = _memory(way)
    target.zero_()  # touches its pages, and makes the comparison below mean something
    best = float("inf")
    for _ in range(5):
        _wait(source, target)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(source, target)
        best = min(best, time.perf_counter() - begin)
    ok = bool(torch.equal(target[:MIB].cpu(), source[:MIB].cpu()))
    return Speed((2 if way in ("host", "device") else 1) * source.nbytes / best, ok)


def _memory(way: str) -> tuple[Tensor, Tensor]:
    if way == "host":
        return (ones := torch.ones(128 * MIB, dtype=torch.uint8)), torch.empty_like(ones)
    if way == "device":
        return (ones := torch.ones(512 * MIB, dtype=torch.uint8, device="cuda:0")), torch.empty_like(ones)
    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory="pinned" in way).fill_(1)
    device = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda:0")
    return (host, device) if way.endswith("to device") else (device, host)


def _wait(*tensors: Tensor) -> None:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
