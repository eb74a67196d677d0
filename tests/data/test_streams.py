"""Who waits for whom on a GPU, and how many calls a batch costs, with streams that only write down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import flatbed
from flatbed.cuda import streams
from flatbed.data import batches, prefetcher
from flatbed.data.batches import Mover
from flatbed.data.lookups import Lookups
from flatbed.data.prefetcher import Iteration, Preparation
from flatbed.data.transfer import FeedLane, Sent

CPU = torch.device("cpu")


class OnGpu(Tensor):
    """Says that it is there, and to whom it is lent."""

    gpu: Gpu
    called: str

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        self.gpu.log.append(f"{stream.name} uses {self.called}")

    def to(self, *_: Any, **__: Any) -> OnGpu:  # type: ignore[override]
        self.gpu.log.append(f"copy {self.called} in {self.gpu.current.name}")
        return self


class Stream:
    """A stream by its name, of the first GPU."""

    device_index, device_type = 0, 1

    def __init__(self, gpu: Gpu, name: str, stream_id: int) -> None:
        self.gpu, self.name, self.stream_id = gpu, name, stream_id

    def wait_event(self, event: Any) -> None:
        self.gpu.log.append(f"{self.name} waits for {event.what}")

    def record_event(self) -> Any:
        event = self.gpu.event()
        event.record(self)
        return event


class Gpu:
    """What torch would ask a GPU for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.calls: Counter[str] = Counter()
        self.streams = [
            Stream(self, name, number) for number, name in enumerate(("training", "batches", "rows"))
        ]
        self.current = self.streams[0]
        self.device = 0
        self.n_recorded: Counter[str] = Counter()

    def named(self, name: str) -> Stream:
        return next(stream for stream in self.streams if stream.name == name)

    def event(self) -> Any:
        self.calls["event"] += 1
        gpu = self

        class Event:
            what = "nothing"

            def record(self, stream: Stream) -> None:
                gpu.n_recorded[stream.name] += 1
                self.what = f"{stream.name} {gpu.n_recorded[stream.name]}"
                gpu.log.append(f"record {self.what}")

        return Event()

    def key(self, index: int) -> tuple[int, int, int]:
        assert index == 0
        return self.current.stream_id, 0, 1

    def enter(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.calls["set"] += 1
        assert (device_index, device_type) == (0, 1)
        self.current = self.streams[stream_id]
        self.device = 0

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        """torch's own way."""
        self.calls["torch.cuda.stream"] += 1
        before, self.current = self.current, stream
        device, self.device = self.device, 0
        yield
        self.current, self.device = before, device

    def current_stream(self, *_: Any) -> Stream:
        self.calls["torch.cuda.current_stream"] += 1
        return self.current


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for name, call in (
        ("_cuda_getCurrentStream", made.key),
        ("_cuda_setStream", made.enter),
        ("_cuda_getDevice", lambda: made.device),
    ):
        monkeypatch.setattr(torch._C, name, call, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "stream", made.within)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(streams, "_known", {}, raising=False)
    monkeypatch.setattr(prefetcher, "stream_for", lambda _, name: made.named(name))
    monkeypatch.setattr(
        prefetcher, "current_stream", lambda _: streams.current_stream(torch.device("cuda", 0))
    )
    monkeypatch.setattr(batches, "Tensor", OnGpu)
    monkeypatch.setattr(batches, "_pinned", lambda tensor: tensor)
    return made


class Noting:
    """An `RowPrefetch` that writes down in which stream it is asked."""

    brings = False

    def __init__(self, gpu: Gpu, late: bool) -> None:
        self.gpu, self.late = gpu, late

    def stage(self, ids: list[Tensor]) -> str:
        return ids[0].called  # type: ignore[attr-defined,no-any-return]

    def bring(self, staged: str) -> None:
        pass

    def waits(self, staged: str) -> bool:
        return self.late

    def admit(self, staged: str, ids: list[Tensor], *, after: Any, front: bool) -> bool:
        if self.late and not front:
            return False
        self.gpu.log.append(f"fetch {staged} in {self.gpu.current.name} after {after.what}")
        return True

    def begin(self, staged: str) -> None:
        self.gpu.log.append(f"begin {staged}")

    def finish(self, staged: str, after: Any) -> None:
        self.gpu.log.append(f"finish {staged} after {after.what}")

    def drop(self, staged: str) -> None:
        pass


class Here:
    """A background that is ready at once."""

    def __init__(self, given: Iterator[Any], prepare: Preparation) -> None:
        self.given, self.prepare = given, prepare

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def join(self) -> None: ...

    def take(self, *, wait: bool) -> Any:
        found = next(self.given, None)
        return prefetcher.Last() if found is None else self.prepare(found)


def iteration(gpu: Gpu, *, late: bool, n: int = 20) -> Iteration:
    table = flatbed.Embedding(50, 4).table

    def ids(batch: Any) -> Any:
        gpu.log.append(f"ids of {batch['ids'].called} in {gpu.current.name}")
        return batch["ids"]

    def given() -> Iterator[Any]:
        for i in range(n):
            made = torch.arange(3).as_subclass(OnGpu)
            made.gpu, made.called = gpu, str(i)
            yield {"ids": made, "label": 3}

    mover = Mover(CPU)
    mover.stream = gpu.named("batches")  # type: ignore[assignment]
    prepare = Preparation(mover, [Lookups(table, [ids], Noting(gpu, late))])
    return Iteration(Here(given(), prepare), prepare, depth=2)  # type: ignore[arg-type]


def test_the_order_of_a_batch(gpu: Gpu) -> None:
    """Rows are fetched after the step before and after the ids; the loop waits for copies; all is lent."""
    found = iteration(gpu, late=False)
    for _ in range(5):
        found.next()
    gpu.log.clear()
    assert found.next()["ids"].called == "5"
    assert gpu.current.name == "training"
    assert gpu.log == [
        "record training 6",
        "finish 4 after training 6",
        "ids of 6 in training",  # in the background
        "copy 6 in batches",
        "ids of 6 in batches",
        "record batches 7",
        "rows waits for batches 7",
        "rows uses 6",
        "fetch 6 in rows after training 6",
        "training waits for batches 6",
        "training uses 5",
        "begin 5",
    ]


def test_the_order_beside_graphs(gpu: Gpu) -> None:
    """The rows of the batch in front, before anything of the next."""
    found = iteration(gpu, late=True)
    for _ in range(5):
        found.next()
    gpu.log.clear()
    found.next()
    assert gpu.log == [
        "record training 6",
        "finish 4 after training 6",
        "fetch 5 in rows after training 6",
        "ids of 6 in training",
        "copy 6 in batches",
        "ids of 6 in batches",
        "record batches 7",
        "rows waits for batches 7",
        "rows uses 6",
        "training waits for batches 6",
        "training uses 5",
        "begin 5",
    ]


@pytest.mark.parametrize("late", [False, True])
def test_what_a_batch_costs(gpu: Gpu, late: bool) -> None:
    found = iteration(gpu, late=late)
    for _ in range(5):
        found.next()
    gpu.calls.clear()
    for _ in range(10):
        found.next()
    # Two streams are entered and left, and one event is made: that of the step, which others may keep.
    assert gpu.calls == {"set": 10 * 2 * 2, "event": 10}


def test_an_event_is_used_again_when_all_have_waited_for_it(gpu: Gpu) -> None:
    found = iteration(gpu, late=False)
    waited: list[int] = []
    for _ in range(18):
        assert found.coming or not waited
        waited += [id(coming.moved.arrived) for coming in found.coming if coming.moved is not None]
        found.next()
        held = [coming.moved.arrived for coming in found.coming if coming.moved is not None]
        assert not {id(event) for event in held} & {id(event) for event in found.mover._spare}
    assert len(set(waited)) <= 2


# ---- torch's calls, in fewer steps


def test_streams_are_known_by_what_torch_knows_them_by(gpu: Gpu) -> None:
    device = torch.device("cuda", 0)
    for stream in gpu.streams:
        gpu.current = stream
        assert streams.current_stream(device) is stream  # type: ignore[comparison-overlap]
        assert streams.current_stream(device) is stream  # type: ignore[comparison-overlap]
    assert gpu.calls == {"torch.cuda.current_stream": 3}
    streams.current_stream(torch.device("cuda"))
    assert gpu.calls == {"torch.cuda.current_stream": 4}


def test_a_stream_is_left_as_it_was_entered(gpu: Gpu) -> None:
    rows, others = gpu.named("rows"), gpu.named("batches")
    entered: Any = streams.Within(rows)  # type: ignore[arg-type]

    def fail() -> None:
        with entered:
            assert gpu.current is rows
            with streams.Within(others):  # type: ignore[arg-type]
                with streams.Within(rows):  # type: ignore[arg-type]
                    assert gpu.current is rows
                assert gpu.current is others
            assert gpu.current is rows
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gpu.current.name == "training"
    with streams.Within(None):
        assert gpu.current.name == "training"


def test_a_stream_of_another_gpu(gpu: Gpu) -> None:
    """Then torch does it, since both have a stream that was current."""
    gpu.device = 1
    with streams.Within(gpu.named("rows")):  # type: ignore[arg-type]
        assert gpu.device == 0
        assert gpu.current.name == "rows"
    assert gpu.device == 1
    assert gpu.current.name == "training"
    assert gpu.calls == {"torch.cuda.stream": 1}


def test_the_lane_of_a_feeder(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch costs none of torch's longer calls, and events that are given are used again."""
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: gpu.event())
    lane: Any = FeedLane(torch.device("cuda", 0), gpu.named("batches"))  # type: ignore[arg-type]
    assert lane.current() is gpu.named("training")
    step, arrived = lane.reached(lane.current()), lane.mark()
    gpu.calls.clear()
    gpu.log.clear()
    for _ in range(3):
        with lane.within():
            assert gpu.current.name == "batches"
            assert lane.mark(arrived) is arrived
        assert gpu.current.name == "training"
        assert lane.reached(lane.current(), step) is step
        assert lane.arrive(Sent("batch", arrived), lane.current()) == "batch"
    assert gpu.calls == {"set": 3 * 2}
    assert gpu.log[:3] == ["record batches 2", "record training 2", "training waits for batches 2"]
    lane.wait(lane.made({torch.device("cuda", 0)}), [])
    assert gpu.log[-2:] == ["record training 5", "batches waits for training 5"]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    first = torch.cuda.current_stream(device)
    side = streams.stream_for(device, "rows")
    assert streams.current_stream(device) == first
    with streams.Within(side):
        assert torch.cuda.current_stream(device) == side == streams.current_stream(device)
        with streams.Within(first):
            assert torch.cuda.current_stream(device) == first == streams.current_stream(device)
        assert torch.cuda.current_stream(device) == side
    assert torch.cuda.current_stream(device) == first
    for _ in range(100):
        other = torch.cuda.Stream(device)
        with torch.cuda.stream(other):
            found = streams.current_stream(device)
            assert found == other
            assert found.cuda_stream == other.cuda_stream
