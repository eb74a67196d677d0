"""A driver without a GPU that registers memory, or refuses; and arrays that have pages of their own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flatbed.cuda.driver import DriverError
from flatbed.data import pins
from flatbed.data.pins import Pins

GPU = torch.device("cuda", 0)
PINNED_PAGES: list[tuple[set[int], bool]] = [
    (set(), False),
    ({0}, False),
    ({5}, False),
    ({0, 5}, False),
    ({1, 2, 3, 4}, False),
    ({0, 1, 2, 3, 4, 5}, True),
]
"""Of memory from the middle of page 0 to that of page 5: which are pinned, and whether all of it is."""
OWN_BYTES = 33 << 20  # from 32 MiB on, the C library maps memory for each block


class FakeDriver:
    """Refuses pages that are registered already, and reads bytes of those that it is to let go."""

    def __init__(self, *, n_gpus: int = 1, reads: bool = True) -> None:
        self.n_gpus = n_gpus
        self.reads = reads
        self.waited: list[int] = []
        """Those GPUs that somebody has waited for, in order."""
        self.registered: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []
        self.refuses = False
        self.on_register: Callable[[], object] = lambda: None
        self.on_unregister: Callable[[int, int], object] = lambda begin, end: None
        self.calls: dict[str, Callable[..., int]] = {
            "cuMemHostUnregister": self._unregister,
            "cuCtxSynchronize": self._synchronize,
        }
        self._lock = threading.RLock()
        self._current = threading.local()

    @contextmanager
    def _context(self, gpu: int) -> Iterator[None]:
        assert 0 <= gpu < self.n_gpus
        before = getattr(self._current, "gpu", None)
        self._current.gpu = gpu
        try:
            yield
        finally:
            self._current.gpu = before

    def register(self, gpu: int, address: int, nbytes: int) -> None:
        self.log.append(("register", address))
        with self._lock:
            taken = any(begin < address + nbytes and address < end for begin, end in self.registered.items())
            if self.refuses or taken:
                raise DriverError("cuMemHostRegister_v2: refused (712)")
            self.registered[address] = address + nbytes
        self.on_register()

    def unregister(self, gpu: int, address: int) -> None:
        self.log.append(("synchronize", address))
        with self._context(gpu):
            self._synchronize()
            self._unregister(address)

    def _synchronize(self) -> int:
        assert self._current.gpu is not None, "no context is current"
        self.waited.append(self._current.gpu)
        return 0

    def _unregister(self, address: int) -> int:
        end = self.registered[address]
        for byte in (address, end - 1) if self.reads else ():
            assert ctypes.c_uint8.from_address(byte).value >= 0  # or the process ends here
        self.on_unregister(address, end)
        self.log.append(("unregister", address))
        del self.registered[address]
        return 0

    def said(self, what: str) -> int:
        return sum(said == what for said, _ in self.log)


def own(value: int = 0, nbytes: int = OWN_BYTES) -> Any:
    """An array that owns memory, and pages."""
    in_the_way = []  # what the heap had room for, since earlier tests have freed as much
    for _ in range(64):
        made = np.full(nbytes, value, np.uint8) if value else np.zeros(nbytes, np.uint8)
        if pins.has_own_pages(made):
            return made
        in_the_way.append(made)
    raise AssertionError("no memory is mapped for an array alone")


def pins_of(driver: FakeDriver, gpu: int = 0) -> Pins:
    fake: Any = driver
    return Pins(torch.device("cuda", gpu), fake)


def nothing_is_registered() -> bool:
    return not pins._roots and pins.registered_bytes() == 0
