"""Where collections live, by the arguments that SpeedTorch's classes have for it."""

from __future__ import annotations

from flatbed.compat.speedtorch.collection import Home


def cupy_home(pinned: object) -> Home:
    """By `CPUPinn`."""
    if not isinstance(pinned, bool):
        raise TypeError(f"CPUPinn must be True (host memory) or False (the device's); found {pinned!r}")
    return Home("host" if pinned else "device")


def torch_home(device: object, pinned: object) -> Home:
    """By `deviceType` and `pinType`."""
    if device not in ("cuda", "cpu"):
        raise ValueError(f"deviceType must be 'cuda' or 'cpu'; found {device!r}")
    if device == "cuda" and pinned:
        raise ValueError("pinType=True is for host memory: use it with deviceType='cpu'")
    return Home("device" if device == "cuda" else "host")
