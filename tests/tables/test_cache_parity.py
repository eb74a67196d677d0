"""Caches and prefetching change no result: the same bits as without them, in combinations of options."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flatbed
import flatbed.optim
from flatbed.data import Prefetcher
from flatbed.tables.cache import write_behind
from flatbed.tables.cache.base import CacheStats
from flatbed.tables.prefetch import RowPrefetch
from flatbed.tables.storage.disk.checked_records import device_row_sums
from tests.cases import DEVICES
from tests.tables.tables import ALL_CASES, BY_NAME, Twins, assert_equal, everything, storage_options

N_ROWS = 40
PADDING = 2
STEPS = 5
SIZES = {"none": 0, "smaller": 5, "between": 20, "larger": 3 * N_ROWS}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

# The interpreter computes with numpy, which remarks on log(0); exp(-inf) is 0, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


# ---- options


PER_ROW = ("adam", "adamw-amsgrad", "nadam", "radam-unrectified", "adagrad-decay", "sparseadam")


RULES: dict[str, Callable[..., Any]] = {
    **{case.name: case.ours for case in ALL_CASES},
    **{f"{name}-per-row": partial(BY_NAME[name].ours, per_row_steps=True) for name in PER_ROW},
    "from-torch": partial(flatbed.optim.from_torch, torch.optim.Rprop),
}


def _rules_by_record() -> list[str]:
    """One rule for each class and set of state: caches move records, and see no other options."""
    names: dict[Any, str] = {}
    for name, make in RULES.items():
        emb = flatbed.Embedding(2, 1)
        optimizer = make([emb.table])
        names.setdefault((type(optimizer), emb.table.state_names), name)
    return [*names.values()]


FACTORS: dict[str, list[Any]] = {
    "rule": _rules_by_record(),
    "dim": [1, 3, 8, 130],
    "dtype": list(DTYPES),
    "size": ["between", "smaller", "larger"],
    "depth": [0, 1, 2, 4],  # 0: no prefetcher
    "storage": ["host", "disk"],
    "policy": ["lru", "lfu"],
    "module": ["embedding", "bag"],
    "padding": [None, PADDING],
    "max_norm": [None, 0.05],
    "n_passes": [1, 3],  # backward passes per step
}


class Training(SimpleNamespace):
    """Options of one training: a value for each of the factors."""

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


def _trainings() -> list[Training]:
    """Every rule three times, with random values of the other factors."""
    draw = random.Random(0)
    return [
        Training(**{name: draw.choice(values) for name, values in FACTORS.items()} | {"rule": rule})
        for rule in FACTORS["rule"] * 3
    ]


# ---- a training


def often(n: int, draw: torch.Generator) -> Tensor:
    """Skewed ids, in all parts of the table."""
    ranks = (N_ROWS * torch.rand(n, generator=draw) ** 3).long()
    return ranks * 7 % N_ROWS


def batches(n: int, draw: torch.Generator, *, small: bool = False) -> list[dict[str, Any]]:
    """Two lookups each; one of the batches is empty, one is larger than most caches."""
    made = []
    for number in range(n):
        n_ids = [0, 48, 14, 9, 20][(number + 2) % 5]
        n_ids, n_more = (min(n_ids, 8), 4) if small else (n_ids, 7)
        made.append({"first": often(n_ids, draw).view(-1, 1), "second": often(n_more, draw), "text": "a"})
    return made


def embedding(training: Training, n_slots: int, device: str, folder: Path) -> Any:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(N_ROWS, training.dim, generator=draw).to(DTYPES[training.dtype])
    options = storage_options(training.storage, folder, f"table-{len(list(folder.iterdir()))}")
    options |= {"cache_rows": n_slots, "cache_policy": training.policy, "padding_idx": training.padding}
    if training.module == "bag":
        options["mode"] = "sum"
    kind: Any = flatbed.EmbeddingBag if training.module == "bag" else flatbed.Embedding
    return kind.from_pretrained(weight, freeze=False, device=device, **options)


def handed_out(given: list[dict[str, Any]], emb: Any, depth: int, device: str) -> Iterator[dict[str, Any]]:
    if not depth:
        yield from ({**b, "first": b["first"].to(device), "second": b["second"].to(device)} for b in given)
        return
    ahead = iter(Prefetcher(given, {emb: lambda batch: [batch["first"], batch["second"]]}, depth=depth))
    with ahead:
        yield from ahead


@dataclass
class Result:
    """Everything that a training computes."""

    outputs: list[Tensor]
    weight: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, float]
    stats: CacheStats


def trained(
    training: Training, n_slots: int, depth: int, device: str, folder: Path, *, steps: int = STEPS
) -> Result:
    emb = embedding(training, n_slots, device, folder)
    optimizer = RULES[training.rule]([emb.table], max_norm=training.max_norm)
    draw, outputs = torch.Generator().manual_seed(2), []
    given = batches(steps * training.n_passes, torch.Generator().manual_seed(3), small=steps < STEPS)
    for number, batch in enumerate(handed_out(given, emb, depth, device), start=1):
        found = [emb(batch[name]) for name in ("first", "second") if training.module == "embedding"]
        if training.module == "bag":
            found = [emb(batch["first"]), emb(batch["second"].view(1, -1))]
        outputs += [one.detach().cpu().clone() for one in found]
        grads = [torch.randn(one.shape, generator=draw).to(one) for one in found]
        torch.autograd.backward(found, grads)
        if number % training.n_passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    weight, state = everything(emb)
    result = Result(outputs, weight, state, emb.table.scalars(), emb.table.cache_stats())
    emb.table.close(discard=True)
    return result


def check(training: Training, device: str, folder: Path, *, steps: int = STEPS) -> None:
    expected = trained(training, 0, 0, device, folder, steps=steps)
    n_slots = SIZES[training.size]
    found = trained(training, n_slots, training.depth, device, folder, steps=steps)
    for number, (one, two) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        assert torch.equal(one, two), f"output {number}"
    assert torch.equal(found.weight, expected.weight)
    assert_equal(found.state, expected.state)
    assert found.scalars == expected.scalars
    assert expected.stats.rows == expected.stats.misses == 0
    assert found.stats.rows == min(n_slots, N_ROWS)
    assert found.stats.misses > 0


@pytest.mark.parametrize("training", _trainings(), ids=str)
def test_combinations(training: Training, tmp_path: Path) -> None:
    check(training, "cpu", tmp_path)


def like(**changes: Any) -> Training:
    """A training with the first value of every factor, and these changes."""
    base = {name: values[0] for name, values in FACTORS.items()}
    return Training(**{**base, "rule": "adam", "dim": 8, **changes})


FEW = [
    like(size="smaller", padding=PADDING, n_passes=2, depth=1),
    like(size="smaller", policy="lfu", rule="rowwise", dim=3),
    like(size="between", dim=130, rule="sgd-momentum", max_norm=0.05, depth=2),
    like(size="between", module="bag", padding=PADDING, rule="adagrad", policy="lfu"),
    like(size="larger", rule="adam-per-row", dtype="bf16", dim=5),
    like(size="larger", dtype="fp64", rule="sparseadam", dim=1, n_passes=2, depth=3),
    like(size="smaller", storage="disk", rule="nadam", n_passes=2, depth=1),
    like(size="between", storage="disk", policy="lfu", padding=PADDING, depth=3),
    like(size="between", rule="from-torch"),
]


@pytest.mark.parametrize("training", FEW, ids=str)
def test_by_kernels(training: Training, kernel_device: str, tmp_path: Path) -> None:
    check(training, kernel_device, tmp_path, steps=3 if training.n_passes == 1 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("training", FEW, ids=str)
def test_prefetched_on_the_gpu(training: Training, depth: int, tmp_path: Path) -> None:
    check(like(**{**vars(training), "depth": depth}), "cuda", tmp_path)


# ---- prefetchers


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_prefetched_rows_are_admitted_once(storage: str, kernel_device: str, tmp_path: Path) -> None:
    """A lookup of a prefetched batch does not admit its rows again."""
    emb = embedding(like(storage=storage), N_ROWS, kernel_device, tmp_path)
    given = batches(6, torch.Generator().manual_seed(5), small=True)
    for batch in handed_out(given, emb, 2, kernel_device):
        emb(batch["first"]), emb(batch["second"])
    stats = emb.table.cache_stats()
    expected = sum(len(batch[name].unique()) for batch in given for name in ("first", "second"))
    assert stats.hits + stats.misses == expected
    emb.table.close(discard=True)


def test_ids_changed_in_place_are_not_taken_for_the_prefetched_ones(kernel_device: str) -> None:
    emb = flatbed.Embedding(40, 3, cache_rows=20, device=kernel_device)
    for ids in Prefetcher([torch.arange(4)], {emb: lambda batch: batch}, device=kernel_device):
        expected = emb.read_rows([7])
        ids.fill_(7)
        assert torch.equal(emb(ids).detach(), expected.expand(4, -1))


@pytest.mark.parametrize(
    "reorder", [lambda ids: ids.t(), lambda ids: ids.t().contiguous().t()], ids=["ids", "prefetched"]
)
def test_ids_in_another_order_are_not_taken_for_the_prefetched_ones(
    reorder: Callable[[Tensor], Tensor], kernel_device: str
) -> None:
    """They may lie in the same memory."""
    emb = flatbed.Embedding(40, 3, cache_rows=20, device=kernel_device)
    flatbed.optim.SGD(emb, lr=0.1)
    rows = emb.read_rows(range(40))
    for ids in Prefetcher([reorder(torch.arange(6).view(2, 3))], {emb: lambda batch: batch}):
        for given in (ids, ids.t()):
            assert torch.equal(emb(given).detach(), rows[given])


def test_a_loader_that_reuses_memory_while_rows_are_read(kernel_device: str, tmp_path: Path) -> None:
    """Rows are read in a thread of its own: the loader may have written the next ids to the same memory."""
    options = storage_options("disk", tmp_path)
    emb = flatbed.Embedding(40, 3, cache_rows=20, device=kernel_device, **options)
    prefetch, ids = RowPrefetch(emb.table, 1), torch.tensor([4, 3, 4])
    request = prefetch.check([ids], at_once=False)
    moved = {id(ids): ids.clone().to(kernel_device)}
    ids.fill_(7)
    prefetch.read(request, moved)
    reserved = request.lookups[0].reserved
    assert reserved is not None
    assert reserved[1].unique.rows.tolist() == [3, 4, -1]
    assert reserved[1].n_rows == 2
    prefetch.finish(request)
    emb.table.close(discard=True)


# ---- operations between steps


@DEVICES
@pytest.mark.parametrize("n_slots", [3, 9, 20])
def test_other_threads_read_and_write(
    n_slots: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a few rows are read and written in other threads, for batches that fit and that do not."""
    monkeypatch.setattr(write_behind, "MANY", 1)
    twins = Twins("disk", tmp_path, n_slots, device=device)
    draw = torch.Generator().manual_seed(n_slots)
    for number in range(30):
        n = int(torch.randint(1, 12, (), generator=draw))
        twins.step((torch.randn(n, generator=draw).abs() * 30 / 4).long().clamp(max=29))
        if number % 11 == 10:
            twins.cached.table.checkpoint()
    assert twins.cached.table.cache_stats().evictions > 0
    twins.check()


