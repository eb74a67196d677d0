"""Tables with a cache: after any operation, their rows are those of a table without one."""

from __future__ import annotations

import copy
import io
import pickle
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.tables.cache import write_behind
from flatbed.tables.loading import load_table
from tests.tables.tables import everything
from tests.tables.test_cache import admit, cached_rows, counts

ROWS, DIM = 30, 3
STORAGES = ("host", "disk")
NUMBERS = count()


def embedding(storage: str, folder: Path, n_slots: int, **options: Any) -> Any:
    path = folder / f"table-{next(NUMBERS)}" if storage == "disk" else None
    return flatbed.Embedding(ROWS, DIM, storage=storage, path=path, seed=1, cache_rows=n_slots, **options)


def step(emb: Any, optimizer: Any, *lookups: Any) -> None:
    """Backward passes, one after the other, and then the step."""
    for ids in lookups:
        emb(ids).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Twins:
    """A table with a cache and one without, trained alike."""

    def __init__(
        self, storage: str, folder: Path, n_slots: int = 6, device: str = "cpu", **options: Any
    ) -> None:
        self.cached = embedding(storage, folder, n_slots, device=device, **options)
        self.plain = embedding(storage, folder, 0, device=device, **options)
        self.optimizers = [flatbed.optim.Adam(emb, lr=0.1) for emb in (self.cached, self.plain)]

    @property
    def both(self) -> list[Any]:
        return [self.cached, self.plain]

    def step(self, *lookups: Any) -> None:
        for emb, optimizer in zip(self.both, self.optimizers, strict=True):
            step(emb, optimizer, *lookups)

    def train(self) -> Twins:
        self.step([1, 2, 3], [3, 4])
        self.step([5, 1, 29])
        self.step([1, 2, 8, 8])
        if self.cached.table._storage.config.cache_rows:
            assert self.changed() > 0
        return self

    def changed(self) -> int:
        """Rows in the cache that are newer than in storage."""
        cache = self.cached.table._storage.cache
        return 0 if cache is None else int(cache.index.dirty.sum())

    def check(self) -> None:
        (weight, state), (wanted, wanted_state) = (everything(emb) for emb in self.both)
        assert torch.equal(weight, wanted)
        assert state.keys() == wanted_state.keys()
        assert all(torch.equal(value, wanted_state[name]) for name, value in state.items())
        assert self.cached.table.scalars() == self.plain.table.scalars()


