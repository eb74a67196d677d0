import io
import sys
import threading

import pytest
import torch.distributed as dist

from flatbed import progress as module
from flatbed.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, *, patience: float) -> Terminal:
    """Called within tests: pytest gives fixtures another stderr."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(module, "PATIENCE", patience)
    return stream


@pytest.mark.parametrize(("unit", "amount"), [("rows", "1,500/2,000 rows"), ("bytes", "1.5/2.0 kB")])
def test_shows_a_bar_when_it_takes_long(monkeypatch: pytest.MonkeyPatch, unit: str, amount: str) -> None:
    stream = terminal(monkeypatch, patience=0.0)
    with progress("moving [the] table", 2000, unit) as advance:
        advance(1000)
        advance(500)
    assert "moving [the] table" in stream.getvalue()
    assert amount in stream.getvalue()


@pytest.mark.parametrize(
    ("patience", "done", "rank"), [(60.0, 5, 0), (0.0, 10, 0), (0.0, 5, 1)], ids=["quick", "end", "rank 1"]
)
def test_shows_nothing(monkeypatch: pytest.MonkeyPatch, patience: float, done: int, rank: int) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    stream = terminal(monkeypatch, patience=patience)
    with progress("moving", 10, "rows") as advance:
        advance(done)
    assert stream.getvalue() == ""


def test_stops_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch, patience=0.0)
    before = set(threading.enumerate())

    def fail() -> None:
        with progress("moving", 10, "rows") as advance:
            advance(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
