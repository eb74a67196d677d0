"""How fast a folder's disk reads records at random: from the disk itself, not from memory."""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

FILE_BYTES = 64 << 20
CHUNK = 4 << 20
THREADS = 16  # as many as a table on disk reads with
SECONDS = 0.4  # of reading, at most
ASKED = 64  # places that are asked for whether memory has them


class Reads(NamedTuple):
    """Records read in a second, or why that is not known."""

    rate: float | None
    why: str = ""


def read_at_random(folder: Path, record_bytes: int) -> Reads:
    """Write a file that has no name, let the system forget its contents, and read records here and there."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return Reads(None, "This system cannot be told to forget a file, so reads would come from memory.")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return _measured(file.fileno(), record_bytes)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return Reads(
                None, f"It cannot be told whether reads in {folder} come from a disk or from memory."
            )
        return Reads(None, f"No file could be written and read in {folder}: {error.strerror or error}.")


def _measured(file: int, record_bytes: int) -> Reads:
    block = os.urandom(CHUNK)
    for _ in range(FILE_BYTES // CHUNK):
        os.write(file, block)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    apart = -(-2 * mmap.PAGESIZE // record_bytes) * record_bytes  # no two in one page: it is read once
    places = list(range(0, FILE_BYTES - record_bytes, apart))
    random.Random(0).shuffle(places)
    if sum(_in_memory(file, place) for place in places[:ASKED]) > ASKED // 8:
        return Reads(None, "The system keeps files in memory here, whatever it is told.")
    places = places[ASKED:]
    end = time.perf_counter() + SECONDS

    def read(some: list[int]) -> int:
        for n_done, place in enumerate(some):
            if time.perf_counter() > end:
                return n_done
            os.pread(file, record_bytes, place)
        return len(some)

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        n_read = sum(pool.map(read, [list(islice(places, i, None, THREADS)) for i in range(THREADS)]))
    return Reads(n_read / (time.perf_counter() - begin))


def _in_memory(file: int, place: int) -> bool:
    """Whether a byte can be had without waiting for the disk; asking brings nothing there."""
    try:
        return os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
