"""Checkpoints in torch's own formats, across flat and per-parameter training."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import flatbed
from flatbed import FlatbedError, FlatParams
from tests.cases import (
    BOTH,
    DEVICES,
    OPTIMIZERS,
    OptimizerCase,
    assert_same,
    batches,
    build,
    loss_of,
    two_groups,
)
from tests.flat.twins import twins

BY_CASE = pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda c: c.name)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for x in batches(stop)[start:]:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_states(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal_states(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal_states(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), where
    else:
        assert a == b, where


@pytest.mark.parametrize(("form", "model"), [("plain", "frozen"), ("named", "conv"), ("groups", "mixed")])
@BY_CASE
def test_the_state_is_what_torch_would_return(case: OptimizerCase, form: str, model: str) -> None:
    def source(m: nn.Module) -> Any:
        if form == "groups":
            return two_groups(m)
        return list(m.named_parameters() if form == "named" else m.parameters())

    reference, flat_model = build(model), build(model)
    expected = case(source(reference), foreach=False)
    flat = FlatParams(source(flat_model))
    optimizer = case(flat.groups(), foreach=False)
    assert_equal_states(expected.state_dict(), flat.optimizer_state_dict(optimizer), "fresh")
    train(reference, expected, 0, 4)
    train(flat_model, optimizer, 0, 4)
    assert_equal_states(expected.state_dict(), flat.optimizer_state_dict(optimizer), "trained")


@BY_CASE
def test_round_trips_continue_the_same_run(case: OptimizerCase) -> None:
    name = ("mixed", "conv", "frozen")[OPTIMIZERS.index(case) % 3]
    whole, first, second = (build(name) for _ in range(3))
    train(whole, case(two_groups(whole), foreach=False), 0, 6)

    # flat, then per parameter
    flat = FlatParams(two_groups(first))
    optimizer = case(flat.groups(), foreach=False)
    train(first, optimizer, 0, 2)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": flat.optimizer_state_dict(optimizer)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.load_state_dict(saved["model"])
    plain = case(two_groups(second), foreach=False)
    plain.load_state_dict(saved["optimizer"])
    train(second, plain, 2, 4)

    # and flat again
    state = plain.state_dict()
    flat = FlatParams(two_groups(second))
    optimizer = case(flat.groups(), foreach=False)
    flat.load_optimizer_state_dict(optimizer, state)
    train(second, optimizer, 4, 6)
    assert_same(whole, second)


def test_scalar_parameters_alone() -> None:
    """A step count and a moment then look alike, and must be told apart."""

    def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            sum((p - 0.3) ** 2 for p in params).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    params, reference = ([nn.Parameter(torch.tensor(float(i))) for i in range(3)] for _ in range(2))
    expected = torch.optim.Adam(reference, lr=0.1, foreach=False)
    run(reference, expected)
    flat = FlatParams(params)
    optimizer = torch.optim.Adam(flat.parameters(), lr=0.1, foreach=False)
    run(params, optimizer)
    flat.load_optimizer_state_dict(optimizer, expected.state_dict())
    run(reference, expected)
    run(params, optimizer)
    assert [p.item() for p in params] == [p.item() for p in reference]


def test_extra_parameters_keep_their_place() -> None:
    model = build("tied")
    before, after = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    flat = FlatParams(model)
    optimizer = torch.optim.Adam([before, *flat.parameters(), after], lr=0.01)
    (model(batches(1)[0]).sum() + before.sum() + after.sum()).backward()
    optimizer.step()
    state = flat.optimizer_state_dict(optimizer)
    assert [len(state["state"][i]["exp_avg"]) for i in range(4)] == [2, 7, 7, 3]
    flat.load_optimizer_state_dict(optimizer, state)
    assert torch.equal(optimizer.state[after]["exp_avg"], state["state"][3]["exp_avg"])


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("step", torch.tensor(7.0), r"'step' of 'decoder.bias' \(7.0\)"),
        ("1", None, r"'decoder.bias' differ in their keys.* \[\]"),
        ("exp_avg", None, "'decoder.bias' differ in their keys"),
        ("exp_avg", torch.zeros(3), r"'exp_avg' of '\w+.\w+' \(\("),
    ],
)
def test_bad_states_are_refused_and_change_nothing(where: str, value: Any, message: str) -> None:
    _, (model, optimizer, flat) = twins(kind=torch.optim.Adam)
    train(model, optimizer, 0, 2)
    state = copy.deepcopy(flat.optimizer_state_dict(optimizer))
    kept = copy.deepcopy(optimizer.state_dict())
    if where == "1":
        del state["state"][1]
    elif value is None:
        del state["state"][1][where]
    else:
        state["state"][1][where] = value
    with pytest.raises(FlatbedError, match=message):
        flat.load_optimizer_state_dict(optimizer, state)
    assert_equal_states(kept, optimizer.state_dict())


def test_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    _, (model, optimizer, flat) = twins(kind=torch.optim.Adam)
    train(model, optimizer, 0, 2)
    kept = copy.deepcopy(optimizer.state_dict())
    _, (other, sgd, other_flat) = twins(kind=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    train(other, sgd, 0, 2)
    with pytest.raises(FlatbedError, match="another optimizer than Adam"):
        flat.load_optimizer_state_dict(optimizer, other_flat.optimizer_state_dict(sgd))
    assert_equal_states(kept, optimizer.state_dict())


def test_optimizers_whose_state_cannot_be_split() -> None:
    _, (model, _, flat) = twins()
    other = FlatParams(build("rnn")).parameters()
    with pytest.raises(ValueError, match=r"1 of another FlatParams.*flat\.parameters"):
        flat.optimizer_state_dict(torch.optim.Adam([*flat.parameters(), *other]))
    optimizer = torch.optim.LBFGS(flat.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batches(1)[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(FlatbedError, match=r"\(list\) of LBFGS.*optimizer\.state_dict"):
        flat.optimizer_state_dict(optimizer)


def test_a_checkpoint_of_another_order_of_parameters(tmp_path: Path) -> None:
    """The flat state would be loaded onto other parameters of the same number of elements."""

    def trained(order: str, *, load: bool) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(3, 3 if name == "a" else 1) for name in order})
        optimizer = torch.optim.Adam(FlatParams(model).parameters())
        if load:
            flatbed.load_checkpoint(tmp_path, model, optimizer)
        model["b"](model["a"](torch.ones(3))).sum().backward()
        optimizer.step()
        return model, optimizer

    flatbed.save_checkpoint(tmp_path, *trained("ab", load=False))
    trained("ab", load=True)
    with pytest.raises(FlatbedError, match=r"shapes \[+3, 3\].*Adam has \[+1, 3\]"):
        trained("ba", load=True)


@BOTH
def test_state_and_gradients_are_pickled_without_the_buffers(grads: Any) -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(20)])
    flat = FlatParams(model, grads=grads)
    optimizer = torch.optim.Adam(flat.parameters(), lr=0.01)
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    assert len(pickle.dumps(model[1].bias.grad)) < 5_000
    assert torch.equal(pickle.loads(pickle.dumps(model[1].weight.grad)), model[1].weight.grad)
    data = pickle.dumps(flat.optimizer_state_dict(optimizer))
    assert len(data) < 2.5 * sum(p.nbytes for p in model.parameters())


# ---- files of a flattened model, written and read by the usual calls


FORMATS: dict[str, tuple[Any, Any]] = {
    "torch": (
        lambda m, f: torch.save(m.state_dict(), f),
        lambda m, f: m.load_state_dict(torch.load(f, weights_only=True)),
    ),
    "parameters": (
        lambda m, f: torch.save(dict(m.named_parameters(remove_duplicate=False)), f),
        lambda m, f: m.load_state_dict(torch.load(f, weights_only=True), strict=False),
    ),
    "safetensors": (safetensors.torch.save_model, safetensors.torch.load_model),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["mixed", "conv", "tied", "frozen", "rnn"])
@DEVICES
def test_files_equal_those_of_a_plain_model(device: str, name: str, form: str, tmp_path: Path) -> None:
    write, read = FORMATS[form]
    plain, model, fresh = (build(name, device) for _ in range(3))
    flat = FlatParams(model)
    write(model, tmp_path / "model")
    is_fused = (name, device) == ("rnn", "cuda")  # cuDNN keeps all weights of a plain RNN in one storage
    if not is_fused:
        write(plain, tmp_path / "plain")
        assert (tmp_path / "model").stat().st_size == (tmp_path / "plain").stat().st_size
    for target in (model,) if is_fused else (fresh, model):
        for p in target.parameters():
            nn.init.zeros_(p)
        read(target, tmp_path / "model")
        assert_same(target, plain)
    assert flat.is_valid()


@pytest.mark.filterwarnings("ignore")
def test_accelerates_checkpoints_are_complete(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(build("tied"))
    flat = FlatParams(model)
    optimizer = accelerator.prepare(torch.optim.Adam(flat.parameters(), lr=0.01))
    train(model, optimizer, 0, 2)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    accelerator.save_state(str(tmp_path))
    accelerator.save(dict(model.named_parameters()), tmp_path / "parameters", safe_serialization=True)
    assert safetensors.torch.load_file(tmp_path / "parameters").keys() == expected.keys()
    train(model, optimizer, 2, 4)
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(expected[n], p) for n, p in model.named_parameters())
    assert flat.is_valid()


@pytest.mark.filterwarnings("ignore")  # of torch, about a single process
def test_the_state_goes_through_distributed_checkpoints(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    (_, one), (_, other) = twins(), twins()
    one.train(0, 1)
    other.train(2)  # other values, which loading replaces
    saved, loaded = (
        {"model": t.model.state_dict(), "optimizer": t.flat.optimizer_state_dict(t.optimizer)}
        for t in (one, other)
    )
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path)
    other.model.load_state_dict(loaded["model"])
    other.flat.load_optimizer_state_dict(other.optimizer, loaded["optimizer"])
    for training in (one, other):
        training.train(2, 3)
    assert_same(one.model, other.model)
