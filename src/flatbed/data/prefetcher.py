"""Batches on the device, and the rows that they will look up, before the training loop asks for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.cuda.streams import stream_for
from flatbed.data import lookups
from flatbed.data.batches import Loaded, Moved, Mover, record_stream, recorded
from flatbed.data.lookups import IdsFunction, Lookups
from flatbed.data.sources import Begins, check_source, n_batches
from flatbed.data.worker import Background, Last, join_stopped
from flatbed.tables.config import parsed
from flatbed.tables.embedding import TableModule
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "flatbed-prefetch"
MOST = 1024  # batches ahead
LEFT_SECONDS = 60.0
"""How long a new iteration waits for the thread of an earlier one that is still in the loader."""


class Prefetcher:
    """The batches of a loader on the device, with the rows of coming batches fetched while a step runs.

    - `loader`: whatever can be iterated, for example a `DataLoader`. Each iteration of the prefetcher is one
      of the loader, in a thread of its own. It must not write into batches that it has handed out.
    - `ids`: for each `Embedding`, `EmbeddingBag` or `Table`, a function of the batch that gives the
      ids which will be looked up: a tensor, a numpy array, a list of integers, or a list of tensors or arrays
      for several lookups. It is called with the batch on the host and, for a GPU, once more with the batch
      that was moved there; it must be pure.
    - `depth`: how many batches are on the device at a time, that in use included; as many again wait on the
      host, and have their rows read from disk (by a second thread, if tables are there: the first one has one
      more batch then). With 1, only the host works ahead.
    - `device`: by default that of the tables. Without tables, batches are moved and no more.

    A batch is a tensor, a numpy array, or dicts, lists, tuples and dataclasses of them. Arrays of numbers
    become tensors, objects with a method `to(device)` are moved by it, all else stays as it is. Training is
    bit for bit that without a prefetcher, if the loader draws its random numbers from a generator of its own.

    An iteration ends, and its threads with it, at the last batch, at an error of the loader (raised when its
    turn comes), when the loop is left, or by `close()` of the iterator.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(1000, 8)
    >>> optimizer = flatbed.optim.Adam(emb, lr=0.01)
    >>> loader = [{"items": torch.randint(0, 1000, (16,))} for _ in range(10)]
    >>> for batch in Prefetcher(loader, {emb: lambda batch: batch["items"]}, depth=2):
    ...     emb(batch["items"]).square().sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        loader: Iterable[Any],
        ids: Mapping[TableModule | Table, IdsFunction],
        *,
        depth: int = 2,
        device: Any = None,
    ) -> None:
        check_source("loader", loader)
        self._source = Begins("loader")
        if isinstance(depth, bool) or not hasattr(depth, "__index__"):
            raise TypeError(f"depth must be an integer; found {depth!r}")
        if depth < 1:
            raise ValueError(f"depth must be 1 at least, the batch in use; found {depth}")
        if depth > MOST:
            raise ValueError(f"depth is how many batches are held at once, {MOST} at most; found {depth}")
        self.loader = loader
        self.depth = int(depth)
        self._functions = lookups.functions_of(ids)
        self._wanted = None if device is None else parsed(device)
        self._earlier: weakref.WeakSet[Background[Coming]] = weakref.WeakSet()
        _ = self.device  # an error, if any, while it is known who is to blame

    @property
    def device(self) -> torch.device:
        """Where batches go: where the tables compute at present."""
        return lookups.common_device([*self._functions], self._wanted)

    def __reduce__(self) -> Any:
        raise TypeError("a Prefetcher cannot be copied or pickled: make another one")

    def __len__(self) -> int:
        return n_batches(self.loader)

    def __iter__(self) -> Prefetched:
        join_stopped(list(self._earlier), LEFT_SECONDS)
        device = self.device
        asked = [
            Lookups(table, each, lookups.ahead_of(table, self.depth))
            for table, each in self._functions.items()
        ]
        prepare = Preparation(Mover(device), asked)
        # Here and not in the thread: what draws random numbers or forks at its start does so as ever.
        background = prepare.in_background(self._source.begin(self.loader), self.depth)
        self._earlier.add(background)
        if background.before is not None:
            self._earlier.add(background.before)  # it has the loader, and may be the last to end
        return Prefetched(Iteration(background, prepare, self.depth))


