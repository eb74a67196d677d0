"""Checkpoints of sharded tables: one number of ranks saves, another goes on."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import flatbed
from flatbed.checkpoint import load as loading
from flatbed.distributed.dense_shards import whole
from flatbed.tables import saving, tensor_file
from flatbed.tables.storage import base
from flatbed.tables.storage.disk import DiskStorage
from tests.distributed.processes import main

ROWS, BAGS = 101, 30
DIM = 32  # whole vectors of the CPU: bits of other rows depend on how many are updated at once
STEPS = 2  # between two checkpoints


class Towers(nn.Module):
    """Tables of three storages, dtypes and kinds, and a dense layer."""

    def __init__(self, folder: Path, world: int, *, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(3)
        shard: Any = {"shard": "row"}
        file: Any = {"storage": "disk", "path": folder / f"users-{world}.bed"}
        self.items = flatbed.Embedding(rows, DIM, seed=1, padding_idx=5, **shard)
        self.users = flatbed.Embedding(rows, 2 * DIM, seed=2, dtype=torch.bfloat16, **file, **shard)
        self.tags = flatbed.EmbeddingBag(BAGS, DIM, seed=3, storage="device", mode="sum", **shard)
        self.dense = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.items(ids).sin().sum() + self.users(ids).float().sin().sum()
        return found + self.tags((ids % BAGS).reshape(-1, 4)).sin().sum()


def build(folder: Path, world: int) -> tuple[Towers, list[Any]]:
    model = Towers(folder, world)
    tables = flatbed.tables(model)
    kinds = [
        flatbed.optim.Adam(tables[:2], lr=0.1),
        flatbed.optim.Adagrad(tables[2:], lr=0.1, initial_accumulator_value=0.5),
        torch.optim.SGD(model.dense.parameters(), lr=0.1, momentum=0.9),
    ]
    return model, kinds


def batch(world: int, number: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * world + 10 * number + rank)
    return torch.randint(ROWS, (8,), generator=draw)


def train(model: Towers, optimizers: Sequence[Any], *, world: int, ranks: Sequence[int]) -> None:
    """Make steps with the batches of these ranks, whose mean gradient counts."""
    for number in range(STEPS):
        for rank in ranks:
            model(batch(world, number, rank)).backward()
        if len(ranks) > 1:  # one process for all ranks
            for table in flatbed.tables(model):
                table.grad = table.grad / len(ranks)
        for param in model.dense.parameters():
            param.grad = torch.full_like(param, 0.1 * number + world)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def contents(model: nn.Module, optimizers: Sequence[Any] = ()) -> dict[str, Tensor]:
    """All rows and whole parameters, with their state and step counts. A collective."""
    found = {}
    for name, param in model.named_parameters():
        if isinstance(param, flatbed.Table):
            rows = range(param.num_embeddings)
            found[name] = param.read_rows(rows)
            found |= {f"{name}.{state}": param.read_state(state, rows) for state in param.state_names}
            found |= {f"{name}.{scalar}": torch.tensor(value) for scalar, value in param.scalars().items()}
            continue
        found[name] = whole(param.detach()).clone()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(param, {}).items():
                found[f"{name}.{key}"] = whole(value).clone()
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    """The name of a tensor that is not the same, bit by bit."""
    if one.keys() != other.keys():
        return f"{one.keys() ^ other.keys()}"
    return next((name for name, value in one.items() if not torch.equal(value, other[name])), None)


def digests(folder: Path) -> dict[str, str]:
    (version,) = folder.glob("v*")
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(version.glob("*.safetensors"))
    }


def world_and_rank() -> tuple[int, int]:
    return dist.get_world_size(), dist.get_rank()


def meeting_place(folder: Path) -> Path:
    """A folder that one group of ranks has for itself."""
    place = folder / f"place-{sys._getframe(1).f_code.co_name}-{dist.get_world_size()}"
    if dist.get_rank() == 0:
        place.mkdir()
    dist.barrier()
    return place


# ---- there and back


def goes_on(folder: Path, model: nn.Module, optimizers: list[Any], make_steps: Callable[[], None]) -> None:
    """Load what the ranks before have saved, train, and save."""
    world, rank = world_and_rank()
    if folder.exists():
        before = flatbed.load_checkpoint(folder, model, optimizers)["world"]
        expected = torch.load(folder.with_name(f"{folder.name}-{before}.pt"))
        assert difference(contents(model, optimizers), expected) is None
    make_steps()
    found = contents(model, optimizers)
    if rank == 0:
        torch.save(found, folder.with_name(f"{folder.name}-{world}.pt"))
    flatbed.save_checkpoint(folder, model, optimizers, extra={"world": world}, copy_disk_tables=True)
    assert difference(contents(model, optimizers), found) is None, "a save must not change what it saves"


def goes_on_with_other_ranks(folder: Path) -> None:
    world, rank = world_and_rank()
    model, optimizers = build(folder, world)
    steps = partial(train, model, optimizers, world=world, ranks=[rank])
    goes_on(folder / "run", model, optimizers, steps)


class Mixed(nn.Module):
    """A sharded table beside parameters of FSDP2, some with fewer rows than ranks, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.items = flatbed.Embedding(ROWS, DIM, seed=1, shard="row")
        self.one = nn.Linear(DIM, 7)  # rows that no number of ranks divides evenly
        self.two = nn.Linear(7, 5)
        self.left, self.right = nn.Linear(5, 1), nn.Linear(5, 1)
        self.tied = self.right
        tables = set(flatbed.tables(self))
        fully_shard(self.two)
        fully_shard(self, ignored_params=tables)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.two(self.one(self.items(ids)))
        found: Tensor = self.left(y) + self.right(y).sin() + self.tied(y).cos()
        return found


