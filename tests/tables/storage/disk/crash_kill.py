"""Train a disk table in child processes, kill each at some moment, look at what is left.

Run as `python -m tests.tables.storage.disk.crash_kill FOLDER N_KILLS SEED`; prints what was seen as JSON.
One process imports torch once and forks all others, which makes a kill cheap.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from flatbed.tables.storage.disk import DiskStorage, journal
from flatbed.tables.storage.disk.mapped_file import MappedFile
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    RECORD,
    Dense,
    batch,
    everything,
    fill,
    filled,
    train,
)

N_ROWS = 2000
LIFE = 6  # checkpoints that the oldest children see


class Model:
    """Rows that the table must hold after a step. Steps are numbered over all children."""

    def __init__(self) -> None:
        self.step, self.rows = 0, filled(0, N_ROWS, NBYTES)

    def at(self, step: int) -> Dense:
        while self.step < step:
            self.step += 1
            train(self.rows, self.step)
            if grows(self.step):
                n_rows = len(self.rows)
                self.rows = np.concatenate([self.rows, filled(n_rows, n_rows + 3, NBYTES)])
        return self.rows


def checkpoints(step: int) -> bool:
    return step % 3 == 0


def grows(step: int) -> bool:
    return step % 45 == 0


def decides(step: int) -> bool:
    return step % 9 == 0 and not grows(step)


def live(folder: Path, report: int) -> None:
    """Open the table and train until killed."""
    storage = DiskStorage.open(folder / "table")
    step = storage.meta["step"]
    while True:
        step += 1
        storage.scatter_(*map(torch.from_numpy, batch(step, storage.n_rows, NBYTES)))
        if not checkpoints(step):
            continue
        if grows(step):
            storage.resize(storage.n_rows + 3, fill=fill, meta={"step": step})
        elif decides(step):
            storage.prepare({"step": step}, decision=folder / "decision", token=f"token {step}")
            (folder / "decision.new").write_text(json.dumps({"token": f"token {step}"}))
            os.replace(folder / "decision.new", folder / "decision")
            storage.commit()
        else:
            storage.checkpoint({"step": step})
        os.write(report, struct.pack("<q", step))


def born(folder: Path, synced: bool) -> tuple[int, int]:
    """A child and the end of a pipe on which it says 0 when it begins, and then every completed step."""
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        # Syncing takes most of the time and does nothing that a kill could show: without it, the moments
        # of the end lie between writes. The same with few rows at a time.
        if not synced:
            MappedFile.sync = lambda self: None  # type: ignore[method-assign]
        journal.CHUNK = 16 * NBYTES
        os.write(report, struct.pack("<q", 0))
        live(folder, report)
    os.close(report)
    os.read(reading, 8)
    return child, reading


def killed(child: int, reading: int) -> int:
    """The last step that a child reported before its end, 0 for none."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reported = struct.pack("<q", 0)
    while more := os.read(reading, 1 << 16):
        reported += more
    os.close(reading)
    return int(struct.unpack_from("<q", reported, len(reported) - 8)[0])


def lifetime(folder: Path, synced: bool) -> tuple[float, int]:
    """Seconds that a child takes for some checkpoints on this machine, and the last step completed."""
    child, reading = born(folder, synced)
    start = time.perf_counter()
    for _ in range(LIFE):
        last = struct.unpack("<q", os.read(reading, 8))[0]
    seconds = time.perf_counter() - start
    return seconds, max(last, killed(child, reading))


def main(folder: Path, n_kills: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    DiskStorage.create(folder / "table", RECORD, N_ROWS, fill=fill, meta={"step": 0}).close()
    model, last, seen = Model(), 0, Counter[str]()
    longest = [0.0, 0.0]
    for kill in range(n_kills):
        synced = kill % 2 == 0
        if kill % 50 < 2:
            longest[synced], last = lifetime(folder, synced)
        else:
            child, reading = born(folder, synced)
            time.sleep(generator.uniform(0, longest[synced]))
            last = max(last, killed(child, reading))
        left = {path.name for path in folder.iterdir()}
        storage = DiskStorage.open(folder / "table")
        step = storage.meta["step"]
        if step not in (last, last + 3) or storage.generation != step // 3:
            raise SystemExit(f"kill {kill}: completed {last}, found {step} ({storage.generation})")
        expected = model.at(step)
        if storage.n_rows != len(expected) or not np.array_equal(everything(storage), expected):
            raise SystemExit(f"kill {kill}: the rows of step {step} are wrong")
        storage.close()
        seen["kills"] += 1
        seen["with a journal"] += "table.journal" in left
        seen["completed by recovery"] += step > last
        last = step
    print(json.dumps({**seen, "steps": last}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
