"""Streams and locks of the package: owners, and the order between them.

Streams of one device

| stream | work | thread |
|---|---|---|
| training: the user's current stream | lookups, their admissions, backward passes, steps | training thread |
| "batches" | copies of batches, and of rows of a `RowReader` | loader thread; that of the reader |
| "decisions" | prefetches: which rows get which slots; copies of batches loaded here | training thread |
| "moves" | prefetches: moves of records | training thread |
| "files" | decisions on rows of disk tables, copies and checksums of their records | second loader thread |
| "scan" | blocks of a table for `topk`, which begins with an idle GPU | training thread |
| "captures" | warm-up and capture of `flatbed.capture` | training thread |
| "graphs" | none: graphs of decisions are captured in it (`cuda.graph`) | training thread |

Events between them, and the reason for each

| event | waits for it | reason |
|---|---|---|
| `MovedBatch.arrived`, after the copies of a batch | "decisions", "files" | admissions read its ids |
| "decisions", after the decisions on a batch, of all tables | "moves" | they name the records to move |
| `PendingBatch.ready`, after copies, decisions and moves | training | the step reads batch and slots |
| `earlier_steps`: training, at each `next` of a loop | "decisions" | a prefetch may evict their rows |
| `earlier_steps` | "decisions" | earlier work may use the memory that a batch is copied to |
| `earlier_steps` | loader thread, on the host | copies follow earlier steps: few batches are on the device |
| "moves", at work on rows that `GpuCache.protects` does not cover | training | admissions may move them |
| training, at such work | "decisions" | the next admission may evict these rows |
| `Reservation.ready`, after records were copied to the device | "decisions" | the lookup reads them |
| `HostCopyCache._last`, after an access | "files", training | the next access sees its records |
| training, at `RowPrefetch.finish` | "files", training | the next access may evict the released rows |
| the loader's stream, before copies | "batches" | the loader made tensors of the batch on a GPU |
| training, after the first batch was made | the loader's stream | it may have such tensors, too |
| `arrived`, for loaders that reuse memory | the loader's stream | the loader writes to these tensors again |
| "scan", after a block | training | `topk` compares queries with the block |
| "batches", after the copy of rows | training | the caller of the `RowReader` uses them |
| training, before and after a warm-up | "captures", training | the warm-up is a step of the training |

A table on disk has threads for its file: up to 16 that copy rows, and one that writes to the journal. The
second loader thread waits for decisions of the GPU, and the writer thread for copies of evicted records, both
by `PendingCopy`. The next admission waits for the writer thread (`WriteBehind.finish`).

`record_stream` tells torch's allocator of memory that another stream uses. Each call costs later allocations
a query of the GPU, 50 to 70 µs per step on a slow host. So batches that the training thread loads have none:

- Their memory is allocated in the training stream, as if the loop had made them. The copies in "decisions"
  are ordered after the allocation (`earlier_steps`), and the step after the copies (`ready`).
- Memory of a `GpuCache`'s admissions is allocated in "decisions", or belongs to a graph that is replayed
  there. A `next` makes "decisions" wait for the last step, and then frees the memory of that step's
  admissions. The step had waited for the moves in "moves".

Other memory needs it: batches that a loader thread allocates in "batches", for training; their ids, or those
of a list of GPU tensors, for "decisions" and "files"; decisions of "files", for training; batches of a loop
that uses several streams; what a loop that is left has in flight; blocks of `topk`, rows of a `RowReader`,
coefficients of an optimizer that is used in another stream, and a `HostCopyCache`, once for each stream.
Staging memory is pinned by torch's allocator, which keeps a block until its copy is done.

CUDA graphs of the user are captured in the user's stream. Once a graph has captured a lookup with its
admission, the table's rows are no longer prefetched to the GPU: see `tables.cache.gpu`. Graphs of the
decisions on an admission (`DecisionGraphs`) are replayed in "decisions", or in "files" for tables on disk.
Their kernels have the high priority of the stream "graphs", in which they are captured.

Locks, in the order in which a thread may take them (`LOCK_ORDER`)

| lock | guards |
|---|---|
| "layout" | `RowStore`: allocation, growth, and replacement of storage and cache |
| "cache" | `HostCopyCache`: index and records |
| "file" | `DiskStorage`: file and journal |
| "gradients" | `GradAccumulator`: recorded gradients; backward passes run in several threads |
| "streams" | the named streams below |

A thread that holds a lock takes only locks further down. `FLATBED_DEBUG_LOCKS=1` checks that at every
`OrderedLock`. Under `capture_lock`, which is held for the millisecond of a capture and for `synchronize`, no
other lock is taken.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flatbed.cuda import driver

HIGH_PRIORITY = ("moves", "files", "scan", "graphs")  # short kernels that other work waits for

LOCK_ORDER = (
    "layout",
    "cache",
    "file",
    "gradients",
    "streams",
)
check_lock_order = os.environ.get("FLATBED_DEBUG_LOCKS") == "1"
_held = threading.local()


class OrderedLock:
    """A reentrant lock with a place in `LOCK_ORDER`, which is checked.

    Without `check_lock_order` it is an `RLock`: `with` takes that without running Python code, so that Ctrl-C
    cannot leave it locked.
    """

    def __new__(cls, name: str) -> Any:
        return super().__new__(cls) if check_lock_order else threading.RLock()

    def __init__(self, name: str) -> None:
        self.name = name
        self._rank = LOCK_ORDER.index(name)
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        held: list[OrderedLock] = _held.__dict__.setdefault("locks", [])
        above = next((lock for lock in held if lock._rank > self._rank), None)
        if above is not None and self not in held:
            self._lock.release()
            raise AssertionError(f"the lock {self.name!r} was taken under {above.name!r}: see LOCK_ORDER")
        held.append(self)

    def __exit__(self, *_: object) -> None:
        held: list[OrderedLock] = _held.__dict__.setdefault("locks", [])
        if held and held[-1] is self:
            held.pop()
        self._lock.release()


capture_lock = threading.Lock()
"""Held while the package captures a graph (`cuda.graph`): no thread may wait for the whole GPU then."""
captured_steps: list[object] = []
"""Steps that `flatbed.capture` captures now. Nothing is freed meanwhile, which waits for the whole GPU."""


def synchronize(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    with capture_lock:
        torch.cuda.synchronize(device)


_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_lock = OrderedLock("streams")


def stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return the stream for a purpose, always the same one for a device.

    torch hands out 32 streams in turn; streams for different purposes are different here.
    """
    key = (device, purpose)
    found = _streams.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _streams:
            others = {stream.cuda_stream for stream in _streams.values()}
            _streams[key] = distinct_stream(device, others, priority=-1 if purpose in HIGH_PRIORITY else 0)
        return _streams[key]


