"""Host memory that a GPU's kernels can address, by the CUDA driver's own calls.

They are called through ctypes: libcuda is loaded wherever CUDA runs, and what a symbol of it takes never
changes, whereas the same calls of the runtime, and of cuda.bindings, take other arguments from CUDA 13 on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import torch

CPU = -1  # CU_DEVICE_CPU
SET_PREFERRED_LOCATION, SET_ACCESSED_BY = 3, 5  # CU_MEM_ADVISE_…
CONCURRENT_MANAGED_ACCESS, HOST_POINTER_FOR_REGISTERED = 89, 91  # CU_DEVICE_ATTRIBUTE_…
ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_…
PORTABLE, DEVICEMAP = 1, 2  # CU_MEMHOSTREGISTER_…
NON_BLOCKING = 1  # CU_STREAM_…
CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_…

SIGNATURES = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAllocManaged": (POINTER(c_uint64), c_size_t, c_uint),
    "cuMemAdvise": (c_uint64, c_size_t, c_int, c_int),
    "cuMemPrefetchAsync": (c_uint64, c_size_t, c_int, c_void_p),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
}


class DriverError(Exception):
    """A call that the driver refused."""


class Driver:
    """The calls of libcuda that host memory needs; GPUs go by torch's index."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """AttributeError: too old a driver."""
        self.calls = {name: getattr(library, name) for name in SIGNATURES}
        for name, arguments in SIGNATURES.items():
            self.calls[name].argtypes, self.calls[name].restype = arguments, c_int
        self.contexts: dict[int, c_void_p] = {}

    def can_manage(self, gpu: int) -> bool:
        """Whether CPU and GPU may use managed memory at the same time."""
        return self._attribute(gpu, CONCURRENT_MANAGED_ACCESS) == 1

    def can_register(self, gpu: int) -> bool:
        """Whether registered memory has the same address on the GPU."""
        return self._attribute(gpu, HOST_POINTER_FOR_REGISTERED) == 1

    def free_bytes(self, gpu: int) -> int:
        """GPU memory that nobody has taken."""
        free, total = c_size_t(), c_size_t()
        with self._context(gpu):
            self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def managed(self, gpu: int, nbytes: int) -> int:
        """The address of managed memory that stays on the host and that the GPU reads and writes there."""
        address = c_uint64()
        device = self._device(gpu)
        with self._context(gpu):
            self._call("cuMemAllocManaged", byref(address), nbytes, ATTACH_GLOBAL)
            try:
                self._call("cuMemAdvise", address, nbytes, SET_PREFERRED_LOCATION, CPU)
                self._call("cuMemAdvise", address, nbytes, SET_ACCESSED_BY, device)
            except DriverError:
                self.calls["cuMemFree_v2"](address)
                raise
        return address.value

    def populate(self, gpu: int, address: int, nbytes: int) -> None:
        """Give managed memory its pages on the host. What they hold is not defined."""
        stream = c_void_p()
        with self._context(gpu):
            self._call("cuStreamCreate", byref(stream), NON_BLOCKING)
            try:
                self._call("cuMemPrefetchAsync", address, nbytes, CPU, stream)
                self._call("cuStreamSynchronize", stream)
            finally:
                self.calls["cuStreamDestroy_v2"](stream)

    def free_managed(self, gpu: int, address: int) -> None:
        """Free managed memory once the GPU's work is done; errors are past mending by then."""
        with suppress(DriverError), self._context(gpu):
            self.calls["cuCtxSynchronize"]()
            self.calls["cuMemFree_v2"](address)

    def register(self, gpu: int, address: int, nbytes: int) -> None:
        """Pin memory and let GPUs address it."""
        with self._context(gpu):
            self._call("cuMemHostRegister_v2", address, nbytes, PORTABLE | DEVICEMAP)

    def unregister(self, gpu: int, address: int) -> None:
        """Unpin memory once the GPU's work is done; errors are past mending by then."""
        with suppress(DriverError), self._context(gpu):
            self.calls["cuCtxSynchronize"]()
            self.calls["cuMemHostUnregister"](address)

    def _call(self, name: str, *arguments: object) -> None:
        code = self.calls[name](*arguments)
        if code:
            text = c_char_p()
            self.calls["cuGetErrorString"](code, byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def _device(self, gpu: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), gpu)
        return device.value

    def _attribute(self, gpu: int, attribute: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, self._device(gpu))
        return value.value

    @contextmanager
    def _context(self, gpu: int) -> Iterator[None]:
        """Make the context that torch uses the current one: memory may be freed from any thread."""
        if gpu not in self.contexts:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(gpu))
            self.contexts[gpu] = context
        self._call("cuCtxPushCurrent_v2", self.contexts[gpu])
        try:
            yield
        finally:
            self.calls["cuCtxPopCurrent_v2"](byref(c_void_p()))


def driver() -> Driver | None:
    """The driver of NVIDIA's GPUs, if there is one. Starts CUDA."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return _load()


@lru_cache(maxsize=1)
def _load() -> Driver | None:
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


def exchange_capture_mode(mode: int) -> int | None:
    """Set this thread's stream capture mode; returns the mode before, None without a CUDA driver."""
    if torch.version.cuda is None:
        return None
    exchange = _capture_mode_call()
    if exchange is None:
        return None
    held = c_int(mode)
    exchange(byref(held))
    return held.value


@lru_cache(maxsize=1)
def _capture_mode_call() -> Any:
    with suppress(OSError, AttributeError):
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    return None
