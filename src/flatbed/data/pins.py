"""Memory of numpy arrays, registered with CUDA for as long as a feeder wants it: GPUs copy from it as it is.

What is registered is the array that owns the memory, known by a weak reference: it goes when nobody else has
it any more, and numpy calls whoever watches it before its memory is freed. All feeders share what there is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from flatbed.cuda import driver as cuda_host
from flatbed.cuda import host_memory as memory
from flatbed.cuda.driver import DriverError
from flatbed.cuda.streams import relaxed_capture
from flatbed.data.packing import Form, form_of
from flatbed.data.staging import Array

MIN_BYTES = 256 << 10  # less is as soon copied through the ring
SHARE = 4  # all that is registered is no more than this part of the machine's memory
HEADER = 2 * ctypes.sizeof(ctypes.c_size_t)  # before each block of memory that the C library hands out
MAPPED = 2  # what its last three bits say of a block that has been mapped for itself
HUGE_PAGE = 2 << 20

lock = threading.RLock()
"""Held by whoever issues copies of registered memory, and by whoever ends that for another reason than that
nobody has the array any more. Finalizers run anywhere, and do without."""


class Root:
    """An array that owns memory, and the pages that are registered for it."""

    __slots__ = ("array", "begin", "driver", "end", "gpu", "gpus", "process", "users")

    def __init__(self, array: Array, gpu: int, driver: cuda_host.Driver, user: int) -> None:
        self.begin, self.end = pages_of(array)
        self.gpu = gpu
        self.gpus = {gpu}
        """All that copies may go to."""
        self.driver = driver
        self.process = os.getpid()
        self.users = {user}
        """Numbers of those `Pins` that want it."""
        self.array = weakref.ref(array, partial(_gone, id(array)))


_roots: dict[int, Root] = {}
"""By the id of the array. Whoever takes one out, in one go, is the one to unregister it."""
_refused: dict[int, weakref.ref[Any]] = {}
"""Arrays that the driver, or we, would not have."""
_freed: deque[int] = deque()
_n_bytes = 0
_n_pins = 0


class Pins:
    """The arrays that one feeder has had registered."""

    def __init__(self, device: torch.device, driver: cuda_host.Driver | None = None) -> None:
        global _n_pins
        with lock:
            _n_pins += 1
            self._number = _n_pins
        self._gpu = 0 if device.index is None else device.index
        self._driver = driver if driver is not None else cuda_host.driver()
        self._end = weakref.finalize(self, _leave, self._number, os.getpid())
        self._end.atexit = False  # the feeder's own handler is earlier, while CUDA is still there

    def pin(self, array: Array, form: Form | None = None, address: int | None = None) -> bool:
        """Whether GPUs can copy all of the array as it is, by our own doing. Registers it if need be.

        `form`, `address`: those of the array, by whoever knows them already.
        """
        root = owner_of(array, form)
        if root is None or not self._end.alive:
            return False
        found = _known(root, address if root is array else None)
        if found is not None and self._number in found.users:
            return True
        return self._register(root)

    def has(self, array: Array) -> bool:
        """Whether it is registered, and this one of those that want it."""
        root = owner_of(array)
        found = None if root is None else _known(root)
        return found is not None and self._number in found.users

    def wants(self, array: Array) -> bool:
        """Whether `pin` would have to register it, or would try."""
        root = owner_of(array)
        if root is None or not self._end.alive or self.has(array):
            return False
        return id(root) in _roots or self._may(root)

    def close(self) -> None:
        """Unregister all that nobody else wants. As often as you like."""
        self._end()

    def _may(self, root: Array) -> bool:
        if self._driver is None or id(root) in _refused:
            return False
        if not has_own_pages(root):
            _refuse(root)
            return False
        begin, end = pages_of(root)
        # Registering gives pages real memory that an array may never have been written to.
        return end - begin <= min(limit_bytes() - registered_bytes(), memory.available_bytes() // 2)

    def _register(self, root: Array) -> bool:
        global _n_bytes
        with lock:
            if not self._end.alive:  # since it was looked at last
                return False
            found = _roots.get(id(root))
            if found is not None:
                found.users.add(self._number)
                found.gpus.add(self._gpu)
            if found is None or _roots.get(id(root)) is not found:  # it may have ended meanwhile
                if self._driver is None or not self._may(root):
                    return False
                _unregister_before_forks()
                # First of all known, then registered: whatever happens in between, it is unregistered.
                found = _roots[id(root)] = Root(root, self._gpu, self._driver, self._number)
                _n_bytes += found.end - found.begin
                try:
                    with relaxed_capture():
                        self._driver.register(self._gpu, found.begin, found.end - found.begin)
                except DriverError:
                    _take(id(root))
                    _refuse(root)
                    return False
            return True


# ---- which arrays


def owner_of(array: Any, form: Form | None = None) -> Array | None:
    """The array whose memory it is, if it is dense, large enough, of numbers, and numpy's alone."""
    if type(array) is not np.ndarray or array.nbytes < MIN_BYTES:
        return None
    form = form_of(array.dtype, array.shape, array.strides) if form is None else form
    if form is None or form.order is None:
        return None
    while (base := array.base) is not None:
        if type(base) is not np.ndarray:  # a file, or a buffer of somebody else
            return None
        array = base
    return array if array.flags.owndata else None


