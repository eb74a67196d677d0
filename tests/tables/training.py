"""A small training with tables of several storages, the same at every run, for tests of checkpoints.

Run as `python -m tests.tables.training kill FOLDER N_KILLS SEED`, it trains in child processes, kills each at
some moment and compares what is left; as `… ranks FOLDER RANK`, it is one of two ranks.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import flatbed
from flatbed.checkpoint import folder as folders
from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.tables import files
from flatbed.tables.embedding import Embedding, tables
from flatbed.tables.storage.disk import mapped_file as disk_file

ROWS, DIM = 40, 4
OPERATIONS = (
    *("open", "pwrite", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate", "posix_fallocate"),
)


class Model(nn.Module):
    """Two tables, tied weights, a frozen parameter, and a buffer of integers."""

    def __init__(self, folder: Path, storages: tuple[str, str] = ("host", "disk")) -> None:
        super().__init__()
        kinds = [
            {"storage": s, "path": folder / f"{i}.bed" if s == "disk" else None}
            for i, s in enumerate(storages)
        ]
        self.first = Embedding(ROWS, DIM, seed=1, **kinds[0])
        self.second = Embedding(ROWS, DIM, seed=2, dtype=torch.bfloat16, **kinds[1])
        self.one = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.BatchNorm1d(DIM)
        self.two = nn.Linear(DIM, DIM, bias=False)
        self.two.weight = self.one.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.two(self.norm(self.one(self.first(ids) + self.second(ids).float())))
        return found


def build(folder: Path, storages: tuple[str, str] = ("host", "disk")) -> tuple[Model, Any]:
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True, parents=True)
    model = Model(folder, storages)
    return model, flatbed.optim.Adam(model, lr=0.1)


def several(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]


def step(model: nn.Module, optimizers: Any, number: int) -> None:
    ids = torch.randint(0, ROWS, (16,), generator=torch.Generator().manual_seed(number))
    model(ids).square().sum().backward()
    for optimizer in several(optimizers):
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model: nn.Module, optimizers: Any) -> dict[str, Any]:
    """Everything that training depends on, by name."""
    found: dict[str, Any] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if not isinstance(value, flatbed.Table):
            found[name] = value.detach().clone()
    for i, table in enumerate(tables(model)):
        _ = table._store.ensure_layout()
        for field in table._store.record.fields:
            found[f"table {i} {field.name}"] = table._store.read_field(field.name, 0, table.num_embeddings)
        found[f"table {i} scalars"] = torch.tensor(list(table.scalars().values()))
    for i, optimizer in enumerate(several(optimizers)):
        for key, held in optimizer.state_dict()["state"].items():
            found |= {f"{i} {key} {name}": torch.as_tensor(value).clone() for name, value in held.items()}
    return found


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    if one.keys() != other.keys():
        return f"keys {one.keys() ^ other.keys()}"
    for name, value in one.items():
        if value.dtype != other[name].dtype or not torch.equal(value, other[name]):
            return name
    return None


def close(model: nn.Module) -> None:
    for table in tables(model):
        table.close(discard=True)


class Expected:
    """Snapshots of a training without interruption, by number of steps."""

    def __init__(self, folder: Path, storages: tuple[str, str] = ("host", "disk")) -> None:
        self.model, self.optimizer = build(folder, storages)
        self.seen: list[dict[str, Any]] = []

    def at(self, n_steps: int) -> dict[str, Any]:
        while len(self.seen) <= n_steps:
            if self.seen:
                step(self.model, self.optimizer, len(self.seen))
            else:
                for table in tables(self.model):
                    _ = table._store.ensure_layout()
            self.seen.append(snapshot(self.model, self.optimizer))
        return self.seen[n_steps]


class Operations:
    """Counts what is done to files, and at one operation does something else."""

    def __init__(
        self, at: int | None = None, then: Callable[[], None] | None = None, *, synced: bool = True
    ) -> None:
        self.at, self.then, self.count = at, then, 0
        self.synced = synced  # syncing takes most of the time, and no test here can see what it does
        self._real: dict[str, Any] = {}

    def __enter__(self) -> Operations:
        gc.disable()  # what others have left open is not closed in between
        for name in OPERATIONS:
            self._real[name] = getattr(os, name)
            done = self._real[name] if self.synced or name != "fsync" else lambda _: None
            setattr(os, name, self._counting(done))
        return self

    def _counting(self, real: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at and self.then is not None:
                self.then()
            return real(*args, **kwargs)

        return operation

    def __exit__(self, *_: Any) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        gc.enable()


# ---- killed


def live(folder: Path, report: int) -> None:
    """Go on from the last checkpoint until killed."""
    model, optimizer = build(folder)
    number = 0
    if (folder / "saved" / "CURRENT.json").exists():
        number = load_checkpoint(folder / "saved", model, optimizer)["step"]
    while True:
        number += 1
        step(model, optimizer, number)
        if number % 2 == 0:
            save_checkpoint(folder / "saved", model, optimizer, extra={"step": number})
            os.write(report, struct.pack("<q", number))


def killed(folder: Path, *, delay: float | None, at: int | None, synced: bool) -> int:
    """A child's life and end; returns the last step that it reported as saved, 0 for none."""
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        with Operations(at, lambda: os.kill(os.getpid(), signal.SIGKILL), synced=synced):
            os.write(report, struct.pack("<q", 0))
            live(folder, report)
    os.close(report)
    os.read(reading, 8)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("a child ended by itself")
    told = b""
    while part := os.read(reading, 1 << 16):
        told += part
    os.close(reading)
    return max((n for (n,) in struct.iter_unpack("<q", told)), default=0)


