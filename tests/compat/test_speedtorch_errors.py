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
from tests.compat.speedtorch_models import DIM, REFUSED, Loop, N, loop, start, values

# ---- constructors


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_are_not_element_wise(kind: Any) -> None:
    model = nn.Sequential(nn.Embedding(4, DIM))
    with pytest.raises(FlatbedError, match=REFUSED[kind]):
        SpeedTorch.OptimizerFactory(kind(model.parameters()), N, DIM, model, "0")


def test_optimizers_of_others() -> None:
    model = nn.Sequential(nn.Embedding(4, DIM))
    with pytest.raises(TypeError, match=r"Adam of flatbed.optim"):
        SpeedTorch.OptimizerFactory(flatbed.optim.Adam(model.parameters()), N, DIM, model, "0")
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="'0' among its parameters"):
        SpeedTorch.OptimizerFactory(other, N, DIM, model, "0")


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_options_about_slots(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        SpeedTorch.ModelFactory(nn.Embedding(4, DIM, **option), N, DIM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda e: SpeedTorch.PytorchModelFactory(e, N, DIM, deviceType="tpu"), "tpu"),
        (lambda e: SpeedTorch.ModelFactory(e, N, DIM + 1), "embed_dimension"),
        (lambda e: SpeedTorch.ModelFactory(e, N, DIM, datatype="float64"), "expected torch.float64"),
        (lambda e: SpeedTorch.COM(10, "uint33"), "'float32'.*found 'uint33'"),
    ],
)
def test_arguments_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        make(nn.Embedding(4, DIM))


def test_averages_need_the_weights() -> None:
    model = nn.Sequential(nn.Embedding(4, DIM))
    state = SpeedTorch.OptimizerFactory(torch.optim.ASGD(model.parameters()), N, DIM, model, "0")
    with pytest.raises(FlatbedError, match="ModelFactory before optInit"):
        state.optInit()


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


# ---- ids


def test_ids_of_before_and_after_must_be_the_same() -> None:
    made = loop(4)
    for switcher in (made.rows, made.state):
        with pytest.raises(FlatbedError, match="without a beforeForwardPass"):
            switcher.afterOptimizerStep([1, 2])
        switcher.beforeForwardPass([1, 2], [3])
        with torch.no_grad():
            made.embedding.weight.fill_(9.0)
        for other in (([1, 3], [3]), ([1, 2, 3, 3], None), ([2, 1], [3])):
            with pytest.raises(FlatbedError, match="other ids"):
                switcher.afterOptimizerStep(*other)
    assert np.array_equal(made.rows.getNumpyVersion(), start()[0].numpy())


def test_ids_that_were_changed_in_place() -> None:
    rows, ids = loop().rows, np.array([1, 2], dtype=np.int64)
    rows.beforeForwardPass(ids)
    ids[0] = 5
    with pytest.raises(FlatbedError, match="other ids"):
        rows.afterOptimizerStep(ids)


# ---- a switcher that was left out


@pytest.mark.parametrize("forgotten", ["rows", "state"])
def test_a_step_that_would_be_lost(forgotten: str) -> None:
    """The first call raises and changes nothing; the second one drops the step."""
    made = loop()
    lost, other = (made.rows, made.state) if forgotten == "rows" else (made.state, made.rows)

    def look() -> Any:
        found = lost.getNumpyVersion()
        return found["exp_avg"] if isinstance(found, dict) else found

    for ids in ([1, 2], [3, 2], [4, 1]):
        before = look()
        made.step(ids)
        other.afterOptimizerStep(ids)
        with pytest.raises(FlatbedError, match=r"lose .*call afterOptimizerStep"):
            lost.beforeForwardPass([5, 6])
        assert np.array_equal(before, look())
        if ids != [4, 1]:
            lost.afterOptimizerStep(ids)
            assert not np.array_equal(before, look())
    lost.beforeForwardPass([5, 6])


@pytest.mark.parametrize("used", ["rows", "state"])
def test_a_step_with_rows_and_state_of_different_ids(used: str) -> None:
    made = loop()
    made.train([1, 2])
    switcher, other = (made.rows, made.state) if used == "rows" else (made.state, made.rows)
    before = np.array(switcher.getCupyVar() if used == "rows" else switcher.CUPYcorpi)
    switcher.beforeForwardPass([3, 4])
    made.backward(2)
    made.optimizer.step()
    with pytest.raises(FlatbedError, match=rf"other rows in {type(other).__name__}.*nothing was written"):
        switcher.afterOptimizerStep([3, 4])
    assert np.array_equal(switcher.getCupyVar() if used == "rows" else switcher.CUPYcorpi, before)


