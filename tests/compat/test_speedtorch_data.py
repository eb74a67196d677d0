"""Whole collections as arrays and files; data gadgets; co-occurrence matrices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed
import flatbed.compat.speedtorch as SpeedTorch
from flatbed.errors import FlatbedError
from tests.compat.speedtorch_models import DIM, HOMES, N, factories, start, values


def trained(home: str, folder: Path) -> tuple[nn.Embedding, torch.optim.Optimizer, Any, Any]:
    """A variable after one step, and its switchers."""
    embedding = nn.Embedding(3, DIM)
    model = nn.Sequential(embedding)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    make, make_state = factories(home, folder)
    rows, state = make(embedding), make_state(optimizer, model, "0")
    rows.customInit(values(start()[0]))
    state.optInit()
    step(embedding, optimizer, rows, state)
    return embedding, optimizer, rows, state


def step(embedding: nn.Embedding, optimizer: torch.optim.Optimizer, *switchers: Any) -> None:
    for switcher in switchers:
        switcher.beforeForwardPass([2, 30, 2])
    optimizer.zero_grad()
    embedding(torch.arange(3)).square().sum().backward()
    optimizer.step()
    for switcher in switchers:
        switcher.afterOptimizerStep([2, 30, 2])


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_saved_and_loaded(home: str, way: str, tmp_path: Path) -> None:
    """Another run goes on as this one does."""
    embedding, optimizer, rows, state = trained(home, tmp_path)
    names = [tmp_path / f"rows.{way}.npy", tmp_path / f"state.{way}.npy"]
    for switcher, name in zip((rows, state), names, strict=True):
        getattr(switcher, f"save{way}")(name)
    saved = copy.deepcopy(optimizer.state_dict())
    again, other, more, more_state = trained(home, tmp_path)
    step(again, other, more, more_state)  # they differ now
    for switcher, name in zip((more, more_state), names, strict=True):
        getattr(switcher, f"load{way}")(name)
    other.load_state_dict(saved)
    step(embedding, optimizer, rows, state)
    step(again, other, more, more_state)
    assert np.array_equal(rows.getNumpyVersion(), more.getNumpyVersion())
    for name, array in state.getNumpyVersion().items():
        assert np.array_equal(array, more_state.getNumpyVersion()[name])
        assert array[[2, 30]].all()
        assert not array[3:30].any()
    for switcher in (rows, state, more, more_state):
        switcher.close()


def test_files_are_numpys_and_torchs(tmp_path: Path) -> None:
    _, _, rows, state = trained("host", tmp_path)
    rows.saveCupy(tmp_path / "rows")
    assert np.array_equal(np.load(tmp_path / "rows.npy"), rows.getNumpyVersion())
    state.saveCupy(tmp_path / "state.npy")
    assert np.load(tmp_path / "state.npy").shape == (2, N, DIM)
    rows.saveTorch(tmp_path / "rows.pt")
    assert torch.equal(torch.load(tmp_path / "rows.pt"), torch.from_numpy(rows.getNumpyVersion()))
    fresh = SpeedTorch.ModelFactory(nn.Embedding(3, DIM), N, DIM)
    fresh.loadCupy(tmp_path / "rows")  # before any init
    assert np.array_equal(fresh.getNumpyVersion(), rows.getNumpyVersion())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.npy", "rows.pt", "state.npy"]


def test_arrays_over_the_memory(tmp_path: Path) -> None:
    _, _, rows, state = trained("host", tmp_path)
    array = rows.getCupyVar()
    assert isinstance(array, np.ndarray)
    array[5] = 4.0
    assert (rows.getNumpyVersion()[5] == 4.0).all()
    assert (rows.CUPYcorpus[5] == 4.0).all()
    assert rows.getTorchVar()[5].eq(4.0).all()
    copied = rows.getNumpyVersion()
    copied[5] = 0.0
    assert (array[5] == 4.0).all()
    assert set(state.getCupyVar()) == {"exp_avg", "exp_avg_sq"}


def test_collections_on_disk(tmp_path: Path) -> None:
    _, _, rows, state = trained("disk", tmp_path)
    assert rows.fileName == f"{tmp_path}/variable0.bed"
    assert state.fileName == f"{tmp_path}/00.bed"
    with pytest.raises(FlatbedError, match="not in memory: use getNumpyVersion"):
        rows.getCupyMM()
    rows.checkpoint()
    expected = rows.getNumpyVersion()
    make, _ = factories("disk", tmp_path)
    second = make(nn.Embedding(3, DIM))
    second.zerosInit()
    assert second.fileName == f"{tmp_path}/variable1.bed"
    rows.close()
    second.close()
    # what was trained can go on as a table
    emb = flatbed.Embedding(N, DIM, storage="disk", path=tmp_path / "variable0.bed")
    assert np.array_equal(emb.read_rows(range(N)).numpy(), expected)
    emb.table.close()


def test_the_default_name_of_state_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.ModuleDict({"u_embeddings": nn.Embedding(3, DIM)})
    optimizer = torch.optim.Adagrad(model.parameters())
    state = SpeedTorch.OptimizerFactoryMM(optimizer, N, DIM, model, "u_embeddings")
    state.optInit()
    assert state.fileName == "u_embeddingsAdagrad0.bed"
    assert Path(state.fileName).exists()
    state.close()


# ---- data


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "int32", "uint32", "uint8", "bool", "float16"])
def test_gadgets_hand_out_parts(pinned: bool, dtype: str, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 200, (9, 2, 3)).astype(dtype)
    np.save(tmp_path / "data.npy", array)
    gadget = SpeedTorch.DataGadget(str(tmp_path / "data.npy"), CPUPinn=pinned)
    gadget.gadgetInit()
    for index in (
        np.array([8, 0, 8], dtype=np.int32),
        [1, 2],
        np.array([[3], [4]]),
        torch.tensor([7]),
        (slice(0, 6), slice(None), 1),
        slice(None, None, -2),
        4,
        (np.array([1, 2]), 0),
        array[:, 0, 0] > 50,
    ):
        found = gadget.getData(indexes=index)
        expected = array[np.asarray(index) if isinstance(index, torch.Tensor) else index]
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.cpu().numpy(), expected)
    assert np.array_equal(gadget.getNumpyVersion(), array)
    gadget.saveCupy(tmp_path / "again")
    assert np.array_equal(np.load(tmp_path / "again.npy"), array)
    assert np.load(tmp_path / "again.npy").dtype == array.dtype


@pytest.mark.parametrize("kind", [SpeedTorch.DataGadget, SpeedTorch.DataGadgetMM])
def test_gadgets_take_data(kind: Any, tmp_path: Path) -> None:
    array = np.zeros((5, 3), dtype=np.float32)
    np.save(tmp_path / "data.npy", array)
    gadget = kind(tmp_path / "data.npy")
    gadget.gadgetInit()
    gadget.insertData(dataObject=torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3]), indexes=[4, 1, 4])
    gadget.insertData(torch.full((2,), 7.0), (slice(2, 4), 0))
    gadget.insertData(np.full(3, 5.0), 0)
    array[[4, 1]] = [[3.0], [2.0]]
    array[2:4, 0] = 7.0
    array[0] = 5.0
    assert np.array_equal(gadget.getNumpyVersion(), array)
    assert np.array_equal(gadget.getCupyVar(), array)
    with pytest.raises(IndexError, match="id -1 at position 0 is out of range for a table of 5 rows"):
        gadget.getData([-1])
    with pytest.raises(IndexError, match="id 5 at position 1"):
        gadget.insertData(torch.zeros(2, 3), [0, 5])
    with pytest.raises(TypeError, match="cannot be stored among"):
        gadget.insertData(torch.zeros(1, 3, dtype=torch.complex64), [0])
    with pytest.raises(ValueError):
        gadget.insertData(torch.zeros(2, 2), [0, 1])
    np.save(tmp_path / "other.npy", array[:2])
    gadget.loadCupy(tmp_path / "other.npy")
    assert np.array_equal(gadget.getData([1]).cpu().numpy(), array[[1]])
    gadget.saveCupy(tmp_path / "third.npy")
    assert np.array_equal(np.load(tmp_path / "third.npy"), array[:2])


def test_gadgets_on_disk_write_to_their_file(tmp_path: Path) -> None:
    path = tmp_path / "data.npy"
    np.save(path, np.zeros((5, 3)))
    gadget = SpeedTorch.DataGadgetMM(path)
    gadget.gadgetInit()
    gadget.insertData(torch.ones(1, 3, dtype=torch.float64), [2])
    assert np.load(path)[2].all()
    with pytest.raises(ValueError, match="is the file itself"):
        gadget.saveCupy(path)


def test_data_that_cannot_be_stored(tmp_path: Path) -> None:
    for array, error in (
        (np.zeros((0, 3)), ValueError),
        (np.float32(3.0), ValueError),
        (np.zeros((2, 2), complex), TypeError),
        (np.array(["a", "b"]), TypeError),
    ):
        with pytest.raises(error):
            SpeedTorch.DataGadget(array).gadgetInit()
    with pytest.raises(FlatbedError, match="there is no array"):
        SpeedTorch.DataGadget(tmp_path / "none.npy").gadgetInit()
    big_endian = SpeedTorch.DataGadget(np.arange(3.0).astype(">f8"))
    big_endian.gadgetInit()
    assert big_endian.getData([2]).tolist() == [2.0]


@pytest.mark.parametrize("kind", [SpeedTorch.DataGadget, SpeedTorch.DataGadgetMM])
def test_gadgets_on_disk_and_in_memory_are_alike(kind: Any, tmp_path: Path) -> None:
    def gadget(array: Any) -> Any:
        np.save(tmp_path / "data.npy", array)
        made = kind(tmp_path / "data.npy")
        made.gadgetInit()
        return made

    big_endian = gadget(np.arange(6.0).astype(">f4").reshape(3, 2))
    assert big_endian.getData([2, 0]).tolist() == [[4.0, 5.0], [0.0, 1.0]]
    big_endian.insertData(torch.ones(1, 2, dtype=torch.bfloat16), [1])
    big_endian.insertData(torch.full((2,), 7.0, dtype=torch.bfloat16), (0, slice(None)))
    assert big_endian.getNumpyVersion().tolist() == [[7.0, 7.0], [1.0, 1.0], [4.0, 5.0]]
    floats = gadget(np.zeros((3, 2), np.float32))
    for wrong in (np.array([5.0]), 7.0, np.ones((1, 2)), np.ones(2)):
        with pytest.raises(ValueError, match=r"must have shape \(2, 2\); found \("):
            floats.insertData(wrong, [0, 1])
    assert not floats.getNumpyVersion().any()
    counts = gadget(np.zeros((3, 2), np.uint16))
    too_far: list[tuple[Any, Any]] = [
        (np.full((1, 2), -1), [0]),
        (torch.full((1, 2), 1 << 16), [0]),
        (-1, (0, 0)),
    ]
    for value, index in too_far:
        with pytest.raises(ValueError, match=r"do not fit .*uint16 \(0 to 65535\)"):
            counts.insertData(value, index)
    counts.insertData(np.full((1, 2), 65535), [0])
    assert counts.getNumpyVersion()[0].tolist() == [65535, 65535]


# ---- co-occurrence


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
        expected = np.zeros((6, 6))
        np.add.at(expected, (rows, columns), 1)
        expected[5, 5] = 40
        assert np.array_equal(matrix.getNumpyVersion(), expected)
        found = matrix.getEntries()
        assert [one.tolist() for one in found] == [[1, 1, 5, 5], [2, 3, 0, 5], [2, 1, 1, 40]]
        assert found[2].dtype == matrix.getNumpyVersion().dtype
        assert matrix.getData([1]).cpu().numpy().tolist() == [[0, 0, 2, 1, 0, 0]]
        with pytest.raises(IndexError, match="id 6 at position 0"):
            matrix.addCounts([0], [6])
        with pytest.raises(ValueError, match="as many; found 2, 1, 2"):
            matrix.addCounts([0, 1], [0])
        matrix.saveCupy(tmp_path / "matrix.npy")
        matrix.loadCupy(tmp_path / "matrix.npy")
        assert np.array_equal(matrix.getNumpyVersion(), expected)
        matrix.close()


def test_weights_of_counts(tmp_path: Path) -> None:
    matrix = SpeedTorch.COM(4, datatype="float32")
    matrix.comInit()
    matrix.addCounts([1, 1], [2, 2], [0.5, 0.25])
    assert matrix.CUPYCom[1, 2] == 0.75
    counts = SpeedTorch.COM(4)
    counts.comInit(CPUPinn=True)
    with pytest.raises(TypeError, match=r"cannot be added to torch\.uint32"):
        counts.addCounts([1], [2], [0.5])


@pytest.mark.parametrize(
    ("datatype", "counts", "message"),
    [
        ("uint32", [-1], r"counts must not be negative; found -1"),
        ("int64", [3, -2], r"counts must not be negative; found -2"),
        ("float32", [-0.5], r"counts must not be negative; found -0.5"),
        ("float32", [float("nan")], r"counts must be finite"),
        ("uint32", [2**32 + 1], r"4294967297 .* uint32 .* at most 4294967295"),
        ("uint32", [2**32 - 1, 1], r"4294967296 .* uint32"),
        ("int32", [2**31 - 1, 1], r"2147483648 .* int32"),
        ("uint8", [200, 56], r"256 .* uint8"),
        ("uint64", np.array([2**63, 2**63], np.uint64), r"18446744073709551616 .* uint64"),
        ("int64", np.array([2**63], np.uint64), r"9223372036854775808 .* int64"),
        ("float16", [2048, 1], r"2049 .* float16"),
        ("float32", [2**24, 1], r"16777217 .* float32"),
        ("float16", [60000.0, 60000.0], r"float16"),
    ],
)
def test_counts_that_do_not_fit(datatype: str, counts: Any, message: str) -> None:
    matrix = SpeedTorch.COM(3, datatype)
    matrix.comInit()
    matrix.addCounts([2], [2])
    with pytest.raises((ValueError, OverflowError), match=message):
        matrix.addCounts([2, *[0] * len(counts)], [2, *[1] * len(counts)], np.insert(counts, 0, 1))
    assert [one.tolist() for one in matrix.getEntries()] == [[2], [2], [1]]


def test_counts_do_not_wrap_later_nor_on_disk(tmp_path: Path) -> None:
    for matrix in (SpeedTorch.COM(3, "uint16"), SpeedTorch.COMMM(3, f"{tmp_path}/COM", "uint16")):
        matrix.comInit()
        matrix.addCounts([0] * 65535, [1] * 65535)
        with pytest.raises(ValueError, match=r"65536 .* uint16 .*nothing was added"):
            matrix.addCounts([2, 0], [2, 1])
        assert matrix.getEntries()[2].tolist() == [65535]
        matrix.close()


def test_matrices_of_bfloat16() -> None:
    matrix = SpeedTorch.COM(3, "bfloat16")
    matrix.comInit()
    matrix.addCounts([0, 0], [1, 1])
    matrix.insertData(np.full(3, 0.5), 2)
    assert [one.tolist() for one in matrix.getEntries()] == [[0, 2, 2, 2], [1, 0, 1, 2], [2, 0.5, 0.5, 0.5]]
    assert matrix.getData((slice(None, None, -2), 1)).tolist() == [0.5, 2.0]
    counts = SpeedTorch.COM(3)
    counts.comInit()
    with pytest.raises(ValueError, match=r"do not fit .*uint32 \(0 to 4294967295\)"):
        counts.insertData(np.full((1, 3), -1), [0])


def test_matrices_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"counts are real numbers; found datatype torch\.complex64"):
        SpeedTorch.COM(3, "complex64")
    matrix = SpeedTorch.COM(3)
    matrix.comInit()
    np.save(tmp_path / "wide.npy", np.ones((3, 4), np.uint32))
    with pytest.raises(ValueError, match=r"must have shape \(3, 3\); found \(3, 4\)"):
        matrix.loadCupy(tmp_path / "wide.npy")
    np.save(tmp_path / "weights.npy", np.full((3, 3), 0.5, np.float32))
    matrix.loadCupy(tmp_path / "weights.npy")
    matrix.addCounts([1, 1, 1], [2, 2, 0])
    matrix.addCounts([1], [2], [0.25])
    assert matrix.getNumpyVersion()[1].tolist() == [1.5, 0.5, 2.75]
    matrix.addCounts([], [])
