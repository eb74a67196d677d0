"""Transfers: every tensor arrives bit for bit, and no memory is written to before it was copied."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatbed import Prefetcher
from flatbed.data import batches as transfers
from flatbed.data.batches import ALIGNMENT, FEW, Sent, as_tensor, pinned, send
from tests.data.fakes import CPU

KINDS = {
    "contiguous": lambda: np.arange(60.0).reshape(3, 4, 5),
    "fortran": lambda: np.asfortranarray(np.arange(5000.0).reshape(50, 100)),
    "permuted": lambda: np.arange(6000).reshape(10, 20, 30).transpose(2, 0, 1),
    "columns": lambda: np.arange(20000, dtype=np.float32).reshape(100, 200)[:, ::2],
    "long columns": lambda: np.arange(20000.0).reshape(10, 2000)[:, ::2],
    "backward": lambda: np.arange(5000)[::-1],
    "swapped": lambda: np.arange(3000.0).astype(">f8"),
    "swapped number": lambda: np.array(3, ">i4"),
    "expanded": lambda: np.broadcast_to(np.arange(600), (30, 600)),
    "locked": lambda: np.frombuffer(bytes(range(256)) * 40, np.uint16),
    "number": lambda: np.array(2.5),
    "bool": lambda: np.arange(99) % 3 == 0,
    "complex": lambda: np.arange(900) * (1 + 2j),
    "empty": lambda: np.zeros((3, 0, 2), np.int16),
    "field": lambda: np.ones(900, [("a", "i1"), ("b", "f4")])["b"],
    "one row": lambda: np.arange(5000.0).reshape(1, 5000)[:, ::1],
    "tensor": lambda: torch.arange(3000),
    "bfloat16": lambda: torch.arange(6000).to(torch.bfloat16),
    "float8": lambda: torch.arange(90).to(torch.float8_e4m3fn).view(9, 10).t(),
    "transposed": lambda: torch.arange(6000.0).view(60, 100).t(),
    "slice": lambda: torch.arange(6000.0).view(60, 100)[:, 3:50],
    "expanded tensor": lambda: torch.arange(600).expand(30, 600),
    "channels last": lambda: (
        torch.arange(5040.0).view(2, 3, 20, 42).contiguous(memory_format=torch.channels_last)
    ),
    "small channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conjugate": lambda: (torch.arange(900) * (1 + 2j)).conj(),
    "negative": lambda: torch.imag((torch.arange(900) * (1 + 2j)).conj()),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "with gradient": lambda: torch.ones(3, requires_grad=True),
}


def given(kind: str) -> Tensor:
    made = KINDS[kind]()
    if isinstance(made, Tensor):
        return made
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found: Tensor = as_tensor(made)
    assert (found.shape, found.tolist()) == (made.shape, made.tolist())
    assert made.flags.writeable or found.data_ptr() != made.ctypes.data, "torch might write to it"
    return found


def bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, want in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (want.dtype, want.shape)
        assert torch.equal(bits(one), bits(want))


def sent_to_cpu(tensors: list[Tensor]) -> Sent:
    sent = send(tensors, CPU)
    for copy in sent.copies:
        copy.issue()
    return sent


@pytest.mark.parametrize("n_beside", [0, FEW], ids=["alone", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_arrives_bit_for_bit(kind: str, n_beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 4096)
    monkeypatch.setattr(transfers, "SMALL_BYTES", 2048)
    want = given(kind)
    sent = sent_to_cpu([want, *torch.ones(n_beside, 8).unbind()]).tensors
    check(sent[:1], [want])
    if kind in ("transposed", "channels last", "small channels last", "fortran", "permuted"):
        assert sent[0].stride() == want.stride(), "as with Tensor.to"
    check([pinned(want)], [want])


def test_small_tensors_share_memory() -> None:
    """They are not views of each other to autograd, which would complain about changes of its neighbours."""
    small = [torch.full((i % 7 + 1, 4), float(i)) for i in range(100)]
    sent, others, copies = sent_to_cpu([*small, torch.ones(3), torch.arange(500_000.0)])
    check(sent[:100], small)
    assert (len(others), len(copies)) == (0, 3)
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent[:100]}) == 1
    assert all(tensor.data_ptr() % ALIGNMENT == sent[0].data_ptr() % ALIGNMENT for tensor in sent[:100])
    one, other = sent[:2]
    loss = (other * torch.ones(2, 4, requires_grad=True) * other).sum()
    one.mul_(2)
    loss.backward()
    assert torch.equal(other, small[1])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_every_kind_arrives_on_a_gpu(depth: int, pin: bool) -> None:
    plain = [kind for kind in KINDS if kind not in ("sparse", "with gradient")]
    made = [{kind: KINDS[kind]() for kind in plain}, {"large": torch.rand(20_000_000)}]
    for _ in range(2):
        prefetcher = Prefetcher(made, device="cuda", depth=depth, pin=pin)
        for found, batch in zip(prefetcher, made, strict=True):
            assert all(tensor.is_cuda for tensor in found.values())
            wanted = [as_tensor(one) if isinstance(one, np.ndarray) else one for one in batch.values()]
            check([tensor.cpu() for tensor in found.values()], wanted)


@pytest.mark.gpu
def test_pinned_tensors_and_tensors_of_the_gpu_need_no_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("staged")

    monkeypatch.setattr(transfers, "_staged", fail)
    given = {"pinned": torch.arange(100_000).pin_memory(), "gpu": torch.arange(10, device="cuda")}
    (found,) = Prefetcher([given], device="cuda")
    assert found["gpu"] is given["gpu"]
    assert torch.equal(found["pinned"].cpu(), given["pinned"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["pageable", "pinned", "gpu"])
def test_a_loader_may_write_to_its_batches_again_on_a_gpu(kind: str) -> None:
    def reused() -> Any:
        tensors = [torch.zeros(n, device="cuda" if kind == "gpu" else "cpu") for n in (10, 3_000_000)]
        if kind == "pinned":
            tensors = [tensor.pin_memory() for tensor in tensors]
        for i in range(20):
            for tensor in tensors:
                tensor.fill_(i)
            yield tensors

    bad = torch.zeros((), dtype=torch.long, device="cuda")
    for i, batch in enumerate(Prefetcher(reused(), device="cuda", depth=3)):
        torch.cuda._sleep(1_000_000)
        bad += sum((tensor != i).sum() for tensor in batch)
    assert int(bad) == 0


@pytest.mark.gpu
def test_tensors_that_the_loader_makes_on_the_gpu_are_waited_for() -> None:
    def made() -> Any:
        for i in range(10):
            torch.cuda._sleep(5_000_000)
            yield torch.full((1000,), i, device="cuda")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [(batch == i).all() for i, batch in enumerate(Prefetcher(made(), device="cuda"))]
    stream.synchronize()
    assert all(bool(one) for one in found)


@pytest.mark.gpu
def test_memory_of_a_small_batch_is_not_used_again_too_early() -> None:
    bad = torch.zeros((), dtype=torch.long, device="cuda")
    for i, batch in enumerate(Prefetcher([torch.full((1000,), i) for i in range(40)], device="cuda")):
        torch.cuda._sleep(1_000_000)
        bad += (batch != i).sum()
        del batch
    assert int(bad) == 0


@pytest.mark.gpu
def test_memory_of_batches_that_are_dropped_is_not_used_again_too_early() -> None:
    """They were allocated in the training stream, and are copied in another one."""
    bad, busy = torch.zeros((), dtype=torch.long, device="cuda"), torch.rand(4000, 4000, device="cuda")
    for _ in range(10):
        iterator = iter(Prefetcher([torch.full((100_000,), i + 1) for i in range(4)], device="cuda"))
        busy @ busy  # the copies wait for it
        next(iterator)
        iterator.close()
        del iterator
        zeros = [torch.zeros(100_000, dtype=torch.int64, device="cuda") for _ in range(4)]
        torch.cuda._sleep(2_000_000)
        bad += sum(one.count_nonzero() for one in zeros)
    assert int(bad) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 3])
def test_memory_of_the_gpu_is_bounded_by_the_depth(depth: int) -> None:
    size = 32 << 20
    given = [np.zeros(size, np.uint8) for _ in range(4)] * 8
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in Prefetcher(given, device="cuda", depth=depth):
        torch.cuda._sleep(10_000_000)
        batch.add_(1)
        del batch
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= (depth + 2) * size