def distinct_stream(device: torch.device, handles: set[int], *, priority: int = 0) -> torch.cuda.Stream:
    """Return a stream with none of these handles; any stream after 64 attempts."""
    for _ in range(64):
        stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call,unused-ignore]
        if stream.cuda_stream not in handles:
            break
    return stream


class InStream:
    """The context of a stream, as `torch.cuda.stream(stream)`, in less of the host's time: for every step.

    One object is not for nested use.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._own = stream.stream_id, stream.device_index, stream.device_type
        self._before: list[tuple[int, int, int]] = []

    def __enter__(self) -> None:
        # The stream of the other GPU comes last: setting it makes that GPU the current one.
        devices = dict.fromkeys((self._own[1], torch._C._cuda_getDevice()))
        self._before = [torch._C._cuda_getCurrentStream(device) for device in devices]
        torch._C._cuda_setStream(*self._own)

    def __exit__(self, *_: object) -> None:
        for stream in self._before:
            torch._C._cuda_setStream(*stream)


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream of this device is capturing a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch._C._cuda_getDevice()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def relax_capture() -> None:
    """Let this thread allocate and wait from now on, while another thread captures a graph."""
    driver.exchange_capture_mode(driver.CAPTURE_RELAXED)


@contextmanager
def relaxed_capture() -> Iterator[bool]:
    """Let the body allocate and wait, also in a thread that captures a graph. Yields False without CUDA."""
    before = driver.exchange_capture_mode(driver.CAPTURE_RELAXED)
    try:
        yield before is not None
    finally:
        if before is not None:
            driver.exchange_capture_mode(before)
