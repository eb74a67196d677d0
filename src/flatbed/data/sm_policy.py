"""When matrix multiplications leave SMs to the kernels which move rows, while a `Prefetcher` runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.cuda.sm_reserve import SmReserve
from flatbed.cuda.streams import stream_for
from flatbed.kernels.cache import COUNTS
from flatbed.tables.table import Table

MOVER_SMS = 12  # programs of the kernel that moves records
PERIOD = 16  # batches between two readings of the counters
BUS_BYTES = 45e9  # per second, in each direction: records of random rows over PCIe 5
MISSES, WRITTEN = COUNTS.index("misses"), COUNTS.index("written")


@dataclass(slots=True, eq=False)
class Reading:
    """Counters of all caches, on their way to the host, and when they were read."""

    counts: list[tuple[Tensor, int]]
    """For each cache its counters, and the bytes of a record."""
    seconds: float
    copied: torch.cuda.Event | None = None

    def bytes_moved(self, count: int) -> int:
        """Return the bytes that crossed the bus in one direction: of missing rows, or of written ones."""
        return sum(int(counts[count]) * nbytes for counts, nbytes in self.counts)


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

    def update(self) -> None:
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
        caches: list[Any] = [table._store.cache for table in self._tables]
        found = [(cache.index.counts, cache.records.shape[1]) for cache in caches if cache is not None]
        if device.type != "cuda":
            return Reading([(counts.clone(), nbytes) for counts, nbytes in found], time.monotonic())
        rows = stream_for(device, "rows")
        with torch.cuda.stream(rows):
            memory = torch.empty((len(found), len(COUNTS)), dtype=torch.int64, device="cpu", pin_memory=True)
            on_host = [(line, nbytes) for line, (_, nbytes) in zip(memory, found, strict=True)]
            for (target, _), (counts, _) in zip(on_host, found, strict=True):
                target.copy_(counts, non_blocking=True)
            return Reading(on_host, time.monotonic(), rows.record_event())

    def _decide(self, reading: Reading) -> None:
        last, self._last = self._last, reading
        if last is None or len(last.counts) != len(reading.counts):
            return
        seconds = reading.seconds - last.seconds
        nbytes = max(reading.bytes_moved(count) - last.bytes_moved(count) for count in (MISSES, WRITTEN))
        if nbytes < 0 or seconds <= 0:  # a cache was replaced
            return
        share = nbytes / BUS_BYTES / seconds
        # Half as much is enough to keep SMs that are reserved: fewer changes.
        enough = self._share_of_sms / (2 if self.reserve.n_sms else 1)
        self.reserve.set(self._n_sms if share > enough else 0)
