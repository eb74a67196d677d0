"""References for tables: torch's optimizers on dense copies of the rows that a step touches."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import flatbed
import flatbed.optim
from tests.optim.devices import is_exact
from tests.optim.optimizers import CASES, Case

N_ROWS = 12
DIM = 16  # whole vectors of every CPU: torch's fused kernels round the odd elements behind them differently
PADDING = 2
STORAGES = ("device", "host", "disk")


class PlainRowwiseAdagrad(optim.Optimizer):
    """Adagrad with one accumulated number per row, which torch does not have."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "eps": eps, "maximize": maximize}
        super().__init__(params, {**options, "initial_accumulator_value": initial_accumulator_value})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                first = torch.full((len(p), 1), group["initial_accumulator_value"], dtype=p.dtype)
                total = self.state[p].setdefault("sum", first)
                total += (g * g).mean(1, keepdim=True)
                p -= group["lr"] * g / (total.sqrt() + group["eps"])


def _of_rows(name: str, kind: Any, torch_kind: Any, **options: Any) -> Case:
    return Case(name, kind, torch_kind, options)


OF_ROWS = [
    _of_rows("sparseadam", flatbed.optim.SparseAdam, optim.SparseAdam, lr=0.01, betas=(0.8, 0.95)),
    _of_rows("sparseadam-eps", flatbed.optim.SparseAdam, optim.SparseAdam, lr=0.1, eps=0.1, maximize=True),
    _of_rows("rowwise", flatbed.optim.RowwiseAdagrad, PlainRowwiseAdagrad, lr=0.05),
    _of_rows(
        "rowwise-initial",
        flatbed.optim.RowwiseAdagrad,
        PlainRowwiseAdagrad,
        lr=0.05,
        initial_accumulator_value=0.1,
        eps=1e-3,
        maximize=True,
    ),
]
ALL_CASES = [*CASES, *OF_ROWS]
BY_NAME = {case.name: case for case in ALL_CASES}
COUNTING = [case for case in ALL_CASES if "step" in case.kind._rule.scalars]


def same_rounding(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, bool]:
    """Options that make torch round like flatbed on a CPU; rows are computed in fp32 at least."""
    if case in OF_ROWS:
        return {}
    return case.same_rounding(torch.promote_types(dtype, torch.float32))


# ---- the reference