class Prefetched(Iterator[Any]):
    """One iteration of a `Prefetcher`. Left alone, it ends everything that it began."""

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration
        self._end = weakref.finalize(self, iteration.close)  # at exit of the interpreter, too

    def __next__(self) -> Any:
        return self._iteration.next()

    def __iter__(self) -> Self:
        return self

    def close(self) -> None:
        """End early: the thread, the iterator of the loader, and whatever was fetched ahead."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


# ---- one batch


@dataclass(slots=True)
class Held:
    """What one table has staged for one batch."""

    ahead: RowPrefetch
    staged: Any
    ids: list[Tensor]
    fetched: bool = False


@dataclass(slots=True, eq=False)
class Coming:
    """A batch between the loader and the training loop."""

    loaded: Loaded | None
    held: deque[Held] = field(default_factory=deque)
    moved: Moved | None = None
    settled: bool = False
    """Whether its rows are fetched, or were asked for in front: for the last time."""

    def finish(self, after: torch.cuda.Event | None) -> None:
        """The loop is done with it."""
        while self.held:
            held = self.held.popleft()
            held.ahead.finish(held.staged)

    def drop(self) -> None:
        """It will not be finished. Each is dropped once, whoever comes."""
        while True:
            try:
                held = self.held.popleft()
            except IndexError:
                return
            held.ahead.finish(held.staged)


@dataclass(slots=True)
class Preparation:
    """What is done with each batch: on the host in the background, then on the way to the device."""

    mover: Mover
    lookups: list[Lookups]

    def in_background(self, batches: Iterator[Any], depth: int) -> Background[Coming]:
        """One thread for all of it; a second one where files are read: the loader goes on meanwhile."""
        if not any(one.ahead.reads_disk for one in self.lookups):
            return Background(batches, self, depth=depth, name=NAME, drop=Coming.drop)
        loading = Background(batches, self.load, depth=1, name=NAME, drop=Coming.drop)
        return Background(loading, self.bring, depth=depth, name=f"{NAME}-rows", drop=Coming.drop)

    def __call__(self, batch: Any) -> Coming:
        """All that is done in the background."""
        return self.bring(self.load(batch))

    def load(self, batch: Any) -> Coming:
        """In the background: tensors, and which rows they ask for."""
        loaded = self.mover.load(batch)
        coming = Coming(loaded)
        try:
            for one in self.lookups:
                ids = [lookups.on_host(found) for found in one.ids(loaded.batch)]
                coming.held.append(Held(one.ahead, one.ahead.stage(ids), ids))
        except BaseException:
            coming.drop()
            raise
        return coming

    def bring(self, coming: Coming) -> Coming:
        """In the background: rows from disk."""
        try:
            for held in coming.held:
                held.ahead.read(held.staged)
        except BaseException:
            coming.drop()
            raise
        return coming

    def move(self, coming: Coming) -> None:
        """In the training thread: to the device, the ids by the same functions."""
        loaded, coming.loaded = coming.loaded, None
        assert loaded is not None
        if self.mover.stream is None:
            coming.moved = self.mover.move(loaded)
            return
        coming.moved = self.mover.move(loaded, self._ids_there)
        for held, ids in zip(coming.held, coming.moved.derived, strict=True):
            held.ids = ids

    def _ids_there(self, batch: Any) -> list[list[Tensor]]:
        return [[lookups.to_there(ids, self.mover.device) for ids in one.ids(batch)] for one in self.lookups]


# ---- one iteration


class Iteration:
    """The training thread's side. Knows nothing of the iterator that it is in."""

    def __init__(self, background: Background[Coming], prepare: Preparation, depth: int) -> None:
        self.background = background
        self.prepare = prepare
        self.mover = prepare.mover
        self.depth = depth
        self.coming: deque[Coming] = deque()
        """On the device or on the way there, that to be handed out in front."""
        self.in_use: Coming | None = None
        self.last: Last | None = None
        self.closed = False
        on_gpu = self.mover.stream is not None
        # Rows wait for earlier steps, and batches must not wait for rows: two streams.
        self.stream = stream_for(self.mover.device, "rows") if on_gpu else None

    def next(self) -> Any:
        """The batch in front, and work for those behind it."""
        if self.closed:
            raise StopIteration
        try:
            self.background.start()
            current = None if self.stream is None else torch.cuda.current_stream(self.mover.device)
            after = None if current is None else recorded(current)
            used, self.in_use = self.in_use, None
            if used is not None:
                used.finish(after)
            if self.coming:
                self._admit(self.coming[0], after, front=True)  # before others take the room
            self._fill(after)
            if self.coming:
                return self._hand_out(current)
            last = self.last
        except BaseException:
            self.close()
            raise
        self.close()
        if last is None or last.error is None:
            raise StopIteration
        try:
            raise last.error
        finally:
            del last  # the error's traceback has this frame

    def _fill(self, after: torch.cuda.Event | None) -> None:
        """Take what is ready; wait for the batch in front alone."""
        while len(self.coming) < self.depth and self.last is None:
            taken = self.background.take(wait=not self.coming)
            if isinstance(taken, Last):
                self.last = taken
            elif taken is None:
                return
            else:
                self.coming.append(taken)
                self.prepare.move(taken)
                self._follow(taken)
                self._admit(taken, after, front=len(self.coming) == 1)

    def _follow(self, coming: Coming) -> None:
        """Rows are fetched once the ids that say which have arrived."""
        if self.stream is None or coming.moved is None or coming.moved.arrived is None:
            return
        self.stream.wait_event(coming.moved.arrived)
        for ids in (ids for held in coming.held for ids in held.ids):
            record_stream(ids, self.stream)

    def _admit(self, coming: Coming, after: torch.cuda.Event | None, *, front: bool) -> None:
        """Have the rows fetched, where they are not; in front once more."""
        if coming.settled:
            return
        coming.settled = front
        asked = [held for held in coming.held if not held.fetched]
        if not asked:
            return
        with torch.cuda.stream(self.stream):
            for held in asked:
                held.ahead.admit(held.staged, held.ids)
                held.fetched = True

    def _hand_out(self, current: torch.cuda.Stream | None) -> Any:
        coming = self.in_use = self.coming.popleft()
        assert coming.moved is not None
        batch = self.mover.arrive(coming.moved, current)
        self.mover.give_back(coming.moved)
        for held in coming.held:
            held.ahead.begin(held.staged)
        coming.moved = None  # the batch is the loop's alone
        return batch

    def close(self) -> None:
        """Drop all that is not finished. In any thread, as often as you like."""
        self.closed = True
        self.background.stop()
        self.last = None
        used, self.in_use = self.in_use, None
        if used is not None:
            used.drop()
        while self.coming:
            self.coming.popleft().drop()
        self.background.join()  # at last: it may be interrupted
