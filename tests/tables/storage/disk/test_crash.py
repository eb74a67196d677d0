"""After a kill at any moment, and after any loss of power, a table is at its last completed checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator, default_rng

from flatbed.errors import FlatbedError
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.journal import Journal
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    RECORD,
    WIDER,
    Dense,
    batch,
    drop_prepared,
    everything,
    failing,
    fill,
    filled,
)
from tests.tables.storage.disk.crash_replay import Choice, Disk, Event, Log, recorded

SOON = 150  # events after a sync that was ignored


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Rows and metadata of a table after a checkpoint."""

    generation: int
    meta: dict[str, Any]
    rows: Dense


@dataclass(slots=True)
class Scenario:
    """A life of a table with every kind of checkpoint: what it did to its files, and what it meant."""

    folder: Path
    log: Log = field(default_factory=Log)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    step: int = 0

    def train(self, storage: DiskStorage, n_steps: int = 2) -> None:
        for _ in range(n_steps):
            self.step += 1
            storage.scatter_(*map(torch.from_numpy, batch(self.step, storage.n_rows, storage.record.nbytes)))

    def begin(self, rows: Dense) -> dict[str, Any]:
        meta = {"checkpoint": len(self.checkpoints), "text": "x" * (700 * len(self.checkpoints) % 3000)}
        self.checkpoints.append(Checkpoint(len(self.checkpoints), meta, rows))
        self.log.mark("begin")
        return meta

    def done(self) -> None:
        self.log.mark("done")

    def run(self) -> None:
        write_decision(self.folder, "none")
        with recorded(self.log):
            meta = self.begin(filled(0, 200, NBYTES))
            storage = DiskStorage.create(self.folder / "table", RECORD, 200, fill=fill, meta=meta)
            self.done()
            for _ in range(2):
                self.train(storage)
                storage.checkpoint(self.begin(everything(storage)))
                self.done()
            self.decide(storage)
            self.abort(storage)
            storage = self.reopen(storage)
            self.train(storage)
            self.shrink_back(storage)
            grown = np.concatenate([everything(storage), filled(200, 230, NBYTES)])
            storage.resize(230, fill=fill, meta=self.begin(grown))
            self.done()
            self.train(storage)
            storage.checkpoint(self.begin(everything(storage)))
            self.done()
            storage = self.rebuild(storage)
            self.train(storage)
            storage.checkpoint(self.begin(everything(storage)))
            self.done()
            self.train(storage)
            storage.close()

    def decide(self, storage: DiskStorage) -> None:
        self.train(storage)
        self.log.mark("prepare")
        storage.prepare(self.begin(everything(storage)), decision=self.folder / "decision", token="first")
        self.log.mark("decide", "first")
        storage.commit()
        self.done()

    def abort(self, storage: DiskStorage) -> None:
        """One checkpoint taken back, after which its decision must not count, should anybody make it."""
        self.train(storage)
        self.log.mark("prepare")
        storage.prepare({}, decision=self.folder / "decision", token="second")
        drop_prepared(storage)
        self.log.mark("late", "second")
        self.train(storage, 1)
        storage.checkpoint(self.begin(everything(storage)))
        self.done()

    def shrink_back(self, storage: DiskStorage) -> None:
        """A growth taken back after its rows were written over the checksums."""
        with failing(Journal, "seal", KeyboardInterrupt()), suppress(KeyboardInterrupt):
            storage.resize(230, fill=fill)

    def reopen(self, storage: DiskStorage) -> DiskStorage:
        """One prepared and left, and dropped by recovery without a decision."""
        self.train(storage)
        self.log.mark("prepare")
        storage.prepare({}, decision=self.folder / "decision", token="third")
        storage.close()
        storage = DiskStorage.open(self.folder / "table")
        self.log.mark("late", "third")
        return storage

    def rebuild(self, storage: DiskStorage) -> DiskStorage:
        self.train(storage)
        before = everything(storage)
        after = filled(0, 230, WIDER.nbytes)
        after[:, :NBYTES] = before

        def carry(start: int, stop: int, records: torch.Tensor) -> None:
            fill(start, stop, records)
            records[:, :NBYTES] = storage.read(start, stop)

        new = storage.rebuilt(WIDER, fill=carry, meta=self.begin(after))
        self.done()
        return new


def write_decision(folder: Path, token: str) -> None:
    (folder / "decision").write_text(json.dumps({"token": token}))


