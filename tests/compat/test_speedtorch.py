"""SpeedTorch's loop trains as nn.Embedding of all rows does, with any optimizer and storage."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed.compat.speedtorch as SpeedTorch
from tests.compat.speedtorch_models import (
    DENSE,
    DIM,
    REFUSED,
    SPARSE,
    STORAGES,
    Loop,
    N,
    Trained,
    factories,
    loop,
    start,
    switched,
    touched,
    values,
    whole,
)


@functools.cache
def trained(name: str, *, sparse: bool = False) -> Trained:
    kind, options = (SPARSE if sparse else DENSE)[name]
    return whole(kind, options, sparse=sparse)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", DENSE)
def test_training_equals_that_of_all_rows(name: str, storage: str, tmp_path: Path) -> None:
    """Results are bitwise equal: repeats are summed in the order of nn.Embedding."""
    losses, u, v, state = switched(*DENSE[name], storage, tmp_path)
    expected = trained(name)
    assert losses == expected.losses
    assert torch.equal(u, expected.u)
    assert torch.equal(v, expected.v)
    assert set(state) == set(expected.state)
    for kept, found in state.items():
        # the reference's first step decays all rows a little, and averages of ASGD begin with those
        rtol = 1e-4 if name == "ASGD averaging" else 0.0
        assert torch.allclose(found[touched()], expected.state[kept][touched()], rtol=rtol, atol=0.0), kept
    assert not torch.equal(u, start()[0])


def test_every_optimizer_of_torch_is_known() -> None:
    """Each is either compared here or refused."""
    known = {kind for kind, _ in (*DENSE.values(), *SPARSE.values())} | set(REFUSED)
    there = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    there = {kind for kind in there if issubclass(kind, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    assert there <= known


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own Adagrad
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name: str, storage: str, tmp_path: Path) -> None:
    kind, options = SPARSE[name]
    # torch's own momentum of sparse gradients moves rows of earlier batches, so dense ones are compared with
    expected = trained(name, sparse=kind is not torch.optim.SGD)
    losses, u, v, _ = switched(kind, options, storage, tmp_path, sparse=True)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert torch.allclose(u, expected[1], rtol=1e-6, atol=1e-6)
    assert torch.allclose(v, expected[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "variation",
    [
        {"spare": 3},
        {"spare": -20},
        {"as_ids": lambda ids: ids.tolist()},
        {"as_ids": torch.from_numpy},
        {"as_ids": lambda ids: ids.astype(np.uint64)},
        {"as_ids": np.asfortranarray},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
    ],
    ids=["more slots", "fewer slots", "lists", "tensors", "uint64", "fortran", "fp64", "bf16", "fp16"],
)
def test_slots_ids_and_datatypes_of_any_kind(variation: dict[str, Any], tmp_path: Path) -> None:
    dtype = variation.get("dtype", torch.float32)
    found = switched(*DENSE["Adamax"], "host", tmp_path, **variation)
    expected = whole(*DENSE["Adamax"], dtype=dtype)
    assert found.losses == expected.losses
    assert torch.equal(found.u.to(dtype), expected.u)
    assert torch.equal(found.v.to(dtype), expected.v)


@pytest.mark.parametrize("sparse", [False, True])
def test_all_slots_of_a_row_take_the_same_step(sparse: bool) -> None:
    embedding, optimizer, rows, _ = loop(6, torch.optim.SGD, sparse=sparse, lr=1.0)
    ids = [7, 9, 7, 7, 1, 9]
    rows.beforeForwardPass(ids)
    slots = torch.tensor([2, 3, 4, 3])  # of row 7 twice and once again, and of row 1; none of row 9
    embedding(slots).sum().backward()
    optimizer.step()
    moved = start()[0][ids] - embedding.weight.detach()
    assert moved[:, 0].tolist() == pytest.approx([3, 0, 3, 3, 1, 0], abs=1e-6)
    rows.afterOptimizerStep(ids)
    after = torch.from_numpy(rows.getNumpyVersion())
    assert torch.equal(after[ids], embedding.weight.detach())
    rest = [row for row in range(N) if row not in ids]
    assert torch.equal(after[rest], start()[0][rest])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_accumulate_over_the_same_ids(sparse: bool, set_to_none: bool) -> None:
    embedding, optimizer, rows, _ = loop(6, torch.optim.SGD, sparse=sparse, lr=1.0)
    for ids in ([3, 3, 5, 5, 5, 2], [8, 8, 8, 8, 8, 8]):
        rows.beforeForwardPass(ids)
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            (embedding(torch.arange(6)).sum() + embedding(torch.arange(4)).sum()).backward()
        optimizer.step()
        rows.afterOptimizerStep(ids)
    moved = (start()[0] - torch.from_numpy(rows.getNumpyVersion()))[:, 0]
    assert moved[[3, 5, 2, 8]].tolist() == pytest.approx([8, 10, 2, 20], abs=1e-5)


def test_slots_without_a_row() -> None:
    for sparse in (False, True):
        embedding, _, rows, _ = loop(6, torch.optim.SGD, sparse=sparse)
        rows.beforeForwardPass([4, 4, 4, 4, 4, 0])
        rows.beforeForwardPass([1, 2])
        assert not embedding.weight[2:].any()
        with pytest.raises(IndexError, match=r"slots from 2 on.*2 ids for the 6 slots"):
            embedding(torch.arange(3)).sum().backward()
        with torch.no_grad():
            embedding.weight.fill_(5.0)
        rows.afterOptimizerStep([1, 2])
        after = torch.from_numpy(rows.getNumpyVersion())
        assert after[[1, 2]].eq(5.0).all()
        assert torch.equal(after[[0, 3, 4]], start()[0][[0, 3, 4]])


def test_first_values_of_state() -> None:
    """A skipped step leaves them, and they follow the options of a state dict, which makes new groups."""
    made = loop(2, torch.optim.Rprop, lr=0.25)
    made.before([1, 2])
    made.after([1, 2])
    assert np.array_equal(made.rows.getNumpyVersion(), start()[0].numpy())
    assert (made.state.getNumpyVersion()["step_size"] == 0.25).all()
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    made.optimizer.param_groups[0]["lr"] = 0.5
    made.state.optInit()
    assert (made.state.getNumpyVersion()["step_size"] == 0.5).all()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_first_values_are_rounded_to_the_datatype(dtype: torch.dtype, sparse: bool) -> None:
    embedding = nn.Embedding(2, DIM, dtype=dtype, sparse=sparse)
    optimizer = torch.optim.Adagrad(embedding.parameters(), initial_accumulator_value=0.3)
    state = SpeedTorch.OptimizerFactory(optimizer, N, DIM, nn.Sequential(embedding), "0", dtype)
    state.optInit()
    assert torch.from_numpy(state.getNumpyVersion()["sum"]).eq(torch.tensor(0.3, dtype=dtype)).all()


def test_copies_and_files_of_a_model_have_no_switchers(tmp_path: Path) -> None:
    embedding, _, rows, _ = loop(2, torch.optim.SGD)
    rows.beforeForwardPass([1, 1])
    twin = copy.deepcopy(embedding)
    twin(torch.arange(2)).sum().backward()
    assert twin.weight.grad is not None
    assert twin.weight.grad.eq(1.0).all()
    torch.save(embedding, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded.weight, embedding.weight)


def test_a_model_is_freed_with_its_switchers() -> None:
    embedding, _, rows, _ = loop(2, torch.optim.SGD)
    rows.beforeForwardPass([1, 1])
    gone = weakref.ref(embedding.weight)
    del embedding, rows, _
    gc.collect()
    assert gone() is None


def test_dummy_inputs_are_slots() -> None:
    rows = loop().rows
    assert rows.variableTransformer(3, 2).tolist() == [[0, 1], [2, 3], [4, 5]]
    positive, negative = rows.variableTransformer(2, 1, 3)
    assert positive.tolist() == [[0], [1]]
    assert negative.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert positive.dtype == negative.dtype == np.int64


@pytest.mark.parametrize("storage", STORAGES)
def test_first_values_of_rows(storage: str, tmp_path: Path) -> None:
    rows = factories(storage, tmp_path)[0](nn.Embedding(2, DIM))

    def begin(method: str, *given: Any) -> Any:
        torch.manual_seed(1)
        getattr(rows, method)(*given)
        found = rows.getNumpyVersion()
        if storage == "disk":
            name = rows.fileName
            rows.close()
            rows.openFile(name)
            assert np.array_equal(rows.getNumpyVersion(), found)
        return found

    uniform = begin("uniformDistributionInit", -1.0, 3.0)
    assert uniform.shape == (N, DIM)
    assert -1.0 <= uniform.min() < -0.8 < 2.8 < uniform.max() < 3.0
    assert np.array_equal(begin("uniformDistributionInit", -1.0, 3.0), uniform)
    normal = begin("normalDistributionInit", 5.0, 0.5)
    assert abs(normal.mean() - 5.0) < 0.1
    assert abs(normal.std() - 0.5) < 0.1
    assert not begin("zerosInit").any()
    assert (begin("customInit", nn.init.constant_, 0.5) == 0.5).all()
    rows.close()


def test_both_orders_of_arguments() -> None:
    embedding = nn.Embedding(2, DIM)
    by_seed = SpeedTorch.ModelFactory(embedding, N, DIM, "mine", "float32", True)
    later = SpeedTorch.ModelFactory(embedding, N, DIM, "float32", True)
    typed = SpeedTorch.ModelFactory(embedding, N, DIM, torch.float)
    assert (by_seed.diskname, by_seed.CPUPinn, later.CPUPinn, typed.CPUPinn) == ("mine", True, True, False)
    assert by_seed.datatype == later.datatype == typed.datatype == torch.float32


MODEL = "model_variable, total_classes, embed_dimension"
OPTIMIZER = "given_optimizer, total_classes, embed_dimension, model, variable_name, dtype='float32'"
SIGNATURES = {
    "ModelFactory": f"{MODEL}, diskname='variable', datatype='float32', CPUPinn=False",
    "ModelFactoryMM": f"{MODEL}, diskname='variable', datatype='float32', CPUPinn=False",
    "PytorchModelFactory": f"{MODEL}, datatype='float32', deviceType='cuda', pinType=False",
    "GPUPytorchModelFactory": f"{MODEL}, datatype='float32'",
    "CPUPytorchModelFactory": f"{MODEL}, datatype='float32'",
    "OptimizerFactory": f"{OPTIMIZER}, CPUPinn=False",
    "OptimizerFactoryMM": f"{OPTIMIZER}, CPUPinn=False, diskname=None",
    "PytorchOptimizerFactory": f"{OPTIMIZER}, deviceType='cuda', pinType=False",
    "GPUPytorchOptimizerFactory": OPTIMIZER,
    "CPUPytorchOptimizerFactory": OPTIMIZER,
    "DataGadget": "fileName, CPUPinn=False",
    "DataGadgetMM": "fileName, CPUPinn=False",
    "COM": "total_classes, datatype='uint32', CPUPinn=False",
    "COMMM": "total_classes, diskname='COM', datatype='uint32', CPUPinn=False",
    "PytorchCOM": "total_classes, datatype='int32', deviceType='cuda', pinType=False",
    "GPUPytorchCOM": "total_classes, datatype='int32'",
    "CPUPytorchCOM": "total_classes, datatype='int32'",
    "PMemory": "size",
    "my_pinned_allocator": "bsize",
}


def test_signatures_are_those_of_speedtorch() -> None:
    assert set(SIGNATURES) == set(SpeedTorch.__all__)
    for name, expected in SIGNATURES.items():
        found = inspect.signature(getattr(SpeedTorch, name)).parameters.values()
        assert ", ".join(str(one.replace(annotation=one.empty)) for one in found) == expected


@pytest.mark.parametrize(
    ("prefix", "options"),
    [
        ("GPUPytorch", {}),
        ("CPUPytorch", {}),
        ("Pytorch", {}),
        ("Pytorch", {"deviceType": "cpu", "pinType": True}),
    ],
)
def test_variants_train_alike(prefix: str, options: dict[str, Any]) -> None:
    embedding = nn.Embedding(3, DIM)
    model = nn.Sequential(embedding)
    optimizer = torch.optim.RMSprop(model.parameters())
    rows = getattr(SpeedTorch, f"{prefix}ModelFactory")(embedding, N, DIM, **options)
    state = getattr(SpeedTorch, f"{prefix}OptimizerFactory")(optimizer, N, DIM, model, "0", **options)
    rows.customInit(values(start()[0]))
    state.optInit()
    Loop(embedding, optimizer, rows, state).train(np.array([1, 4, 1]))
    assert state.getTorchVar()["square_avg"].any(1).nonzero().flatten().tolist() == [1, 4]
