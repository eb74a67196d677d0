"""Calls of the CUDA driver; the only file that opens libcuda.

ctypes calls libcuda, which is loaded wherever CUDA runs. Its symbols never change their arguments, while the
runtime's calls, and those of cuda.bindings, take other arguments from CUDA 13 on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from functools import lru_cache

import torch

CPU = -1  # CU_DEVICE_CPU
SET_PREFERRED_LOCATION, SET_ACCESSED_BY = 3, 5  # CU_MEM_ADVISE_…
CONCURRENT_MANAGED_ACCESS, HOST_POINTER_FOR_REGISTERED = 89, 91  # CU_DEVICE_ATTRIBUTE_…
ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_…
PORTABLE, DEVICEMAP = 1, 2  # CU_MEMHOSTREGISTER_…
NON_BLOCKING = 1  # CU_STREAM_…
CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_…
USE_NODE_PRIORITY = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_…

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
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
}


class DriverError(Exception):
    """The driver returned an error."""


class Driver:
    """Calls of libcuda; GPUs are numbered as in torch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise AttributeError if the driver is too old."""
        self.calls = {name: getattr(library, name) for name in SIGNATURES}
        for name, arguments in SIGNATURES.items():
            self.calls[name].argtypes, self.calls[name].restype = arguments, c_int
        self.contexts: dict[int, c_void_p] = {}

    def can_manage(self, gpu: int) -> bool:
        """True if CPU and GPU can use managed memory at the same time."""
        return self._attribute(gpu, CONCURRENT_MANAGED_ACCESS) == 1

    def can_register(self, gpu: int) -> bool:
        """True if registered memory has the same address on the GPU."""
        return self._attribute(gpu, HOST_POINTER_FOR_REGISTERED) == 1

    def free_bytes(self, gpu: int) -> int:
        """Return how much memory of the GPU is free."""
        free, total = c_size_t(), c_size_t()
        with self._context(gpu):
            self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def managed(self, gpu: int, nbytes: int) -> int:
        """Allocate managed memory that stays on the host, where the GPU reads and writes it."""
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
        """Allocate the pages of managed memory on the host. Their content is undefined."""
        stream = c_void_p()
        with self._context(gpu):
            self._call("cuStreamCreate", byref(stream), NON_BLOCKING)
            try:
                self._call("cuMemPrefetchAsync", address, nbytes, CPU, stream)
                self._call("cuStreamSynchronize", stream)
            finally:
                self.calls["cuStreamDestroy_v2"](stream)

    def free_managed(self, gpu: int, address: int) -> None:
        """Free managed memory after the GPU's work; errors cannot be handled, and are ignored."""
        with suppress(DriverError), self._context(gpu):
            self.calls["cuCtxSynchronize"]()
            self.calls["cuMemFree_v2"](address)

    def register(self, gpu: int, address: int, nbytes: int) -> None:
        """Pin memory, so that GPUs can address it."""
        with self._context(gpu):
            self._call("cuMemHostRegister_v2", address, nbytes, PORTABLE | DEVICEMAP)

    def unregister(self, gpu: int, address: int) -> None:
        """Unpin memory after the GPU's work; errors cannot be handled, and are ignored."""
        with suppress(DriverError), self._context(gpu):
            self.calls["cuCtxSynchronize"]()
            self.calls["cuMemHostUnregister"](address)

    def begin_capture(self, stream: int) -> None:
        """Capture what is issued in this stream. Allocations and calls of other threads are not affected."""
        self._call("cuStreamBeginCapture_v2", stream, CAPTURE_RELAXED)

    def end_capture(self, stream: int) -> int:
        """End the capture, and return a graph that can be launched. Kernels keep the stream's priority."""
        graph, launchable = c_void_p(), c_void_p()
        self._call("cuStreamEndCapture", stream, byref(graph))
        try:
            self._call("cuGraphInstantiateWithFlags", byref(launchable), graph, USE_NODE_PRIORITY)
        finally:
            self.calls["cuGraphDestroy"](graph)
        assert launchable.value is not None
        return launchable.value

    def drop_capture(self, stream: int) -> None:
        """End a capture that has failed, if there is one."""
        graph = c_void_p()
        self.calls["cuStreamEndCapture"](stream, byref(graph))
        if graph:
            self.calls["cuGraphDestroy"](graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Issue all of a graph in a stream."""
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        """Destroy a graph; errors cannot be handled, and are ignored."""
        self.calls["cuGraphExecDestroy"](graph)

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
        """Make torch's context current: memory may be freed from any thread."""
        if gpu not in self.contexts:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(gpu))
            self.contexts[gpu] = context
        self._call("cuCtxPushCurrent_v2", self.contexts[gpu])
        try:
            yield
        finally:
            self.calls["cuCtxPopCurrent_v2"](byref(c_void_p()))


def driver() -> Driver:
    """Start CUDA and return its driver."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    found = _load()
    if found is None:
        raise DriverError("NVIDIA's libcuda.so.1 was not found")
    return found


def exchange_capture_mode(mode: int) -> int | None:
    """Set this thread's stream capture mode, and return the mode before; None without a driver."""
    found = None if torch.version.cuda is None else _load()
    if found is None:
        return None
    held = c_int(mode)
    found.calls["cuThreadExchangeStreamCaptureMode"](byref(held))
    return held.value


@lru_cache(maxsize=1)
def _load() -> Driver | None:
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
