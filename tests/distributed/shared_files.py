"""A file that all ranks write together."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flatbed
from flatbed.distributed.channel import Channel
from flatbed.distributed.ranks import Lockstep
from flatbed.tables import tensor_file
from flatbed.tables.tensor_file import TensorEntry, check_tensors, writing
from tests.distributed.processes import main


def write_parts(path: Path, weight: torch.Tensor, step_bytes: int, *, fail_at: int = -1) -> dict[str, int]:
    """Write a tensor in parts that ranks have in turn."""
    entries = [TensorEntry("weight", weight.dtype, tuple(weight.shape)), TensorEntry("step", torch.int64, ())]
    rank, world = dist.get_rank(), dist.get_world_size()
    data = weight.view(torch.uint8).flatten()
    with (
        Lockstep("saving") as lockstep,
        writing(path, entries, {}, (Channel.of(dist.group.WORLD), lockstep)) as writer,
    ):
        if rank == 0:
            writer.write("step", 0, torch.tensor(7))
        for number, start in enumerate(range(0, len(data), step_bytes * world)):
            writer.meet()
            if number == fail_at and rank == world - 1:
                raise OSError(28, "No space left on device")
            at = min(start + rank * step_bytes, len(data))
            writer.write("weight", at, data[at : at + step_bytes])
    return writer.checksums


def files_are_those_of_one_process(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for n_rows, step_bytes in ((3, 5), (40, 1000), (1000, 4096), (1000, 4099), (3001, 20_000), (3, 10**6)):
        weight = torch.randn(n_rows, 5, generator=generator)
        path = folder / f"{dist.get_world_size()}-{n_rows}-{step_bytes}"
        checksums = write_parts(path, weight, step_bytes)
        if dist.get_rank() == 0:
            alone = path.with_suffix(".alone")
            entries = [TensorEntry("weight", weight.dtype, (n_rows, 5)), TensorEntry("step", torch.int64, ())]
            with writing(alone, entries, {}) as writer:
                writer.write("step", 0, torch.tensor(7))
                writer.write("weight", 0, weight)
            assert checksums == writer.checksums
            assert path.read_bytes() == alone.read_bytes()
            check_tensors(path, checksums)


def a_rank_without_space_ends_the_file_on_all(folder: Path) -> None:
    place = folder / f"failing-{dist.get_world_size()}"
    with suppress(FileExistsError):
        place.mkdir()
    dist.barrier()
    for fail_at in (0, 1, 3):
        own = dist.get_rank() == dist.get_world_size() - 1
        with pytest.raises(flatbed.FlatbedError, match=f"{'' if own else 'failed on rank'}.*free some space"):
            write_parts(place / "table", torch.ones(100, 5), 100, fail_at=fail_at)
        dist.barrier()  # the first rank has removed its draft
        assert os.listdir(place) == []
        dist.barrier()
    write_parts(place / "table", torch.ones(100, 5), 100)
    assert os.listdir(place) == ["table"]


def a_folder_that_one_rank_does_not_see(folder: Path) -> None:
    place = folder / f"seen-by-{dist.get_rank()}"
    place.mkdir(exist_ok=True)
    with pytest.raises(flatbed.FlatbedError, match=r"rank \d does not find.*all ranks see"):
        write_parts(place / "table", torch.ones(100, 5), 100)


def every_write_counts(folder: Path) -> None:
    """The checksums of a rank's bytes find an error of any rank."""
    path, real = folder / f"wrong-{dist.get_world_size()}", tensor_file.write_at

    def other(descriptor: int, offset: int, data: memoryview) -> None:
        real(descriptor, offset, memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1])) if len(data) else data)

    if dist.get_rank() == dist.get_world_size() - 1:
        tensor_file.write_at = other
    checksums = write_parts(path, torch.ones(1000, 5), 1000)
    tensor_file.write_at = real
    if dist.get_rank() == 0:
        with pytest.raises(flatbed.errors.DamagedFileError, match="weight"):
            check_tensors(path, checksums)


SCENARIOS = [files_are_those_of_one_process]
SCENARIOS += [a_rank_without_space_ends_the_file_on_all, a_folder_that_one_rank_does_not_see]
SCENARIOS += [every_write_counts]

if __name__ == "__main__":
    main(SCENARIOS)
