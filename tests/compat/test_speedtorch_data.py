"""All rows as arrays and files, data gadgets, and co-occurrence matrices."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed
import flatbed.compat.speedtorch as SpeedTorch
from flatbed import FlatbedError
from tests.compat.speedtorch_models import DIM, STORAGES, N, loop

GADGETS = (SpeedTorch.DataGadget, SpeedTorch.DataGadgetMM)


IDS = [2, 30, 2]


# ---- rows of switchers


def save(switcher: Any, method: str, path: Path) -> None:
    if method == "File":
        switcher.checkpoint()
        shutil.copy(switcher.fileName, path)
    else:
        getattr(switcher, f"save{method}")(path)


@pytest.mark.parametrize(
    ("storage", "method"), [("disk", "File"), *((s, m) for s in STORAGES for m in ("Cupy", "Torch"))]
)
def test_training_continues_from_files(storage: str, method: str, tmp_path: Path) -> None:
    made, more = (loop(3, storage=storage, folder=tmp_path) for _ in range(2))
    made.train(IDS)
    more.train([1, 2, 3])
    for i, switcher in enumerate(made[2:], 2):
        save(switcher, method, tmp_path / f"{i}.npy")
        getattr(more[i], "openFile" if method == "File" else f"load{method}")(tmp_path / f"{i}.npy")
    more.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.train(IDS)
    more.train(IDS)
    assert np.array_equal(made.rows.getNumpyVersion(), more.rows.getNumpyVersion())
    for array, other in zip(made.state.CUPYcorpi, more.state.CUPYcorpi, strict=True):
        assert np.array_equal(array, other)
        assert array.any(axis=1).nonzero()[0].tolist() == [2, 30]
    for switcher in (*made[2:], *more[2:]):
        switcher.close()


def test_files_are_those_of_numpy_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, rows, state = loop(3, storage="host")
    rows.saveCupy()  # as diskname
    assert np.array_equal(np.load("variable.npy"), rows.getNumpyVersion())
    state.saveCupy("state.npy")
    assert np.load("state.npy").shape == (2, N, DIM)
    rows.saveTorch("rows.pt")
    assert torch.equal(torch.load("rows.pt"), torch.from_numpy(rows.getNumpyVersion()))
    fresh = SpeedTorch.ModelFactory(nn.Embedding(3, DIM), N, DIM)
    fresh.loadCupy()  # before any init
    assert np.array_equal(fresh.getNumpyVersion(), rows.getNumpyVersion())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.pt", "state.npy", "variable.npy"]


@pytest.mark.parametrize("storage", STORAGES)
def test_an_optimizer_without_state_has_empty_arrays_and_files(storage: str, tmp_path: Path) -> None:
    made = loop(3, torch.optim.SGD, storage=storage, folder=tmp_path)
    made.train(IDS)
    for method in ("Cupy", "Torch"):
        getattr(made.state, f"save{method}")(tmp_path / f"{method}.npy")
        getattr(made.state, f"load{method}")(tmp_path / f"{method}.npy")
    assert np.load(tmp_path / "Cupy.npy").shape == (0, N, DIM)
    assert made.state.getNumpyVersion() == made.state.getTorchVar() == made.state.getCupyVar() == {}
    assert made.state.CUPYcorpi == made.state.optVarList == []
    made.train(IDS)
    for switcher in made[2:]:
        if storage == "disk":
            switcher.checkpoint()
        switcher.close()


def test_names_of_arrays() -> None:
    _, _, rows, state = loop(3, storage="host")
    rows.getTorchVar()[5] = 4.0  # the memory itself
    for array in (rows.getCupyVar(), rows.CUPYcorpus, rows.CUPYmemmap, rows.getCupyMM(), rows.pytorchGPUVar):
        assert (array[5] == 4.0).all()
    assert list(state.getCupyVar()) == state.optVarList == ["exp_avg", "exp_avg_sq"]
    assert np.array_equal(state.CUPYcorpi[1], state.getTorchVar()["exp_avg_sq"])
    assert state.optimizerKey == 0


def test_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.ModuleDict({"u_embeddings": nn.Embedding(3, DIM)})
    optimizer = torch.optim.Adagrad(model.parameters())
    state = SpeedTorch.OptimizerFactoryMM(optimizer, N, DIM, model, "u_embeddings")
    state.optInit()
    first, second = (SpeedTorch.ModelFactoryMM(model["u_embeddings"], N, DIM) for _ in range(2))
    for rows in (first, second):
        rows.normalDistributionInit(0.0, 1.0)
    names = [switcher.fileName for switcher in (state, first, second)]
    assert names == ["u_embeddingsAdagrad0.bed", "variable0.bed", "variable1.bed"]
    expected = first.getNumpyVersion()
    assert np.array_equal(first.getTorchVar(), expected)
    for switcher in (state, first, second):
        switcher.close()
    emb = flatbed.Embedding(N, DIM, storage="disk", path="variable0.bed")
    assert np.array_equal(emb.read_rows(range(N)).numpy(), expected)
    emb.table.close()


# ---- data gadgets


@pytest.mark.parametrize("kind", GADGETS)
@pytest.mark.parametrize("dtype", ["float64", "int32", "uint32", "uint8", "bool", "float16", "complex64"])
def test_gadgets_return_parts(kind: Any, dtype: str, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 200, (9, 2, 3)).astype(dtype)
    np.save(tmp_path / "data.npy", array)
    gadget = kind(str(tmp_path / "data"), CPUPinn=dtype == "int32")
    gadget.gadgetInit()
    for index in (
        np.array([8, 0, 8], dtype=np.int32),
        [1, 2],
        np.array([[3], [4]]),
        torch.tensor([7]),
        (slice(0, 6), slice(None), 1),
        slice(None, None, 2),
        4,
        (np.array([1, 2]), 0),
        (torch.tensor([1, 2]), 0),
        array[:, 0, 0] != 0,
    ):
        found = gadget.getData(indexes=index)
        expected = array[np.asarray(index) if isinstance(index, torch.Tensor) else index]
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.cpu().numpy(), expected)
    assert np.array_equal(gadget.getNumpyVersion(), array)
    gadget.saveCupy(tmp_path / "again")
    assert np.array_equal(np.load(tmp_path / "again.npy"), array)
    assert np.load(tmp_path / "again.npy").dtype == array.dtype


@pytest.mark.parametrize("kind", GADGETS)
def test_gadgets_replace_parts(kind: Any, tmp_path: Path) -> None:
    array = np.zeros((5, 3), dtype=np.float32)
    np.save(tmp_path / "data.npy", array)
    gadget = kind(tmp_path / "data.npy")
    gadget.gadgetInit()
    gadget.insertData(dataObject=torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3]), indexes=[4, 1, 4])
    gadget.insertData(torch.full((2,), 7.0, dtype=torch.bfloat16), (slice(2, 4), 0))
    gadget.insertData(np.full(3, 5.0), 0)
    array[[4, 1]] = [[3.0], [2.0]]
    array[2:4, 0] = 7.0
    array[0] = 5.0
    assert np.array_equal(gadget.getNumpyVersion(), array)
    with pytest.raises(IndexError, match="indices must be long"):
        gadget.insertData([0, 1], np.ones((2, 3)))
    assert np.array_equal(gadget.getCupyVar(), array)
    np.save(tmp_path / "other.npy", array[:2])
    gadget.loadCupy(tmp_path / "other.npy")
    assert np.array_equal(gadget.getData([1]).cpu().numpy(), array[[1]])


def test_gadgets_on_disk_write_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.zeros((5, 3)))
    gadget = SpeedTorch.DataGadgetMM(path)
    gadget.gadgetInit()
    gadget.insertData(torch.ones(1, 3, dtype=torch.float64), [2])
    gadget.close()
    assert np.load(path)[2].all()
    gadget.gadgetInit()
    gadget.saveCupy(path)  # the file itself
    gadget.insertData(torch.ones(1, 3), [3])
    gadget.checkpoint()
    assert np.load(path)[2:4].all()
    monkeypatch.setattr("os.access", lambda *_: False)
    gadget.gadgetInit()
    assert gadget.getData([1]).tolist() == [[0.0, 0.0, 0.0]]
    with pytest.raises(FlatbedError, match="only be read"):
        gadget.insertData(np.ones((1, 3)), [2])


@pytest.mark.parametrize("kind", GADGETS)
def test_a_file_is_replaced_when_the_new_one_is_complete(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved.npy"
    for path in (saved, tmp_path / "data.npy"):
        np.save(path, np.ones((5, 3)))
    gadget = kind(tmp_path / "data.npy")
    gadget.gadgetInit()
    gadget.insertData(np.zeros(3), 2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="No space left"):
        gadget.saveCupy(saved)
    assert (np.load(saved) == 1.0).all()


def test_arrays_of_other_orders() -> None:
    array = np.arange(6.0).reshape(2, 3)
    for other in (array.astype(">f8"), np.asfortranarray(array)):
        gadget = SpeedTorch.DataGadget(other)
        gadget.gadgetInit()
        assert gadget.getData([1]).tolist() == [[3.0, 4.0, 5.0]]


def test_pinned_memory() -> None:
    memory = SpeedTorch.my_pinned_allocator(100)
    assert isinstance(memory, SpeedTorch.PMemory)
    assert memory.size == 100
    assert memory.ptr != 0


# ---- co-occurrence matrices


def matrices(folder: Path) -> list[Any]:
    return [
        SpeedTorch.COM(6),
        SpeedTorch.COM(6, "float32", True),
        SpeedTorch.COMMM(6, f"{folder}/COM"),
        SpeedTorch.PytorchCOM(6, deviceType="cpu"),
        SpeedTorch.GPUPytorchCOM(6),
        SpeedTorch.CPUPytorchCOM(6, torch.int64),
    ]


def test_matrices_count(tmp_path: Path) -> None:
    for matrix in matrices(tmp_path):
        matrix.comInit()
        rows, columns = np.array([1, 1, 5, 1], np.int32), np.array([2, 2, 0, 3], np.int32)
        matrix.addCounts(rows, columns)
        matrix.addCounts([5], [5], [40])
        matrix.addCounts([], [])
        expected = np.zeros((6, 6))
        np.add.at(expected, (rows, columns), 1)
        expected[5, 5] = 40
        assert np.array_equal(matrix.getNumpyVersion(), expected)
        assert np.array_equal(matrix.CUPYCom, expected)
        found = matrix.getEntries()
        assert [one.tolist() for one in found] == [[1, 1, 5, 5], [2, 3, 0, 5], [2, 1, 1, 40]]
        assert found[2].dtype == matrix.getNumpyVersion().dtype
        assert matrix.getData([1]).cpu().numpy().tolist() == [[0, 0, 2, 1, 0, 0]]
        matrix.saveCupy(tmp_path / "matrix.npy")
        matrix.loadCupy(tmp_path / "matrix.npy")
        assert np.array_equal(matrix.getNumpyVersion(), expected)
        matrix.close()


def test_matrices_on_disk_keep_their_counts(tmp_path: Path) -> None:
    matrix = SpeedTorch.COMMM(3, f"{tmp_path}/COM")
    matrix.comInit()
    matrix.addCounts([1, 1], [2, 2])
    matrix.checkpoint()
    assert matrix.fileName == f"{tmp_path}/COM0.npy"
    assert np.load(matrix.fileName)[1, 2] == 2
    matrix.close()
    again = SpeedTorch.COMMM(3, f"{tmp_path}/COM")
    again.openFile(tmp_path / "COM0.npy")
    again.addCounts([1], [2])
    assert again.getEntries()[2].tolist() == [3]
    again.comInit()
    assert again.fileName == f"{tmp_path}/COM1.npy"
    assert np.load(tmp_path / "COM0.npy")[1, 2] == 3


@pytest.mark.parametrize(
    ("datatype", "counts", "message"),
    [
        ("float32", [-0.5], r"-0.5"),
        ("float32", [float("nan")], r"nan"),
        ("uint32", [2**32 + 1], r"4294967297 .*uint32 .* 4294967295"),
        ("uint32", [0.5], r"0.5 .*uint32"),
        ("int32", [2**31 - 1, 1], r"2147483648 .*int32"),
        ("uint8", [200, 56], r"256 .*uint8"),
        ("int64", np.array([2**63], np.uint64), r"int64"),
        ("float16", [2048, 1], r"2049 .*float16"),
        ("float32", [2**24, 1], r"16777217 .*float32"),
    ],
)
def test_sums_that_do_not_fit(datatype: str, counts: Any, message: str) -> None:
    matrix = SpeedTorch.COM(3, datatype)
    matrix.comInit()
    matrix.addCounts([2], [2])
    with pytest.raises(ValueError, match=message):
        matrix.addCounts([2, *[0] * len(counts)], [2, *[1] * len(counts)], np.insert(counts, 0, 1))
    assert [one.tolist() for one in matrix.getEntries()] == [[2], [2], [1]]


def test_weights_of_counts(tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.full((3, 3), 0.5, np.float32))
    matrix = SpeedTorch.COM(3)
    matrix.comInit(CPUPinn=True)
    matrix.loadCupy(tmp_path / "weights.npy")
    matrix.addCounts([1, 1, 1], [2, 2, 0])
    matrix.addCounts([1, 1], [2, 2], [0.25, 0.125])
    assert matrix.getNumpyVersion()[1].tolist() == [1.5, 0.5, 2.875]
