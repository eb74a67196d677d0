"""A stand-in for row prefetching; loaders; running threads and processes."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatbed.data.pipeline import THREAD_NAME
from flatbed.tables.table import Table

ROWS = 50
CPU = torch.device("cpu")


# ---- rows


@dataclass(eq=False)
class FakeRequest:
    tensors: list[Tensor]
    ids: list[list[int]]
    state: str = "staged"
    n_moves: int = 0


@dataclass(eq=False)
class FakePrefetch:
    """Checks the order of calls for each batch, and writes them down."""

    table: Table
    depth: int
    keys: Any = ()
    reads_disk: bool = False
    requests: list[FakeRequest] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    threads: dict[str, set[int]] = field(default_factory=dict)
    fail: Callable[[str, int], None] = lambda call, number: None
    """Raises for a call and the first id of its batch."""

    def check(self, ids: list[Tensor], *, at_once: bool) -> FakeRequest:
        request = FakeRequest(ids, [one.flatten().tolist() for one in ids])
        self._note("check", request)
        if self.depth:
            self.requests.append(request)
        return request

    def read(self, request: FakeRequest, moved: dict[int, Tensor], arrived: Any = None) -> None:
        assert self.reads_disk
        assert request.state == "staged"
        request.state = "read"
        self._note("read", request)

    def admit(self, request: FakeRequest, moved: dict[int, Tensor]) -> None:
        assert request.state == ("read" if self.reads_disk else "staged")
        assert [moved[id(one)].flatten().tolist() for one in request.tensors] == request.ids
        request.state = "admitted"
        self._note("admit", request)

    def issue_moves(self, request: FakeRequest) -> None:
        """Also called after an error of `admit`."""
        request.n_moves += 1

    def begin(self, request: FakeRequest, *_: Any) -> None:
        assert (request.state, request.n_moves) == ("admitted", 1)
        request.state, request.tensors = "begun", []
        self._note("begin", request)

    def finish(self, request: FakeRequest, *, is_left: bool = False) -> None:
        if request.state != "finished":  # after an error or an interruption, it is called again
            request.state = "finished"
            self._note("finish", request)

    def _note(self, call: str, request: FakeRequest) -> None:
        number = request.ids[0][0] if request.ids and request.ids[0] else -1
        self.threads.setdefault(call, set()).add(threading.get_ident())
        self.fail(call, number)
        self.calls.append((call, number))

    def numbers(self, call: str) -> list[int]:
        return [number for name, number in self.calls if name == call]

    @property
    def n_open(self) -> int:
        return sum(request.state != "finished" for request in self.requests)


Fakes: TypeAlias = list[FakePrefetch]


# ---- loaders


class Numbered(Dataset[dict[str, Any]]):
    """Item i has i as its id."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"items": np.int64(i)}


def loader(n: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(n), batch_size=batch_size, **options)


def batches(n: int, size: int = 4) -> list[dict[str, Tensor]]:
    """Batch i has ids that are all i."""
    return [{"items": torch.full((size,), i % ROWS)} for i in range(n)]


def first(batch: Any) -> int:
    return int(batch["items"][0])


def collect(results: Iterable[Any], seen: list[int]) -> None:
    """Append the ids of results to a list, which has those before an error."""
    for result in results:
        seen.append(first(result))


# ---- ids

PAIRS = torch.tensor([[1, 7], [2, 8], [3, 9]])
LAYOUTS = {
    "strided": PAIRS[:, 0],
    "strided int32": PAIRS.int()[:, 1],
    "offset": PAIRS[1:].flatten()[1:],
    "transposed": PAIRS.t(),
    "expanded": torch.tensor([3]).expand(5),
    "expanded rows": torch.tensor([[3], [4]]).expand(2, 4),
    "number": torch.tensor(3),
    "empty": PAIRS[:0, 0],
    "array, strided": PAIRS.numpy()[:, 0],
    "array, backward": np.arange(10, dtype=np.int16)[::-3],
    "array, fortran": np.asfortranarray(PAIRS.numpy()),
    "array, repeated": np.broadcast_to(np.int32(4), (3, 2)),
    "array, swapped": np.arange(4, dtype=">i8"),
    "array, empty": np.zeros((2, 0), np.int64),
}


# ---- what is running


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def workers() -> list[Any]:
    return multiprocessing.active_children()


def wait_until(condition: Callable[[], bool], seconds: float = 200.0) -> bool:
    """Wait for a condition; False if it did not become true."""
    begin = time.monotonic()
    while not condition() and time.monotonic() < begin + seconds:
        if time.monotonic() > begin + 0.5:
            gc.collect()
        time.sleep(0.002)
    return condition()
