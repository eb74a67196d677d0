"""Lookup, backward and step in one CUDA graph, and training beside late streams: the same bits as eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import FlatbedError
from flatbed.cuda.streams import stream_for
from tests.tables.tables import storage_options

pytestmark = pytest.mark.gpu
N_ROWS, DIM, N_IDS, N_STEPS = 300, 8, 96, 12
SIZES = [0, 40, 150, 1000]  # of caches: none, smaller than a batch, smaller than the table, larger


class Model(nn.Module):
    def __init__(self, cache_rows: int | None, policy: str = "lfu", folder: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)

        if folder is not None:
            folder.mkdir(exist_ok=True)

        def options(name: str) -> dict[str, Any]:
            where = storage_options("host" if folder is None else "disk", folder, name)
            return {"device": "cuda", "cache_rows": cache_rows, "cache_policy": policy, **where}

        self.items = flatbed.Embedding(N_ROWS, DIM, padding_idx=3, seed=1, **options("items"))
        self.users = flatbed.Embedding(N_ROWS, DIM, seed=2, **options("users"))
        self.top = nn.Linear(DIM, 1).cuda()

    def forward(self, ids: Tensor) -> Tensor:
        both = self.items(ids) * self.users(ids.flip(0)) + self.users(ids)
        loss: Tensor = self.top(both).square().mean()
        return loss


def batches(seed: int = 0) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [(torch.rand(N_IDS, generator=chance) ** 3 * N_ROWS).long() for _ in range(N_STEPS)]


def everything(model: Model) -> list[Tensor]:
    rows = torch.arange(N_ROWS)
    found = [table.read_rows(rows).cpu() for table in flatbed.tables(model)]
    for table in flatbed.tables(model):
        found += [table.read_state(name, rows).cpu() for name in table.state_names]
    return found + [p.detach().cpu() for p in model.top.parameters()]


def trained(
    cache_rows: int | None, how: Callable[..., None], make: Callable[..., Any], **options: Any
) -> list[Tensor]:
    model = Model(cache_rows, **options)
    optimizer = make(model)
    how(model, optimizer)
    torch.cuda.synchronize()
    found = everything(model)
    for table in flatbed.tables(model):
        table.close(discard=True)
    return found


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def step(model: Model, optimizer: Any, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def eagerly(model: Model, optimizer: Any) -> None:
    for ids in batches():
        step(model, optimizer, ids.cuda())


def captured(model: Model, optimizer: Any, ids: Tensor) -> torch.cuda.CUDAGraph:
    """A graph of a step on these ids."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, optimizer, ids)
    return graph


def replayed(model: Model, optimizer: Any) -> None:
    given = [ids.cuda() for ids in batches()]
    static = given[0].clone()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for ids in given[:3]:
            step(model, optimizer, ids)
    torch.cuda.current_stream().wait_stream(aside)
    graph = captured(model, optimizer, static)
    for ids in given[3:]:
        static.copy_(ids)
        graph.replay()
    torch.cuda.synchronize()


def beside_a_prefetcher(model: Model, optimizer: Any) -> None:
    """Replays of batches that a prefetcher hands out; the capture is in the middle of its iteration."""
    given = batches()
    lookups = {model.items: lambda b: b, model.users: lambda b: b}
    graph, static = None, given[0].cuda()
    for n, ids in enumerate(flatbed.Prefetcher(given, lookups, depth=2)):
        torch.cuda._sleep(400_000 * (n % 3))
        if n < 3:
            step(model, optimizer, ids)
            continue
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step(model, optimizer, static)
        static.copy_(ids)
        graph.replay()
    torch.cuda.synchronize()


def adam(model: Model) -> Any:
    return flatbed.optim.Adam(model, lr=0.05)


def with_eager_steps(model: Model, optimizer: Any) -> None:
    """Eager steps and lookups between replays."""
    given = [ids.cuda() for ids in batches()]
    static = given[0].clone()
    step(model, optimizer, given[0])
    graph = captured(model, optimizer, static)
    for n, ids in enumerate(given[1:]):
        if n % 3 == 0:
            step(model, optimizer, ids)
        else:
            static.copy_(ids)
            graph.replay()
        with torch.no_grad():
            model(ids.flip(0))


@pytest.mark.filterwarnings("ignore:rows of .* are not prefetched")
@pytest.mark.parametrize("how", [replayed, beside_a_prefetcher, with_eager_steps])
@pytest.mark.parametrize("cache_rows", SIZES)
def test_replays_are_steps(cache_rows: int, how: Callable[..., None]) -> None:
    assert_equal(trained(cache_rows, how, adam), trained(0, eagerly, adam))


RULES: dict[str, Callable[..., Any]] = {
    "SGD": lambda model: flatbed.optim.SGD(model, lr=0.1, momentum=0.9),
    "Adagrad clipped": lambda model: flatbed.optim.Adagrad(model, lr=0.1, max_norm=0.05),
    "RAdam": lambda model: flatbed.optim.RAdam(model, lr=0.05),
    "per row": lambda model: flatbed.optim.Adam(model, lr=0.05, per_row_steps=True),
}