def address_of(array: Array) -> int:
    """Of its first number in memory, if it is dense."""
    return int(array.__array_interface__["data"][0])


def pages_of(root: Array, address: int | None = None) -> tuple[int, int]:
    """From the begin of the first to the end of the last one."""
    page, address = mmap.PAGESIZE, address_of(root) if address is None else address
    return address // page * page, -(-(address + root.nbytes) // page) * page


def has_own_pages(root: Array) -> bool:
    """Whether nothing else is in them. So it is with memory that the C library maps for one block alone: from
    32 MiB on always, from 128 KiB on until larger blocks have been freed.

    CUDA refuses to copy what is registered in part. That is what memory of anybody would become that begins
    in the last page of an array and ends in the next.
    """
    address, page = address_of(root), mmap.PAGESIZE
    if address % page != HEADER:
        return False
    before, size = (ctypes.c_size_t * 2).from_address(address - HEADER)
    n, flags = size & ~7, size & 7
    least = root.nbytes + HEADER
    slack = HEADER + (HUGE_PAGE if n % HUGE_PAGE == 0 else page)
    return before == 0 and flags == MAPPED and n % page == 0 and least <= n < least + slack


@lru_cache(maxsize=1)
def limit_bytes() -> int:
    """How much may be registered in all."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // SHARE
    except (OSError, ValueError):
        return 0


def registered_bytes() -> int:
    """How much is, by all feeders."""
    global _n_bytes
    with lock:
        while _freed:
            _n_bytes -= _freed.popleft()
        return _n_bytes


def is_ours(address: int) -> bool:
    """Whether memory is registered by our own doing."""
    return any(root.begin <= address < root.end for root in list(_roots.values()))


# ---- ends


def _refuse(root: Array) -> None:
    key = id(root)
    _refused[key] = weakref.ref(root, lambda _: _refused.pop(key, None))


def _known(root: Array, address: int | None = None) -> Root | None:
    """What is registered of an array, as long as its memory is where it was."""
    found = _roots.get(id(root))
    if found is None or (found.begin, found.end) == pages_of(root, address):
        return found
    with lock:
        _end(id(root))
    return None


def _take(key: int) -> Root | None:
    found = _roots.pop(key, None)
    if found is not None:
        _freed.append(found.end - found.begin)
    return found


def _gone(key: int, _: Any) -> None:
    """Nobody has the array any more, and so no copy of it is under way: its memory is freed after this."""
    found = _take(key)
    if found is None or os.getpid() != found.process:
        return
    with relaxed_capture():
        with suppress(Exception):
            if torch.cuda.is_initialized() and not _is_capturing():  # type: ignore[no-untyped-call,unused-ignore]
                for gpu in found.gpus:  # copies of the user's own keep nothing
                    torch.cuda.current_stream(gpu).synchronize()
        with suppress(Exception), found.driver._context(found.gpu):  # no wait for all that the GPU does
            found.driver.calls["cuMemHostUnregister"](found.begin)


def _end(key: int) -> None:
    """For another reason: copies may be under way, and are waited for. With the lock."""
    found = _roots.get(key)
    array = None if found is None else found.array()  # which must not go before
    if array is None or (found := _take(key)) is None or os.getpid() != found.process:
        return
    with suppress(Exception), relaxed_capture():
        for gpu in found.gpus - {found.gpu}:
            with suppress(Exception), found.driver._context(gpu):
                found.driver.calls["cuCtxSynchronize"]()
        found.driver.unregister(found.gpu, found.begin)
    del array


def _leave(number: int, process: int) -> None:
    if os.getpid() == process:
        memory._when_allowed(partial(_leave_now, number))


def _leave_now(number: int) -> None:
    with lock:
        for key in list(_roots):  # not its items: to make pairs may collect garbage, and that may end some
            root = _roots.get(key)
            if root is not None and number in root.users:
                root.users.discard(number)
                if not root.users:
                    _end(key)


def let_go(begin: int, end: int) -> None:
    """Unregister what there is in a range, for good: somebody wants to do so for reasons of their own."""
    with lock:
        for key in list(_roots):
            root = _roots.get(key)
            if root is not None and root.begin < end and begin < root.end:
                array = root.array()
                if array is not None:
                    _refuse(array)
                _end(key)


def close_all() -> None:
    """Unregister everything, at the end of the process."""
    with lock:
        for key in list(_roots):
            _end(key)


@lru_cache(maxsize=1)
def _unregister_before_forks() -> None:
    """A child would be given a copy of every page, or share those that the GPU reads. Arrays are registered
    again when they come next.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=lock.release, after_in_child=lock.release)


def _before_fork() -> None:
    lock.acquire()
    if _roots and not _is_capturing():
        close_all()


def _is_capturing() -> bool:
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call,unused-ignore]
    return started and bool(torch.cuda.is_current_stream_capturing())
