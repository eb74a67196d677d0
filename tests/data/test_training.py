"""Training with a prefetcher gives bitwise the same result as without, for every storage and depth."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import flatbed
from flatbed.cuda.streams import stream_for
from flatbed.data import Prefetcher
from tests.cases import DEVICES
from tests.data.fakes import LAYOUTS, PAIRS, threads, wait_until

ROWS, DIM = 64, 8


class Clicks(Dataset[dict[str, Any]]):
    """Few rows, so that each batch shares many with those before and after it; some ids as numpy."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps

    def __len__(self) -> int:
        return 16 * self.n_steps

    def __getitem__(self, i: int) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(i)
        return {
            "items": torch.randint(0, ROWS, (3,), generator=chance).numpy(),
            "user": torch.randint(0, ROWS, (), generator=chance),
            "label": torch.rand((), generator=chance),
        }


class Model(nn.Module):
    def __init__(self, storage: str, folder: Path, device: str, **options: Any) -> None:
        super().__init__()
        folder.mkdir(exist_ok=True, parents=True)

        def place(name: str) -> dict[str, Any]:
            path = {"path": folder / f"{name}.bed"} if storage == "disk" else {}
            return {"storage": storage, "device": device, **path, **options}

        self.items = flatbed.EmbeddingBag(ROWS, DIM, padding_idx=0, seed=1, **place("items"))
        self.users = flatbed.Embedding(ROWS, DIM, seed=2, **place("users"))
        self.top = nn.Linear(DIM, 1, device=device)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        rows = self.items(batch["items"]) * self.users(batch["user"])
        found: Tensor = self.top(rows + self.users(batch["items"][:, 0])).squeeze(1)
        return found

    def lookups(self) -> dict[Any, Any]:
        return {self.items: "items", self.users: lambda b: [b["user"], b["items"][:, 0]]}


