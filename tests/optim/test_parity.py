"""Every optimizer is bitwise equal to torch's on a CPU: parameters, state and state dicts."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flatbed.optim
from flatbed.kernels.step import has_holes, stride_of
from flatbed.rule import MAX_COEFFICIENTS, MAX_SCALARS, MAX_STATES
from tests.cases import MODELS, assert_same, batches, build, loss_of
from tests.optim.mutants import WRONG, Wrong, broken
from tests.optim.optimizers import CASES, Case

STEPS = 8  # RAdam rectifies from the sixth on
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
TORCH_CASES = [case for case in CASES if case.torch_kind.__module__.startswith("torch.optim")]
PAIRS = [(a, b) for a, b in pairwise(CASES) if a.kind is b.kind]


def assert_same_state(theirs: Any, ours: Any) -> None:
    """State dicts: the same keys in the same order, and the same bits."""
    left, right = theirs.state_dict(), ours.state_dict()
    assert list(left["state"]) == list(right["state"])
    for index, expected in left["state"].items():
        found = right["state"][index]
        assert list(expected) == list(found)
        for key, value in expected.items():
            assert value.dtype == found[key].dtype, key
            assert torch.equal(value, found[key]), f"{key} of {index}: {(value - found[key]).abs().max()}"
    for expected, found in zip(left["param_groups"], right["param_groups"], strict=True):
        assert set(expected) == set(found)
        asked_for = {"foreach", "fused"}  # of torch's alone
        assert {k: v for k, v in expected.items() if k not in asked_for} == {
            k: v for k, v in found.items() if k not in asked_for
        }


def train(optimizer: Any, model: nn.Module, *, set_to_none: bool = True, gaps: bool = False) -> None:
    dtype = next(model.parameters()).dtype
    for i, x in enumerate(batches(STEPS)):
        loss = torch.tanh(loss_of(model, x.to(dtype)))  # bounded: half of the cases climb
        loss.backward()
        for n, p in enumerate(model.parameters()):
            if gaps and i > 0 and (i + n) % 3 == 0:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def check(case: Case, model: str, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    left, right = build(model).to(dtype), build(model).to(dtype)
    theirs, ours = case.theirs(left.parameters(), **case.same_rounding(dtype)), case.ours(right.parameters())
    train(theirs, left, **more)
    train(ours, right, **more)
    assert_same(left, right)
    assert_same_state(theirs, ours)


# ---- the interface


@pytest.mark.parametrize("case", TORCH_CASES, ids=lambda c: c.name)
def test_signatures(case: Case) -> None:
    """Names, order, kinds and defaults of all arguments."""
    theirs = inspect.signature(case.torch_kind).parameters
    ours = dict(inspect.signature(case.kind).parameters)
    assert ours.pop("extras").kind is inspect.Parameter.VAR_KEYWORD
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_every_optimizer_is_in_the_table() -> None:
    rules = {
        name: getattr(flatbed.optim, name)._rule for name in flatbed.optim.__all__ if name != "from_torch"
    }
    of_parameters = {name for name, rule in rules.items() if rule.for_tables is None}
    assert {case.kind.__name__ for case in CASES} == of_parameters
    for rule in rules.values():  # the kernels' tables have no more room
        assert len(rule.state) <= MAX_STATES
        assert len(rule.scalars) <= MAX_SCALARS
        assert len(rule.hyperparameters) <= MAX_COEFFICIENTS


# ---- steps


KINDS_OF_MODEL = [*((model, torch.float32) for model in MODELS), *(("mixed", dtype) for dtype in DTYPES[1:])]


@pytest.mark.parametrize(("model", "dtype"), KINDS_OF_MODEL, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bitwise(case: Case, model: str, dtype: torch.dtype) -> None:
    """Patterns of missing gradients are paired with the models rather than crossed."""
    check(case, model, dtype, set_to_none=model != "tied", gaps=model in ("mixed", "rnn"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.kind._rule.fused is not None], ids=lambda c: c.name)
def test_bitwise_without_fused_kernels(case: Case, dtype: torch.dtype) -> None:
    check(case.without_fused(), "mixed", dtype, gaps=case.options.get("momentum", 0) == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}+{pair[1].name}")
def test_groups_with_different_options(pair: tuple[Case, Case], dtype: torch.dtype) -> None:
    """Even optional state may differ between groups."""
    first, second = pair

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [{"params": params[::2], **first.options}, {"params": params[1::2], **second.options}]

    left, right = build("mixed").to(dtype), build("mixed").to(dtype)
    theirs, ours = second.torch_kind(groups(left), **second.same_rounding(dtype)), second.kind(groups(right))
    train(theirs, left)
    train(ours, right)
    assert_same(left, right)
    assert_same_state(theirs, ours)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gradients_that_come_late(case: Case) -> None:
    """A parameter's step count is its own: every parameter as if it had an optimizer to itself."""
    left = [nn.Parameter(torch.randn(6, 5)) for _ in range(3)]
    right = [nn.Parameter(p.detach().clone()) for p in left]
    theirs, ours = [case.theirs([p], **case.same_rounding()) for p in left], case.ours(right)
    for i in range(2 * STEPS):
        for n, (p, q) in enumerate(zip(left, right, strict=True)):
            p.grad = torch.randn_like(p) if i >= n and (i + n) % 4 else None
            q.grad = None if p.grad is None else p.grad.clone()
        for optimizer in theirs:
            optimizer.step()
        ours.step()
    for p, q, optimizer in zip(left, right, theirs, strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, ours.state[q][key]), key


