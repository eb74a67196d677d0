"""`flatbed.capture`: a whole training step as one CUDA graph, with the results of the step itself."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed.captured_grads import sharing_grads
from flatbed.tables.captured_lookups import NotedLookup, current_capture
from tests.recorded_graphs import graph_device, record_graphs

__all__ = ["graph_device"]
ROWS, DIM, N_IDS = 200, 8, 64
gpu = pytest.mark.gpu


class Model(nn.Module):
    def __init__(self, storage: str, device: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = flatbed.Embedding(
            ROWS, DIM, storage=storage, device=device, cache_rows=80 if storage == "host" else None
        )
        self.head = nn.Sequential(nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)

    def forward(self, batch: Any) -> Tensor:
        error: Tensor = self.head(self.items(batch["ids"])).squeeze(-1) - batch["target"]
        return error.square().mean()


def batches(device: str, n: int = 10, size: int = N_IDS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(ROWS, (size,), generator=generator) for _ in range(n)]
    return [{"ids": one.to(device), "target": one.to(device).float() / ROWS} for one in ids]


def train_step(model: Model, optimizer: Any, scaler: Any = None) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        loss = model(batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sgd_step(model: Model) -> Callable[[Any], Tensor]:
    return train_step(model, flatbed.optim.SGD(model.parameters(), lr=0.1))


def everything(model: Model) -> list[Tensor]:
    rows = range(ROWS)
    table = model.items.table
    state = [table.read_state(name, rows) for name in table.state_names]
    return [table.read_rows(rows), *state, *(p.detach() for p in model.head.parameters())]


def check_captured(storage: str, device: str, **options: Any) -> None:
    losses, models = [], []
    for captured in (False, True):
        model = Model(storage, device)
        scaler = torch.amp.GradScaler(device, init_scale=4.0) if options.get("scaler") else None
        optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01, max_norm=options.get("max_norm"))
        step = train_step(model, optimizer, scaler)
        if captured:
            step = flatbed.capture(step, batches(device)[0])
        loader: Any = batches(device)
        if options.get("prefetched"):
            loader = flatbed.Prefetcher(loader, {model.items: "ids"})
        losses.append([float(step(batch)) for batch in loader])
        models.append(everything(model))
    assert losses[0] == losses[1]
    for one, other in zip(*models, strict=True):
        assert torch.equal(one, other)


def test_on_a_cpu_the_function_is_called() -> None:
    check_captured("host", "cpu", max_norm=0.5)


@gpu
@pytest.mark.filterwarnings("ignore:rows of .* are not prefetched")  # the cache has no room for them
@pytest.mark.parametrize("storage", ["host", "device"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"scaler": True}, {"prefetched": True}], ids=str)
def test_captured_steps_are_the_steps(storage: str, options: dict[str, Any]) -> None:
    check_captured(storage, "cuda", **options)


@gpu
def test_dense_models_and_host_batches() -> None:
    torch.manual_seed(0)
    first = nn.Linear(DIM, 1).cuda()
    results = []
    for captured in (False, True):
        model = copy.deepcopy(first)
        optimizer = flatbed.optim.AdamW(model.parameters(), lr=0.1)

        def step(batch: Any, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(batch[0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        data = [(np.random.default_rng(i).random((4, DIM), np.float32),) for i in range(8)]
        run = flatbed.capture(step, data[0], device="cuda") if captured else step
        for batch in data:
            run(batch if captured else (torch.from_numpy(batch[0]).cuda(),))
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


@gpu
def test_losses_of_several_calls_are_kept_apart() -> None:
    model = Model("device", "cuda")
    step = flatbed.capture(sgd_step(model), batches("cuda")[0])
    losses = [step(batch) for batch in batches("cuda")]
    assert len({float(loss) for loss in losses}) == len(losses)


def test_results_are_copies_on_a_cpu() -> None:
    total = torch.zeros(2)
    add = flatbed.capture(lambda x: total.add_(x))
    assert [add(torch.ones(2)), add(torch.ones(2))][0].tolist() == [1, 1]


@gpu
def test_another_shape_runs_the_function_and_warns_once() -> None:
    model, reference = Model("host", "cuda"), Model("host", "cuda")
    step = flatbed.capture(sgd_step(model), batches("cuda")[0])
    eager = sgd_step(reference)
    data = [*batches("cuda", 6), *batches("cuda", 2, size=7), *batches("cuda", 2)]
    with pytest.warns(UserWarning, match="the example batch") as caught:
        losses = [float(step(batch)) for batch in data]
    assert len(caught) == 1
    assert losses == [float(eager(batch)) for batch in data]


@gpu
def test_ids_out_of_range_raise_at_the_next_call() -> None:
    model = Model("host", "cuda")
    step = flatbed.capture(sgd_step(model), batches("cuda")[0])
    for batch in batches("cuda", 5):
        step(batch)
    bad = batches("cuda", 1)[0]
    bad["ids"][3] = ROWS
    run = [bad, *batches("cuda", 1)]
    with pytest.raises(IndexError, match=f"{ROWS} rows"):
        list(map(step, run))
    for batch in batches("cuda", 3):
        step(batch)


@gpu
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_take_effect(tensor: bool) -> None:
    results = []
    for captured in (False, True):
        model = Model("host", "cuda")
        lr: Any = torch.tensor(0.1, device="cuda") if tensor else 0.1
        optimizer = flatbed.optim.SGD(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        step = train_step(model, optimizer)
        run = flatbed.capture(step, batches("cuda")[0]) if captured else step
        for batch in batches("cuda"):
            is_new = captured and not tensor and scheduler.last_epoch == 4  # the rate changes
            with pytest.warns(UserWarning, match="hyperparameters") if is_new else nullcontext():
                run(batch)
            scheduler.step()
        results.append(everything(model))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@gpu
def test_two_captured_steps_of_one_model() -> None:
    """Also in another stream, by hand, after a step that returned a loss with its graph."""
    model = Model("host", "cuda")
    optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = batches("cuda")
    for run in (flatbed.capture(step, data[0]), flatbed.capture(step, data[0])):
        for batch in data:
            run(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(data[0])
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool(value.isfinite().all()) for value in everything(model))


@gpu
def test_a_step_that_cannot_be_captured_raises() -> None:
    layer = nn.Linear(DIM, 1).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: Tensor) -> float:
        loss = layer(x).sum()
        loss.backward()
        found: float = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return found

    run = flatbed.capture(step, torch.zeros(2, DIM, device="cuda"))
    with pytest.raises(flatbed.FlatbedError, match="cannot be captured"):
        list(map(run, torch.zeros(5, 2, DIM, device="cuda")))
    assert [p.grad for p in layer.parameters()] == [None, None], "a gradient that no kernel has computed"


@gpu
def test_torch_works_as_before_after_a_capture_that_fails() -> None:
    """Alone, torch would no longer draw random numbers, nor use the memory of other streams again."""
    side = torch.cuda.Stream()

    def new_blocks() -> int:
        """Count the allocations out of ten for which torch asks CUDA for memory."""
        nbytes, before = 64 << 20, torch.cuda.memory_reserved()
        for _ in range(10):
            one = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            one.record_stream(side)
            del one
            torch.cuda.synchronize()
        return (torch.cuda.memory_reserved() - before) // nbytes

    def step(x: Tensor) -> float:
        return float((x + torch.rand_like(x)).sum())

    run = flatbed.capture(step, torch.zeros(2, device="cuda"))
    for _ in range(3):
        run(torch.zeros(2, device="cuda"))
    for _ in range(2):
        with pytest.raises(flatbed.FlatbedError, match="cannot be captured"):
            run(torch.zeros(2, device="cuda"))
        assert new_blocks() <= 1  # each capture begins with an empty cache
        assert torch.rand(4, device="cuda").isfinite().all()
    run = flatbed.capture(lambda x: x + torch.rand_like(x))
    found = torch.cat([run(torch.zeros(1, device="cuda")) for _ in range(6)])
    assert len(found.unique()) == 6


def test_gradients_are_put_back_if_a_capture_fails() -> None:
    embedding, layer = flatbed.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
    params = [*embedding.parameters(), *layer.parameters()]
    optimizer = flatbed.optim.SGD(params, lr=0.1)
    layer(embedding(torch.tensor([1, 2]))).sum().backward()
    rows = embedding.table.grad_rows.tolist()
    weight, bias = layer.weight.grad, layer.bias.grad

    def fail() -> None:
        optimizer.zero_grad()
        layer.weight.grad = torch.zeros(1, DIM)
        embedding(torch.tensor([3])).sum().backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sharing_grads([optimizer]):
        fail()
    assert layer.weight.grad is weight
    assert layer.bias.grad is bias
    assert embedding.table.grad_rows.tolist() == rows == [1, 2]
    with sharing_grads([optimizer]):
        optimizer.zero_grad()
    assert layer.bias.grad is None


def test_gradients_of_other_parameters_are_put_back_if_a_capture_fails(graph_device: str) -> None:
    first, last = (nn.Linear(2, 2).to(graph_device) for _ in range(2))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    shown: list[float] = []

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss = last(first(x)).sum()
        loss.backward()
        optimizer.step()
        shown.append(loss.item())

    run = flatbed.capture(step)
    for _ in range(3):
        run(torch.ones(1, 2, device=graph_device))
        last.zero_grad()
    with pytest.raises(flatbed.FlatbedError, match=r"cannot be captured.*waits"):
        run(torch.ones(1, 2, device=graph_device))
    assert len(shown) == 3
    assert [p.grad for p in last.parameters()] == [None, None], "a gradient that no kernel has computed"


class OtherParameter(nn.Parameter):
    """A kind of its own, as those of FSDP2."""


def outside_steps(
    device: str,
    kind: Any,
    drops: Callable[[int], bool],
    *,
    captured: bool,
    fails: int = -1,
    replaces: int = -1,
    other_kind: bool = False,
) -> list[Tensor]:
    """Losses of a step whose optimizer is called outside of it. `drops`: whether it drops gradients then."""
    torch.manual_seed(0)
    model, generator = nn.Linear(8, 1).to(device), torch.Generator().manual_seed(1)
    if other_kind:
        model.weight = OtherParameter(model.weight.detach().clone())
        model.bias = None  # type: ignore[assignment]
    optimizer = kind(model.parameters(), lr=0.1)
    losses, failed = list[Tensor](), [False]

    def backward(x: Tensor) -> Tensor:
        if len(losses) == fails and not failed[0]:
            failed[0] = True
            raise ZeroDivisionError
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step = flatbed.capture(backward) if captured else backward
    for n in range(30):
        x = torch.rand(4, 8, generator=generator).to(device)
        for _ in range(2 if n == fails else 1):
            with suppress(ZeroDivisionError):
                losses.append(step(x))
        optimizer.step()
        optimizer.zero_grad(set_to_none=drops(n))
        if n == replaces:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
    return losses


@pytest.mark.parametrize("kind", [torch.optim.SGD, flatbed.optim.SGD])
def test_a_step_outside_of_the_captured_function(kind: Any, graph_device: str) -> None:
    """Gradients that are kept have the memory that replays write to. The first ones may not be dropped."""
    refused = torch.ones(2).requires_grad_().clone().unbind()[0]  # another tensor of the process
    with torch.no_grad():
        refused._base.add_(1)  # type: ignore[union-attr]
    drops: Any
    for drops, options in (
        (lambda n: True, {}),
        (lambda n: True, {"fails": 2}),
        (lambda n: True, {"other_kind": kind is torch.optim.SGD}),
        (lambda n: n % 3 == 2, {}),
    ):
        with pytest.raises(flatbed.FlatbedError, match=r"leaves gradients of . parameters.* Call step\(\)"):
            outside_steps(graph_device, kind, drops, captured=True, **options)
    for drops, options, warns in (
        (lambda n: False, {}, False),
        (lambda n: n == 7, {}, True),
        (lambda n: n % 4 == 3, {}, True),
        (lambda n: n % 7 == 6, {}, True),
        (lambda n: False, {"replaces": 7}, True),
    ):
        eager = outside_steps(graph_device, kind, drops, captured=False, **options)
        with replaced_grads() if warns else nullcontext():
            found = outside_steps(graph_device, kind, drops, captured=True, **options)
        assert torch.equal(torch.stack(found), torch.stack(eager))


def replaced_grads() -> Any:
    return pytest.warns(UserWarning, match=r"dropped or replaced .*zero_grad\(set_to_none=False\)")


def adversarial_losses(device: str, *, captured: bool, drops: bool = True, eager: int = -1) -> Tensor:
    """Train a GAN: the generator's step leaves gradients in the discriminator, unless it `drops` them.

    The step of one of both may be `eager`.
    """
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]

    def steps(number: int) -> Any:
        def train(rows: Tensor) -> Tensor:
            for one in nets if drops else nets[number : number + 1]:
                one.zero_grad()
            made = nets[0](rows) if number == 0 else nets[0](rows).detach()
            loss: Tensor = nets[1](made).square().mean() * (1 - 2 * number) / 4
            loss.backward()
            optimizers[number].step()
            for one in nets if drops else nets[number : number + 1]:
                one.zero_grad()
            return loss.detach()

        return flatbed.capture(train) if captured and number != eager else train

    pair = steps(0), steps(1)
    batches = torch.rand(12, 4, 3, generator=torch.Generator().manual_seed(1))
    losses = [step(x.to(device)) for x in batches for step in pair]
    assert not captured or all(n == eager or step._graph is not None for n, step in enumerate(pair))
    return torch.stack(losses)


@pytest.mark.parametrize("eager", [-1, 1])
def test_gradients_of_parameters_that_the_step_does_not_train(eager: int, graph_device: str) -> None:
    expected = adversarial_losses(graph_device, captured=False, drops=False)
    assert torch.equal(adversarial_losses(graph_device, captured=True, eager=eager), expected)
    with pytest.raises(flatbed.FlatbedError, match=r"leaves gradients of 2 .* zero_grad\(\) of these"):
        adversarial_losses(graph_device, captured=True, drops=False, eager=eager)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_of_frozen_objects(is_frozen: bool, graph_device: str) -> None:
    """`gc.freeze` hides all objects from the search, and not the parameters of the step's optimizers."""
    model = nn.Linear(8, 1).to(graph_device)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(4, 8, device=graph_device)

    def train(x: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    if is_frozen:
        gc.freeze()
    try:
        step = flatbed.capture(train)
        for _ in range(3):
            model(x).sum().backward()
            step(x)
        model(x).sum().backward()
        with pytest.raises(flatbed.FlatbedError, match="uses gradients from outside, and drops them"):
            step(x)
    finally:
        gc.unfreeze()


ACCUMULATIONS = {
    "the step": (False, True),
    "backward and step": (True, True),
    "the step, and gradients are dropped outside of it": (True, False),
}


@pytest.mark.parametrize("kind", ["torch", "flatbed", "flat"])
@pytest.mark.parametrize("name", ACCUMULATIONS)
def test_gradients_that_are_accumulated_outside(name: str, kind: str, graph_device: str) -> None:
    """Their memory must stay the same: a graph would read that of the first ones."""
    computes, drops = ACCUMULATIONS[name]

    def losses(captured: bool, set_to_none: bool) -> Tensor:
        torch.manual_seed(0)
        model, generator = nn.Linear(8, 1).to(graph_device), torch.Generator().manual_seed(1)
        params: Any = flatbed.FlatParams(model).parameters() if kind == "flat" else model.parameters()
        optimizer = (flatbed.optim if kind == "flatbed" else torch.optim).SGD(params, lr=0.1)

        def backward(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss.detach()

        def train(x: Tensor) -> Tensor:
            loss = backward(x) if computes else x.sum()
            optimizer.step()
            if drops:
                optimizer.zero_grad(set_to_none=set_to_none)
            return loss

        step, found = flatbed.capture(train) if captured else train, []
        for x in torch.rand(12, 3, 4, 8, generator=generator).to(graph_device):
            found += [backward(x[0]), backward(x[1]), step(x[2])]
            if not drops:
                optimizer.zero_grad(set_to_none=set_to_none)
        return torch.stack(found)

    for set_to_none in (False, True):
        expected = losses(False, set_to_none)
        if set_to_none and (drops or (kind == "flat" and computes)):  # the buffer takes the gradients
            with pytest.raises(flatbed.FlatbedError, match=r"drops them.*zero_grad\(set_to_none=False\)"):
                losses(True, set_to_none)
            return
        with replaced_grads() if set_to_none else nullcontext():
            assert torch.equal(losses(True, set_to_none), expected)


@pytest.mark.parametrize("is_first", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_a_scaler_that_skips_the_first_steps(is_first: bool, graph_device: str) -> None:
    """Warm-ups do not leave out the optimizer's step, which makes the state."""
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model, generator = nn.Linear(8, 1).to(graph_device), torch.Generator().manual_seed(1)
        optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(graph_device, init_scale=2.0**127)

        def train(
            x: Tensor, model: nn.Module = model, optimizer: Any = optimizer, scaler: Any = scaler
        ) -> Tensor:
            if is_first:
                optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            scaler.scale(loss * 64).backward()
            scaler.step(optimizer)
            scaler.update()
            if not is_first:
                optimizer.zero_grad()
            return loss.detach()

        step: Any = flatbed.capture(train) if captured else train
        losses = [step(x) for x in torch.rand(16, 4, 8, generator=generator).to(graph_device)]
        assert 2.0**115 < scaler.get_scale() < 2.0**124
        assert not captured or step._graph is not None
        results.append(torch.stack([*losses, *model.weight.detach().flatten()]))
    assert torch.equal(*results)


def test_an_optimizer_that_steps_in_some_calls_only(graph_device: str) -> None:
    model, calls = nn.Linear(8, 1).to(graph_device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        calls.append(x)
        loss: Tensor = model(x).sum()
        loss.backward()
        if len(calls) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss

    step, x = flatbed.capture(train), torch.ones(4, 8, device=graph_device)
    with pytest.raises(flatbed.FlatbedError, match="do not take the same steps in each call"):
        list(map(step, [x] * 8))


def test_a_capture_that_fails_is_no_partial_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing, and a checkpoint can be saved."""
    record_graphs(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model, batch = Model("device", "cpu"), batches("cpu")[0]
    optimizer = flatbed.optim.SGD(model.items.parameters(), lr=0.1)
    step = train_step(model, optimizer)
    step(batch)

    def capture_often() -> None:
        for _ in range(20):  # an optimizer has memory for eight captures between two steps
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                step(batch)

    with pytest.raises(flatbed.FlatbedError, match="take an eager step before this capture"):
        capture_often()
    flatbed.save_checkpoint(tmp_path, model.items, optimizer)


def test_a_batch_whose_call_failed_is_no_example() -> None:
    run = flatbed.capture(lambda batch: batch["ids"] + 1)
    with pytest.raises(KeyError):
        run({"id": torch.arange(3)})
    assert run({"ids": torch.arange(3)}).tolist() == [1, 2, 3]
    with pytest.warns(UserWarning, match="other keys, another order or another nesting"):
        run({"ids": torch.arange(3), "other": torch.zeros(2)})


def test_batches_on_the_host_for_tables_on_a_gpu() -> None:
    on_gpu: Any = SimpleNamespace(_store=SimpleNamespace(device=torch.device("cuda", 0)))

    def step(batch: Any) -> None:
        context = current_capture()
        assert context is not None
        context.noted.append(NotedLookup(on_gpu, None))  # as a lookup does

    run = flatbed.capture(step)
    with pytest.warns(UserWarning, match=r"without a CUDA graph\. .* device=.cuda:0.") as found:
        run(torch.zeros(2))
    assert found[0].filename == __file__
    run(torch.zeros(2))  # warns once


@gpu
def test_batches_that_the_gpu_has_not_computed_yet_for_a_step_on_the_host() -> None:
    step = flatbed.capture(lambda x: x.clone(), device="cpu")
    for value in (1.0, 2.0, 3.0):
        x = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(100_000_000)
        x += value
        assert torch.equal(step(x), torch.full((1 << 20,), value))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_batches_are_checked_in_the_same_way_on_every_device(device: str) -> None:
    seen: list[Any] = []

    def step(batch: Any) -> dict[str, Any]:
        seen.append(batch["ids"])
        return {"sum": (batch["ids"] * torch.ones(3, device=device, requires_grad=True)).sum(), "name": "a"}

    run = flatbed.capture(step, device=device)  # the first batch is the example
    for ids in (np.arange(3)[::-1], torch.arange(3), np.arange(3)):
        found = run({"ids": ids})
        assert (float(found["sum"]), found["sum"].requires_grad, found["name"]) == (3.0, False, "a")
    assert {(type(ids), ids.device.type) for ids in seen} == {(Tensor, device)}
    named = r"batch\['ids'\] is torch.int32 of shape \(3,\), and that of the example batch is torch.int64"
    with pytest.warns(UserWarning, match=named) as caught:
        list(map(run, [{"ids": torch.arange(3).int()}, {"ids": torch.arange(6).view(2, 3)}]))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert ("CUDA graph" in str(caught[0].message)) == (device == "cuda")
    with pytest.raises(TypeError, match=r"found int in batch\['ids'\]"):
        run({"ids": 3})
    with pytest.raises(TypeError, match="found an array of object"):
        run({"ids": np.array([None])})