@dataclass
class Reference:
    """A table as it should be: dense weights and state, of which every step copies the touched rows into a
    dense parameter, lets torch's optimizer take one step on it, and copies the result back.

    `make` builds torch's optimizer. A row that is touched for the first time begins with no state, as torch
    does; if there are counters, which are the table's, with the first values of state instead.
    """

    weight: Tensor
    make: Callable[[list[nn.Parameter]], optim.Optimizer]
    first: dict[str, float | str] = field(default_factory=dict)
    """First values of state that are not 0; "weight" stands for the row itself."""
    padding_idx: int | None = None
    per_row: bool = False
    state: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    """The table's; or, `per_row`, by how often a row was touched."""
    touched: Tensor = field(init=False)
    """Number of steps that touched each row."""
    changes: Callable[[optim.Optimizer], None] | None = None
    """A change of the optimizer before the next step, such as another learning rate."""

    def __post_init__(self) -> None:
        self.touched = torch.zeros(len(self.weight), dtype=torch.long)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.weight.dtype, torch.float32)

    def gradients(self, lookups: Sequence[Tensor], upstream: Sequence[Tensor]) -> Tensor:
        """Dense gradients of one backward pass through nn.Embedding."""
        weight = nn.Parameter(self.weight.to(self.wide))
        outputs = [functional.embedding(ids, weight, padding_idx=self.padding_idx) for ids in lookups]
        torch.autograd.backward(outputs, [grad.to(self.wide) for grad in upstream])
        return weight.grad

    def rows(self, lookups: Sequence[Tensor]) -> Tensor:
        """The unique rows, without the padding row."""
        rows = torch.unique(torch.cat([ids.flatten() for ids in lookups]))
        return rows if self.padding_idx is None else rows[rows != self.padding_idx]

    def step(self, lookups: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
        self.apply(self.rows(lookups), self.gradients(lookups, upstream))

    def apply(self, rows: Tensor, grad: Tensor) -> None:
        """A step with the dense gradient `grad`, on these rows."""
        counts = self.touched[rows]
        parts = [rows]
        if self.per_row:
            parts = [rows[counts == count] for count in counts.unique()]
        elif self.state and not self.numbers:
            parts = [part for part in (rows[counts == 0], rows[counts > 0]) if len(part)]
        for part in parts:
            self._apply(part, grad[part].contiguous())
        self.touched[rows] += 1

    def _apply(self, rows: Tensor, grad: Tensor) -> None:
        param = nn.Parameter(self.weight[rows].to(self.wide))
        optimizer = self.make([param])
        if self.changes is not None:
            self.changes(optimizer)
        new = not len(rows) or int(self.touched[rows].min()) == 0
        numbers: dict[str, Any] = self.numbers
        if self.per_row and len(rows):
            numbers = self.numbers.get(int(self.touched[rows[0]]), {})
        if numbers or (self.state and not new):
            optimizer.state[param] = copy.deepcopy(numbers)
            for name, held in self.state.items():
                optimizer.state[param][name] = held[rows].clone()
        param.grad = grad
        if isinstance(optimizer, optim.SparseAdam):
            param.grad = torch.sparse_coo_tensor(torch.arange(len(rows))[None], grad, check_invariants=False)
            param.grad._coalesced_(True)
        optimizer.step()
        self._keep(rows, param, optimizer.state[param])

    def _keep(self, rows: Tensor, param: Tensor, state: dict[str, Any]) -> None:
        before = self.weight
        self.weight = self.weight.index_copy(0, rows, param.detach().to(self.weight.dtype))
        numbers = {}
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.dim() != 2:
                numbers[name] = value
                continue
            if name not in self.state:
                first = self.first.get(name, 0.0)
                shape = (len(self.weight), value.shape[1])
                begin = (
                    before.to(self.wide) if first == "weight" else torch.full(shape, first, dtype=self.wide)
                )
                self.state[name] = begin.clone()
            self.state[name][rows] = value
        if self.per_row and len(rows):
            self.numbers[int(self.touched[rows[0]]) + 1] = numbers
        elif not self.per_row:
            self.numbers = numbers


def reference(case: Case, weight: Tensor, **more: Any) -> Reference:
    """The reference for one of the cases."""

    def make(params: list[nn.Parameter]) -> optim.Optimizer:
        return case.theirs(params, **same_rounding(case, weight.dtype))

    first = {"sum": case.options.get("initial_accumulator_value", 0.0), "ax": "weight", "slow": "weight"}
    first["step_size"] = case.options.get("lr", 0.01)
    return Reference(weight.clone(), make, first, **more)


# ---- ids


def _late(step: int) -> list[Tensor]:
    return [torch.arange(2 * step + 1).clamp(max=N_ROWS - 1)]


PATTERNS: dict[str, Callable[[int], list[Tensor]]] = {
    "duplicates": lambda step: [torch.randint(3, 8, (40,))],
    "distinct": lambda step: [torch.randperm(N_ROWS)[:7].view(7, 1)],
    "one row": lambda step: [torch.full((2, 3), 3 + step % 2)],
    "all rows": lambda step: [torch.cat([torch.randperm(N_ROWS), torch.randint(N_ROWS, (5,))])],
    "empty": lambda step: [torch.randint(N_ROWS, ((0, 2) if step % 2 == 0 else (6,)))],
    "padding": lambda step: [
        torch.full((3,), PADDING) if step == 1 else torch.tensor([PADDING, 4, PADDING, 4, step])
    ],
    "late": _late,
    "lookups": lambda step: [torch.randint(N_ROWS, (2, 2, 3)), torch.randint(N_ROWS, (9,)), torch.tensor(5)],
}
"""The ids of every step, one tensor per lookup."""


def paired(cases: Sequence[Any]) -> list[Any]:
    """Every case with every pattern of ids; storages take turns."""
    made = []
    for i, case in enumerate(cases):
        for j, pattern in enumerate(PATTERNS):
            storage = STORAGES[(i + j) % 3]
            made.append(pytest.param(case, pattern, storage, id=f"{case.name}-{pattern}-{storage}"))
    return made


def diagonal(cases: Sequence[Any], shift: int = 0) -> list[Any]:
    """Every case once, with patterns and storages that take turns."""
    return [paired(cases)[i * len(PATTERNS) + (i + shift) % len(PATTERNS)] for i in range(len(cases))]


def upstream(lookups: Sequence[Tensor], dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of what the lookups give, of many sizes; some are zero."""
    sizes = 10 ** torch.linspace(-3, 0, dim)
    sizes[dim // 2] = 0.0 if dim > 1 else 1.0
    return [(torch.randn(*ids.shape, dim) * sizes).to(dtype) for ids in lookups]


# ---- ours


def storage_options(storage: str, folder: Path | None, name: str = "table") -> dict[str, Any]:
    """Options of a table with this storage; on disk, its file is in the folder."""
    return {"storage": storage, "path": folder / name if storage == "disk" else None}


@dataclass
class Setup:
    """Where a table lives and where it computes."""

    storage: str = "host"
    device: str = "cpu"
    folder: Path | None = None

    def options(self) -> dict[str, Any]:
        name = f"table-{len(os.listdir(self.folder))}" if self.storage == "disk" else ""
        return {**storage_options(self.storage, self.folder, name), "device": self.device}

    def embedding(self, weight: Tensor, padding_idx: int | None = None) -> Any:
        return flatbed.Embedding.from_pretrained(
            weight, freeze=False, padding_idx=padding_idx, **self.options()
        )

    def bag(self, weight: Tensor, **more: Any) -> Any:
        return flatbed.EmbeddingBag.from_pretrained(weight, freeze=False, **more, **self.options())


def weights(n_rows: int = N_ROWS, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n_rows, dim).to(dtype)


def backward(emb: Any, lookups: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """One backward pass through lookups of one table."""
    outputs = [emb(ids) for ids in lookups]
    torch.autograd.backward(outputs, [grad.to(outputs[0].device) for grad in grads])


def everything(emb: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """All weights and all state that optimizers show, on the host."""
    rows = torch.arange(emb.num_embeddings)
    names = [name for name in emb.table.state_names if not name.startswith("_")]
    return emb.read_rows(rows).cpu(), {name: emb.table.read_state(name, rows).cpu() for name in names}


def dense_grad(table: Any) -> Tensor:
    """A table's gradient in the form of nn.Embedding's."""
    dense = torch.zeros(table.num_embeddings, table.embedding_dim)
    return dense if table.grad is None else dense.index_copy(0, table.grad_rows.cpu(), table.grad.cpu())


def assert_gradients(emb: Any, dense: Tensor, touched: Tensor, where: str) -> None:
    """`grad` is the dense gradient of the touched rows, in ascending order."""
    assert torch.equal(emb.table.grad_rows.cpu(), touched)
    assert_close(emb.table.grad.cpu(), dense[touched], where, "gradient")


def cached_rows(emb: Any) -> set[int]:
    """The rows in a table's cache, which no public function tells."""
    cache = emb.table._store.cache
    rows = torch.tensor([]) if cache is None else cache.index.row_of_slot
    return set(rows[rows >= 0].tolist())


def assert_close(ours: Tensor, theirs: Tensor, where: str, message: str, *, low: bool = False) -> None:
    """Compare bitwise on a CPU, otherwise to some units in the last place, of half precision if `low`."""
    assert ours.dtype == theirs.dtype, message
    if is_exact(where):
        assert torch.equal(ours, theirs), f"{message}: {(ours - theirs).abs().max()}"
        return
    low = low or ours.dtype in (torch.bfloat16, torch.float16)
    # The interpreter cuts bits off where a GPU rounds: up to an ulp is lost at every step.
    relative = 1e-5 if not low else 1e-2 if where == "cuda" else 5e-2
    torch.testing.assert_close(
        ours, theirs, rtol=relative, atol=1e-2 if low else 2e-6, msg=lambda m: f"{message}: {m}"
    )


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def assert_same(emb: Any, expected: Reference, where: str) -> None:
    """Weights, state of all rows, and step counts."""
    weight, state = everything(emb)
    low = weight.dtype in (torch.bfloat16, torch.float16)  # weight decay carries its rounding into the state
    assert_close(weight, expected.weight, where, "weight")
    tensors = {name: value for name, value in state.items() if value.shape[1] > 1 or name in expected.state}
    assert set(expected.state) <= set(tensors), f"{set(tensors)} for {set(expected.state)}"
    for name, value in expected.state.items():
        # State that begins as a copy of the weight is made when the row is first touched.
        rows = expected.touched > 0 if expected.first.get(name) == "weight" else slice(None)
        assert_close(tensors[name][rows], value[rows], where, name, low=low)
    if expected.per_row:
        return
    scalars = emb.table.scalars()
    for name, value in expected.numbers.items():
        assert abs(scalars[name] - float(value)) <= 1e-6 * abs(float(value)), name


def train(emb: Any, optimizer: Any, expected: Reference, batches: Sequence[list[Tensor]]) -> None:
    """The same steps for both."""
    for lookups in batches:
        grads = upstream(lookups, emb.embedding_dim, expected.weight.dtype)
        backward(emb, lookups, grads)
        optimizer.step()
        optimizer.zero_grad()
        expected.step(lookups, grads)


# ---- with and without a cache


def step(emb: Any, optimizer: Any, *lookups: Any) -> None:
    """Backward passes, one after the other, and then the step."""
    for ids in lookups:
        emb(ids).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Twins:
    """A table with a cache and one without, trained alike."""

    def __init__(
        self, storage: str, folder: Path, n_slots: int = 6, *, n_rows: int = 30, **options: Any
    ) -> None:
        self.both: list[Any] = [
            flatbed.Embedding(
                n_rows, 3, seed=1, cache_rows=n, **storage_options(storage, folder, name), **options
            )
            for name, n in (("cached.bed", n_slots), ("plain.bed", 0))
        ]
        self.optimizers = [flatbed.optim.Adam(emb, lr=0.1) for emb in self.both]

    @property
    def cached(self) -> Any:
        return self.both[0]

    def step(self, *lookups: Any) -> None:
        for emb, optimizer in zip(self.both, self.optimizers, strict=True):
            step(emb, optimizer, *lookups)

    def train(self) -> Twins:
        self.step([1, 2, 3], [3, 4])
        self.step([5, 1, 29])
        self.step([1, 2, 8, 8])
        return self

    def check(self) -> None:
        (weight, state), (wanted, wanted_state) = (everything(emb) for emb in self.both)
        assert torch.equal(weight, wanted)
        assert_equal(state, wanted_state)
        assert self.both[0].table.scalars() == self.both[1].table.scalars()
