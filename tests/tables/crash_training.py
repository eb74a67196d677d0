"""Train a table on disk in child processes, kill each at some moment, compare with a training never stopped.

Run as `python -m tests.tables.crash_training FOLDER N_KILLS SEED CACHE_ROWS`; prints what was seen as JSON.
With rows for a cache, the table has one, and children have their batches from a prefetcher. One process
imports torch once and forks all others, which makes a kill cheap.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

import flatbed
from flatbed.data import Prefetcher
from flatbed.tables.storage.disk import journal

N_ROWS, DIM = 2000, 16
EVERY = 3  # steps from one checkpoint to the next
LIFE = 5  # checkpoints that the oldest children see
SOON = 0.02  # seconds from a message of a child to its end
NEW_TABLE = 25  # kills that a table lives through
MESSAGE = struct.Struct("<cq")
OPENED, STEPPED, BEGUN, COMPLETED = b"o", b"s", b"b", b"c"


class Training:
    """An embedding and its optimizer; the table itself knows how many steps were made."""

    def __init__(self, embedding: Any) -> None:
        self.embedding, self.table = embedding, embedding.table
        self.optimizer = flatbed.optim.Adam(embedding, lr=0.05)

    @property
    def n_steps(self) -> int:
        return n_steps(self.table)

    def step(self, ids: Tensor, wanted: Tensor) -> None:
        (self.embedding(ids) - wanted).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Ids, of which a few are looked up again and again, and what their rows should be like."""
    generator = torch.Generator().manual_seed(step)
    often = torch.randint(0, 40, (24,), generator=generator)
    ids = torch.cat([often, torch.randint(0, N_ROWS, (72,), generator=generator)]).view(4, 24)
    return ids, torch.randn(*ids.shape, DIM, generator=generator)


def embedding(**where: Any) -> Any:
    """The same first rows in memory and on disk, unless the file is there already."""
    return flatbed.Embedding(N_ROWS, DIM, seed=3, **where)


def n_steps(table: Any) -> int:
    return int(table.scalars().get("step", 0))


def state(table: Any) -> dict[str, Any]:
    """The step count of a table, and a digest of every field of all rows."""
    every = torch.arange(N_ROWS)
    tensors = {"weight": table.read_rows(every)}
    tensors |= {name: table.read_state(name, every) for name in table.state_names}
    digests = {name: hashlib.sha256(value.numpy()).hexdigest() for name, value in tensors.items()}
    return {"step": n_steps(table), **digests}


def live(path: Path, report: int, cache_rows: int) -> NoReturn:
    """Go on from the last checkpoint until killed, and tell about it."""

    def tell(what: bytes) -> None:
        os.write(report, MESSAGE.pack(what, training.n_steps))

    training = Training(embedding(storage="disk", path=path, cache_rows=cache_rows))
    tell(OPENED)
    batches: Any = map(batch, count(training.n_steps))
    if cache_rows:
        batches = Prefetcher(batches, {training.embedding: lambda given: given[0]})
    for given in batches:
        training.step(*given)
        tell(STEPPED)
        if training.n_steps % EVERY == 0:
            tell(BEGUN)
            training.table.checkpoint()
            tell(COMPLETED)
    raise SystemExit("there were no batches any more")


class Child:
    """A process that trains, and the end of a pipe on which it tells what it does."""

    def __init__(self, path: Path, cache_rows: int) -> None:
        self.told: list[tuple[bytes, int]] = []
        while len(os.listdir("/proc/self/task")) != 1:  # threads of a closed table end by themselves
            time.sleep(0.001)
        self.reading, report = os.pipe()
        self.process = os.fork()
        if not self.process:
            try:
                live(path, report, cache_rows)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(report)

    def listen(self, n_messages: int) -> None:
        """Wait for so many messages, or for the end."""
        while n_messages and (message := os.read(self.reading, MESSAGE.size)):
            self.told.append(MESSAGE.unpack(message))
            n_messages -= 1

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        _, status = os.waitpid(self.process, 0)
        check(os.WIFSIGNALED(status), "a child ended by itself")
        self.listen(-1)
        os.close(self.reading)

    def last(self, what: bytes, default: int) -> int:
        return max((step for said, step in self.told if said == what), default=default)


