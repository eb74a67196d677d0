"""Two ranks of sharded tables save a checkpoint, and end at any operation on a file.

`python -m tests.distributed.checkpoint_kills FOLDER 0-25 1-6` saves once, and copies the files before every
operation of either rank: what a kill of both leaves. Then it kills rank 0 at operation 25, and rank 1 at 6.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import flatbed
from flatbed.tables import saving

WORLD, ROWS, DIM = 2, 50, 32
OPERATIONS = (
    *("pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "mkdir", "rmdir", "ftruncate"),
)


def build(place: Path) -> tuple[nn.ModuleDict, Any]:
    torch.manual_seed(0)
    shard: Any = {"shard": "row"}
    model = nn.ModuleDict(
        {
            "movies": flatbed.Embedding(ROWS, DIM, seed=1, **shard),
            "users": flatbed.Embedding(ROWS, DIM, seed=2, storage="disk", path=place / "users.bed", **shard),
        }
    )
    return model, flatbed.optim.Adam(model, lr=0.1)


def step(model: Any, optimizer: Any, number: int) -> None:
    ids = torch.randint(ROWS, (9,), generator=torch.Generator().manual_seed(number))
    sum(model[name](ids).sin().sum() for name in ("movies", "users")).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def expected(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Rows after one and after two steps, in one process."""
    folder.mkdir()
    model, optimizer = build(folder)
    found = {}
    for number in (1, 2):
        step(model, optimizer, number)
        found[number] = {name: model[name].read_rows(range(ROWS)) for name in ("movies", "users")}
    model["users"].table.close(discard=True)
    return found


@contextmanager
def before_operations(call: Callable[[str, str], None], place: Path) -> Iterator[None]:
    """Call a function with the name and the file of each operation on files of a folder, before it."""
    is_inside = False

    def hooked(name: str) -> Any:
        real = getattr(os, name)

        def operation(target: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            file = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            is_of_place = (
                not file.startswith("/") or str(place) in file
            )  # relative: in a folder being removed
            if is_of_place and not is_inside:
                is_inside = True
                call(name, file)
                is_inside = False
            return real(target, *args, **kwargs)

        return operation

    with mock.patch.multiple(os, **{name: hooked(name) for name in OPERATIONS}):
        yield


def copying(folder: Path, rank: int) -> Callable[[str, str], None]:
    """Copy all files before each operation, one rank at a time, and list the operations."""

    def call(name: str, file: str) -> None:
        with (folder / "log").open("a") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            copy = folder / "copies" / str(len((folder / "log").read_text().splitlines()))
            while True:
                try:
                    shutil.copytree(folder / "place", copy)
                    break
                except shutil.Error:  # the other rank has removed a file meanwhile
                    shutil.rmtree(copy)
            log.write(json.dumps([rank, name, file]) + "\n")

    return call


def killing(number: int) -> Callable[[str, str], None]:
    left = [number]

    def call(*_: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return call


def worker(folder: Path, rank: int, killed: int | None, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    saving.SEGMENT_BYTES = 1 << 12  # several windows
    place = folder / "place"
    model, optimizer = build(place)
    step(model, optimizer, 1)
    flatbed.save_checkpoint(place / "run", model, optimizer, extra={"step": 1})
    step(model, optimizer, 2)
    dist.barrier()
    call = copying(folder, rank) if killed is None else killing(number if rank == killed else -1)
    with before_operations(call, place):
        flatbed.save_checkpoint(place / "run", model, optimizer, extra={"step": 2})
        dist.barrier()  # the other rank has seen the end


def start(folder: Path, killed: int | None, number: int) -> list[int]:
    """Start both ranks, and return their processes."""
    for name in ("place", "copies"):
        (folder / name).mkdir(parents=True)
    processes = []
    for rank in range(WORLD):
        process = os.fork()
        if not process:
            try:
                worker(folder, rank, killed, number)
            except BaseException as error:
                (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
                os._exit(1)
            os._exit(0)
        processes.append(process)
    return processes


def main(folder: Path, kills: list[str]) -> None:
    """Save without a kill and, at the same time, with each one; prints how ranks ended."""
    started = {"whole": start(folder / "whole", None, 0)}
    for kill in kills:
        started[kill] = start(folder / kill, *map(int, kill.split("-")))
    ends = {
        name: sorted(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)
        for name, processes in started.items()
    }
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