def goes_on_beside_fsdp(folder: Path) -> None:
    world, rank = world_and_rank()
    model = Mixed()
    optimizers = [
        flatbed.optim.Adam([*model.items.parameters(), *model.one.parameters()], lr=0.1, max_norm=1.0),
        torch.optim.SGD(
            [*model.two.parameters(), *model.left.parameters(), *model.right.parameters()],
            lr=0.1,
            momentum=0.9,
        ),
    ]

    def make_steps() -> None:
        for number in range(STEPS):
            model(batch(world, number, rank)).sin().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    goes_on(folder / "fsdp", model, optimizers, make_steps)


def goes_on_with_sharded_state(folder: Path) -> None:
    """State of shard_state=True, of parameters that every rank holds."""
    torch.manual_seed(5)
    model = nn.Linear(33, 70)
    optimizer = flatbed.optim.AdamW(model, lr=0.1, shard_state=True)

    def make_steps() -> None:
        for number in range(STEPS):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.1 * number + dist.get_world_size())
            optimizer.step()

    goes_on(folder / "state", model, [optimizer], make_steps)


def files_do_not_depend_on_ranks(folder: Path) -> None:
    world, rank = world_and_rank()
    with mock.patch.object(saving, "SEGMENT_BYTES", 1 << 12):  # several windows
        model, optimizers = build(meeting_place(folder), world)
        place = folder / f"same-{world}"
        flatbed.save_checkpoint(place, model, optimizers, copy_disk_tables=True)
        model.items.table.save(place / "items.safetensors")
        train(model, optimizers, world=world, ranks=[rank])
        model.items.table.load(place / "items.safetensors")
        model.items.table.save(place / "again.safetensors")
        assert (place / "again.safetensors").read_bytes() == (place / "items.safetensors").read_bytes()


# ---- disk tables in place