class Trials:
    """Kills, one after the other, of children that go on with one table."""

    def __init__(self, folder: Path, seed: int, cache_rows: int) -> None:
        self.place, self.copy, self.cache_rows = folder / "place", folder / "copy", cache_rows
        self.generator = np.random.default_rng(seed)
        self.never_stopped = Training(embedding(storage="host"))
        self.expected = [state(self.never_stopped.table)]  # after each step
        self.seen: Counter[str] = Counter()
        self.step = 0  # of the last checkpoint

    def run(self, n_kills: int) -> None:
        for kill in range(n_kills):
            is_new, early = kill % NEW_TABLE == 0, kill % 5 == 4
            if is_new:
                shutil.rmtree(self.place, ignore_errors=True)
                self.place.mkdir()
                self.step = 0
            child = Child(self.place / "table", self.cache_rows)
            # New: while the file is made. Early: while files of the child before are recovered.
            child.listen(is_new or (0 if early else int(self.generator.integers(0, LIFE * (EVERY + 2)))))
            time.sleep(self.generator.uniform(0, SOON / (4 if early else 1)))
            child.kill()
            # A copy, so that the next child finds what this one has left, and may be killed again.
            shutil.rmtree(self.copy, ignore_errors=True)
            shutil.copytree(self.place, self.copy)
            try:
                self.look(child, kill)
            except Exception as error:
                raise SystemExit(f"kill {kill}, after {child.told[-1:]}: {error!r}") from error

    def look(self, child: Child, kill: int) -> None:
        completed = child.last(COMPLETED, self.step)
        begun, trained = child.last(BEGUN, completed), child.last(STEPPED, completed)
        is_saving = begun > completed
        self.seen["while opening"] += not child.told
        self.seen["during a checkpoint"] += is_saving
        self.seen["between checkpoints"] += bool(child.told) and not is_saving
        self.seen["steps lost between checkpoints"] += 0 if is_saving else trained - completed
        self.seen["checkpoints completed"] += sum(said == COMPLETED for said, _ in child.told)
        if not (self.copy / "table").exists():
            check(not trained, f"there is no table after {trained} steps")
            return
        found = self.opened(kill)
        self.step = step = n_steps(found.table)
        check(step in (completed, begun), f"completed {completed}, begun {begun}, found {step}")
        self.compare(found.table, step)
        training = Training(found)
        self.compare(found.table, step)
        self.seen["checkpoints dropped"] += is_saving and step == completed
        self.seen["checkpoints completed by recovery"] += step > completed
        if kill % 4 < 2:
            self.go_on(training, kill)
        found.table.close(discard=True)

    def opened(self, kill: int) -> Any:
        """As users do who know what the table is like, and as those who do not."""
        path = self.copy / "table"
        if kill % 2:
            return embedding(storage="disk", path=path, cache_rows=self.cache_rows)
        found = flatbed.Embedding.from_table(flatbed.load_table(path))
        found.table.set_cache(self.cache_rows)
        return found

    def compare(self, table: Any, step: int) -> None:
        while len(self.expected) <= step:
            self.never_stopped.step(*batch(len(self.expected) - 1))
            self.expected.append(state(self.never_stopped.table))
        found = state(table)
        check(found.keys() >= {"weight", "exp_avg", "exp_avg_sq"}, f"found {list(found)}")
        wrong = [name for name, value in found.items() if value != self.expected[step].get(name)]
        check(not wrong, f"the table of step {step} has another {', '.join(wrong)}")

    def go_on(self, training: Training, kill: int) -> None:
        """Train a table that was left, stop in peace, and look again."""
        step = training.n_steps + EVERY
        while training.n_steps < step:
            training.step(*batch(training.n_steps))
        self.compare(training.table, step)
        training.table.checkpoint()
        training.step(*batch(step))
        self.seen["rows that left the cache"] += training.table.cache_stats().written
        training.table.close(discard=True)
        again = self.opened(kill + 1)
        self.compare(again.table, step)
        again.table.close()
        self.seen["gone on"] += 1


def check(right: bool, otherwise: str) -> None:
    if not right:
        raise ValueError(otherwise)


def main(folder: Path, n_kills: int, seed: int, cache_rows: int) -> None:
    torch.set_num_threads(1)
    # Syncing takes most of the time and does nothing that a kill could show: without it, the moments of the
    # end lie between writes. The same with few rows at a time.
    os.fsync = os.fdatasync = lambda descriptor: None
    journal.CHUNK = 4096
    trials = Trials(folder, seed, cache_rows)
    trials.run(n_kills)
    print(json.dumps(trials.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
