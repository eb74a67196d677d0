from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flatbed.bench import disk_reads
from flatbed.bench.disk_reads import read_at_random


def test_reads_are_measured_quickly_and_nothing_is_left(tmp_path: Path) -> None:
    begin = time.perf_counter()
    reads = read_at_random(tmp_path, 1536)
    assert time.perf_counter() - begin < 10
    assert list(tmp_path.iterdir()) == []
    assert reads.why if reads.rate is None else reads.rate > 1


def test_no_page_is_read_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second record of a page would come from memory."""
    seen: list[int] = []

    def pread(file: int, n: int, place: int) -> bytes:
        seen.append(place)
        return b"\0" * n

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(disk_reads, "_in_memory", lambda file, place: False)
    assert read_at_random(tmp_path, 1536).rate
    pages = [page for place in seen for page in {place // 4096, (place + 1535) // 4096}]
    assert len(pages) == len(set(pages)) > 1000


def test_memory_is_not_taken_for_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)  # nothing is forgotten
    reads = read_at_random(tmp_path, 1536)
    assert reads.rate is None
    assert "memory" in reads.why


def test_a_disk_that_cannot_be_told_from_memory_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unsupported(*_: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert "cannot be told" in read_at_random(tmp_path, 1536).why


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    reads = read_at_random(tmp_path / "nowhere", 1536)
    assert reads.rate is None
    assert str(tmp_path / "nowhere") in reads.why


def test_a_system_without_the_calls_says_so(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert "cannot be told" in read_at_random(tmp_path, 1536).why
