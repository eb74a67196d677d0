"""Calls with wrong ids, in the wrong order or left out raise before they mix up rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed
import flatbed.compat.speedtorch as SpeedTorch
from flatbed import FlatbedError
from tests.compat.speedtorch_models import DIM, REFUSED, Loop, N, loop, start

# ---- constructors


def state_of(model: nn.Module, kind: Any, of: nn.Module | None = None) -> Any:
    return SpeedTorch.OptimizerFactory(kind((of or model).parameters()), N, DIM, model, "0")


def rows_of(**options: Any) -> Any:
    return SpeedTorch.ModelFactory(nn.Embedding(4, DIM, **options), N, DIM)


CONSTRUCTORS: list[tuple[Any, type[Exception], str]] = [
    *((lambda m, kind=kind: state_of(m, kind), FlatbedError, said) for kind, said in REFUSED.items()),  # type: ignore[misc]
    (lambda m: state_of(m, flatbed.optim.Adam), TypeError, "Adam of flatbed.optim"),
    (lambda m: state_of(m, torch.optim.Adam, nn.Linear(2, 2)), ValueError, "'0' among its parameters"),
    (lambda m: state_of(m, torch.optim.ASGD).optInit(), FlatbedError, "ModelFactory before optInit"),
    (lambda m: rows_of(max_norm=1.0), ValueError, "max_norm"),
    (lambda m: rows_of(padding_idx=0), ValueError, "padding_idx"),
    (lambda m: rows_of(scale_grad_by_freq=True), ValueError, "scale_grad_by_freq"),
    (lambda m: SpeedTorch.PytorchModelFactory(m[0], N, DIM, deviceType="tpu"), RuntimeError, "tpu"),
    (lambda m: SpeedTorch.ModelFactory(m[0], N, DIM + 1), ValueError, "embed_dimension"),
    (lambda m: SpeedTorch.ModelFactory(m[0], N, DIM, datatype="float64"), ValueError, "torch.float64"),
    (lambda m: SpeedTorch.COM(10, "uint33"), ValueError, "'float32'.*found 'uint33'"),
]


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTORS)
def test_arguments_that_do_not_fit(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(nn.Sequential(nn.Embedding(4, DIM)))


# ---- methods


def with_rows(name: str, folder: Path, *, init: bool = True) -> Any:
    """A switcher, a matrix of counts or a gadget, with rows."""
    model = nn.ModuleDict({"u": nn.Embedding(4, DIM)})
    on_disk = {"diskname": f"{folder}/rows"} if name.endswith("MM") else {}
    np.save(folder / "data.npy", np.ones((N, DIM), np.float32))
    if "Optimizer" in name:
        optimizer = torch.optim.Adam(model.parameters())
        made = getattr(SpeedTorch, name)(optimizer, N, DIM, model, "u", **on_disk)
    elif "Model" in name:
        made = getattr(SpeedTorch, name)(model["u"], N, DIM, **on_disk)
    else:
        given = N if "COM" in name else folder / "data.npy"
        made = getattr(SpeedTorch, name)(given, **on_disk if "COM" in name else {})
    first = {"Optimizer": "optInit", "Model": "zerosInit", "COM": "comInit", "Gadget": "gadgetInit"}
    if init:
        getattr(made, next(method for kind, method in first.items() if kind in name))()
    return made


SWITCHERS = ("ModelFactory", "ModelFactoryMM", "OptimizerFactory", "OptimizerFactoryMM")
MATRICES, GADGETS = ("COM", "COMMM"), ("DataGadget", "DataGadgetMM")
ALL = (*SWITCHERS, *MATRICES, *GADGETS)
WRONG: list[tuple[tuple[str, ...], str, tuple[Any, ...], type[Exception], str]] = [
    (ALL, "saveCupy", ("{}/no/x",), FileNotFoundError, r"no/x"),
    (ALL, "loadCupy", ("{}/no",), FileNotFoundError, r"no\.npy"),
    (("ModelFactoryMM", "COMMM"), "openFile", ("{}/no",), FileNotFoundError, r"/no"),
    (SWITCHERS, "beforeForwardPass", ([0, N],), IndexError, rf"id {N} .*0 to {N - 1}"),
    (SWITCHERS, "beforeForwardPass", (np.ones(1),), TypeError, r"integers.*float64"),
    (SWITCHERS, "saveTorch", ("{}/no/x",), RuntimeError, r"no.* does not exist"),
    (SWITCHERS, "loadTorch", ("{}/no.pt",), FileNotFoundError, r"no\.pt"),
    (("ModelFactory",), "uniformDistributionInit", (1, -1), ValueError, r"low=1.*high"),
    (("ModelFactory",), "normalDistributionInit", (0, -1), ValueError, r"std=-1"),
    ((*MATRICES, *GADGETS), "getData", ([0, N],), IndexError, rf"index {N} .*size {N}"),
    ((*MATRICES, *GADGETS), "getData", ([0.5],), IndexError, r"indices must be long"),
    ((*MATRICES, *GADGETS), "insertData", (np.ones((1, 3)), [1]), RuntimeError, r"shape mismatch.*\[3\]"),
    (MATRICES, "loadCupy", ("{}/data",), ValueError, rf"\({N}, {N}\); found \({N}, {DIM}\)"),
    (MATRICES, "addCounts", ([1], [N]), IndexError, rf"id {N} .*0 to {N - 1}"),
    (MATRICES, "addCounts", ([1, 2], [0]), ValueError, r"2 rows, 1 columns"),
]


@pytest.mark.parametrize(
    ("name", "method", "given", "error", "message"),
    [(name, *rest) for names, *rest in WRONG for name in names],
)
def test_wrong_arguments_change_nothing(
    name: str, method: str, given: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    made = with_rows(name, tmp_path)
    before = made.getNumpyVersion()
    with pytest.raises(error, match=message):
        getattr(made, method)(*[one.format(tmp_path) if isinstance(one, str) else one for one in given])
    np.testing.assert_equal(made.getNumpyVersion(), before)
    made.close()


@pytest.mark.parametrize("name", ALL)
def test_calls_before_an_init(name: str, tmp_path: Path) -> None:
    made = with_rows(name, tmp_path, init=False)
    ids = {"getData": ([1],), "addCounts": ([1], [1]), "beforeForwardPass": ([1],), "saveCupy": ("rows",)}
    for method in ("getNumpyVersion", "getTorchVar", "getCupyMM", "getEntries", "checkpoint", *ids):
        if hasattr(made, method):
            with pytest.raises(FlatbedError, match=rf"{name} has no .*: call \w+Init"):
                getattr(made, method)(*ids.get(method, ()))


# ---- calls that were left out, or are in the wrong order


def seen(switcher: Any) -> Any:
    """Rows, or the state of all rows."""
    return np.array(switcher.CUPYcorpi if "Optimizer" in type(switcher).__name__ else switcher.getCupyVar())


NEW = "without a beforeForwardPass.*nothing was written"
OTHER = "with other ids than beforeForwardPass.*nothing was written"
LOST = "lose .*call afterOptimizerStep"
CALLS = [
    ("rows.after 1 2", NEW),
    ("state.after 1 2", NEW),
    ("train 1 2, rows.after 1 2", NEW),
    ("step 1 2, rows.zerosInit, rows.after 1 2", NEW),
    ("step 1 2, state.optInit, state.after 1 2", NEW),
    ("step 1 2, rows.after 1 3", OTHER),
    ("step 1 2, rows.after 2 1", OTHER),
    ("step 1 2, state.after 1 2 2", OTHER),
    ("step 1 2, state.after 1 2, rows.before 5 6", LOST),
    ("step 1 2, rows.after 1 2, state.before 5 6", LOST),
    ("train 3 2, step 1 2, state.after 1 2, rows.before 1 2", LOST),
    ("train 1 2, rows.before 3 4, learn, rows.after 3 4", "other rows in OptimizerFactory"),
    ("train 1 2, state.before 3 4, learn, state.after 3 4", "other rows in ModelFactory"),
    ("step 1 2, state.optInit, rows.after 1 2", "other rows in OptimizerFactory"),
]


@pytest.mark.parametrize(("calls", "message"), CALLS)
def test_the_last_call_would_mix_up_rows(calls: str, message: str) -> None:
    made = loop()
    *first, last = calls.split(", ")
    made.play(*first)
    before = [seen(switcher) for switcher in made[2:]]
    with pytest.raises(FlatbedError, match=message):
        made.play(last)
    assert all(map(np.array_equal, before, [seen(switcher) for switcher in made[2:]]))
    if message == LOST:
        made.play(last)  # a second call drops the step


@pytest.mark.parametrize(
    "calls",
    [
        "step 1 2, state.after 1 2, rows.after 1 2, train 7 8",
        "train 1 2, before 1 2, before 5 6, optimizer.zero_grad, optimizer.step, train 7 8",
        "train 1 2, state.before 7 8, rows.before 7 8, rows.before 7 8, learn, after 7 8",
        "step 1 2, state.close, rows.after 1 2, rows.before 7 8, learn, rows.after 7 8",
    ],
)
def test_calls_that_are_right(calls: str) -> None:
    """Reading other rows, steps without a gradient, and training after the state's switcher is closed."""
    made = loop()
    made.play(*calls.split(", "))
    assert (made.rows.getNumpyVersion() != start()[0].numpy()).any(1).nonzero()[0].tolist() == [1, 2, 7, 8]


