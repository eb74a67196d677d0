"""The worker thread: order, bounds, errors and ends, for one thread and for two in a row."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flatbed.data.pipeline import THREAD_NAME
from flatbed.data.worker import BoundedSource, EndOfStream, WorkerThread
from tests.data.fakes import collect

SECONDS = 60.0


class Chain:
    """One worker or two, over a bounded source, and everything that was discarded."""

    def __init__(
        self,
        items: Iterator[Any],
        *,
        n_threads: int,
        depth: int = 2,
        prepare: Callable[[Any], Any] = lambda item: item,
    ) -> None:
        self.discarded: list[Any] = []
        self.source = BoundedSource(items, depth)
        self.first: WorkerThread[Any] = WorkerThread(
            self.source, lambda item: prepare(item[1]), discard=self.discarded.append, name=THREAD_NAME
        )
        self.last = self.first
        if n_threads == 2:
            self.last = WorkerThread(
                self.first, lambda item: item, discard=self.discarded.append, name=THREAD_NAME
            )

    def results(self) -> Iterator[Any]:
        """Take results as a consumer does, a permit for each."""
        self.last.start()
        for result in iter(lambda: next(self.last, EndOfStream), EndOfStream):
            yield result
            self.source.permit(None)

    def close(self) -> None:
        self.last.stop()
        self.last.join(SECONDS)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def n_threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_order_and_end(n_threads: int, depth: int) -> None:
    chain = Chain(iter(range(50)), n_threads=n_threads, depth=depth, prepare=lambda item: -item)
    assert [*chain.results()] == [-i for i in range(50)]


def test_the_consumer_need_not_wait(n_threads: int) -> None:
    go = threading.Event()

    def items() -> Iterator[int]:
        assert go.wait(SECONDS)
        yield 1

    chain = Chain(items(), n_threads=n_threads)
    assert chain.last.take(wait=False) is None
    chain.last.start()
    assert chain.last.take(wait=False) is None
    go.set()
    assert chain.last.take(wait=True) == 1
    assert isinstance(chain.last.take(wait=True), EndOfStream)


@pytest.mark.parametrize("where", ["loader", "prepare"])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_is_raised_when_its_turn_comes(n_threads: int, where: str, error: BaseException) -> None:
    def fail(item: int) -> int:
        if item == 3:
            raise error
        return item

    items = map(fail, range(10)) if where == "loader" else iter(range(10))
    prepare = fail if where == "prepare" else lambda item: item
    chain = Chain(items, n_threads=n_threads, prepare=prepare)
    seen: list[int] = []
    with pytest.raises(type(error)) as raised:
        collect(chain.results(), seen)
    assert seen == [0, 1, 2]
    assert raised.value is error
    assert any(entry.name == "fail" for entry in raised.traceback), "with its traceback"


def test_stop_iteration_while_preparing_does_not_end_the_stream(n_threads: int) -> None:
    def fail(item: int) -> int:
        raise StopIteration

    chain = Chain(iter(range(3)), n_threads=n_threads, prepare=fail)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(chain.results())


def test_results_that_are_not_taken_are_discarded_once(n_threads: int) -> None:
    chain = Chain(iter(range(100)), n_threads=n_threads, depth=5)
    taken = [result for _, result in zip(range(3), chain.results(), strict=False)]
    chain.close()
    chain.close()
    found = sorted(taken + chain.discarded)
    assert found == list(range(len(found)))
    assert next(chain.last, None) is None


def test_stop_does_not_wait_for_the_loader(n_threads: int) -> None:
    go, entered = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        entered.set()
        assert go.wait(SECONDS)
        yield 1

    chain = Chain(items(), n_threads=n_threads)
    chain.last.start()
    assert entered.wait(SECONDS)
    chain.last.stop()
    assert isinstance(chain.last.take(wait=True), EndOfStream)
    chain.last.join(0.0)
    go.set()
    chain.close()


def test_a_worker_may_be_stopped_in_its_own_thread(n_threads: int) -> None:
    chains: list[Chain] = []

    def stop(item: int) -> int:
        if item == 2:
            chains[0].close()
        return item

    chains.append(Chain(iter(range(10)), n_threads=n_threads, prepare=stop))
    assert set(chains[0].results()) <= {0, 1}
    chains[0].last.join(SECONDS)


def test_the_thread_has_the_settings_of_its_maker(n_threads: int) -> None:
    def look(_: Any) -> Any:
        return torch.is_grad_enabled(), torch.get_num_threads(), torch.zeros(1).device.type

    with torch.no_grad(), torch.device("meta"):
        here = look(0)
        chain = Chain(iter([0]), n_threads=n_threads, prepare=look)
    assert [*chain.results()] == [here]


@pytest.mark.parametrize("seed", range(10))
def test_random_delays_and_ends(n_threads: int, seed: int) -> None:
    chance = random.Random(seed)

    def pause(item: int) -> int:
        time.sleep(chance.random() * 0.001)
        return item

    depth, n_taken = chance.randint(1, 4), chance.randint(0, 30)
    chain = Chain(map(pause, range(30)), n_threads=n_threads, depth=depth, prepare=pause)
    taken = []
    for result in chain.results():
        taken.append(result)
        time.sleep(chance.random() * 0.001)
        if len(taken) >= n_taken:
            break
    chain.close()
    assert taken == list(range(len(taken)))
    found = sorted(taken + chain.discarded)
    assert found == list(range(len(found))), "each item is taken or discarded"