def disk_tables_stay_in_their_files(folder: Path) -> None:
    world, rank = world_and_rank()
    place = meeting_place(folder)
    model, optimizers = build(place, world)
    train(model, optimizers, world=world, ranks=[rank])
    flatbed.save_checkpoint(place / "run", model, optimizers)
    saved = contents(model)
    name = f"users-{world}.bed" + (f".{rank}-of-{world}" if world > 1 else "")
    size = (place / name).stat().st_size
    train(model, optimizers, world=world, ranks=[rank])
    assert 0 < model.users.table._store.unsaved_rows < ROWS // world, "changed rows alone"
    flatbed.load_checkpoint(place / "run", model, optimizers)
    assert difference(contents(model), saved) is None
    model.users.table.close()
    model, optimizers = build(place, world)
    flatbed.load_checkpoint(place / "run", model, optimizers)
    assert difference(contents(model), saved) is None
    assert (place / name).stat().st_size == size
    with pytest.raises(flatbed.FlatbedError, match=r"holds no checkpoint, but .* in .*run:"):  # on all ranks
        flatbed.load_checkpoint(place / "none", model, optimizers)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        flatbed.load_checkpoint(place / "none", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"keep=2.*copy_disk_tables"):
        flatbed.save_checkpoint(place / "run", model, optimizers, keep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flatbed.save_checkpoint(place / "other", model, optimizers)
    lost = [str(w.message) for w in caught if "copy_disk_tables=True keeps both" in str(w.message)]
    assert len(lost) == (rank == 0), lost
    flatbed.save_checkpoint(place / "run", model, optimizers)
    if world > 1:
        elsewhere = Towers(folder, 10 * world)
        with pytest.raises(flatbed.FlatbedError, match=r"own file|is missing"):
            flatbed.load_checkpoint(place / "run", elsewhere)
    refuse_another_number(folder)


def refuse_another_number(folder: Path) -> None:
    """The rows are in files of other ranks: loading says so."""
    world, _ = world_and_rank()
    for other in folder.glob("place-disk_tables_stay_in_their_files-*"):
        if int(other.name.rpartition("-")[2]) != world:
            model = Towers(meeting_place(folder), world)
            with pytest.raises(flatbed.FlatbedError, match=r"ranks.*copy_disk_tables"):
                flatbed.load_checkpoint(other / "run", model)
            return


# ---- one rank fails


def assert_all_raise(what: str, own: str, patches: Sequence[Any], action: Callable[[], Any]) -> None:
    """Let the first rank and the last one fail in turn: it raises its own error, the others name it."""
    world, rank = world_and_rank()
    for failing in {0, world - 1}:
        for patched in patches:
            message = own if rank == failing else f"{what} failed on rank {failing}"
            with (
                patched if rank == failing else nullcontext(),
                pytest.raises(flatbed.FlatbedError, match=message),
            ):
                action()
            dist.barrier()


def a_rank_that_fails_to_save(folder: Path) -> None:
    world, rank = world_and_rank()
    place = meeting_place(folder)
    model, optimizers = build(place, world)
    flatbed.save_checkpoint(place / "run", model, optimizers, extra={"step": 0}, copy_disk_tables=True)
    saved = contents(model)
    train(model, optimizers, world=world, ranks=[rank])
    trained = contents(model)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def save() -> None:
        try:
            flatbed.save_checkpoint(place / "run", model, optimizers, copy_disk_tables=True)
        finally:
            dist.barrier()
            assert len(list((place / "run").glob("v*"))) == 1

    places = (tensor_file, "write_at"), (DiskStorage, "read"), (os, "fsync")
    patches = [mock.patch.object(*place, full) for place in places]
    assert_all_raise("saving a checkpoint", "free some space|No space", patches, save)
    for failing in {0, world - 1}:
        kind = TypeError if rank == failing else flatbed.FlatbedError
        with pytest.raises(kind, match="JSON"):
            flatbed.save_checkpoint(
                place / "run", model, optimizers, extra={"x": trained if rank == failing else 1}
            )
        with pytest.raises(kind, match="found int"):
            flatbed.load_checkpoint(place / "run", model, 1 if rank == failing else optimizers)  # type: ignore[arg-type]
    assert difference(contents(model), trained) is None
    assert flatbed.load_checkpoint(place / "run", model, optimizers) == {"step": 0}
    assert difference(contents(model), saved) is None
    flatbed.save_checkpoint(place / "run", model, optimizers, extra={"step": 1}, copy_disk_tables=True)
    assert flatbed.load_checkpoint(place / "run", model, optimizers) == {"step": 1}


def a_rank_with_another_model(folder: Path) -> None:
    """A pipeline stage, for example: the first rank would write its own alone."""
    world, rank = world_and_rank()
    place = meeting_place(folder)
    others = (
        nn.Sequential(nn.Identity(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 3)),
        nn.Sequential(nn.Linear(2, 2, bias=False)),
    )
    for other in others:
        model = other if 0 < rank == world - 1 else nn.Sequential(nn.Linear(2, 2))
        message = rf"(weight|bias)' of rank {world - 1}.* not that of the first"
        if world > 1:
            with pytest.raises(flatbed.FlatbedError, match=message):
                flatbed.save_checkpoint(place / "run", model)
        dist.barrier()
        assert not list((place / "run").glob("v*"))
    model = nn.Sequential() if 0 < rank == world - 1 else nn.Sequential(nn.Linear(2, 2))
    flatbed.save_checkpoint(place / "run", model)  # as FSDP1 with `rank0_only`


def ranks_whose_parameters_differ(folder: Path) -> None:
    """Names and shapes are equal, as in tensor parallelism by hand, and the first rank's values are saved."""
    world, rank = world_and_rank()
    place = meeting_place(folder)

    def warnings_of_save(model: nn.Module, optimizer: Any = None) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1's
            flatbed.save_checkpoint(place / "run", model, optimizer)
        assert {warning.filename for warning in caught} <= {__file__}
        return [str(warning.message) for warning in caught]

    def assert_differs(found: list[str], *words: str) -> None:
        assert len(found) == (rank == 0 < world - 1), found
        assert all(word in message for message in found for word in words), found

    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), nn.BatchNorm1d(3))
    model[0].weight.data = model[0].weight.data.t()
    model[1].bfloat16()
    model[2].requires_grad_(False)
    running_mean: Any = model[3].running_mean
    running_mean.fill_(rank)  # DDP leaves buffers as they are if it is told so
    optimizer = flatbed.optim.Adam(model)
    assert warnings_of_save(model, optimizer) == []
    with torch.no_grad():
        for layer in model[:3] if rank == world - 1 else ():
            layer.bias.mul_(-1)  # type: ignore[operator, union-attr]
    of_last = f"'0.bias', '1.bias', '2.bias' of rank {world - 1} differ from those of the first rank"
    assert_differs(warnings_of_save(model, optimizer), of_last, "tensor parallelism")
    with torch.no_grad():
        model[0].weight.add_(rank)  # type: ignore[operator]
    other = f"'0.weight'{', ' if world == 2 else ' '}"
    assert_differs(warnings_of_save(model), other, " and 1 more of rank 1" if world == 2 else "of rank 1 ")
    versions = list((place / "run").glob("v*"))
    dist.barrier()
    if world > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((UserWarning, flatbed.FlatbedError), match="differ from"):
                flatbed.save_checkpoint(place / "run", model)
    dist.barrier()
    assert list((place / "run").glob("v*")) == versions

    replica = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(replica)
    optimizer = flatbed.optim.Adam(wrapped)
    for seed in range(2):
        torch.manual_seed(10 * seed + rank)
        wrapped(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert warnings_of_save(replica, optimizer) == []


def shards_that_are_no_dtensors(folder: Path) -> None:
    """FSDP1 gives state dicts whole models; an optimizer has parts of flat parameters."""
    world, rank = world_and_rank()
    place = meeting_place(folder)
    if world == 1:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        warnings.filterwarnings("always", category=UserWarning)
        flatbed.save_checkpoint(place / "run", model)
        assert not caught
        flatbed.save_checkpoint(place / "run", model, optimizer)
    found = [str(warning.message) for warning in caught]
    assert len(found) == (rank == 0)
    assert all("'parameter 0 of optimizer 0 (Adam)' of rank 1 " in message for message in found), found


def a_rank_that_fails_to_load(folder: Path) -> None:
    world, rank = world_and_rank()
    place = meeting_place(folder)
    model, optimizers = build(place, world)
    flatbed.save_checkpoint(place / "run", model, optimizers, copy_disk_tables=True)
    train(model, optimizers, world=world, ranks=[rank])
    trained = contents(model)

    def fail(*_: Any, **__: Any) -> None:
        raise flatbed.FlatbedError("no memory")

    places = (saving, "begin_read"), (loading, "load_plain_state"), (DiskStorage, "draft")
    patches = [mock.patch.object(*place, fail) for place in places]
    load = partial(flatbed.load_checkpoint, place / "run", model, optimizers)
    assert_all_raise("loading a checkpoint", "no memory", patches, load)
    assert difference(contents(model), trained) is None
    (version,) = (place / "run").glob("v*")
    for number in range(3):  # some rank compares the checksum of each tensor
        file = version / f"table-{number}.safetensors"
        good = file.read_bytes()
        dist.barrier()
        for at in (10, len(good) // 4, len(good) // 2, -1000):
            if rank == 0:
                bad = bytearray(good)
                bad[at] ^= 4
                file.write_bytes(bad)
            dist.barrier()
            with pytest.raises(flatbed.FlatbedError, match=rf"{file.name} is .*damaged"):
                flatbed.load_checkpoint(place / "run", model, optimizers)
        dist.barrier()
        if rank == 0:
            file.write_bytes(good)
        dist.barrier()
    assert difference(contents(model), trained) is None
    flatbed.load_checkpoint(place / "run", model, optimizers)


def a_rank_that_writes_other_bytes_or_elsewhere(folder: Path) -> None:
    world, rank = world_and_rank()
    emb, place = flatbed.Embedding(ROWS, DIM, shard="row"), meeting_place(folder)
    write = tensor_file.write_at

    def write_other(descriptor: int, offset: int, data: memoryview) -> None:
        write(descriptor, offset, memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1])) if len(data) else data)

    is_last = rank == world - 1
    with mock.patch.object(tensor_file, "write_at", write_other) if is_last else nullcontext():
        flatbed.save_checkpoint(place / "run", emb)
    with pytest.raises(flatbed.FlatbedError, match="damaged"):
        flatbed.load_checkpoint(place / "run", emb)
    if world > 1:
        (place / f"{rank}").mkdir()
        on_disk = flatbed.Embedding(ROWS, DIM, shard="row", storage="disk", path=place / "items.bed")
        for save in (
            lambda: emb.table.save(place / f"{rank}" / "items.safetensors"),
            lambda: flatbed.save_checkpoint(place / f"{rank}" / "run", on_disk),  # its decision is there
        ):
            with pytest.raises(flatbed.FlatbedError, match=r"rank \d does not find.*all ranks see"):
                save()
        on_disk.table.close(discard=True)


