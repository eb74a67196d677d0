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


def test_shows_nothing_when_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, patience=60.0)
    with progress("moving", 10, "rows") as advance:
        advance(5)
    assert stream.getvalue() == ""


def test_shows_the_bar_of_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for rank in (0, 1):
        stream = terminal(monkeypatch, patience=0.0)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with progress("moving", 10, "rows") as advance:
            advance(5)
        assert (stream.getvalue() == "") == (rank > 0)


def test_shows_nothing_at_the_very_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch, patience=0.0)
    with progress("moving", 10, "rows") as advance:
        advance(10)
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