@pytest.mark.parametrize("steps", [(0.9, 0.0, 0.9), (0.0, 0.9, 0.9)])
def test_momentum_that_comes_and_goes(steps: tuple[float, ...]) -> None:
    """The first gradient of a buffer is not dampened, whenever it is."""
    left, right = nn.Parameter(torch.randn(9)), nn.Parameter(torch.empty(9))
    right.data.copy_(left.data)
    theirs = torch.optim.SGD([left], momentum=0.9, dampening=0.5, fused=True)
    ours = flatbed.optim.SGD([right], momentum=0.9, dampening=0.5)
    for momentum in steps:
        theirs.param_groups[0]["momentum"] = ours.param_groups[0]["momentum"] = momentum
        left.grad = torch.randn(9)
        right.grad = left.grad.clone()
        theirs.step()
        ours.step()
        assert torch.equal(left, right)


# ---- any shape, any stride, any number


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(low, high, allow_subnormal=False))


HYPERPARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "lr": numbers(1e-4, 0.5),
    "weight_decay": numbers(1e-3, 0.5),
    "maximize": st.booleans(),
    "betas": st.tuples(numbers(0.01, 0.999), numbers(0.01, 0.9999)),
    "momentum": numbers(0.01, 0.99),
    "alpha": numbers(0.01, 0.999),
    "rho": numbers(0.01, 1.0),
    "centered": st.booleans(),
    "amsgrad": st.booleans(),
    "momentum_decay": numbers(1e-3, 1.0),
    "lr_decay": numbers(1e-3, 1.0),
    "initial_accumulator_value": numbers(0.01, 1.0),
}
KINDS = list({case.kind: case for case in CASES}.values())


@st.composite
def strided(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """A tensor of any order of dimensions; some have holes."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.sampled_from([1, 1, 2])) if shape else 1
    room = torch.randn([shape[i] for i in order[:-1]] + [step * shape[i] for i in order[-1:]], dtype=dtype)
    room = room[..., ::step] if shape else room
    return room.permute([order.index(i) for i in range(len(shape))])


def in_layout_of(p: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_strided(p.shape, stride_of(p), dtype=p.dtype).copy_(grad)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_any_parameters(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from(KINDS))
    options = data.draw(
        st.fixed_dictionaries(
            {k: HYPERPARAMETERS[k] for k in inspect.signature(case.kind).parameters if k in HYPERPARAMETERS}
        )
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    left = [nn.Parameter(p) for p in data.draw(st.lists(strided(dtype), min_size=1, max_size=4))]
    right = [nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=dtype)) for p in left]
    for p, q in zip(left, right, strict=True):
        q.data.copy_(p.data)
    theirs = [
        case.torch_kind([p], **options, **case.same_rounding(dtype, whole=not has_holes(p))) for p in left
    ]
    ours: Any = case.kind(right, **options)
    for _ in range(data.draw(st.integers(1, 4))):
        for p, q in zip(left, right, strict=True):
            grad = torch.randn(p.shape, dtype=dtype)
            p.grad, q.grad = in_layout_of(p, grad), data.draw(st.sampled_from([grad, in_layout_of(p, grad)]))
        for optimizer in theirs:
            optimizer.step()
        ours.step()
    for p, q, optimizer in zip(left, right, theirs, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=0, equal_nan=True)
        for key, value in optimizer.state[p].items():
            assert torch.allclose(value, ours.state[q][key], rtol=0, atol=0, equal_nan=True), key


# ---- the check itself


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.part != "kernel"], ids=str)
def test_wrong_rules_are_caught(wrong: Wrong, tmp_path: Any) -> None:
    case = broken(wrong, tmp_path)
    if wrong.part == "reference":
        case = case.without_fused()
    with pytest.raises(AssertionError):
        check(case, "frozen")