def kill(folder: Path, n_kills: int, seed: int) -> None:
    """Half of the kills at a random moment, half at a random operation on a file."""
    draw, expected = random.Random(seed), Expected(folder / "expected")
    place, seen = folder / "place", {"kills": 0, "saved": 0, "leftovers": 0, "steps": 0}
    place.mkdir()
    for number in range(n_kills):
        by_time = number % 2 == 0
        delay = draw.uniform(0, 0.3) if by_time else None
        told = killed(
            place, delay=delay, at=None if by_time else draw.randrange(1, 120), synced=number % 4 < 2
        )
        seen["kills"] += 1
        if not (place / "saved" / "CURRENT.json").exists():
            if told:
                raise SystemExit(f"step {told} was saved, and there is nothing")
            continue
        seen["leftovers"] += len(list((place / "saved").glob("v*"))) > 1
        model, optimizer = build(place)
        found = load_checkpoint(place / "saved", model, optimizer)["step"]
        if found < told or (wrong := difference(snapshot(model, optimizer), expected.at(found))):
            raise SystemExit(f"kill {number}: step {told} was saved, found {found}: {wrong}")
        seen["saved"] += told > 0
        seen["steps"] = found
        close(model)
    print(json.dumps(seen))


# ---- ranks


def ranks(folder: Path, rank: int) -> None:
    """Save and load on two ranks, each with a disk table of its own."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    model, optimizer = build(folder / f"rank{rank}")
    step(model, optimizer, 1)
    error = flatbed.FlatbedError("no space left")
    fails = mock.patch.object(folders, "write_manifest", side_effect=error) if rank == 0 else nullcontext()
    with fails, suppress(flatbed.FlatbedError):
        save_checkpoint(folder / "saved", model, optimizer)
    close(model)
    torch.distributed.barrier()  # the first rank has removed the version
    model, optimizer = build(folder / f"rank{rank}")
    step(model, optimizer, 1)
    save_checkpoint(folder / "saved", model, optimizer, extra={"step": 1})
    before = snapshot(model, optimizer)
    step(model, optimizer, 2)
    moved = difference(snapshot(model, optimizer), before)
    if rank == 1:
        files.write_text = None  # only the first rank writes
    load_checkpoint(folder / "saved", model, optimizer)
    back = difference(snapshot(model, optimizer), before)
    failures = []
    for failing in (0, 1):  # one rank cannot save: all of them say so, and the last checkpoint stays
        step(model, optimizer, 3)
        if rank == failing:
            disk_file.MappedFile.write = _refusing_once(disk_file.MappedFile.write)
        try:
            save_checkpoint(folder / "saved", model, optimizer, extra={"step": 3})
        except (flatbed.FlatbedError, OSError) as error:
            failures.append(str(error))
        load_checkpoint(folder / "saved", model, optimizer)
    again = difference(snapshot(model, optimizer), before)
    found = {"moved": moved is not None, "back": back, "again": again, "failures": failures}
    print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # torch's gloo threads may abort an interpreter that ends


def _refusing_once(real: Any) -> Any:
    left = [True]

    def refuse(*args: Any) -> Any:
        if left.pop() if left else False:
            raise OSError(28, "No space left on device")
        return real(*args)

    return refuse


if __name__ == "__main__":
    what, where, *numbers = sys.argv[1:]
    if what == "kill":
        kill(Path(where), int(numbers[0]), int(numbers[1]))
    else:
        ranks(Path(where), int(numbers[0]))