@pytest.mark.parametrize("rule", RULES)
def test_replays_under_other_rules(rule: str) -> None:
    assert_equal(trained(150, replayed, RULES[rule], policy="lru"), trained(0, eagerly, RULES[rule]))


def test_ids_in_pinned_memory() -> None:
    """Every replay reads them again."""

    def step(model: Model, optimizer: Any, ids: Tensor) -> None:
        model.top(model.items(ids) + model.users(ids)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(model: Model, optimizer: Any, *, replays: bool) -> None:
        given = batches()
        for ids in given[:3]:
            step(model, optimizer, ids)
        static, graph = given[0].pin_memory(), torch.cuda.CUDAGraph()
        if replays:
            with torch.cuda.graph(graph):
                step(model, optimizer, static)
        for ids in given[3:]:
            if replays:
                static.copy_(ids)
                graph.replay()
                torch.cuda.synchronize()
            else:
                step(model, optimizer, ids)

    results = [trained(n, partial(train, replays=n > 0), adam) for n in (150, 0)]
    assert_equal(*results)


def test_bad_ids_in_a_replay_raise_later() -> None:
    model = Model(150)
    optimizer = adam(model)
    static = batches()[0].cuda()
    step(model, optimizer, static)
    graph = captured(model, optimizer, static)
    before = everything(model)[0]
    static.fill_(N_ROWS)
    graph.replay()
    for read in (lambda: model.items.read_rows([1]), model.users.table.cache_stats):
        with pytest.raises(IndexError, match=f"ids out of range for a table of {N_ROWS} rows"):
            read()
    assert torch.equal(everything(model)[0], before)
    static.fill_(-1)
    graph.replay()
    with pytest.raises(IndexError, match="out of range"):
        model.state_dict()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_lookups_that_cannot_be_captured(tmp_path: Any) -> None:
    disk = flatbed.Embedding(N_ROWS, DIM, device="cuda", storage="disk", path=tmp_path / "a.bed")
    fresh = flatbed.Embedding(N_ROWS, DIM, device="cuda")
    used = flatbed.Embedding(N_ROWS, DIM, device="cuda")
    optimizer = flatbed.optim.Adam([disk.table, used.table], lr=0.1)
    ids = batches()[0].cuda()
    for emb in (disk, used):
        emb(ids).sum().backward()
    optimizer.step()
    wrong = [
        (disk, ids, "on disk"),
        (fresh, ids, "take a training step"),
        (used, ids.cpu(), "on the GPU, or in pinned memory"),
    ]
    for emb, given, message in wrong:
        with pytest.raises(FlatbedError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            emb(given)
    used(ids).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_gradients_from_outside_of_a_graph_raise_in_it() -> None:
    model = Model(150)
    optimizer = adam(model)
    ids = batches()[0].cuda()
    step(model, optimizer, ids)
    model(ids).backward()
    with pytest.raises(FlatbedError, match="in one CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    optimizer.zero_grad()
    captured(model, optimizer, ids)


# ---- streams that are late


def with_delays(model: Model, optimizer: Any, *, depth: int, n_passes: int = 1) -> None:
    """Random pauses in every stream, and an evaluation in the middle; `depth` 0 trains without them."""
    lookups = {model.items: lambda b: b, model.users: lambda b: [b, b.flip(0)]}
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [
        torch.cuda.current_stream(),
        *(stream_for(device, p) for p in ("decisions", "moves", "batches")),
    ]
    chance = torch.Generator().manual_seed(depth)

    def over(given: list[Tensor]) -> Any:
        return flatbed.Prefetcher(given, lookups, depth=depth) if depth else (ids.cuda() for ids in given)

    for n, ids in enumerate(over(batches(7) * 3)):
        for stream in streams if depth else ():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(torch.randint(0, 600_000, (), generator=chance)))
        model(ids).backward()
        if n % n_passes == n_passes - 1:
            optimizer.step()
            optimizer.zero_grad()
        if n == N_STEPS:
            with torch.no_grad():
                for other in over(batches(8)[:3]):
                    model(other)


@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("cache_rows", [None, 40, 150, 320])
@pytest.mark.parametrize(("depth", "n_passes"), [(1, 1), (2, 3), (4, 1)])
def test_training_while_streams_are_late(
    depth: int, n_passes: int, cache_rows: int | None, storage: str, tmp_path: Path
) -> None:
    """Many common rows of consecutive batches."""
    results = []
    for rows, ahead in ((cache_rows, depth), (0, 0)):
        folder = tmp_path / str(ahead) if storage == "disk" else None
        how = partial(with_delays, depth=ahead, n_passes=n_passes)
        results.append(trained(rows, how, adam, folder=folder))
    assert_equal(*results)