@DEVICES
def test_checksums_that_a_device_computes(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go with the records through cache and journal to the file, and are compared when it is read."""
    n_sums, own = [], write_behind.WriteBehind.row_sums

    def row_sums(writer: write_behind.WriteBehind, records: Tensor) -> Tensor:
        assert records.device.type == device
        n_sums.append(len(records))
        found = own(writer, records)
        assert (found is None) == (device == "cpu" or not len(records))
        return device_row_sums(records) if found is None else found

    monkeypatch.setattr(write_behind, "MANY", 1)
    monkeypatch.setattr(write_behind.WriteBehind, "row_sums", row_sums)
    twins = Twins("disk", tmp_path, n_slots=4, device=device).train()
    expected = everything(twins.cached)[0]
    twins.cached.table.checkpoint()
    twins.cached.table.close()
    assert sum(n_sums) > 0
    again = flatbed.Embedding.from_table(flatbed.load_table(tmp_path / "cached.bed"))
    assert torch.equal(everything(again)[0], expected)
    again.table.close()


def test_discarded_rows_are_dropped_from_the_cache(tmp_path: Path) -> None:
    twins = Twins("disk", tmp_path, 3).train()
    twins.cached.table.checkpoint()
    hits = twins.cached.table.cache_stats().hits
    twins.cached([1, 2, 8])  # checkpointed rows stay in the cache
    assert twins.cached.table.cache_stats().hits == hits + 3
    before = everything(twins.cached)[0]
    twins.step([10, 11, 12])
    twins.step([12, 13])
    twins.cached.table.close(discard=True)
    twins.cached.table.close()
    again = flatbed.Embedding.from_table(flatbed.load_table(tmp_path / "cached.bed"))
    assert torch.equal(everything(again)[0], before)
    again.table.close()


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_moving_a_model_to_the_gpu_and_back(storage: str, tmp_path: Path) -> None:
    twins = Twins(storage, tmp_path).train()
    for device in ("cuda", "cpu", "cuda"):
        for emb in twins.both:
            emb.to(device)
        twins.train()
        twins.check()