def test_ids_that_were_changed_in_place() -> None:
    rows, ids = loop().rows, np.array([1, 2], dtype=np.int64)
    rows.beforeForwardPass(ids)
    ids[0] = 5
    with pytest.raises(FlatbedError, match=OTHER):
        rows.afterOptimizerStep(ids)


def test_two_switchers_of_one_optimizer_or_variable() -> None:
    made = loop()
    again = SpeedTorch.OptimizerFactory(made.optimizer, N, DIM, nn.Sequential(made.embedding), "0")
    again.optInit()
    made._replace(state=again).train([3, 4])
    made.state.beforeForwardPass([3, 4])
    again.beforeForwardPass([3, 4])
    with pytest.raises(FlatbedError, match="another switcher"):
        made.state.afterOptimizerStep([3, 4])
    other = SpeedTorch.ModelFactory(made.embedding, N, DIM)
    other.zerosInit()
    made.rows.beforeForwardPass([1, 2])
    other.beforeForwardPass([1, 2])
    with pytest.raises(FlatbedError, match=r"another switcher.*nothing was written"):
        made.rows.afterOptimizerStep([1, 2])
    assert made.rows.getNumpyVersion()[1:3].any()


# ---- gradients


def test_several_forward_and_backward_passes() -> None:
    made = loop(4, torch.optim.SGD)
    with torch.inference_mode():
        made.rows.beforeForwardPass([5, 6, 7, 8])
    made.rows.beforeForwardPass([1, 1, 3, 4])
    losses = [made.embedding(torch.arange(4)).sum() for _ in range(3)]
    made.state.beforeForwardPass([1, 1, 3, 4])
    losses[2].backward(retain_graph=True)
    losses[2].backward()
    (losses[0] + losses[1]).backward()
    weight = made.embedding.weight
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [8, 8, 4, 4]
    grad = torch.autograd.grad(made.embedding(torch.arange(2)).sum(), weight)[0]
    assert grad[:, 0].tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_an_earlier_batch(sparse: bool) -> None:
    """They are of rows that the variable no longer holds."""
    made = loop(3, torch.optim.SGD, sparse=sparse)
    made.rows.beforeForwardPass([1, 2, 3])
    old, again = (made.embedding(torch.arange(3)).sum() for _ in range(2))
    made.rows.beforeForwardPass([1, 2, 3])
    again.backward()
    made.rows.beforeForwardPass([4, 5, 6])
    with pytest.raises(FlatbedError, match="zero_grad"):
        made.embedding(torch.arange(3)).sum().backward()
    made.optimizer.zero_grad()
    with pytest.raises(FlatbedError, match=r"earlier batch.*before the next beforeForwardPass"):
        old.backward()
    made.backward(3)
    made.optimizer.step()
    made.rows.afterOptimizerStep([4, 5, 6])


