"""SMs that matrix multiplications leave to the kernels which move rows.

On Hopper, a matrix multiplication runs one persistent program per SM. Programs whose SM is taken by a row
mover run as a second wave. Prefetched steps on an H200 (20 M × 128, 65,536 uniform ids) took 2.8 to 4.9 ms
beside matrix multiplications of 2.4 ms, and 2.7 to 2.9 ms with 4 SMs left to the movers; beside an MLP and
beside convolutions that changed nothing. With fewer SMs, cuBLAS chooses other kernels, which round
differently. So none are reserved by default.

Two libraries need to know. cuBLAS takes the number of SMs for each handle, and each thread has handles of its
own: here those of the training thread and of autograd's thread. cublasLt, as torch calls it, takes torch's
carve-out, which holds for the whole process. Where one of these calls is missing, it is left out.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.streams import stream_for
from flatbed.kernels.cache import COUNTS
from flatbed.tables.table import Table


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
        (2 * there).backward()  # type: ignore[no-untyped-call]  # a kernel gives the thread its CUDA context
    return handles


# ---- when SMs are reserved, while a `Prefetcher` runs


MOVER_SMS = 4  # programs of the kernel that moves records
PERIOD = 16  # batches between two readings of the counters
BUS_BYTES = 45e9  # per second, in each direction: records of random rows over PCIe 5
MISSES, WRITTEN = COUNTS.index("misses"), COUNTS.index("written")


@dataclass(slots=True, eq=False)
class Reading:
    """Counters of all caches, on their way to the host, and when they were read."""

    counts: Tensor
    """For each cache its counters, and the bytes of a record."""
    record_bytes: list[int]
    seconds: float
    copied: torch.cuda.Event | None

    def bytes_moved(self, count: int) -> int:
        """Return the bytes that crossed the bus in one direction: of missing rows, or of written ones."""
        return sum(
            n * nbytes for n, nbytes in zip(self.counts[:, count].tolist(), self.record_bytes, strict=True)
        )


class SmPolicy:
    """Reserves SMs for one iteration: a fixed number, or as many as pay for themselves ("auto").

    With "auto", the training thread copies the caches' counters to the host every few batches, without
    waiting for the GPU. It reserves SMs while the bus is busy for a larger share of the time than the share
    of SMs that matrix multiplications lose.
    """

    def __init__(self, device: torch.device, tables: Sequence[Table], reserve_sms: int | str) -> None:
        self.reserve = SmReserve(device)
        self._tables = tables
        self._is_auto = reserve_sms == "auto"
        self._n_sms = MOVER_SMS if isinstance(reserve_sms, str) else reserve_sms
        self._n_batches = 0
        self._last: Reading | None = None
        self._next: Reading | None = None
        self._share_of_sms = 0.0
        if device.type == "cuda":
            n_all = torch.cuda.get_device_properties(device).multi_processor_count
            if self._n_sms >= n_all:
                raise ValueError(f"reserve_sms must leave SMs to the model; found {self._n_sms} of {n_all}")
            self._share_of_sms = self._n_sms / n_all

    def adjust(self) -> None:
        """Reserve SMs or give them back. The training thread calls this for each batch."""
        if not self._is_auto:
            self.reserve.set(self._n_sms)
            return
        self._n_batches += 1
        if self._next is not None:
            if self._next.copied is None or self._next.copied.query():  # type: ignore[no-untyped-call,unused-ignore]
                self._decide(self._next)
                self._next = None
        elif self._n_batches >= PERIOD:
            self._n_batches = 0
            self._next = self._read()

    def _read(self) -> Reading:
        device = self.reserve.device
        rows = stream_for(device, "rows") if device.type == "cuda" else None
        caches: list[Any] = [table._store.cache for table in self._tables if table._store.cache is not None]
        shape = (len(caches), len(COUNTS))
        with torch.cuda.stream(rows):
            counts = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=rows is not None)
            for target, cache in zip(counts, caches, strict=True):
                target.copy_(cache.index.counts, non_blocking=True)
        copied = None if rows is None else rows.record_event()
        return Reading(counts, [cache.records.shape[1] for cache in caches], time.monotonic(), copied)

    def _decide(self, reading: Reading) -> None:
        last, self._last = self._last, reading
        if last is None or last.record_bytes != reading.record_bytes:
            return
        seconds = reading.seconds - last.seconds
        nbytes = max(reading.bytes_moved(count) - last.bytes_moved(count) for count in (MISSES, WRITTEN))
        if nbytes < 0 or seconds <= 0:  # a cache was replaced
            return
        share = nbytes / BUS_BYTES / seconds
        # Half as much is enough to keep SMs that are reserved: fewer changes.
        enough = self._share_of_sms / (2 if self.reserve.n_sms else 1)
        self.reserve.set(self._n_sms if share > enough else 0)
