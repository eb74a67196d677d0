"""Cache whose index and records are on the computing device, over storage that its kernels can address.

Every kernel that reads or writes a row reads the index first, and finds the row in its slot or in storage. So
the only hazard is an admission that moves a row while work in another stream uses it.

**Invariant.** An admission evicts no rows of the batch in use, nor of batches prefetched after it, as long as
the ids of all of them fit into the cache together. It waits for all training work before the batch in use. So
a step and the admissions of later batches run at the same time.

**Example.** A loop with a depth of 2, and one lookup per batch. The `next` that hands out batch 5

1. makes the stream "decisions" wait for step 4,
2. admits batch 7 with a window of 2: it evicts no rows of batches 5 and 6, nor of 7,
3. makes the training stream wait for the moves of batch 5, and returns.

If loader threads deliver batch 7 one `next` later, its admission waits for step 5, too.

**Streams.** Admissions run in the training stream, or ahead of time (`prefetch`) in two streams. In
"decisions", kernels decide which rows get which slots, and write the index. In "moves", a kernel moves the
records (`issue_moves`). So the bus and the decisions on the next batch do not wait for each other. Decisions
on batches of one size are replayed as a CUDA graph (`DecisionGraphs`), since the host takes longer to launch
them one by one than the GPU to run them.

**Numbers.** Admissions are numbered in the order in which the host issues them. The clock of the index counts
them on the device, and `_n_admissions` on the host.

- Admission T with a window W does not evict slots used by admissions T - W to T - 1. W is above 0 only if the
  ids of all of them fit into the cache together, so that all their rows are in slots.
- Windows reach back to the oldest prefetch whose step has not ended (`_live`): that of the batch handed out.
  Other admissions in between, and prefetches of other loops, are in the window, too.
- `protects(batch)` is True if the batch's admission is at least `_oldest_protected`: no admission issued so
  far can evict its rows. Later admissions wait for all training work issued before their `next`. So a step
  needs no event for rows that are protected.

**Order.**

- Moves wait for the decisions on them, and so for the same training work. Decisions need not wait for earlier
  moves: they touch no records. All moves run in one stream, so a row that one admission evicts and the next
  one wants is written before it is read.
- All other work (older batches, ids that were not prefetched, `read_rows`, `flush`) calls
  `wait_for_prefetch`: the current stream waits for the stream "moves", and the next prefetch waits for the
  current stream.
- A graph of decisions writes to the same memory at each replay. It may be replayed again once the
  `UniqueRows` object of its last decisions is gone. By then the step that used them is issued, and the `next`
  that prefetches has made "decisions" wait for that step. If a loop is left, `prefetch_after` orders the next
  prefetch after the loop's moves and its last step.
- Graphs that the user captures replay admissions and lookups which the host does not see. After the first
  such capture, nothing is prefetched and nothing is protected. Lookups of prefetched rows in
  `flatbed.capture` are no such lookups: the host calls `location_for` before each replay, and the replay is
  work of the current stream, as an eager step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing, relaxed_capture, stream_for, synchronize
from flatbed.errors import FlatbedError
from flatbed.kernels import RecordLocation, UniqueRows
from flatbed.kernels.cache import CacheIndex
from flatbed.kernels.rows import key_dtype
from flatbed.tables.cache.base import Cache, LookupBatch
from flatbed.tables.storage.base import MemoryStorage

if TYPE_CHECKING:
    from flatbed.kernels._triton.cache import Decisions

MAX_WINDOW = 1024
# After an interrupted admission, the index names slots whose records may not be there.
INTERRUPTED = (
    "the program was interrupted (Ctrl-C), or failed, while rows moved into a table's cache, and rows that "
    "changed may be lost: build the model again, and load its last checkpoint"
)


class GpuCache(Cache):
    """A cache whose records kernels move, and the order between training and prefetches."""

    location: RecordLocation

    def __init__(self, storage: MemoryStorage, n_slots: int, *, policy: str, device: torch.device) -> None:
        from flatbed.kernels._triton import cache as kernels
        from flatbed.kernels._triton.decision_graphs import DecisionGraphs

        self._kernels = kernels
        self.storage = storage
        self.n_slots, self.device = n_slots, device
        self.index = CacheIndex(storage.n_rows, n_slots, policy=policy, device=device)
        self.records = torch.empty((n_slots, storage.record.nbytes), dtype=torch.uint8, device=device)
        self.location = RecordLocation(storage.memory, self.records, self.index.slot_of_row, self.index.dirty)
        self._n_admissions = 0
        self._n_ids: deque[int] = deque(maxlen=MAX_WINDOW)  # of the last admissions
        self._live: set[int] = set()  # numbers of the prefetches whose step has not ended
        self._oldest_protected = 1
        # The next prefetch waits for both: streams with other work, and those of loops that ended early.
        self._streams_to_await: set[torch.cuda.Stream] = set()
        self._streams_of_left_loops: set[torch.cuda.Stream] = set()
        self._has_prefetched = False
        self._graphs = DecisionGraphs(self.index, key_dtype(storage.n_rows, device), "decisions")
        self._pending_moves: deque[Decisions] = deque()  # prefetches whose moves are not issued yet

    # ---- admission

    def admit(
        self,
        keys: Tensor,
        first_error: Tensor | None = None,
        on_checked: Callable[[], None] | None = None,
    ) -> tuple[UniqueRows, int]:
        """Find unique rows, and admit them. Calls `on_checked` before rows move."""
        self.wait_for_prefetch()
        n = keys.numel()
        window = self._window_over_live(n)
        oldest = self._begin_admission(n, window)
        decided = self._kernels.decide(
            self.index, keys, window, first_error=first_error, on_checked=on_checked
        )
        if n:
            self._kernels.move(decided, self.location)
            self.index.moving = False
        return decided.unique, self._end_admission(n, oldest)

    def prefetch(
        self, ids: Tensor, *, window: int, reservation: object
    ) -> tuple[Tensor, UniqueRows, int] | None:
        """Decide on the admission of a batch ahead of time; `issue_moves` follows before any other use.

        Rows are kept if the ids, which are in range, fit in addition to those of the last `window`
        prefetches. The current stream, "decisions", is ordered after the training work on all batches before.
        """
        if self.has_unseen_replays or is_capturing(self.device):
            return None
        self._check_moved()
        n = ids.numel()
        if not self._has_room(n, window):
            return None
        over_live = self._window_over_live(n)
        if over_live > window:  # rounded up if possible: each window has graphs of its own
            rounded = 1 << (over_live - 1).bit_length()
            window = rounded if self._has_room(n, rounded) else over_live
        # Before the streams are awaited: a graph is free after its last loop has called `prefetch_after`.
        graph = self._graphs.find(n, window, captures=True)
        for streams in (self._streams_to_await, self._streams_of_left_loops):
            while streams:
                stream_for(self.device, "decisions").wait_stream(streams.pop())
        self._has_prefetched = True
        oldest = self._begin_admission(n, window)
        try:
            decided = self._graphs.decide(ids, window, graph)
            if n:
                self._pending_moves.append(decided)
                self.index.moving = False
        except BaseException:
            self._order_moves()  # later work waits for "moves" only, and so for what "decisions" has begun
            raise
        assert decided.keys is not None
        number = self._end_admission(n, oldest)
        if n:
            self._live.add(number)
        return decided.keys, decided.unique, number

    def end_prefetch(self, batch: LookupBatch) -> None:
        if batch.keys.numel():  # otherwise the number is that of the admission before
            self._live.discard(batch.admission)

    def issue_moves(self) -> None:
        """Move the records of prefetches in the stream "moves", which is ordered after "decisions"."""
        stream = stream_for(self.device, "moves") if self.device.type == "cuda" else None
        while self._pending_moves and not self.index.moving:  # after an interruption, the next use raises
            self.index.moving = True
            # Taken out before the launch: a second one would write wrong records back.
            self._kernels.move(self._pending_moves.popleft(), self.location, stream)
            self.index.moving = False

    def _order_moves(self) -> None:
        if self.device.type == "cuda":
            stream_for(self.device, "moves").wait_stream(stream_for(self.device, "decisions"))

    def _has_room(self, n: int, window: int) -> bool:
        """Return True if n ids fit in addition to those of the last `window` admissions."""
        if self.index.direct:
            return True
        if window > MAX_WINDOW:
            return False
        return sum(islice(reversed(self._n_ids), window)) + n <= self.n_slots

    def _window_over_live(self, n: int) -> int:
        """Return the window for n ids that keeps as many live prefetches as fit, the latest first."""
        windows = [self._n_admissions + 1 - number for number in [*self._live]]
        if self.index.direct or not windows:
            return 0
        most, n_kept = 0, n  # the largest window with room
        for size in islice(reversed(self._n_ids), max(windows)):
            n_kept += size
            if n_kept > self.n_slots:
                break
            most += 1
        return max((window for window in windows if window <= most), default=0)

    def _begin_admission(self, n: int, window: int) -> int:
        """Count an admission of n ids, unless there are none. Returns the oldest that is protected after it.

        Until `_end_admission`, nothing is protected: a launch may raise.
        """
        if n == 0:
            return self._oldest_protected
        before, number = self._oldest_protected, self._n_admissions + 1
        self._n_admissions, self._oldest_protected = number, number + 1
        if self.index.direct:  # no admission evicts rows
            return before
        return max(before, number - window) if n <= self.n_slots else number + 1

    def _end_admission(self, n: int, oldest_protected: int) -> int:
        """Return the number of the admission."""
        if n:
            self._n_ids.append(n)
            self._oldest_protected = oldest_protected
        return self._n_admissions

    def _check_moved(self) -> None:
        """Raise if an admission was interrupted before its moves were issued; end an interrupted `clear`."""
        if self.index.moving:
            raise FlatbedError(INTERRUPTED)
        if self.index.is_clearing:
            self.index.clear()

    def _enter_graph(self) -> None:
        """End prefetching for good, since the host does not see what replays do."""
        self.in_graphs = True
        if not self.has_unseen_replays:
            self.has_unseen_replays = True
            self._live.clear()
            if self._has_prefetched and self.device.type == "cuda":
                with relaxed_capture():
                    stream_for(self.device, "moves").synchronize()

    # ---- order between streams: see the module's docstring

    def protects(self, batch: LookupBatch | None) -> bool:
        """Return True if no prefetch moves the rows of this batch before work that is issued now ends.

        Later prefetches wait for the stream that is current at the next `PrefetchIterator.__next__`: this
        work is in that stream, or ordered before it.
        """
        if batch is None or batch.cache is not self or self.has_unseen_replays:
            return False
        return batch.admission is not None and batch.admission >= self._oldest_protected

    def covering(self, batches: list[LookupBatch]) -> LookupBatch | None:
        numbers = [-1 if batch.admission is None else batch.admission for batch in batches]
        return batches[numbers.index(min(numbers))]

    def prefetch_after(self, stream: torch.cuda.Stream) -> None:
        self._streams_of_left_loops.add(stream)

    def wait_for_prefetch(self) -> None:
        """Order the current stream after all prefetches, and the next prefetch after the current stream.

        In the capture of a CUDA graph, end prefetching.
        """
        self._check_moved()
        if self._pending_moves:  # an error prevented its moves
            self._order_moves()
            self.issue_moves()
        if is_capturing(self.device):
            self._enter_graph()
            return
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device.index)
        if stream not in self._streams_to_await:  # otherwise there was no prefetch since
            if self._has_prefetched:
                stream.wait_stream(stream_for(self.device, "moves"))
            self._streams_to_await.add(stream)

    # ---- rows

    def location_for(self, batch: LookupBatch | None) -> RecordLocation:
        """Return where kernels find the rows of a batch, after prefetches that may move them."""
        if not self.protects(batch):
            self.wait_for_prefetch()
        return self.location

    def flush(self) -> None:
        self.wait_for_prefetch()
        if self.device.type == "cuda":
            synchronize(self.device)
        self._kernels.flush(self.index, self.location)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def drop(self) -> None:
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        self.wait_for_prefetch()
        self._oldest_protected = self._n_admissions + 1
        self.index.clear()
