"""Ways through a cache that are laid out once and used again, for sizes of batches that come again."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatbed.kernels.cache import CacheIndex
from flatbed.kernels.rows import NARROW, RecordLocation, UniqueRows
from flatbed.tables.record import Field

SIZES = 16  # kinds of batches that get a way of their own
SOON = 2  # how often a kind has come before it gets one
AT_ONCE = 8  # batches of a kind that are at work: if somebody keeps more, they do without


class Lease:
    """The use of a passage; it goes back when nobody needs what it has found any more."""

    __slots__ = ("_home", "passage")

    def __init__(self, passage: Any, home: list[Any]) -> None:
        self.passage, self._home = passage, home

    def __del__(self) -> None:
        self._home.append(self.passage)

    @property
    def keys(self) -> Tensor:
        """The ids as kernels take them."""
        keys: Tensor = self.passage.keys
        return keys

    @property
    def found(self) -> UniqueRows:
        """Their distinct rows."""
        found: UniqueRows = self.passage.found
        return found

    @property
    def bad(self) -> Tensor | None:
        """Where the place of the first id out of range is, if they were not looked at."""
        bad: Tensor | None = self.passage.bad
        return bad

    def take(self, ids: Tensor) -> None:
        """Ids from the host, (n,), for `look`: they may be changed afterwards."""
        self.passage.staged.take(ids.numpy())

    def look(self) -> Tensor:
        """Let the ids that were taken pass, in the current stream: their weights, (n, dim)."""
        looked: Tensor = self.passage.look()
        return looked

    def run(self, ids: Tensor) -> None:
        """Let ids pass that are on the GPU, (n,), in the current stream."""
        _narrow()(ids, self.passage.n_rows, self.passage.keys)
        self.passage.run()

    def find(self, ids: Tensor) -> None:
        """Find the rows of ids, (n,), on the GPU, for `bring`. Only with `early`."""
        self.passage.done.wait()  # whoever had it before
        _narrow()(ids, self.passage.n_rows, self.passage.keys)
        self.passage.find()

    def bring(self) -> None:
        """Let them come, in another stream perhaps."""
        self.passage.bring()


@cache
def _narrow() -> Callable[[Tensor, int, Tensor], Tensor]:
    """Looked for once, since it is asked for in every batch."""
    from flatbed.kernels._triton import rows

    return rows.narrow


class Passages:
    """All passages of one cache. A stream has its own: what they share must not be used by two."""

    def __init__(self, tags: CacheIndex, place: RecordLocation, weight: Field) -> None:
        self.tags, self.place, self.weight = tags, place, weight
        self.free: dict[Any, list[Any]] = {}
        self.seen: Counter[Any] = Counter()
        self.n_made: Counter[Any] = Counter()
        self.pools: dict[tuple[int, bool], Any] = {}
        self._index = tags.clock.device.index
        self.usable = tags.clock.is_cuda and len(tags.slot_of_row) <= NARROW

    def lease(
        self, n: int, *, window: int, from_host: bool, checked: bool, early: bool = False
    ) -> Lease | None:
        """A passage for so many ids; None if there is none, or not yet.

        With `early`, rows are found and brought by two calls, in two streams of which nobody else uses what
        is found.
        """
        if not self.usable or n == 0:
            return None
        stream = int(torch._C._cuda_getCurrentRawStream(self._index))
        kind = (n, window, from_host, checked, early, stream)
        free = self.free.get(kind)
        if free is None:
            if len(self.seen) > 100 * SIZES:
                self.seen.clear()
            self.seen[kind] += 1
            if self.seen[kind] <= SOON or len(self.free) >= SIZES:
                return None
            free = self.free[kind] = []
        if free and (free[0].free or self.n_made[kind] == AT_ONCE):  # the one used longest ago
            return Lease(free.pop(0), free)
        if self.n_made[kind] == AT_ONCE:
            return None
        self.n_made[kind] += 1
        passage = self._made(*kind)
        return None if passage is None else Lease(passage, free)

    def _made(self, n: int, window: int, from_host: bool, checked: bool, early: bool, stream: int) -> Any:
        from flatbed.kernels._triton.passage import Passage

        key = (stream, early)  # graphs of one pool share memory, and must not run at the same time
        if key not in self.pools:
            self.pools[key] = torch.cuda.graph_pool_handle()
        weight = self.weight
        how: dict[str, Any] = {
            "dim": weight.count,
            "dtype": weight.dtype,
            "window": window,
            "from_host": from_host,
            "checked": checked,
            "early": early,
        }
        try:
            with torch.inference_mode(False), torch.no_grad():
                return Passage(self.tags, self.place, n, pool=self.pools[key], **how)
        except RuntimeError as error:  # another capture is under way, for example
            warnings.warn(f"lookups go on in many small launches, since: {error}", stacklevel=2)
            self.usable = False
            return None
