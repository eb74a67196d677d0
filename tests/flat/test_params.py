"""Sources that FlatParams accepts and refuses, its layout, and copies of it."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flatbed import Embedding, FlatbedError, FlatParams
from flatbed.flat import Segment
from tests.cases import BOTH, MODELS, assert_same, batches, build, loss_of, two_groups
from tests.flat.twins import twins


def in_buffer(flat: FlatParams, p: torch.Tensor, segment: Segment) -> bool:
    buffer = flat.buffers[segment.buffer]
    return p.data_ptr() == buffer.data_ptr() + segment.offset * buffer.element_size()


@pytest.mark.parametrize("name", MODELS)
def test_values_strides_and_alignment(name: str) -> None:
    before, model = build(name), build(name)
    frozen = {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}
    flat = FlatParams(model)
    assert_same(before, model)
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert old.stride() == new.stride()
    # a tied weight is stored once, and frozen parameters are left alone
    assert [s.name for s in flat.segments] == [n for n, p in model.named_parameters() if p.requires_grad]
    assert frozen == {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad}
    for p, segment in zip(flat.originals(), flat.segments, strict=True):
        if p.numel():
            assert p.data_ptr() % 64 == 0
            assert in_buffer(flat, p, segment)
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        assert (tuple(p.shape), p.stride()) == (segment.shape, segment.stride)


@pytest.mark.parametrize(
    "source",
    [
        lambda m: m.parameters(),
        lambda m: m.named_parameters(),
        lambda m: list(m.parameters()),
        lambda m: [{"params": m.parameters(), "lr": 0.5}],
        lambda m: [{"params": list(m.named_parameters())}],
        lambda m: [{"params": p} for p in m.parameters()],
    ],
)
def test_sources(source: Any) -> None:
    model, reference = build("mixed"), build("mixed")
    flat = FlatParams(source(model))
    assert [id(p) for p in flat.originals()] == [id(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(flat, lr=0.1)
    expected = torch.optim.SGD(source(reference), lr=0.1)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in expected.param_groups]
    for m, o in ((model, optimizer), (reference, expected)):
        loss_of(m, batches(1)[0]).backward()
        o.step()
    assert_same(model, reference)


def test_tables_are_left_alone() -> None:
    model = nn.ModuleDict({"table": Embedding(5, 4), "head": nn.Linear(4, 1)})
    for source in (model, [*model.parameters(), model["table"].table]):
        assert [p.shape for p in FlatParams(source).originals()] == [(1, 4), (1,)]


def test_one_buffer_per_group_and_dtype() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16)])
    flat = FlatParams(model)
    assert [b.dtype for b in flat.buffers] == [torch.float32, torch.bfloat16]
    assert len(FlatParams([{"params": model[0].weight}, {"params": model[0].bias}]).buffers) == 2
    assert len(FlatParams([model[0].bias, model[0].bias]).segments) == 1


class OtherTensor(torch.Tensor):
    """As a DTensor, of another type than torch's."""


