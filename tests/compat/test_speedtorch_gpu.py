"""Training on a GPU equals training on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import flatbed.compat.speedtorch as SpeedTorch
from tests.compat.speedtorch_models import DENSE, SPARSE, STORAGES, switched

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["Adam", "Rprop", "Adagrad", "SGD momentum"])
def test_dense(name: str, storage: str, tmp_path: Path) -> None:
    expected = switched(*DENSE[name], "device", tmp_path)
    found = switched(*DENSE[name], storage, tmp_path, device="cuda")
    # Rprop follows signs, which rounding changes where a gradient is almost 0
    off = [(a - b).abs().gt(1e-5).float().mean() for a, b in zip(found[1:3], expected[1:3], strict=True)]
    assert max(off) <= (0.01 if name == "Rprop" else 0.0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def test_sparse(name: str, storage: str, tmp_path: Path) -> None:
    expected = switched(*SPARSE[name], "device", tmp_path, sparse=True)
    found = switched(*SPARSE[name], storage, tmp_path, sparse=True, device="cuda")
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_ids_on_the_gpu(tmp_path: Path) -> None:
    expected = switched(*DENSE["Adam"], "host", tmp_path, device="cuda")
    found = switched(
        *DENSE["Adam"], "host", tmp_path, device="cuda", as_ids=lambda ids: torch.from_numpy(ids).cuda()
    )
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def test_rows_follow_a_model_to_another_device() -> None:
    for pinned in (False, True):
        embedding = torch.nn.Embedding(3, 16)
        rows = SpeedTorch.ModelFactory(embedding, 40, 16, CPUPinn=pinned)
        rows.normalDistributionInit(0.0, 1.0)
        before = rows.getNumpyVersion()
        for device in ("cuda", "cpu"):
            embedding.to(device)
            rows.beforeForwardPass(np.array([5, 6, 5], dtype=np.int32))
            assert embedding.weight.device.type == device
            assert np.array_equal(embedding.weight.detach().cpu().numpy(), before[[5, 6, 5]])
            rows.afterOptimizerStep(np.array([5, 6, 5], dtype=np.int32))
        assert np.array_equal(rows.getNumpyVersion(), before)
        embedding.cuda()
        assert np.array_equal(rows.getNumpyVersion(), before)  # moves the rows, too
        embedding.cpu()
        rows.beforeForwardPass([5])
        with torch.no_grad():
            embedding.weight.zero_()
        rows.afterOptimizerStep([5])
        assert not rows.getNumpyVersion()[5].any()


@pytest.mark.parametrize("pinned", [False, True])
def test_gadgets_and_matrices(pinned: bool, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    np.save(tmp_path / "data.npy", array)
    gadget = SpeedTorch.DataGadget(tmp_path / "data.npy", CPUPinn=pinned)
    gadget.gadgetInit()
    for index in (np.array([49, 0, 49], np.int32), (slice(0, 6), slice(0, 2)), array[:, 0] > 0):
        found = gadget.getData(index)
        assert found.is_cuda
        assert np.array_equal(found.cpu().numpy(), array[index])
    gadget.insertData(torch.ones(2, 3, device="cuda"), [1, 7])
    gadget.insertData(np.full(3, 2.0), 9)
    assert gadget.getNumpyVersion()[[1, 7, 9], 0].tolist() == [1.0, 1.0, 2.0]
    assert gadget.getTorchVar().is_cuda != pinned
    matrix = SpeedTorch.COM(6, CPUPinn=pinned)
    matrix.comInit()
    matrix.addCounts([1, 1, 5], [2, 2, 0])
    assert matrix.getEntries()[2].tolist() == [2, 1]
    assert matrix.getData([1]).is_cuda