def trained(
    storage: str,
    folder: Path,
    *,
    depth: int | None,
    device: str = "cpu",
    workers: int = 0,
    epochs: int = 1,
    n_steps: int = 24,
    checkpoints: bool = False,
    **options: Any,
) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(0)
    model = Model(storage, folder, device, **options)
    optimizer = flatbed.optim.Adam(model, lr=0.05)
    chance = torch.Generator().manual_seed(1)
    plain = DataLoader(Clicks(n_steps), batch_size=16, shuffle=True, generator=chance, num_workers=workers)

    def moved() -> Iterator[Any]:
        for batch in plain:
            yield {name: value.to(device) for name, value in batch.items()}

    losses = []
    for _ in range(epochs):
        for batch in moved() if depth is None else Prefetcher(plain, model.lookups(), depth=depth):
            loss = (model(batch) - batch["label"]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            for table in flatbed.tables(model) if checkpoints and len(losses) % 3 == 0 else ():
                table.checkpoint()
    everything = torch.arange(ROWS)
    found = [table.read_rows(everything).cpu() for table in flatbed.tables(model)]
    found += [table.read_state("exp_avg_sq", everything).cpu() for table in flatbed.tables(model)]
    found += [p.detach().cpu() for p in model.top.parameters()]
    for table in flatbed.tables(model):
        table.close(discard=True)
    return found, [float(loss) for loss in losses]


def check(storage: str, folder: Path, *, depth: int, **options: Any) -> None:
    ours, losses = trained(storage, folder / "ours", depth=depth, **options)
    theirs, expected = trained(storage, folder / "theirs", depth=None, **options)
    assert losses == expected
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    assert losses[-1] < losses[0]


@DEVICES
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("storage", ["host", "disk", "device"])
def test_the_same_training(storage: str, depth: int, device: str, tmp_path: Path) -> None:
    check(storage, tmp_path, depth=depth, device=device, epochs=1 if device == "cpu" else 2)


def test_the_same_training_with_workers(tmp_path: Path) -> None:
    check("disk", tmp_path, depth=2, workers=2, epochs=2)


def test_rows_are_prefetched_while_a_table_is_checkpointed(where: str, tmp_path: Path) -> None:
    check("disk", tmp_path, depth=3, device=where, n_steps=10, checkpoints=True, cache_rows=40)


def test_a_disk_table_is_not_read_after_the_loop(tmp_path: Path) -> None:
    """A loop that was left has no thread that reads a table which is then closed."""
    for i in range(20):
        emb = flatbed.Embedding(ROWS, DIM, storage="disk", path=tmp_path / f"{i}.bed")
        given = [torch.randint(0, ROWS, (200,)) for _ in range(50)]
        for batch in islice(Prefetcher(given, {emb: lambda b: b}, depth=3), i % 5 + 1):
            emb.read_rows(batch)
        emb.table.close(discard=True)
        assert wait_until(lambda: not threads())


def test_a_cache_that_is_made_while_a_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of a prefetcher may make it; it is over the file from before."""
    emb = flatbed.Embedding(20, 4, storage="disk", path=tmp_path / "a.bed", cache_rows=8, init="zeros")
    other = flatbed.Embedding(20, 4, storage="host", init="zeros")
    other.write_rows(range(20), torch.full((20, 4), 7.0))
    other.table.save(tmp_path / "other.safetensors")
    emb(torch.arange(4))
    store, drop = emb.table._store, emb.table._store.drop_cache

    def drop_and_make(**options: Any) -> None:
        drop(**options)
        monkeypatch.undo()
        assert store.ensure_cache(4) is not None

    monkeypatch.setattr(store, "drop_cache", drop_and_make)
    emb.table.load(tmp_path / "other.safetensors")
    assert (emb(torch.arange(6)) == 7).all()
    assert (emb.read_rows(range(20)) == 7).all()
    emb.table.close(discard=True)


@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_bags_find_their_prefetched_rows(
    padding_idx: int | None, storage: str, kernel_device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup admits nothing, and so does not wait for the disk."""
    path = tmp_path / "a.bed" if storage == "disk" else None
    options: dict[str, Any] = {"padding_idx": padding_idx, "seed": 1, "device": kernel_device}
    bag = flatbed.EmbeddingBag(ROWS, DIM, storage=storage, path=path, cache_rows=60, **options)
    plain = flatbed.EmbeddingBag(ROWS, DIM, storage="device", **options)
    given = [torch.tensor([[1, 2, 1], [n + 5, n + 6, 1]]) for n in range(6)]
    optimizers = [flatbed.optim.SGD(one, lr=0.1) for one in (bag, plain)]
    cache = bag.table._store.ensure_cache(1)
    admit = mock.Mock(side_effect=cache.admit)  # type: ignore[union-attr]
    monkeypatch.setattr(cache, "admit", admit)
    for ids in Prefetcher(given, {bag: lambda b: b}, depth=1):
        for one, optimizer in zip((bag, plain), optimizers, strict=True):
            one(ids).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    admit.assert_not_called()
    assert torch.equal(bag.read_rows(torch.arange(ROWS)), plain.read_rows(torch.arange(ROWS)))
    bag.table.close(discard=True)


@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.uint16])
def test_bags_without_ids(dtype: torch.dtype, storage: str, kernel_device: str, tmp_path: Path) -> None:
    """In a second lookup. The key of no row depends on the dtype."""
    found = []
    given = [(torch.tensor([[0, 1], [3, 2]]), torch.tensor([4, 4]).to(dtype))]
    given += [(torch.tensor([[5, 6], [7, 3]]), torch.empty(0, dtype=dtype))] * 4
    offsets = torch.tensor([0, 0], device=kernel_device)
    for is_prefetched in (True, False):
        options: dict[str, Any] = {"path": tmp_path / f"{is_prefetched}.bed"} if storage == "disk" else {}
        options |= {"storage": storage, "device": kernel_device}
        bag = flatbed.EmbeddingBag(20, 4, padding_idx=3, cache_rows=16, seed=1, **options)
        optimizer = flatbed.optim.Adam(bag, lr=0.1)
        for bags, ids in Prefetcher(given, {bag: lambda b: [*b]}) if is_prefetched else given:
            (bag(bags).square().sum() + bag(ids, offsets).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(bag.read_rows(range(20)))
        bag.table.close(discard=True)
    assert torch.equal(*found)


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_batches_of_a_list_that_change_after_their_rows_were_read(
    storage: str, kernel_device: str, tmp_path: Path
) -> None:
    """Lookups have the rows of the ids as they are then."""
    path = tmp_path / "a.bed" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path, cache_rows=40, device=kernel_device)
    weight = emb.read_rows(torch.arange(ROWS))
    given = [torch.arange(4, device=kernel_device) + 4 * n for n in range(3)]
    for number, ids in enumerate(Prefetcher(given, {emb: lambda b: b}, depth=1)):
        assert torch.equal(emb(ids), weight[ids.cpu()].to(kernel_device)), number
        if number == 0:
            live = emb.table._store.cache._live if storage == "disk" else [None] * 2  # type: ignore[union-attr]
            assert wait_until(lambda live=live: len(live) == 2)  # type: ignore[misc]
            given[1].fill_(7)
    emb.table.close(discard=True)