@dataclass(slots=True)
class Expected:
    """Which checkpoints may be found at a moment, and the decision that lies in the folder by then."""

    last: int = -1
    begun: int = -1
    prepared: bool = False
    token: str = "none"

    def happen(self, event: Event) -> None:
        if event.kind == "begin":
            self.begun += 1
        elif event.kind == "done":
            self.last, self.prepared = self.begun, False
        elif event.kind == "prepare":
            self.prepared = True
        elif event.kind in ("decide", "late"):
            self.token = event.file
            if event.kind == "late":
                self.prepared = False

    def cases(self) -> Iterator[tuple[str, set[int]]]:
        """Decisions that may lie there, with the checkpoints that may then be found."""
        if self.prepared and self.token == "first" and self.begun > self.last:
            yield self.token, {self.begun}
            yield "none", {self.last, self.begun}  # lost, which must not tear the table either
        elif self.prepared:
            yield "none", {self.last}
        else:
            yield self.token, {self.last, self.begun}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    scenario = Scenario(tmp_path_factory.mktemp("scenario"))
    scenario.run()
    return scenario


def laid_out(folder: Path, files: dict[str, bytes], token: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    write_decision(folder, token)


def found(folder: Path, checkpoints: list[Checkpoint]) -> int:
    """Which checkpoint the table in a folder is at, -1 if there is none."""
    if not (folder / "table").exists():
        return -1
    storage = DiskStorage.open(folder / "table")
    expected = checkpoints[storage.generation]
    same = storage.meta == expected.meta and np.array_equal(everything(storage), expected.rows)
    storage.close()
    if not same:
        raise FlatbedError(f"the table at checkpoint {expected.generation} holds something else")
    return expected.generation


def replayed(
    scenario: Scenario, generator: Generator, *, how: str | None = None, deaf: str | None = None
) -> Iterator[str]:
    """End after events of the scenario, open what is left; what was wrong, and "" for right.

    `how` says which unsynced writes are left: "all" after a kill, any after a loss of power (None). The disk
    ignores syncs at the site `deaf`. Power is then lost soon after one of them.
    """
    # Decisions are named by where the scenario ran, so that all of it happens in its folder.
    disk, expected, events = Disk(deaf), Expected(), scenario.log.events
    since_ignored = 0 if deaf is None else SOON
    for event, following in zip(events, [*events[1:], Event("end")], strict=True):
        disk.happen(event)
        expected.happen(event)
        if deaf is not None:
            since_ignored = 0 if event.site == deaf else since_ignored + 1
            if since_ignored >= SOON:
                continue
        n_times = 1
        if following.kind == "sync":
            n_times = 5  # most is at stake here
        elif event.kind == "write" and generator.random() > 0.15:
            n_times = 0
        for token, allowed in list(expected.cases()) * n_times:
            files = disk.left(Choice.random(generator, how))
            yield outcome(scenario, files, token=token, allowed=allowed, generator=generator)


def outcome(
    scenario: Scenario, files: dict[str, bytes], *, token: str, allowed: set[int], generator: Generator
) -> str:
    folder, log = scenario.folder, Log()
    laid_out(folder, files, token)
    try:
        with recorded(log):
            at = found(folder, scenario.checkpoints)
    except FlatbedError as error:
        return str(error)
    if at not in allowed:
        return f"found checkpoint {at}, expected one of {allowed}"
    if not log.events or generator.random() > 0.3:
        return ""
    # Power is lost again, while opening.
    disk = Disk(files=files)
    for event in log.events[: generator.integers(0, len(log.events) + 1)]:
        disk.happen(event)
    laid_out(folder, disk.left(Choice.random(generator)), token)
    try:
        with recorded(Log()):
            again = found(folder, scenario.checkpoints)
    except FlatbedError as error:
        return f"the second time: {error}"
    return "" if again in allowed else f"found checkpoint {again} the second time, expected one of {allowed}"


@pytest.mark.parametrize(
    ("how", "seed"), [("all", 0), (None, 1), (None, 2)], ids=["kill", "power", "power 2"]
)
def test_any_end(scenario: Scenario, how: str | None, seed: int) -> None:
    outcomes = list(replayed(scenario, default_rng(seed), how=how))
    assert len(outcomes) >= 150
    assert set(outcomes) == {""}


def test_every_sync_is_needed(scenario: Scenario) -> None:
    """The test above can fail: without any one of the syncs, it does."""
    sites = sorted({event.site for event in scenario.log.events if event.site})
    assert len(sites) >= 8
    unneeded = []
    for site in sites:
        seeds = range(100, 140)
        if not any(any(replayed(scenario, default_rng(seed), deaf=site)) for seed in seeds):
            unneeded.append(site)
    assert unneeded == []
