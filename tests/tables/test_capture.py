"""Lookup, backward and step in one CUDA graph, and training beside late streams: the same bits as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import FlatbedError
from flatbed.cuda.streams import stream_for
from flatbed.tables.grads import GradAccumulator

N_ROWS, DIM, N_IDS, N_STEPS = 300, 8, 96, 12
SIZES = [0, 40, 150, 1000]  # of caches: none, smaller than a batch, smaller than the table, larger


class Model(nn.Module):
    def __init__(self, cache_rows: int | None, policy: str = "lfu") -> None:
        super().__init__()
        torch.manual_seed(0)
        made = {"device": "cuda", "cache_rows": cache_rows, "cache_policy": policy}
        self.items = flatbed.Embedding(N_ROWS, DIM, padding_idx=3, seed=1, **made)
        self.users = flatbed.Embedding(N_ROWS, DIM, seed=2, **made)
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
    return everything(model)


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


@pytest.mark.gpu
@pytest.mark.parametrize("how", [replayed, beside_a_prefetcher])
@pytest.mark.parametrize("cache_rows", SIZES)
def test_replays_are_steps(cache_rows: int, how: Callable[..., None]) -> None:
    for ours, theirs in zip(trained(cache_rows, how, adam), trained(0, eagerly, adam), strict=True):
        assert torch.equal(ours, theirs)


RULES: dict[str, Callable[..., Any]] = {
    "SGD": lambda model: flatbed.optim.SGD(model, lr=0.1, momentum=0.9),
    "Adagrad clipped": lambda model: flatbed.optim.Adagrad(model, lr=0.1, max_norm=0.05),
    "RAdam": lambda model: flatbed.optim.RAdam(model, lr=0.05),
    "per row": lambda model: flatbed.optim.Adam(model, lr=0.05, per_row_steps=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_replays_under_other_rules(rule: str) -> None:
    ours = trained(150, replayed, RULES[rule], policy="lru")
    for one, other in zip(ours, trained(0, eagerly, RULES[rule]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_ids_in_pinned_memory() -> None:
    """Every replay reads them again."""

    def from_the_host(model: Model, optimizer: Any) -> None:
        given = batches()
        static = given[0].pin_memory()
        for ids in given[:3]:
            step(model, optimizer, ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step_apart(model, optimizer, static)
        for ids in given[3:]:
            static.copy_(ids)
            graph.replay()
            torch.cuda.synchronize()

    def step_apart(model: Model, optimizer: Any, ids: Tensor) -> None:
        loss = model.top(model.items(ids) + model.users(ids)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def reference(model: Model, optimizer: Any) -> None:
        given = batches()
        for n, ids in enumerate(given):
            (step if n < 3 else step_apart)(model, optimizer, ids)

    for one, other in zip(trained(150, from_the_host, adam), trained(0, reference, adam), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_eager_steps_between_replays() -> None:
    def mixed(model: Model, optimizer: Any) -> None:
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

    for one, other in zip(trained(150, mixed, adam), trained(0, eagerly, adam), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


def test_gradients_of_a_graph_stay_in_it() -> None:
    pending = GradAccumulator(10)
    pending.record(torch.tensor([1]), torch.ones(1, 2))
    pending.check_capture(capturing=False)
    with pytest.raises(FlatbedError, match="in one CUDA graph"):
        pending.check_capture(capturing=True)
    assert not pending.parts
    pending.check_capture(capturing=True)


# ---- streams that are late


def with_delays(depth: int) -> Callable[..., None]:
    def run(model: Model, optimizer: Any) -> None:
        lookups = {model.items: lambda b: b, model.users: lambda b: [b, b.flip(0)]}
        device = torch.device("cuda", torch.cuda.current_device())
        streams = [torch.cuda.current_stream(), stream_for(device, "rows"), stream_for(device, "batches")]
        chance = torch.Generator().manual_seed(depth)
        for ids in flatbed.Prefetcher(batches(7) * 3, lookups, depth=depth):
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(int(torch.randint(0, 600_000, (), generator=chance)))
            step(model, optimizer, ids)

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("cache_rows", [None, 40, 150, 300, 320, 1000])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_training_while_streams_are_late(depth: int, cache_rows: int | None) -> None:
    """Random pauses in every stream, and many common rows of consecutive batches."""

    def plainly(model: Model, optimizer: Any) -> None:
        for ids in batches(7) * 3:
            step(model, optimizer, ids.cuda())

    ours = trained(cache_rows, with_delays(depth), adam)
    for one, other in zip(ours, trained(0, plainly, adam), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_accumulated_gradients_while_streams_are_late() -> None:
    def several(model: Model, optimizer: Any, given: Any) -> None:
        for n, ids in enumerate(given):
            torch.cuda._sleep(200_000 * (n % 3))
            model(ids.cuda()).backward()
            if n % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    def prefetched(model: Model, optimizer: Any) -> None:
        lookups = {model.items: lambda b: b, model.users: lambda b: [b, b.flip(0)]}
        several(model, optimizer, flatbed.Prefetcher(batches(4), lookups, depth=3))

    ours = trained(150, prefetched, adam)
    theirs = trained(0, lambda model, optimizer: several(model, optimizer, batches(4)), adam)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


class Shop(nn.Module):
    """A bag and two lookups of a table, for batches of several sizes."""

    def __init__(self, storage: str, folder: Any, cache_rows: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)

        def made(name: str) -> dict[str, Any]:
            path = {"path": folder / f"{name}-{cache_rows}.bed"} if storage == "disk" else {}
            return {"device": "cuda", "storage": storage, "cache_rows": cache_rows, **path}

        self.items = flatbed.Embedding(N_ROWS, DIM, seed=1, **made("items"))
        self.bag = flatbed.EmbeddingBag(N_ROWS, DIM, seed=2, mode="sum", **made("bag"))
        self.top = nn.Linear(DIM, 1).cuda()

    def forward(self, ids: Tensor) -> Tensor:
        both = self.items(ids) * self.bag(ids.unsqueeze(1)) + self.items(ids.flip(0) // 2)
        loss: Tensor = self.top(both).square().mean()
        return loss


def mixed_epochs(model: Shop, optimizer: Any, *, depth: int) -> None:
    """Epochs with an evaluation in the middle, one ended early, gradients of two batches for each step."""
    chance = torch.Generator().manual_seed(3)
    sizes = [20, 20, 70, 96, 20, 96, 96, 20]
    given = [(torch.rand(n, generator=chance) ** 2 * N_ROWS).long() for n in sizes]
    lookups = {model.items: lambda b: [b, b.flip(0) // 2], model.bag: lambda b: b}

    def over(batches: Any) -> Any:
        return flatbed.Prefetcher(batches, lookups, depth=depth) if depth else (ids.cuda() for ids in batches)

    for epoch in range(4):
        for n, ids in enumerate(over(given)):
            if depth:
                torch.cuda._sleep(int(torch.randint(0, 500_000, (), generator=chance)))
            model(ids).backward()
            if n % 2:
                optimizer.step()
                optimizer.zero_grad()
            if n == 3:
                with torch.no_grad():
                    for other in over(given[:3]):
                        model(other)
                for other in over(given[5:7]):
                    model(other).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == 1 and n == 5:
                break
        optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["host", "disk"])
@pytest.mark.parametrize("cache_rows", [None, 60, 250, 1000])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mixed_epochs(depth: int, cache_rows: int | None, storage: str, tmp_path: Any) -> None:
    results = []
    for rows, ahead in ((cache_rows, depth), (0, 0)):
        model = Shop(storage, tmp_path, rows)
        optimizer = flatbed.optim.Adam(model, lr=0.05)
        mixed_epochs(model, optimizer, depth=ahead)
        every = torch.arange(N_ROWS)
        found = [table.read_rows(every).cpu() for table in flatbed.tables(model)]
        found += [table.read_state("exp_avg_sq", every).cpu() for table in flatbed.tables(model)]
        results.append(found)
        for table in flatbed.tables(model):
            table.close(discard=True)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