@pytest.mark.parametrize("cache_rows", [0, 6])
def test_files_that_are_replaced_in_the_loop(cache_rows: int, tmp_path: Path) -> None:
    emb = flatbed.Embedding(20, 4, storage="disk", path=tmp_path / "a.bed", cache_rows=cache_rows, seed=0)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb.table.save(tmp_path / "first.safetensors")
    given = [torch.arange(4) + 5 * n for n in range(4)]
    for ids in Prefetcher(given * 5, {emb: lambda b: b % 20}, depth=4):
        emb(ids % 20).sum().backward()
        optimizer.step()
        emb.table.load(tmp_path / "first.safetensors")
    assert torch.equal(emb.read_rows(torch.arange(20)), flatbed.Embedding(20, 4, seed=0).weight)
    emb.table.close(discard=True)


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_a_step_after_the_next_batch_was_taken(storage: str, kernel_device: str, tmp_path: Path) -> None:
    """Its rows may have been evicted for coming batches."""
    device, chance = kernel_device, torch.Generator().manual_seed(0)
    given, found = [torch.randint(0, ROWS, (8,), generator=chance).to(device) for _ in range(20)], []
    for is_prefetched in (True, False):
        path = tmp_path / f"{is_prefetched}.bed" if storage == "disk" else None
        emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path, cache_rows=16, seed=0, device=device)
        optimizer = flatbed.optim.Adam(emb, lr=0.1)
        batches = iter(Prefetcher(given, {emb: lambda b: b}, depth=1) if is_prefetched else given)
        ids = next(batches, None)
        while ids is not None:
            emb(ids).square().sum().backward()
            batch, ids = emb.table._grads.parts[0].batch, next(batches, None)
            if storage == "disk" and batch is not None and batch.cache is not None:
                assert not batch.cache.protects(batch), "the reservation has ended"
            optimizer.step()
            optimizer.zero_grad()
        found.append(emb.read_rows(range(ROWS)))
        emb.table.close(discard=True)
    assert torch.equal(*found)


