"""The ring of pinned chunks, the threads that fill it, and how batches are divided, without a GPU."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from flatbed.data import packing, staging
from flatbed.data.packing import Slot, send, slot_of_array, slot_of_tensor
from flatbed.data.staging import Carrier, Ring, ring_for
from tests.data.fake_driver import PINNED_PAGES
from tests.data.fake_streams import LateLane, Reached, fed, lane, ring


def sent(slots: list[Slot], through: LateLane, of: Ring) -> list[torch.Tensor]:
    owners = send(slots, Carrier(of, through))
    through.settle()
    return owners


def slots_of(*arrays: Any) -> list[Slot]:
    found = [slot_of_array(a) if isinstance(a, np.ndarray) else slot_of_tensor(a) for a in arrays]
    assert all(slot is not None for slot in found)
    return [slot for slot in found if slot is not None]


def equal(slot: Slot, given: Any) -> bool:
    want = (
        torch.from_numpy(np.array(given, given.dtype.newbyteorder("=")))
        if isinstance(given, np.ndarray)
        else given
    )
    tensor = slot.tensor
    assert tensor is not None
    return tensor.dtype == want.dtype and tensor.shape == want.shape and torch.equal(tensor, want)


# ---- the ring


def test_a_chunk_is_not_written_to_before_its_copy_is_done() -> None:
    """Three chunks for a hundred pieces, each of which is copied late."""
    with lane(most_seconds=0.001) as through:
        arrays = [np.full(4096, i, np.uint8) for i in range(100)]
        slots = slots_of(*arrays)
        sent(slots, through, ring(3))
        assert all(equal(slot, array) for slot, array in zip(slots, arrays, strict=True))
        assert through.n_sent == 100


def test_a_lane_that_marks_too_early_is_caught_by_that_test() -> None:
    class Early(LateLane):
        def mark(self, event: Any = None) -> Any:
            return Reached()

    through = Early(most_seconds=0.001)
    try:
        slots = slots_of(*(np.full(4096, i, np.uint8) for i in range(100)))
        send(slots, Carrier(ring(3), through))
    finally:
        through.close()
    assert any(slot.tensor is not None and int(slot.tensor[0]) != i for i, slot in enumerate(slots))


def test_chunks_are_shared_by_many_users_at_once() -> None:
    """More users than chunks: nobody waits for ever."""
    of = ring(2)
    failures: list[str] = []

    def use(seed: int) -> None:
        chance = random.Random(seed)
        with lane(seed=seed) as through:
            for k in range(15):
                arrays = [np.full(chance.randrange(1, 9000), seed + k, np.uint8) for _ in range(5)]
                slots = slots_of(*arrays)
                sent(slots, through, of)
                if not all(equal(slot, array) for slot, array in zip(slots, arrays, strict=True)):
                    failures.append(f"{seed} {k}")

    users = [threading.Thread(target=use, args=(10 * i,)) for i in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    assert not failures


def test_the_ring_is_shared_and_goes_with_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_pinned", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(staging, "RING_BYTES", 1 << 20)
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 18)
    place = torch.device("cuda", 0)
    one, other = ring_for(place), ring_for(place)
    assert one is other
    assert one is not ring_for(torch.device("cuda", 1))
    assert (one.n_chunks, one.chunk_bytes) == (4, 1 << 18)
    gone = weakref.ref(one)
    del one
    assert gone() is not None
    del other
    gc.collect()
    assert gone() is None


# ---- division


def test_small_arrays_share_one_copy_and_large_ones_have_several() -> None:
    with lane(most_seconds=0) as through:
        small = [np.arange(n, dtype=np.int32) for n in (1, 7, 0, 64, 3)]
        slots = slots_of(*small)
        owners = sent(slots, through, ring(3))
        assert (len(owners), through.n_sent) == (1, 1)
        assert all(equal(slot, array) for slot, array in zip(slots, small, strict=True))
        for slot in slots:
            assert slot.tensor is not None
            if slot.tensor.numel():
                assert (slot.tensor.data_ptr() - owners[0].data_ptr()) % packing.ALIGNMENT == 0
        large = np.random.default_rng(0).normal(size=(100, 100))
        (slot,) = slots_of(large)
        sent([slot], through, ring(3))
        assert equal(slot, large)
        assert through.n_sent == 1 + -(-large.nbytes // 4096)


def test_tensors_that_share_memory_are_not_views_of_each_other() -> None:
    """To write into one must not make autograd complain about another that was saved for backward."""
    with lane() as through:
        slots = slots_of(np.ones(4, np.float32), np.ones(4, np.float32))
        (owner,) = sent(slots, through, ring())
        a, b = (slot.tensor for slot in slots)
        assert a is not None
        assert b is not None
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == owner.data_ptr()
        loss = (b * torch.ones(4, requires_grad=True) * b).sum()
        before = b._version
        a.mul_(2)
        assert b._version == before
        loss.backward()
        assert b.tolist() == [1, 1, 1, 1]


KINDS = {
    "contiguous": lambda: np.arange(60.0).reshape(3, 4, 5),
    "fortran": lambda: np.asfortranarray(np.arange(5000.0).reshape(50, 100)),
    "permuted": lambda: np.arange(6000).reshape(10, 20, 30).transpose(2, 0, 1),
    "columns": lambda: np.arange(20000, dtype=np.float32).reshape(100, 200)[:, ::2],
    "backward": lambda: np.arange(5000)[::-1],
    "swapped": lambda: np.arange(3000.0).astype(">f8"),
    "swapped rows": lambda: np.arange(3000.0).reshape(3, 1000).astype(">f8")[:, ::-1],
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
    "channels last": lambda: (
        torch.arange(5040.0).view(2, 3, 20, 42).contiguous(memory_format=torch.channels_last)
    ),
    "conjugate": lambda: (torch.arange(900) * (1 + 2j)).conj(),
    "negative": lambda: torch.imag((torch.arange(900) * (1 + 2j)).conj()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_arrives_bit_for_bit(kind: str) -> None:
    given = KINDS[kind]()
    with lane() as through:
        (slot,) = slots_of(given)
        sent([slot], through, ring())
    tensor = slot.tensor
    assert tensor is not None
    native = (
        np.array(given, given.dtype.newbyteorder("="), order="K") if isinstance(given, np.ndarray) else given
    )
    want = torch.from_numpy(native.copy(order="K")) if isinstance(native, np.ndarray) else native
    want = want.resolve_conj().resolve_neg()
    assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape)
    bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, want)]
    assert torch.equal(*bits)
    if kind in ("transposed", "channels last", "fortran", "permuted"):
        assert tensor.stride() == want.stride(), "as with Tensor.to"


NUMBERS = [*"?bhilqBHILQefdFD"]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
    torch.complex128, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("parallel_bytes", [1, 1 << 18])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [*NUMBERS, *DTYPES], ids=str)
def test_every_bit_of_every_dtype(
    dtype: Any, together: bool, parallel_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are no number, too."""
    monkeypatch.setattr(packing, "PARALLEL_BYTES", parallel_bytes)
    bits = np.random.default_rng(0).integers(0, 255, 16 * 60, np.uint8)
    if dtype in ("?", torch.bool):
        bits %= 2
    given: Any = bits.view(dtype) if isinstance(dtype, str) else torch.from_numpy(bits).view(dtype)
    arrays = [given[: len(given) // 20 * 20].reshape(4, 5, -1)]
    arrays += [arrays[0][1:], arrays[0].swapaxes(0, 1)] if together else []
    of = ring(3)
    with lane() as through:
        for _ in range(2):
            slots = slots_of(*arrays)
            owners = sent(slots, through, of)
            assert len(owners) == 1
            for slot, array in zip(slots, arrays, strict=True):
                known = array.view(array.dtype.str) if isinstance(array, np.ndarray) else array
                want = torch.from_numpy(known) if isinstance(known, np.ndarray) else known
                assert (slot.tensor.dtype, slot.tensor.shape) == (want.dtype, want.shape)
                assert slot.tensor.stride() == want.stride()
                assert slot.tensor._base is None
                found, wanted = (one.flatten().view(torch.uint8) for one in (slot.tensor, want))
                assert torch.equal(found, wanted)


def test_a_small_array_alone_has_memory_of_its_own() -> None:
    with lane() as through:
        for array in (np.arange(5), np.array(3.0), np.zeros((2, 0)), np.arange(6)[::-2]):
            (slot,) = slots_of(array)
            (owner,) = sent([slot], through, ring())
            assert equal(slot, array.copy())
            assert not array.nbytes or (owner is slot.tensor and owner.nbytes == array.nbytes)
        large, small = np.arange(3000.0), np.arange(3)
        slots = slots_of(large, small)
        assert len(sent(slots, through, ring(3, 1 << 15))) == 2
        assert all(equal(slot, array) for slot, array in zip(slots, (large, small), strict=True))


def test_an_axis_of_one_that_goes_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dense all the same, and torch would not have it."""
    monkeypatch.setattr(packing, "PARALLEL_BYTES", 1)
    array = np.arange(50.0).reshape(1, 50)[::-1]
    assert array.strides[0] < 0
    (slot,) = slots_of(array)
    assert slot.form.order is not None
    assert slot.over() is None
    with lane() as through:
        sent([slot], through, ring())
    assert equal(slot, array.copy())


def test_chunks_remember_what_they_have_been_and_not_for_ever() -> None:
    of = ring(1)
    with lane(most_seconds=0) as through:
        for n in (*range(1, 200), *range(1, 200)):
            array = np.full(n, n, np.int16)
            (slot,) = slots_of(array)
            sent([slot], through, of)
            assert equal(slot, array)
            chunk = of.take()
            assert 0 < len(chunk.views) <= staging.VIEWS
            of.give(chunk)
        for _ in range(3):
            sent([slot], through, of)
        chunk = of.take()
        held = [one for one in chunk.views if one is slot.form]
        of.give(chunk)
    assert len(held) == 1


def test_batches_that_look_alike_are_divided_once() -> None:
    packing._loads.cache_clear()
    with lane(most_seconds=0) as through:
        for i in range(5):
            arrays = [np.full(9, i), np.full((2, 3), i, np.float32), np.full(9, -i)]
            slots = slots_of(*arrays)
            sent(slots, through, ring())
            assert all(equal(slot, array) for slot, array in zip(slots, arrays, strict=True))
    assert (packing._loads.cache_info().misses, packing._loads.cache_info().hits) == (1, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True),
        torch.ones(3, device="meta"),
    ],
    ids=["sparse", "parameter", "grad", "meta"],
)
def test_others_know_themselves_how_to_be_moved(tensor: torch.Tensor) -> None:
    assert slot_of_tensor(tensor) is None


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.ma.masked_array([1]), np.zeros(2, np.longdouble)]
)
def test_arrays_that_are_no_numbers(array: Any) -> None:
    assert slot_of_array(array) is None


def test_random_batches_through_random_rings() -> None:
    chance = random.Random(3)
    for seed in range(25):
        of = ring(chance.randint(1, 5), 256 * chance.randint(1, 12))
        with lane(seed=seed, most_seconds=0.0002) as through:
            arrays = []
            for _ in range(chance.randint(0, 12)):
                shape = [chance.randint(0, 40) for _ in range(chance.randint(0, 3))]
                arrays.append(
                    np.random.default_rng(seed).integers(0, 99, shape).astype(chance.choice("iqbhfd"))
                )
                if chance.random() < 0.3:
                    arrays[-1] = arrays[-1].T
                if chance.random() < 0.3 and arrays[-1].ndim:
                    arrays[-1] = arrays[-1][:: chance.choice([-1, 2])]
            arrays = [np.asarray(array) for array in arrays]
            slots = slots_of(*arrays)
            sent(slots, through, of)
            assert all(equal(slot, array) for slot, array in zip(slots, arrays, strict=True))


# ---- copies on the host


@pytest.mark.parametrize("kind", KINDS)
def test_large_arrays_are_copied_by_torchs_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kinds, bit for bit, where numpy copies only what torch cannot read."""
    by_numpy: list[Any] = []
    monkeypatch.setattr(packing, "PARALLEL_BYTES", 1)
    copy = np.copyto
    monkeypatch.setattr(packing.np, "copyto", lambda *pair: (by_numpy.append(pair), copy(*pair)))
    test_every_kind_arrives_bit_for_bit(kind)
    assert bool(by_numpy) == (kind in ("backward", "swapped", "swapped number", "field"))


@pytest.mark.parametrize("kind", [np.uint64, np.ulonglong, np.longlong, np.intc, np.longdouble])
def test_names_that_numpy_has_for_the_same_numbers(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps, and larger than a chunk; torch knows one of the names."""
    monkeypatch.setattr("flatbed.data.packing.PARALLEL_BYTES", 256)
    array = np.arange(4000, dtype=kind).reshape(-1, 2)[:, :1]
    lane = LateLane(most_seconds=0)
    (found,) = fed([{"x": array}], lane, of=ring(3, 1 << 12))
    lane.close()
    if kind is np.longdouble:
        assert found["x"] is array  # no number of torch's
    else:
        assert found["x"].numpy().tobytes() == array.tobytes()
        assert found["x"].dtype.itemsize == array.itemsize


def test_memory_is_pinned_if_it_is_beside_the_pages_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    page = packing.mmap.PAGESIZE
    memory = torch.zeros(9 * page, dtype=torch.uint8)
    base = -(-memory.data_ptr() // page) * page
    pages: set[int] = set()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: (tensor.data_ptr() - base) // page in pages)
    begin, nbytes = base + page // 2, 5 * page  # pages 0 to 5, the ends of which are others', too
    for some, want in PINNED_PAGES:
        pages = some
        assert packing.is_pinned(begin, nbytes) == want
    pages = {0}
    assert packing.is_pinned(begin, 1)
    assert packing.is_pinned(begin, page // 2)
    assert not packing.is_pinned(begin, page)


def test_arrays_that_are_locked_are_read_without_a_warning() -> None:
    array = np.arange(4000, dtype=np.uint16).reshape(40, 100)[3:, ::2]
    array.flags.writeable = False
    over = packing.tensor_over(array)
    assert over is not None
    assert over.data_ptr() == array.__array_interface__["data"][0]
    assert np.array_equal(over.numpy(), array)


# ---- the way through


def test_sources_may_change_at_once() -> None:
    with lane(most_seconds=0.002) as through:
        array = np.ones(5000)
        (slot,) = slots_of(array)
        send([slot], Carrier(ring(40), through))
        array[:] = 7
        through.settle()
        assert bool((slot.tensor == 1).all())


@pytest.mark.parametrize("fail_at", [1, 4])
def test_an_error_of_the_device_arrives_and_the_ring_is_whole(fail_at: int) -> None:
    of = ring(3)
    with lane() as through:
        through.fail_at = fail_at
        with pytest.raises(RuntimeError, match="the device is gone"):
            send(slots_of(np.ones(5000)), Carrier(of, through))
        array = np.arange(5000.0)
        (slot,) = slots_of(array)
        sent([slot], through, of)
        assert equal(slot, array)
    assert of._free.qsize() == 3


def test_a_source_that_cannot_be_copied() -> None:
    def fill(chunk: Any) -> None:
        raise MemoryError("no pages")

    of = ring(3)
    with lane() as through, pytest.raises(MemoryError, match="no pages"):
        Carrier(of, through).carry(torch.zeros(10, dtype=torch.uint8), fill)
    assert (of._free.qsize(), through.n_sent) == (3, 0)


# ---- on a GPU


@pytest.mark.gpu
def test_the_ring_of_a_gpu_is_pinned_and_freed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = ring_for(device)
    chunk = found.take()
    assert chunk.memory.is_pinned()
    assert chunk.memory.data_ptr() % 4096 == 0
    found.give(chunk)
    gone = weakref.ref(found)
    del found, chunk
    gc.collect()
    assert gone() is None


@pytest.mark.gpu
def test_a_ring_of_two_chunks_under_a_slow_stream() -> None:
    from flatbed.data.staging import CudaLane

    device = torch.device("cuda", torch.cuda.current_device())
    through = CudaLane(device, torch.cuda.Stream())
    of = Ring(torch.empty(2 << 20, dtype=torch.uint8, pin_memory=True), 1 << 20)
    for i in range(5):
        arrays = [np.full(5_000_000 + k, i * 3 + k, np.uint8) for k in range(3)]
        slots = slots_of(*arrays)
        with through.within():
            torch.cuda._sleep(5_000_000)
            send(slots, Carrier(of, through))
        through.settle()
        for slot, array in zip(slots, arrays, strict=True):
            assert slot.tensor is not None
            assert slot.tensor.device == device
            assert torch.equal(slot.tensor.cpu(), torch.from_numpy(array))
