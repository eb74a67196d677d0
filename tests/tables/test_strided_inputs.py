"""Ids and values of any memory layout: each public function treats them like contiguous copies of them.

`RowReader` and `Prefetcher`: tests/data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flatbed
import flatbed.optim

N_ROWS, DIM = 50, 6  # a record of 6 floats is padded
IDS = torch.tensor([3, 17, 3, 49, 0, 8, 21])
OTHERS = torch.tensor([40, 41, 42, 43, 44, 45, 46])

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "strided": lambda ids: torch.stack([ids, OTHERS.to(ids.device)], 1)[:, 0],
    "expanded": lambda ids: ids[1:2].expand(5),
    "offset": lambda ids: torch.cat([OTHERS[:1].to(ids.device), ids])[1:],  # no multiple of 16 bytes
    "transposed": lambda ids: torch.stack([ids, ids.flip(0)], 1).T,
    "expanded matrix": lambda ids: ids[:, None].expand(-1, 3),
    "empty": lambda ids: ids[:0],
    "empty and strided": lambda ids: torch.stack([ids, ids], 1)[:0, 0],
    "strided int32": lambda ids: torch.stack([ids, OTHERS.to(ids.device)], 1).int()[:, 0],
    "reversed numpy": lambda ids: ids.cpu().numpy()[::-1],
    "strided numpy": lambda ids: np.stack([ids.cpu().numpy(), OTHERS.numpy()], 1)[:, 0],
}
STORAGES = {
    "host": {"storage": "host"},
    "host, cache": {"storage": "host", "cache_rows": 20},
    "device": {"storage": "device"},
    "disk": {"storage": "disk", "cache_rows": 20},
}


def plain(ids: Any) -> Tensor:
    """The same ids in memory of their own."""
    if isinstance(ids, np.ndarray):
        return torch.from_numpy(ids.copy())
    return ids.clone(memory_format=torch.contiguous_format)


def strided(values: Tensor) -> Tensor:
    """The same values with a distance between all elements."""
    wide = torch.full((*values.shape, 2), 7.0, dtype=values.dtype, device=values.device)
    wide[..., 0] = values
    return wide[..., 0]


Make = Callable[..., Any]


@pytest.fixture
def make(request: pytest.FixtureRequest, where: str, tmp_path: Any) -> Make:
    """Makes equal modules: of a class, with the storage of the test."""
    options = dict(STORAGES[request.param])
    made = []

    def new(kind: Any = flatbed.Embedding, **more: Any) -> Any:
        path = {"path": tmp_path / f"{len(made)}.bed"} if options["storage"] == "disk" else {}
        made.append(kind(N_ROWS, DIM, device=where, seed=1, **options, **path, **more))
        return made[-1]

    return new


# Storages take turns: ids are converted before any of them sees them.
PAIRS = [(form, list(STORAGES)[(i + 1) % 4]) for i, form in enumerate(FORMS)]
on_all = pytest.mark.parametrize(("form", "make"), PAIRS, indirect=["make"])


def step(emb: Any, out: Tensor) -> None:
    """One step whose gradient has strides, too."""
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    if out.numel():
        out.backward(strided(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)))
    optimizer.step()


@on_all
def test_embedding(form: str, make: Make, where: str) -> None:
    ids, found = FORMS[form](IDS.to(where)), []
    for given in (ids, plain(ids).to(where)):
        emb = make()
        out = emb(given)
        step(emb, out)
        found.append((out.detach(), emb.read_rows(range(N_ROWS))))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@on_all
def test_embedding_bag(form: str, make: Make, where: str) -> None:
    ids, found = FORMS[form](IDS.to(where)), []
    flat = plain(ids).flatten().to(where)
    offsets = torch.tensor([0, 9, 1, 9, 1, 9], device=where)[::2][: 3 if len(flat) else 1]
    weights = strided(torch.linspace(0, 1, len(flat), device=where))
    for given in (ids if ids.ndim == 1 else flat, flat):
        emb = make(flatbed.EmbeddingBag, mode="sum")
        out = emb(given, offsets, weights) if given is not flat else emb(flat, plain(offsets), plain(weights))
        step(emb, out)
        found.append((out.detach(), emb.read_rows(range(N_ROWS))))
    # Torch rounds a bag of strided weights in another way.
    torch.testing.assert_close(found[0], found[1])


@on_all
def test_rows_and_state(form: str, make: Make, where: str) -> None:
    ids = FORMS[form](IDS.to(where))
    wanted = plain(ids).to("cpu", torch.int64)
    emb = make()
    step(emb, emb(torch.arange(N_ROWS, device=where)))
    before, state = emb.read_rows(range(N_ROWS)).cpu(), emb.table.read_state("exp_avg", range(N_ROWS)).cpu()
    assert torch.equal(emb.read_rows(ids).cpu(), before[wanted])
    assert torch.equal(emb.table.read_state("exp_avg", ids).cpu(), state[wanted])
    values = torch.arange(wanted.numel() * DIM, dtype=torch.float32, device=where).view(*wanted.shape, DIM)
    emb.write_rows(ids, strided(values))
    for position, row in enumerate(wanted.flatten().tolist()):  # the last one counts
        before[row] = values.view(-1, DIM)[position].cpu()
    assert torch.equal(emb.read_rows(range(N_ROWS)).cpu(), before)
    assert torch.equal(emb.table.read_state("exp_avg", range(N_ROWS)).cpu(), state)


QUERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": strided,
    "expanded": lambda queries: queries[:1].expand(5, -1),
    "offset": lambda queries: queries[1:],
    "transposed": lambda queries: queries.T.contiguous().T,
}


@pytest.mark.parametrize("make", STORAGES, indirect=True)
@pytest.mark.parametrize("form", QUERIES)
def test_topk(form: str, make: Make, where: str) -> None:
    emb = make()
    queries = QUERIES[form](torch.linspace(-1, 1, 4 * DIM, device=where).view(4, DIM))
    found, expected = emb.topk(queries, 3), emb.topk(plain(queries), 3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", QUERIES)
def test_from_pretrained(form: str, where: str) -> None:
    weights = QUERIES[form](torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    emb = flatbed.Embedding.from_pretrained(weights, device=where)
    assert torch.equal(emb.read_rows(range(len(weights))).cpu(), weights)