def test_inference_mode() -> None:
    emb = flatbed.Embedding(20, 4)
    given = [torch.arange(4) + 5 * n for n in range(4)]
    with torch.inference_mode():
        found = [emb(ids) for ids in Prefetcher(given, {emb: lambda b: b})]
    assert torch.equal(torch.cat(found), emb.weight[:20][torch.cat(given)])


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_every_layout_of_ids(where: str, storage: str, tmp_path: Path) -> None:
    layouts = [*LAYOUTS.values()]
    if where == "cuda":
        pairs = PAIRS.cuda()
        layouts += [pairs[:, 0], pairs.int()[:, 1], pairs.t(), pairs[:1, 0].expand(30), pairs[:0]]
    found = []
    for is_prefetched in (False, True):
        path = tmp_path / f"{is_prefetched}.bed" if storage == "disk" else None
        emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path, cache_rows=40, seed=0, device=where)
        optimizer = flatbed.optim.Adam(emb, lr=0.1)
        for ids in Prefetcher(layouts, {emb: lambda b: b}) if is_prefetched else layouts:
            emb(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(emb.read_rows(range(ROWS)))
        emb.table.close(discard=True)
    assert torch.equal(*found)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_delays_in_every_stream(storage: str, tmp_path: Path) -> None:
    """Each batch, each id and each row is right, whichever stream is late, and whichever is the user's."""
    path = tmp_path / "a.bed" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, device="cuda", seed=5, storage=storage, path=path)
    table = emb.read_rows(torch.arange(ROWS)).clone()
    chance = torch.Generator().manual_seed(2)

    def given() -> Iterator[dict[str, Any]]:
        for i in range(60):
            items = torch.randint(0, ROWS, (4000,), generator=chance)
            yield {"items": items.pin_memory() if i % 2 else items, "array": items.numpy().astype("int32")}

    prefetched = Prefetcher(given(), {emb: lambda b: [b["items"], b["array"] + 0]}, depth=3)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()
    user = torch.cuda.Stream()
    streams = [user, *(stream_for(device, purpose) for purpose in ("decisions", "moves", "batches"))]
    with torch.no_grad(), torch.cuda.stream(user):
        bad = torch.zeros((), dtype=torch.long, device="cuda")
        for n, batch in enumerate(prefetched):
            with torch.cuda.stream(streams[n % 4]):
                torch.cuda._sleep(3_000_000 * (n % 3))
            bad += (batch["items"] != batch["array"]).sum()
            bad += (emb(batch["items"]) != table[batch["items"]]).sum()
            del batch
        assert int(bad) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_delays_in_every_stream_of_training(storage: str, tmp_path: Path) -> None:
    """Loops are left, and backward passes are those of earlier batches: memory is used for long."""
    chance, found = torch.Generator().manual_seed(3), []
    given = [[torch.randint(0, 500, (64,), generator=chance) for _ in range(12)] for _ in range(6)]
    purposes = ("decisions", "moves", "batches", "files")
    streams = [stream_for(torch.device("cuda", torch.cuda.current_device()), name) for name in purposes]
    for is_prefetched in (True, False):
        path = tmp_path / f"{is_prefetched}.bed" if storage == "disk" else None
        emb = flatbed.Embedding(500, DIM, device="cuda", seed=5, storage=storage, path=path, cache_rows=400)
        optimizer, kept = flatbed.optim.Adam(emb, lr=0.1), list[Tensor]()
        for epoch, batches in enumerate(given):
            for n, ids in enumerate(Prefetcher(batches, {emb: lambda b: b}) if is_prefetched else batches):
                with torch.cuda.stream([*streams, torch.cuda.current_stream()][(n + epoch) % 5]):
                    torch.cuda._sleep(3_000_000)
                kept.append(emb(ids).square().sum())
                if len(kept) > 2:
                    kept.pop(0).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if epoch % 2 and n == 7:
                    break
        found.append(emb.read_rows(range(500)))
        emb.table.close(discard=True)
    assert torch.equal(*found)


@pytest.mark.gpu
def test_batches_are_handed_out_while_the_gpu_is_busy() -> None:
    emb = flatbed.Embedding(ROWS, DIM, device="cuda")
    given = [{"items": torch.randint(0, ROWS, (100,)), "array": torch.rand(10).numpy()} for _ in range(40)]
    list(Prefetcher(given, {emb: "items"}))  # memory is allocated, kernels compiled
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    with iter(Prefetcher(given, {emb: "items"}, depth=3)) as prefetched:
        next(prefetched)
        torch.cuda._sleep(4_000_000_000)
        busy.record()
        for _ in range(3):
            next(prefetched)
        assert not busy.query()
        torch.cuda.synchronize()


@pytest.mark.parametrize("stop", [(0, 3), (0, 10), (1, 5), (1, 9), (2, 10)])
def test_recipe_of_resuming_in_an_epoch(stop: tuple[int, int], tmp_path: Path) -> None:
    """The one of docs/data.md; a checkpoint may be that of an epoch's last batch."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    recipe = page[page.index("### Resuming in an epoch") :]
    names: dict[str, Any] = {"flatbed": flatbed}
    exec(recipe[recipe.index("```python") + 9 :].partition("```")[0], names)
    names["batch_size"] = 10
    assert names["train"](tmp_path / "resumed", stop) is None
    assert (tmp_path / "resumed").exists() == (stop > (0, 4))
    assert torch.equal(names["train"](tmp_path / "resumed"), names["train"](tmp_path / "whole"))
