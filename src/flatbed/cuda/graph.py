"""CUDA graphs: of the package's own kernels, captured while the user trains, and of training steps.

`torch.cuda.CUDAGraph` is for training steps (`capture_step`): each capture changes the state of torch's
random generator, which may be in use while the package captures its own kernels (`Graph`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from flatbed.cuda.driver import Driver, driver
from flatbed.cuda.host_memory import free_after_captures, unless_forked
from flatbed.cuda.streams import capture_lock, captured_steps, relaxed_capture, stream_for

SWITCH = "FLATBED_PREFETCH_GRAPHS"
MODE = "thread_local"
"""Of captures of a step: other threads may allocate then, such as that of DataLoader(pin_memory=True)."""
_pools: dict[tuple[torch.device, str], torch.cuda.MemPool] = {}


def can_capture(device: torch.device) -> bool:
    """Return True for GPUs with NVIDIA's driver and torch's own allocator, unless the user turned it off."""
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get(SWITCH) == "0":
        return False
    settings = [os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")]
    return (
        torch.cuda.get_allocator_backend() == "native"
        and "max_split_size" not in "".join(settings)  # it may free memory of graphs if there is no other
        # Pools of older versions take the memory of all threads.
        and hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
    )


class Graph:
    """Launches of a function, which a replay issues in one call.

    The function has issued the same launches before, so that all kernels are loaded. It does not wait, and
    does not use torch's random generator. All graphs of a purpose are replayed in the stream of that purpose:
    they share the memory that their functions allocate and free.
    """

    def __init__(self, function: Callable[[], object], device: torch.device, purpose: str) -> None:
        """Raise DriverError or RuntimeError if the capture fails; nothing has run then."""
        self._device, self._driver = device, driver()
        # No other work of the package is in this stream. Kernels keep its high priority.
        stream = stream_for(device, "graphs")
        with (
            capture_lock,
            torch.cuda.stream(stream),
            torch.cuda.use_mem_pool(_pool_of(device, purpose)),
            _no_garbage_collection(),
        ):
            _check_in_use(_pool_of(device, purpose))
            try:
                self._driver.begin_capture(stream.cuda_stream)
                function()
                self._graph = self._driver.end_capture(stream.cuda_stream)
            except BaseException:
                self._driver.drop_capture(stream.cuda_stream)
                raise
        release = partial(free_after_captures, partial(_release, self._driver, self._graph))
        weakref.finalize(self, unless_forked, os.getpid(), release).atexit = False

    def replay(self) -> None:
        """Issue the launches in the current stream. Raise DriverError if the driver does not take them."""
        self._driver.launch_graph(self._graph, torch._C._cuda_getCurrentRawStream(self._device.index))


@contextmanager
def capture_step(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Capture the body, a training step on a GPU, in the stream "captures".

    After an error, torch's random generator and allocator work as before.
    """
    pool, stream = torch.cuda.graph_pool_handle(), stream_for(device, "captures")
    captured_steps.append(graph)
    try:
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=MODE),
        ):
            yield
    except RuntimeError:
        _forget_capture(pool, stream)
        raise
    finally:
        captured_steps.remove(graph)


def _forget_capture(pool: Any, stream: torch.cuda.Stream) -> None:
    """Let torch forget a capture that CUDA has ended with an error. torch has no function for that.

    Otherwise memory that was given to `record_stream` is never used again, and random numbers on the GPU
    raise.
    """
    with suppress(RuntimeError, AttributeError):  # torch has ended the capture itself; another torch
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    other = torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.graph(other, stream=stream, capture_error_mode=MODE):
        torch.zeros(1, device=stream.device)  # at the end, the generator leaves its state of a capture


def _release(driver: Driver, graph: int) -> None:
    with relaxed_capture():  # another thread may capture
        driver.destroy_graph(graph)


def _pool_of(device: torch.device, purpose: str) -> torch.cuda.MemPool:
    """Return the memory of all graphs of a purpose on a device, which is the current one.

    It is never destroyed: that would free memory, which ends a capture of the user that is going on.
    """
    key = device, purpose
    if key not in _pools:
        _pools[key] = torch.cuda.MemPool()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_pools[key]))  # not at exit, either
    return _pools[key]


def _check_in_use(pool: torch.cuda.MemPool) -> None:
    """Raise if memory comes from elsewhere: from a pool of the user, or uncached."""
    address = torch.empty(1, device=torch.device("cuda")).data_ptr()
    segments = ((segment["address"], segment["total_size"]) for segment in pool.snapshot())  # type: ignore[no-untyped-call,unused-ignore]
    if not any(begin <= address < begin + size for begin, size in segments):
        raise RuntimeError("torch takes the memory of graphs from another pool")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the body: finalizers of tables and of CUDA graphs of torch end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