# ---- state and files


def test_state_that_was_loaded(tmp_path: Path) -> None:
    made = loop()
    made.state.saveCupy(tmp_path / "state")
    made.state.loadCupy(tmp_path / "state")
    with pytest.raises(FlatbedError, match="state dict"):
        made.state.beforeForwardPass([1])
    made.state.optInit()
    made.play("train 1 2", "step 1 2")
    made.state.loadCupy(tmp_path / "state")
    with pytest.raises(FlatbedError, match=NEW):
        made.state.afterOptimizerStep([1, 2])


def test_files_that_are_not_loaded(tmp_path: Path) -> None:
    """Files of another shape, or with objects, change nothing."""
    rows, fresh = loop().rows, SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), N, DIM, f"{tmp_path}/rows")
    np.save(tmp_path / "small.npy", np.ones((3, DIM), np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    torch.save(Loop, tmp_path / "strange.pt")
    for switcher in (rows, fresh):
        with pytest.raises(ValueError, match=rf"expected \(1, {N}, {DIM}\)"):
            switcher.loadCupy(tmp_path / "small.npy")
        with pytest.raises(ValueError, match="objects"):
            switcher.loadCupy(tmp_path / "objects.npy")
        with pytest.raises(pickle.UnpicklingError):
            switcher.loadTorch(tmp_path / "strange.pt")
    assert np.array_equal(rows.getNumpyVersion(), start()[0].numpy())
    with pytest.raises(FlatbedError, match="no rows yet"):
        fresh.beforeForwardPass([1, 2])
    assert not list(tmp_path.glob("*.bed"))
