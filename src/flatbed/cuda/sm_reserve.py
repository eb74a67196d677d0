"""SMs that matrix multiplications leave to the kernels which move rows.

On Hopper, a matrix multiplication runs one persistent program per SM. Programs whose SM is taken by a row
mover run as a second wave. Prefetched steps on an H200 (20 M × 128, 65,536 uniform ids) took 3.54 ms beside
matrix multiplications of 2.85 ms, and 3.35 ms with 12 SMs left to the movers; beside an MLP and beside
convolutions they took 4 % and 7 % longer with them. So none are reserved by default.

Two libraries need to know. cuBLAS takes the number of SMs for each handle, and each thread has handles of its
own: here those of the training thread and of autograd's thread. cublasLt, as torch calls it, takes torch's
carve-out, which holds for the whole process. Where one of these calls is missing, it is left out.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


class SmReserve:
    """SMs of one GPU that matrix multiplications of this thread and of autograd's leave free.

    Several may exist: the largest number counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_sms = 0
        self._handles: list[int] = []
        _reserves.add(self)

    def set(self, n_sms: int) -> None:
        """Leave so many SMs free from now on; 0 for none.

        The first number above 0 is to be set in the training thread; others may be set in any thread.
        """
        if n_sms == self.n_sms or self.device.type != "cuda":
            return
        if n_sms and not self._handles:
            self._handles = blas_handles(self.device)
        self.n_sms = n_sms
        set_target = sm_count_target()
        if set_target is not None:
            most = max(one.n_sms for one in _reserves if one.device == self.device)
            n_all = torch.cuda.get_device_properties(self.device).multi_processor_count
            for handle in self._handles:
                set_target(handle, n_all - most if most else 0)  # 0: all
        if hasattr(torch._C, "_set_sm_carveout_experimental"):
            most = max(one.n_sms for one in _reserves)
            if most and not _carveout_before:
                _carveout_before.append(torch._C._get_sm_carveout_experimental())
            if _carveout_before:
                torch._C._set_sm_carveout_experimental(most or _carveout_before.pop())


_reserves: weakref.WeakSet[SmReserve] = weakref.WeakSet()
_carveout_before: list[Any] = []
"""The carve-out of the user, while there is another one."""


@lru_cache(maxsize=1)
def sm_count_target() -> Callable[[int, int], int] | None:
    """Return `cublasSetSmCountTarget` of the cuBLAS that torch has loaded; None if there is none."""
    try:
        major = str(torch.version.cuda).split(".")[0]
        # Only if it is loaded: another copy of the library would not know torch's handles.
        library = ctypes.CDLL(f"libcublas.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        function = library.cublasSetSmCountTarget
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int
    return function


def blas_handles(device: torch.device) -> list[int]:
    """Return the cuBLAS handles of this thread and of autograd's thread for a GPU."""
    handles: list[int] = []

    def note(*_: Any) -> None:
        handles.append(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call,unused-ignore]

    with torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
        note()
        there = torch.zeros((), device=device, requires_grad=True)
        there.register_hook(note)  # type: ignore[no-untyped-call]  # autograd's thread calls it
        there.clone().backward()  # type: ignore[no-untyped-call]
    return handles
