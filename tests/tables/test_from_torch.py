"""Any optimizer class of torch over tables, against its own step on the touched rows, bitwise."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import flatbed
from flatbed.errors import FlatbedError
from flatbed.optim import from_torch
from tests.tables.tables import (
    DIM,
    PATTERNS,
    Setup,
    assert_same,
    backward,
    diagonal,
    reference,
    upstream,
    weights,
)
from tests.tables.test_parity import STEPS, check


class Simple(optim.Optimizer):
    """An optimizer whose subclasses update one parameter from its gradient and state."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class CountsInPython(Simple):
    """Its step count is an int."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        average = state.setdefault("average", torch.zeros_like(p))
        average.lerp_(p.grad, 0.25)
        p.add_(average / (1 - 0.75 ** state["step"]), alpha=-group["lr"])


class LooksAhead(Simple):
    """Its state has a copy of the weights, with which it averages them every second step."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "slow" not in state:
            state["slow"], state["step"] = p.clone(), 0
        state["step"] += 1
        p.add_(p.grad, alpha=-group["lr"])
        if state["step"] % 2 == 0:
            state["slow"].lerp_(p, 0.5)
            p.copy_(state["slow"])


class LooksAheadUncounted(Simple):
    """Averages at every step, without a count."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        slow = state.setdefault("slow", p.clone())
        p.add_(p.grad, alpha=-group["lr"])
        slow.lerp_(p, 0.5)
        p.lerp_(slow, 0.25)


class RemembersLater(Simple):
    """Has state from its second step on, which begins with zeros."""

    def first(self, p: Any) -> Tensor:
        return torch.zeros_like(p)

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 1 and "buffer" not in state:
            state["buffer"] = self.first(p)
        if "buffer" in state:
            state["buffer"].mul_(0.5).add_(p.grad)
        p.add_(state.get("buffer", p.grad), alpha=-group["lr"])


@dataclass(frozen=True)
class Torchs:
    """A class of torch with options, in the form of `Case`."""

    name: str
    kind: type[optim.Optimizer]
    options: dict[str, Any]

    def ours(self, params: Any, **more: Any) -> Any:
        return from_torch(self.kind, params, **copy.deepcopy({**self.options, **more}))

    def theirs(self, params: Any, **_: Any) -> optim.Optimizer:
        return self.kind(params, **copy.deepcopy(self.options))

    def table_lr(self) -> float | Tensor:
        """Another learning rate, of the type of the case: torch computes with tensors in another order."""
        return torch.tensor(0.02) if isinstance(self.options.get("lr"), Tensor) else 0.02

    def same_rounding(self, *_: Any, **__: Any) -> dict[str, bool]:
        return {}


def case(name: str, kind: type[optim.Optimizer], **options: Any) -> Torchs:
    return Torchs(name, kind, options)


CASES = [
    case("sgd", optim.SGD, lr=0.05, weight_decay=0.1),
    case("sgd-momentum", optim.SGD, lr=0.05, momentum=0.9),
    case("sgd-dampening", optim.SGD, lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    case("sgd-nesterov", optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    case("adam", optim.Adam, lr=0.01, weight_decay=0.1),
    case("adam-amsgrad", optim.Adam, lr=torch.tensor(0.01), amsgrad=True, betas=(0.8, 0.9), maximize=True),
    case("adam-fused", optim.Adam, lr=0.01, fused=True),
    case("adamw", optim.AdamW, lr=0.01),
    case("adamax", optim.Adamax, lr=0.01, weight_decay=0.1),
    case("nadam", optim.NAdam, lr=0.01, weight_decay=0.1),
    case("radam", optim.RAdam, lr=0.01, foreach=True),
    case("rmsprop", optim.RMSprop, lr=0.01, centered=True, momentum=0.5, weight_decay=0.01),
    case("rprop", optim.Rprop, lr=0.02),
    case("adadelta", optim.Adadelta, lr=0.5, weight_decay=0.1),
    case("adagrad", optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.1),
    case("asgd", optim.ASGD, lr=0.05, weight_decay=0.1),
    case("asgd-averaging", optim.ASGD, lr=0.05, t0=2),
    case("python-int", CountsInPython),
    case("looks-ahead", LooksAhead),
    case("looks-ahead-uncounted", LooksAheadUncounted),
    case("remembers-later", RemembersLater),
]
NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize(("case", "pattern", "storage"), [*diagonal(CASES), *diagonal(CASES, 2)])
def test_steps(case: Torchs, pattern: str, storage: str, tmp_path: Path) -> None:
    check(case, pattern, Setup(storage, "cpu", tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "pattern", "storage"), diagonal(CASES))
def test_steps_on_the_gpu(case: Torchs, pattern: str, storage: str, tmp_path: Path) -> None:
    check(case, pattern, Setup(storage, "cuda", tmp_path))


@pytest.mark.parametrize("name", ["adam", "rprop", "sgd-dampening", "asgd-averaging", "looks-ahead"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    check(NAMED[name], "late", Setup(), dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_counts_per_row(case: Torchs) -> None:
    """Every row is updated as if it had been trained alone."""
    check(case, "late", Setup(), per_row=True)


# ---- with other parameters


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_dense_parameters_with_tables(case: Torchs) -> None:
    """Tables have options of their own, and one dense parameter has no gradient at first."""
    weight = weights()
    emb, expected = Setup().embedding(weight), reference(case, weight)
    expected.first["step_size"] = 0.02
    expected.changes = lambda made: made.param_groups[0].update(lr=case.table_lr())
    ours = [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(7))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = case.ours([{"params": ours}, {"params": [emb.table], "lr": case.table_lr()}])
    dense = case.theirs(theirs)
    for step in range(STEPS):
        lookups = PATTERNS["late"](step)
        grads = upstream(lookups, DIM, torch.float32)
        backward(emb, lookups, grads)
        for p, q in zip(ours, theirs, strict=True):
            if step >= 2 or p is ours[0]:
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
        for each in (optimizer, dense):
            each.step()
            each.zero_grad()
        expected.step(lookups, grads)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for name, value in dense.state[q].items():
            if isinstance(value, Tensor):
                assert torch.equal(optimizer.state[p][name].to(value.dtype), value), name
    assert_same(emb, expected, "cpu")


class OtherOptions(optim.Optimizer):
    """Has no lr, and names of torch's options with other meanings."""

    def __init__(self, params: Any, betas: Any = (0.5, 0.25, 0.25), *, nesterov: bool = True) -> None:
        super().__init__(params, {"betas": betas, "nesterov": nesterov, "alpha": -1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * sum(group["betas"]), alpha=group["alpha"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_by_themselves(copied: Any) -> None:
    model = nn.Sequential(flatbed.Embedding(9, 3), nn.Linear(3, 2))
    optimizer = from_torch(optim.Rprop, model, lr=0.1, max_norm=5.0)

    def train(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
        model(torch.tensor([1, 2, 2])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model(torch.arange(9)).detach()

    train(model, optimizer)
    twin, its_optimizer = copied((model, optimizer))
    for _ in range(2):
        assert torch.equal(train(model, optimizer), train(twin, its_optimizer))


def test_a_class_checks_its_own_options() -> None:
    emb = flatbed.Embedding(5, 4)
    optimizer = from_torch(OtherOptions, [emb.table])
    expected = emb.read_rows([1]) - 1
    emb(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(emb.read_rows([1]), expected)


# ---- refusals


class CountsElsewhere(Simple):
    """Its step count is in the group, where a table's rows cannot have one."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Drifts(Simple):
    """Has state that begins at 1 and fades by itself."""

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        scale = state.setdefault("scale", torch.ones_like(p))
        scale.mul_(0.5).addcmul_(p.grad, p.grad)
        p.sub_(scale, alpha=group["lr"])


class LateStart(RemembersLater):
    """Has state from its second step on, which begins with the gradient."""

    def first(self, p: Any) -> Tensor:
        return p.grad.clone()


class Lamb(Simple):
    """Scales steps by the norm of the whole parameter."""

    def scale(self, p: Any) -> Tensor:
        return p.norm() / p.grad.norm()

    def update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(self.scale(p) * p.grad * group["lr"])


class RowNorms(Lamb):
    """Scales steps by the norm of a row."""

    def scale(self, p: Any) -> Tensor:
        return p.norm(dim=-1, keepdim=True)


class Still(Lamb):
    """Moves nothing."""

    def scale(self, p: Any) -> Tensor:
        return torch.zeros(())


REFUSED: list[tuple[Any, str]] = [
    (optim.LBFGS, "closure"),
    (optim.Adafactor, "row_var.*neither per element"),
    (optim.SparseAdam, r"flatbed\.optim\.SparseAdam"),
    (Lamb, "depends on"),
    (RowNorms, "depends on other elements"),
    (CountsElsewhere, "not in its state"),
    (Drifts, "'scale' is unknown"),
    (LateStart, "buffer"),
    (Still, "moved nothing"),
    *([(optim.Muon, "depends on other elements")] if hasattr(optim, "Muon") else []),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_refused_by_name_and_reason(kind: type[optim.Optimizer], reason: str) -> None:
    emb = flatbed.Embedding(5, 4)
    random_state = torch.get_rng_state()
    with pytest.raises(FlatbedError, match=rf"^{kind.__name__}.*{reason}"):
        from_torch(kind, [emb.table])
    assert torch.equal(random_state, torch.get_rng_state())
    assert emb.table.state_names == ()


def test_state_that_an_option_adds_later_is_refused() -> None:
    emb = Setup().embedding(weights())
    random_state = torch.get_rng_state()
    optimizer = from_torch(optim.SGD, [emb.table], lr=0.1)
    assert torch.equal(random_state, torch.get_rng_state())
    optimizer.param_groups[0]["momentum"] = 0.9
    before = emb.read_rows([1])
    emb(torch.tensor([1])).sum().backward()
    with pytest.raises(FlatbedError, match=r"SGD keeps state.*momentum_buffer"):
        optimizer.step()
    assert torch.equal(emb.read_rows([1]), before)