P = nn.Parameter
MEMORY, TWICE = torch.randn(10), P(torch.ones(2))
REFUSED: dict[str, Callable[[], list[Any]]] = {
    "lazy.*forward": lambda: list(nn.LazyLinear(3).parameters()),
    "sparse": lambda: [P(torch.randn(3).to_sparse())],
    "complex": lambda: [P(torch.randn(3, dtype=torch.complex64))],
    "meta device": lambda: [P(torch.empty(3, device="meta"))],
    "overlaps itself": lambda: [P(torch.randn(1, 4).expand(3, 4))],
    r"OtherTensor.*flatbed\.optim": lambda: [P(torch.randn(3).as_subclass(OtherTensor))],
    "not a leaf": lambda: [P(torch.randn(3)) * 2],
    "flat parameter already": lambda: list(FlatParams([P(torch.ones(2))])),
    "same memory.*one Parameter": lambda: [P(MEMORY[:6]), P(MEMORY[4:], requires_grad=False)],
    "'w' is given twice": lambda: [("w", P(torch.ones(2))), ("w", P(torch.ones(2)))],
    "'params' key": lambda: [{"lr": 0.1}],
    "in param group 1 and in 2": lambda: [{"params": [TWICE]}, {"params": [TWICE]}],
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_come_before_any_change(message: str) -> None:
    good = P(torch.randn(5))
    before = good.data_ptr()
    source = REFUSED[message]()
    with pytest.raises((ValueError, TypeError), match=message):
        FlatParams([{"params": [good]}, *source] if isinstance(source[0], dict) else [good, *source])
    assert good.data_ptr() == before


def test_memory_is_freed_without_the_cycle_collector() -> None:
    pair = twins()
    pair[1].train(0)
    gone = weakref.ref(pair[1].flat)
    del pair
    assert gone() is None


# ---- copies


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, n: int = 3) -> None:
    for x in batches(n):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def pickled(things: Any) -> Any:
    return pickle.loads(pickle.dumps(things))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@BOTH
def test_copies_of_all_three_stay_connected(copied: Any, order: tuple[int, ...], grads: Any) -> None:
    model = build("tied")
    flat = FlatParams(model, grads=grads)
    things: list[Any] = [model, flat, torch.optim.Adam(flat.parameters(), lr=0.01)]
    train_on(things[0], things[2])
    copies = copied(tuple(things[i] for i in order))
    twin: list[Any] = [copies[order.index(i)] for i in range(3)]
    assert twin[2].param_groups[0]["params"][0] is twin[1].parameters()[0]
    assert in_buffer(twin[1], twin[0].encoder.weight, twin[1].segments[0])
    train_on(things[0], things[2])
    train_on(twin[0], twin[2])
    assert_same(things[0], twin[0])
    before = twin[0].encoder.weight.clone()
    train_on(things[0], things[2])
    assert torch.equal(before, twin[0].encoder.weight), "the copy must not share memory"


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_the_model_alone_are_ordinary(copied: Any) -> None:
    model = build("conv")
    plain = len(pickle.dumps(model))
    model.flat.weight.tag = "kept"
    flat = FlatParams(model)
    assert len(pickle.dumps(model)) < 1.1 * plain
    twin = copied(model)
    assert_same(model, twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(q) is nn.Parameter
        assert q.untyped_storage().nbytes() == q.numel() * 4
        assert q.stride() == p.stride()
    train_on(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    assert flat.is_valid()


# ---- snapshot


def test_snapshot_and_restore() -> None:
    model = build("mixed")
    flat = FlatParams([*two_groups(model)])
    before = copy.deepcopy(model)
    kept = flat.snapshot()
    train_on(model, torch.optim.SGD(flat.groups(), lr=0.1))
    assert not torch.equal(before.scale, model.scale)
    loss = loss_of(model, batches(1)[0])
    flat.restore(kept)
    assert_same(before, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- handing over to an optimizer


def test_lost_group_options_are_reported() -> None:
    model = build("tied")
    flat = FlatParams([{"params": model.parameters(), "weight_decay": 0.5}])
    optimizer = torch.optim.AdamW(flat.parameters(), lr=0.1)
    loss_of(model, batches(1)[0]).backward()
    with pytest.warns(UserWarning, match=r"weight_decay=0\.5.*0\.01.*flat\.groups\(\)"):
        optimizer.step()
    optimizer = torch.optim.AdamW(flat.groups(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer)  # a warm-up's learning rate is no lost option
    optimizer.step()


def test_held_twice_is_refused() -> None:
    model = build("tied")
    optimizer = torch.optim.SGD([*FlatParams(model).parameters(), *model.parameters()], lr=0.1)
    with pytest.raises(FlatbedError, match=r"'encoder\.weight'.*twice.*flat\.parameters"):
        optimizer.step()
