"""Transfers: every tensor arrives bit for bit, and no memory is written to before it was copied."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatbed import Prefetcher
from flatbed.data.batches import as_tensor
from flatbed.data.transfer import FEW, StagingRing, pinned, send
from tests.data.fakes import LateCopies, Reached, late_copies, small_ring

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
    return as_tensor(made) if isinstance(made, np.ndarray) else made


def bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, want in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (want.dtype, want.shape)
        assert torch.equal(bits(one), bits(want))


@pytest.mark.parametrize("n_beside", [0, FEW], ids=["alone", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_arrives_bit_for_bit(kind: str, n_beside: int) -> None:
    want = given(kind)
    with late_copies() as copies:
        sent, _ = send([want, *torch.ones(n_beside, 2).unbind()], copies)
        copies.hand_over()
    check(sent[:1], [want])
    if kind in ("transposed", "channels last", "small channels last", "fortran", "permuted"):
        assert sent[0].stride() == want.stride(), "as with Tensor.to"


def test_small_tensors_share_copies_and_large_ones_have_several() -> None:
    small = [torch.full((i % 7 + 1, 3), i) for i in range(100)]
    large = torch.arange(5000.0)
    with late_copies() as copies:
        sent, owners = send([*small, large], copies)
        copies.hand_over()
        n_shared = len(owners) - 1
        assert n_shared < len(small) / 10
        assert copies.n_copies == n_shared + -(-large.nbytes // 4096)
    check(sent, [*small, large])
    assert max(owner.nbytes for owner in owners[1:]) <= 4096
    assert all(tensor.data_ptr() % 16 == 0 for tensor in sent)


def test_tensors_that_share_memory_are_not_views_of_each_other() -> None:
    """A write to one must not make autograd complain about another that was saved for backward."""
    with late_copies() as copies:
        sent, _ = send([*torch.ones(FEW + 1, 4).unbind()], copies)
        copies.hand_over()
    a, b = sent[:2]
    loss = (b * torch.ones(4, requires_grad=True) * b).sum()
    a.mul_(2)
    loss.backward()
    assert b.tolist() == [1, 1, 1, 1]


class EarlyEvents(LateCopies):
    """A stream whose events are reached before its copies are done."""

    def record(self) -> Reached:
        self.may_copy.clear()
        event = Reached()
        event.flag.set()
        return event


@pytest.mark.parametrize("kind", [LateCopies, EarlyEvents])
def test_a_chunk_is_not_written_to_before_its_copy_is_done(kind: type[LateCopies]) -> None:
    """The stream with early events shows that the test would find a chunk that is reused too early."""
    copies = kind(small_ring(2, 2048))
    wanted = [torch.full((300,), float(i)) for i in range(50)]
    found = [send([one], copies)[0][0] for one in wanted]
    copies.may_copy.set()
    copies.todo.put(None)
    copies.thread.join(60)
    assert all(map(torch.equal, found, wanted)) == (kind is LateCopies)


def test_many_threads_share_a_ring() -> None:
    with late_copies(small_ring(2, 1024)) as copies, ThreadPoolExecutor(4) as pool:

        def run(number: int) -> bool:
            want = torch.full((200,), number)
            sent, _ = send([want], copies)
            copies.hand_over()
            return torch.equal(sent[0], want)

        assert all(pool.map(run, range(80)))


@pytest.mark.parametrize("seed", range(5))
def test_random_batches_through_random_rings(seed: int) -> None:
    chance = random.Random(seed)
    with late_copies(seed=seed) as copies:
        for _ in range(10):
            tensors = [given(chance.choice([*KINDS])) for _ in range(chance.randint(0, 12))]
            copies.ring = small_ring(chance.randint(1, 3), chance.choice([1024, 4096, 65536]))
            sent, _ = send(tensors, copies)
            copies.hand_over()
            check(sent, tensors)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_the_ring_is_whole_after_an_error_of_the_device(fail_at: int) -> None:
    with late_copies(small_ring(2, 1024)) as copies:
        large = torch.arange(1000.0)
        copies.fail_at = fail_at
        with pytest.raises(RuntimeError, match="the device is gone"):
            send([large], copies)
        for _ in range(3):
            sent, _ = send([large], copies)
        copies.hand_over()
        check(sent, [large])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    tensor = given(kind)
    copy = pinned(tensor)
    check([copy], [tensor])
    assert (copy is tensor) == (kind in ("sparse", "with gradient", "conjugate", "negative"))


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

    monkeypatch.setattr(StagingRing, "send", fail)
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