@pytest.mark.parametrize("n_slots", [3, 9, 20])
def test_other_threads_read_and_count(
    n_slots: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and counts in other threads, for batches that fit and batches that do not."""
    monkeypatch.setattr(write_behind, "MANY", 1)
    twins = Twins("disk", tmp_path, n_slots, where)
    generator = torch.Generator().manual_seed(n_slots)
    for number in range(30):
        n = int(torch.randint(1, 12, (), generator=generator))
        twins.step((torch.randn(n, generator=generator).abs() * ROWS / 4).long().clamp(max=ROWS - 1))
        if number % 11 == 10:
            twins.cached.table.checkpoint()
    assert twins.cached.table.cache_stats().evictions > 0
    twins.check()


EDITS = [*product(["write_rows", "load_state_dict", "drop_state"], STORAGES), ("weight", "host")]  # of memory


@pytest.mark.parametrize(("edit", "storage"), EDITS)
def test_edits_of_cached_rows(storage: str, edit: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path).train()
    for emb in twins.both:
        if edit == "write_rows":
            emb.write_rows([8, 20, 8], torch.arange(9.0).view(3, 3))
        elif edit == "load_state_dict":
            emb.load_state_dict({"weight": torch.arange(90.0).view(30, 3)})
        elif edit == "drop_state":
            emb.table.drop_state()
        else:
            view = emb.weight
            view[1:9] *= 2
            step(emb, twins.optimizers[twins.both.index(emb)], [2, 3, 8])  # a view may be held over steps
            view[8] += 1
            assert torch.equal(view.detach().clone(), emb.read_rows(range(ROWS)))
    if edit == "drop_state":
        twins.optimizers = [flatbed.optim.Adam(emb, lr=0.1) for emb in twins.both]
    twins.check()
    twins.train()
    twins.check()


@pytest.mark.parametrize("storage", STORAGES)
def test_lookups_without_gradient_leave_the_cache_alone(storage: str, where: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path, 4, where).train()
    before = twins.cached.table.cache_stats()
    rows = cached_rows(twins.cached.table._storage.cache)
    ids = torch.arange(ROWS).view(5, 6)
    with torch.no_grad():
        assert torch.equal(*(emb(ids) for emb in twins.both))
    twins.cached.read_rows(ids)
    twins.cached.table.read_state("exp_avg", ids)
    assert twins.cached.table.cache_stats() == before
    assert cached_rows(twins.cached.table._storage.cache) == rows


# ---- files and copies


def test_checkpoint_of_a_table_on_disk(tmp_path: Path) -> None:
    twins = Twins("disk", tmp_path).train()
    path = twins.cached.table._storage.config.path
    twins.cached.table.checkpoint()
    assert twins.changed() == 0
    hits = twins.cached.table.cache_stats().hits
    twins.step([1, 2, 8])  # they are still there
    assert twins.cached.table.cache_stats().hits == hits + 3
    twins.cached.table.checkpoint()
    twins.cached.table.close()
    twins.cached = flatbed.Embedding.from_table(load_table(path))
    twins.check()


def test_closing_and_discarding(tmp_path: Path) -> None:
    """Changed rows are counted in the cache, too, and dropped."""
    twins = Twins("disk", tmp_path, 3).train()
    path = twins.cached.table._storage.config.path
    twins.cached.table.checkpoint()
    before = everything(twins.cached)[0]
    twins.step([10, 11, 12])
    twins.step([12, 13])
    assert twins.changed() > 0
    assert twins.cached.table._storage.unsaved_rows == 4
    twins.cached.table.close(discard=True)
    twins.cached.table.close()
    again = flatbed.Embedding.from_table(load_table(path))
    assert torch.equal(everything(again)[0], before)
    again.table.close()


@pytest.mark.parametrize("storage", STORAGES)
def test_saving(storage: str, where: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path, device=where).train()
    twins.cached.table.save(tmp_path / "saved.safetensors")
    assert torch.equal(twins.cached.state_dict()["weight"], twins.plain.state_dict()["weight"])
    twins.train()
    expected = everything(twins.plain)[0]
    twins.cached.table.save(tmp_path / "saved.safetensors")
    twins.cached = flatbed.Embedding.from_table(load_table(tmp_path / "saved.safetensors"))
    assert torch.equal(everything(twins.cached)[0], expected)
    twins.check()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("with_state", [False, True])
def test_loading_into_a_table_with_changed_rows(storage: str, with_state: bool, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path).train()
    other = embedding("host", tmp_path, 4)
    if with_state:
        step(other, flatbed.optim.Adam(other, lr=0.2), [1, 2], [8])
    other.table.save(tmp_path / "other.safetensors")
    for emb in twins.both:
        emb.table.load(tmp_path / "other.safetensors")
    assert torch.equal(everything(twins.cached)[0], everything(other)[0])
    twins.check()
    twins.train()
    twins.check()


def copies(how: str, emb: Any) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(emb)
    if how == "pickle":
        return pickle.loads(pickle.dumps(emb))
    file = io.BytesIO()
    torch.save(emb, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str, tmp_path: Path) -> None:
    twins = Twins("host", tmp_path, cache_policy="lfu").train()
    twins.check()
    twins.train()
    made = copies(how, twins.cached)
    original = twins.cached
    twins.cached = made
    twins.check()
    config = made.table._storage.config
    assert (config.cache_rows, config.cache_bytes, config.cache_policy) == (6, None, "lfu")
    twins.optimizers[0] = flatbed.optim.Adam(made, lr=0.1)
    twins.train()
    twins.check()
    assert not torch.equal(everything(made)[0], everything(original)[0])


@pytest.mark.parametrize("storage", STORAGES)
def test_growing(storage: str, where: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path, device=where).train()
    for emb in twins.both:
        emb.table.resize(ROWS + 7)
    twins.step([1, 2, ROWS + 6], [8, ROWS])
    twins.check()
    assert twins.cached.table.cache_stats().rows == 6


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_another_optimizer(storage: str, kind: str, tmp_path: Path) -> None:
    """Equal state is reset in place; other state needs another layout. Weights stay."""
    twins = Twins(storage, tmp_path).train()
    twins.step([8, 9])
    before = everything(twins.plain)[0]
    if storage == "disk" and kind == "SGD":  # otherwise refused: the file holds state
        for emb in twins.both:
            emb.table.drop_state()
    twins.optimizers = [
        getattr(flatbed.optim, kind)(emb, lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))
        for emb in twins.both
    ]
    assert torch.equal(everything(twins.cached)[0], before)
    twins.check()
    twins.train()
    twins.check()


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_moving_a_model_to_the_gpu_and_back(storage: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path).train()
    for device in ("cuda", "cpu", "cuda"):
        for emb in twins.both:
            emb.to(device)
        twins.train()
        twins.check()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("copied", [False, True])
def test_checkpoints_of_trainings(storage: str, copied: bool, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path).train()
    model = nn.Sequential(twins.cached)
    save_checkpoint(tmp_path / "saved", model, twins.optimizers[0], copy_disk_tables=copied)
    saved = everything(twins.cached)
    twins.train()
    assert twins.changed() > 0
    load_checkpoint(tmp_path / "saved", model, twins.optimizers[0])
    weight, state = everything(twins.cached)
    assert torch.equal(weight, saved[0])
    assert all(torch.equal(value, saved[1][name]) for name, value in state.items())
    fresh = Twins(storage, tmp_path).train()
    twins.plain, twins.optimizers[1] = fresh.plain, fresh.optimizers[1]
    twins.train()
    twins.check()


def test_going_back_to_a_checkpoint_forgets_what_is_cached(tmp_path: Path) -> None:
    """With all rows in the cache, no read of the reopened file would show the mistake."""
    emb = embedding("disk", tmp_path, ROWS)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    emb.table.warm(range(ROWS))
    step(emb, optimizer, range(ROWS))
    save_checkpoint(tmp_path / "saved", emb, optimizer)
    saved = everything(emb)[0]
    step(emb, optimizer, range(ROWS))
    load_checkpoint(tmp_path / "saved", emb, optimizer)
    assert torch.equal(everything(emb)[0], saved)
    emb.table.close(discard=True)


# ---- size and content of the cache


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_warming_by_repeats(policy: str, where: str) -> None:
    emb = flatbed.Embedding(100, DIM, cache_rows=4, cache_policy=policy, device=where)
    ids = [7] * 5 + [8] * 4 + [9] * 3 + [10] * 2 + [11, 12, 13]
    emb.table.warm(torch.tensor(ids)[torch.randperm(len(ids))])
    cache = emb.table._storage.cache
    assert cache is not None
    assert cached_rows(cache) == {7, 8, 9, 10}
    assert counts(cache) == (0, 4, 0, 0, 0)


def test_warming_by_counts(where: str) -> None:
    emb = flatbed.Embedding(100, DIM, cache_rows=3, cache_policy="lfu", device=where)
    emb.table.warm([5, 6, 7, 8, 5], counts=[1.0, 10, 30, 20, 12])  # 13 uses of row 5
    cache = emb.table._storage.cache
    assert cache is not None
    assert cached_rows(cache) == {5, 7, 8}
    frequency = {
        int(row): float(cache.index.frequency[slot]) for slot, row in enumerate(cache.index.row_of_slot)
    }
    assert sorted(frequency, key=frequency.__getitem__) == [5, 8, 7]
    for number in range(5):
        admit(cache, [20 + number])
    assert cached_rows(cache) >= {7, 8}  # the others were used less


def test_warming_is_checked() -> None:
    emb = flatbed.Embedding(10, DIM, cache_rows=4)
    for wrong in ([1.0], [1.0, 2.0, 3.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="one per id, none of them negative"):
            emb.table.warm([1, 2], counts=wrong)
    with pytest.raises(IndexError, match="id 10 at position 1 is out of range"):
        emb.table.warm([1, 10])
    flatbed.Embedding(10, DIM).table.warm([1, 2])  # without a cache there is nothing to do
    flatbed.Embedding(10, DIM, storage="device").table.warm([1, 2])


@pytest.mark.parametrize("storage", STORAGES)
def test_another_size_of_cache(storage: str, where: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path, device=where).train()
    for options, n_slots in (
        ({"cache_rows": 2, "policy": "lru"}, 2),
        ({"cache_bytes": 5 * twins.cached.table._storage.record.nbytes + 1}, 5),
        ({"cache_rows": 1000}, ROWS),
        ({"cache_rows": 0}, 0),
        ({"cache_bytes": 0}, 0),
    ):
        twins.cached.table.set_cache(**options)
        twins.check()
        twins.step([1, 2, 3], [9, 8])
        twins.check()
        assert twins.cached.table.cache_stats().rows == n_slots
    assert twins.cached.table._storage.config.cache_policy == "lru"  # as it was said last


def test_too_few_bytes_for_a_record() -> None:
    emb = flatbed.Embedding(1000, 8, cache_bytes=100)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    with pytest.raises(flatbed.FlatbedError, match="no room for a single record, which takes 128 bytes"):
        step(emb, optimizer, [1, 2])
    emb.table.set_cache(cache_bytes=0)
    step(emb, optimizer, [1, 2])


def test_by_default_there_is_none_on_a_cpu() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    step(emb, flatbed.optim.SGD(emb, lr=0.1), [1, 2])
    assert emb.table._storage.cache is None


@pytest.mark.gpu
def test_by_default_it_has_room_for_some_batches() -> None:
    emb = flatbed.Embedding(100_000, DIM, device="cuda")
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    step(emb, optimizer, range(100))
    assert emb.table.cache_stats().rows == 400
    step(emb, optimizer, range(1000))
    assert emb.table.cache_stats().rows == 4000
    step(emb, optimizer, range(10))
    assert emb.table.cache_stats().rows == 4000


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache_rows": -1}, ValueError, "cache_rows.*-1"),
    ({"cache_bytes": -5}, ValueError, "cache_bytes.*-5"),
    ({"cache_rows": 2.5}, TypeError, "cache_rows.*integer.*2.5"),
    ({"cache_bytes": "1G"}, TypeError, "cache_bytes.*integer.*'1G'"),
    ({"cache_rows": 2, "cache_bytes": 512}, ValueError, "not both; found 2 and 512"),
    ({"cache_policy": "fifo"}, ValueError, "one of lru, lfu; found 'fifo'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=str)
def test_wrong_arguments(
    options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    """They raise, and a table that exists keeps its cache."""
    for made in (flatbed.EmbeddingBag, flatbed.Embedding):
        with pytest.raises(kind, match=message):
            made(ROWS, DIM, **options)
    twins = Twins("host", tmp_path).train()
    cache = twins.cached.table._storage.cache
    with pytest.raises(kind, match=message):
        twins.cached.table.set_cache(
            **{name.replace("cache_policy", "policy"): v for name, v in options.items()}
        )
    assert twins.cached.table._storage.cache is cache
    twins.train()
    twins.check()


@pytest.mark.parametrize("name", ["cache_rows", "cache_bytes"])
def test_tables_on_the_device_have_no_cache(name: str) -> None:
    some: dict[str, Any] = {name: 3}
    none: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name}=3"):
        flatbed.Embedding(ROWS, DIM, storage="device", **some)
    emb = flatbed.Embedding(ROWS, DIM, storage="device", **none)
    with pytest.raises(ValueError, match="needs no cache"):
        emb.table.set_cache(**some)
    step(emb, flatbed.optim.SGD(emb, lr=0.1), [1, 2])
    assert emb.table._storage.cache is None
