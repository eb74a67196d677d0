"""Ids of every kind and memory layout, and wrong ids, which change nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed
from tests.cases import DEVICES
from tests.tables.tables import STORAGES, dense_grad, storage_options

ROWS, DIM = 50, 6  # a record of 6 floats is padded
IDS = torch.tensor([[3, 1, 49, 7], [0, 3, 3, 8], [1, 1, 2, 2]])
TORCH = [torch.int8, torch.int16, torch.int32, torch.int64]
TORCH += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u2", ">u4", ">u8")


def read_only(ids: Tensor) -> np.ndarray[Any, Any]:
    found = ids.cpu().numpy().copy()
    found.flags.writeable = False
    return found


def apart(values: Tensor) -> Tensor:
    """The same values with a distance between all elements."""
    return torch.stack([values, values + 1], -1)[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "strided": apart,
    "strided int32": lambda ids: apart(ids.int()),
    "offset": lambda ids: ids.flatten()[1:],  # no multiple of 16 bytes
    "expanded": lambda ids: ids[0, 1:2].expand(5),
    "expanded matrix": lambda ids: ids[0, :, None].expand(-1, 3),
    "transposed": lambda ids: ids.T,
    "empty and strided": lambda ids: apart(ids)[:0, 0],
    "reversed numpy": lambda ids: ids.cpu().numpy()[::-1, ::2],
    "fortran": lambda ids: np.asfortranarray(ids.cpu().numpy()),
    "read-only": read_only,
}
KINDS: dict[str, Callable[[Tensor], Any]] = {
    **{str(dtype): lambda ids, dtype=dtype: ids.to(dtype) for dtype in TORCH},
    **{dtype: lambda ids, dtype=dtype: ids.cpu().numpy().astype(dtype) for dtype in NUMPY},
    **{
        f"shape {shape}": lambda ids, shape=shape: ids.new_zeros(shape)
        for shape in ((), (0,), (0, 3), (3, 0), (2, 3, 4), (1, 1, 1, 2))
    },
    "lists": lambda ids: ids.tolist(),
    "tuple": lambda ids: (7,),
    "no list": lambda ids: [],
    "int": lambda ids: 7,
    "numpy scalar": lambda ids: np.uint64(7),
}


def check(ids: Any, emb: Any, where: str) -> None:
    """Lookups, gradients, reads and writes are those of int64 ids in memory of their own."""
    wanted = torch.from_numpy(np.array(ids.cpu().numpy() if isinstance(ids, Tensor) else ids, np.int64))
    weight = emb.read_rows(range(ROWS)).cpu()
    theirs = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    found, expected = emb(ids), theirs(wanted)
    assert torch.equal(found.cpu(), expected)
    grad = torch.arange(expected.numel() * 1.0).view(expected.shape)
    found.backward(apart(grad.to(where)))
    expected.backward(grad)
    assert torch.equal(dense_grad(emb.table), theirs.weight.grad)
    assert torch.equal(emb.read_rows(ids).cpu(), weight[wanted])
    assert torch.equal(emb.table.read_state("sum", ids).cpu(), torch.zeros_like(weight)[wanted])
    emb.write_rows(ids, apart(grad.to(where)))
    for position, row in enumerate(wanted.flatten().tolist()):  # the last one counts
        weight[row] = grad.view(-1, DIM)[position]
    assert torch.equal(emb.read_rows(range(ROWS)).cpu(), weight)
    bag = flatbed.EmbeddingBag.from_table(emb.table, mode="sum")
    if wanted.dim() == 1:
        samples = torch.arange(len(wanted), device=where)
        out = bag(ids, apart(torch.zeros(1, dtype=torch.int64, device=where)), apart(samples.float()))
        assert torch.equal(out.cpu()[0], (weight[wanted] * samples.cpu()[:, None]).sum(0))


@pytest.mark.parametrize("kind", KINDS)
@DEVICES
def test_any_kind(kind: str, device: str) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device=device)
    optimizer = flatbed.optim.Adagrad(emb)
    check(KINDS[kind](IDS.to(device)), emb, device)
    optimizer.step()


CACHED = [("host", 0), ("host", 20), ("device", None), ("disk", 20)]


# Storages take turns: ids are converted before any of them sees them.
@pytest.mark.parametrize(("layout", "place"), [(name, CACHED[i % 4]) for i, name in enumerate(LAYOUTS)])
def test_any_layout(layout: str, place: tuple[str, int | None], where: str, tmp_path: Path) -> None:
    emb = flatbed.Embedding(
        ROWS, DIM, cache_rows=place[1], device=where, **storage_options(place[0], tmp_path)
    )
    _kept = flatbed.optim.Adagrad(emb)
    check(LAYOUTS[layout](IDS.to(where)), emb, where)


@pytest.mark.parametrize(
    "layout", [apart, lambda values: values[:1].expand(5, -1), lambda values: values.T.contiguous().T]
)
def test_values_of_any_layout(layout: Callable[[Tensor], Tensor], where: str) -> None:
    values = layout(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    emb = flatbed.Embedding.from_pretrained(values, device=where)
    assert torch.equal(emb.read_rows(range(len(values))).cpu(), values)
    plain = values.clone(memory_format=torch.contiguous_format)
    found, expected = emb.topk(values.to(where), 3), emb.topk(plain.to(where), 3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_ids_that_change_after_the_lookup() -> None:
    """A loader may fill the same memory with the next batch before backward."""
    emb = flatbed.Embedding(ROWS, DIM)
    for ids in (torch.tensor([1, 2]), np.array([1, 2])):
        emb.table.grad = None
        out = emb(ids)
        ids[:] = 9
        out.sum().backward()
        assert emb.table.grad_rows.tolist() == [1, 2]
        flatbed.optim.SGD(emb, lr=0.1)


# ---- wrong ids


WRONG_KIND = [
    *(torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1 + 0j])),
    *(np.array([1.0]), np.array([True]), np.array(["1"]), np.array([1, None])),
    *([1.5], [True, False], True, 1.0, "1", None, {1, 2}),
]
WRONG_VALUE = [
    (torch.tensor([3, 50]), "id 50 at position 1 is out of range for a table of 50 rows (0 to 49)"),
    (torch.tensor([[3, 4], [-1, 99]]), "id -1 at position (1, 0) is out of range"),
    (torch.tensor(51), "id 51 at position () is out of range"),
    (np.array([0, 0, 10**12]), "id 1000000000000 at position 2"),
    (np.array([1, 2**64 - 1], np.uint64), f"id {2**64 - 1} at position 1"),
    (torch.tensor([0, -1]).view(torch.uint64), f"id {2**64 - 1} at position 1"),
    ([[2**63 + 1]], f"id {2**63 + 1} at position (0, 0)"),
    (torch.tensor([200], dtype=torch.uint8), "id 200 at position 0"),
    (torch.tensor([-128], dtype=torch.int8), "id -128 at position 0"),
    ([[[0], [77]]], "id 77 at position (0, 1, 0)"),
]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        *((ids, TypeError, "integers") for ids in WRONG_KIND),
        *((ids, IndexError, message) for ids, message in WRONG_VALUE),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}"[:40],
)
def test_wrong_ids_are_named(ids: Any, error: type[Exception], message: str) -> None:
    emb = flatbed.Embedding(ROWS, DIM, padding_idx=0)
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    write = [lambda bad: emb.write_rows(bad, torch.zeros(*np.shape(bad), DIM))]
    for use in [emb, emb.read_rows, *(write if error is IndexError else [bag])]:
        with pytest.raises(error, match=re.escape(message)):
            use(ids)


@pytest.mark.parametrize(("storage", "cache_rows"), [("device", None), *product(("host", "disk"), (0, 20))])
def test_nothing_is_made_for_wrong_ids(storage: str, cache_rows: int | None, tmp_path: Path) -> None:
    """Neither memory nor a file: the table may have been meant to be larger."""
    options = {**storage_options(storage, tmp_path), "cache_rows": cache_rows}
    emb = flatbed.Embedding(ROWS, DIM, **options)
    with pytest.raises(IndexError, match="id 50 at position 2 is out of range for a table of 50 rows"):
        emb([0, 1, ROWS])
    assert not list(tmp_path.iterdir())
    larger = flatbed.Embedding(ROWS + 1, DIM, **options)
    assert larger([0, 1, ROWS]).shape == (3, DIM)
    larger.table.close(discard=True)


@pytest.mark.parametrize("storage", STORAGES)
def test_bad_batch_changes_nothing(storage: str, tmp_path: Path) -> None:
    emb = flatbed.Embedding(ROWS, DIM, **storage_options(storage, tmp_path))
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    emb([1, 2]).sum().backward()
    optimizer.step()
    emb([2, 3]).sum().backward()

    def everything() -> list[Tensor]:
        table, every = emb.table, range(ROWS)
        return [table.read_rows(every), table.read_state("exp_avg", every), table.grad, table.grad_rows]

    before = [value.clone() for value in everything()]
    for use in (emb, bag, emb.read_rows, lambda ids: emb.write_rows(ids, torch.zeros(1, 2, DIM))):
        with pytest.raises(IndexError):
            use(torch.tensor([[4, 50]]))
    assert all(torch.equal(*each) for each in zip(everything(), before, strict=True))
    optimizer.step()
    assert float(optimizer.state[emb.table]["step"]) == 2


# ---- ids on a GPU: their range is checked without waiting


@pytest.mark.gpu
def test_ids_that_the_gpu_has_not_computed_yet_for_a_table_on_the_host() -> None:
    emb, n = flatbed.Embedding(1 << 20, DIM, seed=0), 1 << 20
    ids = torch.zeros(n, dtype=torch.int64, device="cuda")
    ids.to("cpu", non_blocking=True)  # pinned memory of zeros, which the next copy takes
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    ids += torch.arange(n, device="cuda")
    assert torch.equal(emb(ids), emb(torch.arange(n)))


@pytest.mark.gpu
def test_evaluation_with_bad_ids_on_a_gpu() -> None:
    """A later lookup raises, since no step is taken; checks of good batches do not accumulate."""
    emb = flatbed.Embedding(ROWS, DIM, device="cuda").eval()
    with torch.no_grad():
        for _ in range(10):
            emb(torch.tensor([1], device="cuda"))
            torch.cuda.synchronize()
        assert len(emb.table._deferred_checks.pending) <= 1
        emb(torch.tensor([1, ROWS], device="cuda"))
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match="id 50 at position 1"):
            emb(torch.tensor([1], device="cuda"))
        emb(torch.tensor([1], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", [flatbed.Embedding, flatbed.EmbeddingBag])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint64])
def test_bad_ids_on_a_gpu_are_raised_at_the_step(
    storage: str, kind: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    emb: Any = kind(ROWS, DIM, device="cuda", **storage_options(storage, tmp_path))
    model = nn.Sequential(emb, nn.Linear(DIM, 1)).cuda()
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    good = torch.tensor([[1, 2], [3, 1]], device="cuda").to(dtype)
    model(good).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = list(range(ROWS))
    weights, dense = emb.read_rows(rows), model[1].weight.detach().clone()
    model(torch.tensor([[4, 5], [ROWS + 3, 1]], device="cuda").to(dtype)).sum().backward()
    with pytest.raises(
        IndexError, match=r"id 53 at position \(1, 0\) is out of range for a table of 50 rows"
    ):
        optimizer.step()
    assert torch.equal(emb.read_rows(rows), weights)
    assert torch.equal(model[1].weight, dense)
    optimizer.zero_grad()
    model(good).sum().backward()
    optimizer.step()
    assert not torch.equal(emb.read_rows([1]), weights[[1]])
    assert torch.equal(emb.read_rows([4, 5]), weights[[4, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize("drop", [True, False])
def test_zero_grad_between_lookup_and_backward_hides_no_bad_ids(drop: bool) -> None:
    emb = flatbed.Embedding(ROWS, DIM, device="cuda")
    optimizer = flatbed.optim.Adam(emb)
    before = emb.read_rows(torch.arange(ROWS)).clone()
    loss = emb(torch.tensor([1, ROWS], device="cuda")).sum()
    optimizer.zero_grad()
    if not drop:
        loss.backward()
    with pytest.raises(IndexError, match=f"id {ROWS} at position 1"):
        optimizer.step()
    assert torch.equal(emb.read_rows(torch.arange(ROWS)), before)
    emb(torch.tensor([1], device="cuda")).sum().backward()
    optimizer.step()
