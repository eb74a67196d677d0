"""CUDA graphs of the package's own kernels, captured while the user trains.

`torch.cuda.CUDAGraph` is for captures that the user asks for: each one changes the state of torch's random
generator, which may be in use then, and one that fails leaves torch's allocator as if it were still going on.
Here a failed capture changes nothing.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from flatbed.cuda.driver import Driver, driver
from flatbed.cuda.host_memory import free_after_captures
from flatbed.cuda.streams import relaxed_capture, stream_for

_lock = threading.Lock()
_pools: dict[torch.device, torch.cuda.MemPool] = {}


def can_capture(device: torch.device) -> bool:
    """Return True for GPUs with NVIDIA's driver and torch's own allocator."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_allocator_backend() == "native"


class Graph:
    """Launches of a function, which are issued at once when the graph is replayed.

    The function has issued the same launches before, so that all kernels are loaded. It does not wait, and
    draws no random numbers. All graphs of a device are replayed in one stream: they share the memory that
    their functions allocate and free.
    """

    def __init__(self, function: Callable[[], object], device: torch.device) -> None:
        """Raise DriverError or RuntimeError if the capture fails; nothing has run then."""
        self._device, self._driver = device, driver()
        stream = stream_for(device, "decisions")  # which nothing else uses; kernels keep its high priority
        with (
            _lock,
            torch.cuda.stream(stream),
            torch.cuda.use_mem_pool(_pool_of(device)),
            _no_garbage_collection(),
        ):
            try:
                self._driver.begin_capture(stream.cuda_stream)
                function()
            except BaseException:
                self._driver.drop_capture(stream.cuda_stream)
                raise
            self._graph = self._driver.end_capture(stream.cuda_stream)
        release = partial(_release, self._driver, self._graph)
        weakref.finalize(self, free_after_captures, release).atexit = False

    def replay(self) -> None:
        """Issue the launches in the current stream."""
        self._driver.launch_graph(self._graph, torch._C._cuda_getCurrentRawStream(self._device.index))


def _release(driver: Driver, graph: int) -> None:
    with relaxed_capture():  # another thread may capture
        driver.destroy_graph(graph)


def _pool_of(device: torch.device) -> torch.cuda.MemPool:
    """Return the memory of all graphs of a device.

    It is never destroyed: that would free memory, which ends a capture of the user that is going on.
    """
    if device not in _pools:
        _pools[device] = torch.cuda.MemPool()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_pools[device]))  # not at exit, either
    return _pools[device]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the body: finalizers of tables wait for the GPU, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