# ---- memory


class Peak:
    """Measures the largest growth of this process's own memory in a `with` block."""

    def __enter__(self) -> Peak:
        self._before, self._is_over, self.nbytes = self._now(), threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @staticmethod
    def _now() -> int:
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["RssAnon"].split()[0]) << 10

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self.nbytes = max(self.nbytes, self._now() - self._before)


def memory_stays_small(folder: Path) -> None:
    """Part of a rank: 38 MB. It is saved in segments of 1 MiB, and loaded in blocks of 2 MiB.

    The bound is half of it: gloo frees what it has sent when its thread gets to run.
    """
    world, _ = world_and_rank()
    if world != 2 or sys.platform != "linux":
        return
    emb = flatbed.Embedding(100_000, 64, seed=1, shard="row")
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    emb(torch.arange(10)).sum().backward()
    optimizer.step()
    place = meeting_place(folder)
    flatbed.save_checkpoint(place / "first", flatbed.Embedding(10, 4, shard="row"))  # imports modules
    with (
        mock.patch.object(saving, "SEGMENT_BYTES", 1 << 20),
        mock.patch.object(base, "CHUNK_BYTES", 1 << 21),
        mock.patch.object(tensor_file, "BLOCK_BYTES", 1 << 20),
    ):
        with Peak() as saved:
            flatbed.save_checkpoint(place / "run", emb, optimizer)
        with Peak() as loaded:
            flatbed.load_checkpoint(place / "run", emb, optimizer)
    assert saved.nbytes < 19 << 20, saved.nbytes
    assert loaded.nbytes < 19 << 20, loaded.nbytes


SCENARIOS = [
    *(goes_on_with_other_ranks, goes_on_beside_fsdp, files_do_not_depend_on_ranks),
    *(goes_on_with_sharded_state, disk_tables_stay_in_their_files),
    *(a_rank_that_fails_to_save, a_rank_that_fails_to_load, a_rank_that_writes_other_bytes_or_elsewhere),
    *(a_rank_with_another_model, ranks_whose_parameters_differ, shards_that_are_no_dtensors),
    memory_stays_small,
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(SCENARIOS)
