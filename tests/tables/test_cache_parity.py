"""Caches and prefetching change no result: the same bits as without them, in all pairs of options."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from flatbed.cuda.streams import stream_for
from flatbed.data import Prefetcher
from flatbed.kernels import use_triton
from flatbed.tables.cache.base import CacheStats
from flatbed.tables.cache.gpu import GpuCache
from flatbed.tables.cache.host_index import HostIndexCache
from flatbed.tables.prefetch import PrefetchRequest, RowPrefetch
from tests.tables.tables import ALL_CASES, BY_NAME, everything

N_ROWS = 40
PADDING = 2
STEPS = 5
SIZES = {"none": 0, "smaller": 5, "between": 20, "larger": 3 * N_ROWS}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

# The interpreter computes with numpy, which remarks on log(0); exp(-inf) is 0, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")


# ---- options


PER_ROW = ("adam", "adamw-amsgrad", "nadam", "radam-unrectified", "adagrad-decay", "sparseadam")


def _rules() -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {case.name: case.ours for case in ALL_CASES}
    for case in [BY_NAME[name] for name in PER_ROW]:
        made[f"{case.name}-per-row"] = lambda params, case=case, **more: case.ours(
            params, per_row_steps=True, **more
        )
    made["from-torch"] = lambda params, **more: flatbed.optim.from_torch(torch.optim.Rprop, params, **more)
    return made


RULES = _rules()
FACTORS: dict[str, list[Any]] = {
    "rule": list(RULES),
    "dim": [1, 3, 5, 8, 130],
    "dtype": list(DTYPES),
    "size": ["smaller", "between", "larger"],
    "depth": [0, 1, 2, 4],  # 0: no prefetcher
    "storage": ["host", "disk"],
    "policy": ["lru", "lfu"],
    "module": ["embedding", "bag"],
    "padding": [None, PADDING],
    "max_norm": [None, 0.05],
    "n_passes": [1, 3],  # backward passes per step
    "around": [False, True],  # whether rows are read and written in between
}


@dataclass(frozen=True)
class Training:
    """Options of one training."""

    rule: str
    dim: int
    dtype: str
    size: str
    depth: int
    storage: str
    policy: str
    module: str
    padding: int | None
    max_norm: float | None
    n_passes: int
    around: bool

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in FACTORS)


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(chosen: dict[str, Any]) -> set[Pair]:
    return set(combinations(chosen.items(), 2))


def every_pair(factors: dict[str, list[Any]]) -> set[Pair]:
    return {
        ((one, a), (other, b))
        for one, other in combinations(factors, 2)
        for a, b in product(factors[one], factors[other])
    }


def pairwise(factors: dict[str, list[Any]]) -> list[Training]:
    """Trainings that contain every pair of values of any two factors."""
    draw = random.Random(0)
    left = sorted(every_pair(factors), key=repr)
    uncovered, made = set(left), []
    for needed in left:
        if needed not in uncovered:
            continue
        tries = [
            {name: draw.choice(values) for name, values in factors.items()} | dict(needed) for _ in range(12)
        ]
        best = max(tries, key=lambda one: len(pairs_of(one) & uncovered))
        uncovered -= pairs_of(best)
        made.append(Training(**best))
    return made


TRAININGS = pairwise(FACTORS)


def test_every_pair_is_there() -> None:
    found = {pair for one in TRAININGS for pair in pairs_of({name: getattr(one, name) for name in FACTORS})}
    assert found >= every_pair(FACTORS)


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
    path = folder / f"table-{len(list(folder.iterdir()))}" if training.storage == "disk" else None
    options: dict[str, Any] = {"storage": training.storage, "path": path, "device": device}
    options |= {"cache_rows": n_slots, "cache_policy": training.policy, "padding_idx": training.padding}
    if training.module == "bag":
        return flatbed.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum", **options)
    return flatbed.Embedding.from_pretrained(weight, freeze=False, **options)


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

    def check(self, other: Result) -> None:
        assert len(self.outputs) == len(other.outputs)
        for number, (one, two) in enumerate(zip(self.outputs, other.outputs, strict=True)):
            assert torch.equal(one, two), f"output {number}"
        assert torch.equal(self.weight, other.weight)
        assert self.state.keys() == other.state.keys()
        for name, value in self.state.items():
            assert torch.equal(value, other.state[name]), name
        assert self.scalars == other.scalars


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
        if training.around:
            outputs += between(emb, number, draw, storage=training.storage)
        if number % training.n_passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    weight, state = everything(emb)
    result = Result(outputs, weight, state, emb.table.scalars(), emb.table.cache_stats())
    emb.table.close(discard=True)
    return result


def between(emb: Any, number: int, draw: torch.Generator, *, storage: str) -> list[Tensor]:
    """Other reads and writes of rows that have gradients."""
    rows = often(9, draw)
    values = torch.randn(9, emb.embedding_dim, generator=draw)
    emb.write_rows(rows, values)
    found = [emb.read_rows(rows).cpu()]
    with torch.no_grad():
        found.append(emb.eval()(rows.view(3, 3)).cpu())
        emb.train()
        found.append(emb(often(6, draw).view(2, 3)).cpu())
        if storage == "host" and number % 2:
            emb.weight[3:6] *= 0.5
            found.append(emb.weight.detach().clone())
    if number % 3 == 0:
        found += [value.cpu() for value in everything(emb)[1].values()]
    return found


def check(training: Training, device: str, folder: Path, *, steps: int = STEPS) -> None:
    expected = trained(training, 0, 0, device, folder, steps=steps)
    n_slots = SIZES[training.size]
    found = trained(training, n_slots, training.depth, device, folder, steps=steps)
    found.check(expected)
    assert expected.stats.rows == expected.stats.misses == 0
    assert found.stats.rows == min(n_slots, N_ROWS)
    assert found.stats.misses > 0


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_pairs(training: Training, tmp_path: Path) -> None:
    check(training, "cpu", tmp_path)


BASE = Training("adam", 8, "fp32", "between", 0, "host", "lru", "embedding", None, None, 1, False)


def like(**changes: Any) -> Training:
    return Training(**{name: getattr(BASE, name) for name in FACTORS} | changes)


FEW = [
    like(size="smaller", padding=PADDING, n_passes=2),
    like(size="smaller", policy="lfu", rule="rowwise", dim=3, around=True),
    like(size="between", dim=130, rule="sgd-momentum", max_norm=0.05),
    like(size="between", module="bag", padding=PADDING, rule="adagrad", policy="lfu", around=True),
    like(size="larger", rule="adam-per-row", dtype="bf16", dim=5),
    like(size="larger", dtype="fp64", rule="sparseadam", dim=1, n_passes=2, around=True),
    like(size="smaller", storage="disk", rule="nadam", n_passes=2),
    like(size="between", storage="disk", policy="lfu", around=True, padding=PADDING),
    like(size="between", rule="from-torch", around=True),
]


@pytest.mark.parametrize("training", FEW, ids=str)
def test_by_kernels(training: Training, kernel_device: str, tmp_path: Path) -> None:
    check(training, kernel_device, tmp_path, steps=3)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("training", FEW, ids=str)
def test_prefetched_on_the_gpu(training: Training, depth: int, tmp_path: Path) -> None:
    check(like(**{name: getattr(training, name) for name in FACTORS} | {"depth": depth}), "cuda", tmp_path)


@pytest.mark.parametrize("depth", FACTORS["depth"])
@pytest.mark.parametrize("storage", FACTORS["storage"])
@pytest.mark.parametrize("policy", FACTORS["policy"])
def test_every_size_and_depth(depth: int, storage: str, policy: str, tmp_path: Path) -> None:
    """Each with each, for one rule: several backward passes a step, and rows that change in between."""
    for size in FACTORS["size"]:
        check(
            like(size=size, depth=depth, storage=storage, policy=policy, n_passes=2, around=True),
            "cpu",
            tmp_path,
        )


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_kind_of_cache(storage: str, where: str, tmp_path: Path) -> None:
    emb = embedding(like(storage=storage), 5, where, tmp_path)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb([1, 2]).sum().backward()
    kind = GpuCache if storage == "host" and use_triton(torch.device(where)) else HostIndexCache
    assert type(emb.table._storage.cache) is kind
    optimizer.zero_grad()


# ---- prefetching without a loader thread


def prefetched(table: flatbed.Table, batches: list[list[Tensor]], depth: int) -> Iterator[list[Tensor]]:
    """Hand out batches of lookups, with the rows of the next `depth` batches admitted ahead of time."""
    prefetcher, pending = RowPrefetch(table, depth), deque[tuple[list[Tensor], PrefetchRequest]]()
    device, coming, in_use = table._storage.device, iter(batches), None
    on_gpu = device.type == "cuda"
    while True:
        if in_use is not None:
            prefetcher.finish(in_use)
        for ids in islice(coming, depth + 1 - len(pending)):
            request = prefetcher.stage([one.cpu() for one in ids])
            prefetcher.read(request)
            stream = stream_for(device, "rows") if on_gpu else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                prefetcher.admit(request, ids)
            pending.append((ids, request))
        if not pending:
            return
        ids, in_use = pending.popleft()
        prefetcher.begin(in_use)
        yield ids


@pytest.mark.parametrize(
    ("policy", "storage", "depth", "n_passes"),
    [
        *(("lru", "host", 0, 1), ("lfu", "host", 1, 2), ("lru", "host", 3, 1), ("lfu", "host", 2, 3)),
        *(("lfu", "disk", 1, 1), ("lru", "disk", 3, 2)),
    ],
)
def test_prefetched_lookups(
    policy: str, storage: str, depth: int, n_passes: int, where: str, tmp_path: Path
) -> None:
    """Two lookups in each batch, and gradients of several batches for each step."""
    given = batches(6, torch.Generator().manual_seed(5), small=True)
    lookups = [[batch[name].to(where) for name in ("first", "second")] for batch in given]
    results, n_used = [], 0
    for n_slots in (0, 8, 36):
        emb = embedding(like(storage=storage, policy=policy, dim=3), n_slots, where, tmp_path)
        optimizer, outputs = flatbed.optim.Adam(emb, lr=0.1), []
        for number, batch in enumerate(prefetched(emb.table, lookups, depth)):
            n_used += len(emb.table._prefetched)
            found = [emb(batch[0].flatten()), emb(batch[1].view(1, -1))]
            outputs += [one.detach().cpu() for one in found]
            torch.autograd.backward([one.sin().sum() for one in found])
            if number % n_passes == n_passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert not emb.table._prefetched
        results.append(Result(outputs, *everything(emb), emb.table.scalars(), emb.table.cache_stats()))
    results[1].check(results[0])
    results[2].check(results[0])
    assert n_used >= 4 or not use_triton(torch.device(where))


def test_ids_out_of_range_raise_when_their_batch_is_handed_out() -> None:
    emb = flatbed.Embedding(10, 3)
    prefetcher = RowPrefetch(emb.table, 1)
    request = prefetcher.stage([torch.tensor([1, 12])])
    with pytest.raises(IndexError, match=r"id 12 at position 1 .* 10 rows"):
        prefetcher.begin(request)
    emb.table.resize(13)
    prefetcher.begin(request)
    prefetcher.finish(request)
    prefetcher.finish(request)


def test_ids_changed_in_place_are_not_taken_for_the_prefetched_ones(kernel_device: str) -> None:
    emb = flatbed.Embedding(40, 3, cache_rows=20, device=kernel_device)
    flatbed.optim.SGD(emb, lr=0.1)
    ids = torch.arange(4, device=kernel_device)
    for batch in prefetched(emb.table, [[ids]], 0):
        expected = emb.read_rows([7])
        batch[0].fill_(7)
        assert torch.equal(emb(batch[0]).detach(), expected.expand(4, -1))


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_second_loader_over_the_same_table(storage: str, where: str, tmp_path: Path) -> None:
    """Validation with a prefetcher in the middle of an epoch."""
    given = batches(6, torch.Generator().manual_seed(8), small=True)
    others = batches(4, torch.Generator().manual_seed(9), small=True)
    results = []
    for n_slots, depth in ((0, 0), (20, 2)):
        emb = embedding(like(storage=storage, dim=3), n_slots, where, tmp_path)
        optimizer, outputs = flatbed.optim.Adam(emb, lr=0.1), []
        for number, batch in enumerate(handed_out(given, emb, depth, where)):
            found = [emb(batch[name]) for name in ("first", "second")]
            if number % 2:
                with torch.no_grad():
                    for other in handed_out(others, emb, depth, where):
                        outputs += [emb(other[name]).cpu() for name in ("first", "second")]
            outputs += [one.detach().cpu() for one in found]
            torch.autograd.backward([one.sin().sum() for one in found])
            optimizer.step()
            optimizer.zero_grad()
        results.append(Result(outputs, *everything(emb), emb.table.scalars(), emb.table.cache_stats()))
    results[1].check(results[0])


# ---- compiled models


class Tower(nn.Module):
    """Two lookups of one table, and something dense."""

    emb: Any

    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(3)
        self.head = nn.Linear(8, 2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        out: Tensor = self.head(self.emb(first).relu() + self.emb(second).mean(0))
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what comes after a graph break
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("size", ["smaller", "larger"])
def test_compiled_models(backend: str, size: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    results = []
    for compiled, n_slots in ((False, 0), (True, SIZES[size])):
        model = Tower(embedding(BASE, n_slots, "cpu", tmp_path))
        optimizer = flatbed.optim.Adam(model, lr=0.01)
        run = torch.compile(model, backend=backend) if compiled else model
        outputs = []
        draw = torch.Generator().manual_seed(7)
        for _ in range(4):
            out = run(often(12, draw), often(5, draw))
            outputs.append(out.detach().clone())
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs.append(model.head.weight.detach().clone())
        results.append(
            Result(outputs, *everything(model.emb), model.emb.table.scalars(), model.emb.table.cache_stats())
        )
    results[1].check(results[0])