def test_steps_and_reads_that_are_right() -> None:
    """Reading other rows, steps without a gradient, and training after the state's switcher is closed."""
    made = loop()
    before = made.rows.getNumpyVersion()
    made.train([1, 2])
    made.before([1, 2])
    made.before([5, 6])
    made.optimizer.zero_grad()
    made.optimizer.step()
    made.state.beforeForwardPass([1, 2])
    made.rows.beforeForwardPass([1, 2])
    made.rows.beforeForwardPass([1, 2])  # the state of these rows is still loaded
    made.backward(2)
    made.optimizer.step()
    made.state.close()
    made.rows.afterOptimizerStep([1, 2])
    made.rows.beforeForwardPass([7, 8])
    made.backward(2)
    made.optimizer.step()
    made.rows.afterOptimizerStep([7, 8])
    assert (made.rows.getNumpyVersion() != before).any(1).nonzero()[0].tolist() == [1, 2, 7, 8]


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


def test_a_gradient_that_an_earlier_batch_left() -> None:
    made = loop(3)
    made.rows.beforeForwardPass([1, 2, 3])
    made.embedding(torch.arange(3)).sum().backward()
    made.rows.beforeForwardPass([4, 5, 6])
    with pytest.raises(FlatbedError, match="zero_grad"):
        made.embedding(torch.arange(3)).sum().backward()


@pytest.mark.parametrize("sparse", [False, True])
def test_backward_of_an_earlier_forward_pass(sparse: bool) -> None:
    """Its gradient is of rows that the variable no longer holds."""
    made = loop(3, torch.optim.SGD, sparse=sparse)
    made.rows.beforeForwardPass([1, 2, 3])
    old, again = (made.embedding(torch.arange(3)).sum() for _ in range(2))
    made.rows.beforeForwardPass([1, 2, 3])
    again.backward()
    made.optimizer.zero_grad()
    made.rows.beforeForwardPass([4, 5, 6])
    with pytest.raises(FlatbedError, match=r"earlier batch.*before the next beforeForwardPass"):
        old.backward()
    made.backward(3)
    made.optimizer.step()
    made.rows.afterOptimizerStep([4, 5, 6])


# ---- state and files


@pytest.mark.parametrize("method", ["loadCupy", "loadTorch", "customInit", "zerosInit"])
def test_rows_that_were_replaced_in_between(method: str, tmp_path: Path) -> None:
    rows, other = loop().rows, torch.full((N, DIM), 3.0)
    np.save(tmp_path / "rows.npy", other.numpy())
    torch.save(other, tmp_path / "rows.pt")
    rows.beforeForwardPass([1, 2])
    given: dict[str, Any] = {"loadCupy": tmp_path / "rows", "loadTorch": tmp_path / "rows.pt"}
    given["customInit"] = values(other)
    getattr(rows, method)(*[given[method]] if method in given else [])
    with pytest.raises(FlatbedError, match="without a beforeForwardPass"):
        rows.afterOptimizerStep([1, 2])
    assert (rows.getNumpyVersion() == (0.0 if method == "zerosInit" else 3.0)).all()


def test_state_that_was_loaded(tmp_path: Path) -> None:
    made = loop()
    made.state.saveCupy(tmp_path / "state")
    made.state.loadCupy(tmp_path / "state")
    with pytest.raises(FlatbedError, match="state dict"):
        made.state.beforeForwardPass([1])
    made.state.optInit()
    made.train([1, 2])
    made.step([1, 2])
    made.state.loadCupy(tmp_path / "state")
    with pytest.raises(FlatbedError, match="without a beforeForwardPass"):
        made.state.afterOptimizerStep([1, 2])
    with pytest.raises(FlatbedError, match="other rows in OptimizerFactory"):
        made.rows.afterOptimizerStep([1, 2])


def test_rows_that_could_not_be_loaded(tmp_path: Path) -> None:
    rows = SpeedTorch.ModelFactoryMM(nn.Embedding(2, DIM), N, DIM, f"{tmp_path}/rows")
    np.save(tmp_path / "small.npy", np.ones((3, DIM), np.float32))
    with pytest.raises(ValueError, match=rf"expected \(1, {N}, {DIM}\)"):
        rows.loadCupy(tmp_path / "small.npy")
    with pytest.raises(FlatbedError, match="no rows yet"):
        rows.beforeForwardPass([1, 2])
    assert not list(tmp_path.glob("*.bed"))


def test_files_are_not_unpickled(tmp_path: Path) -> None:
    rows = loop().rows
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(ValueError, match="objects"):
        rows.loadCupy(tmp_path / "objects.npy")
    torch.save(Loop, tmp_path / "strange.pt")
    with pytest.raises(pickle.UnpicklingError):
        rows.loadTorch(tmp_path / "strange.pt")
    assert np.array_equal(rows.getNumpyVersion(), start()[0].numpy())
