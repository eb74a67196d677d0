"""Ways to train a large table: flatbed's, SpeedTorch's, and torch's where it fits on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from flatbed.bench import tables_cupy
from flatbed.bench.tables_rows import DEVICE, HOST, SPARSE, SPEEDTORCH


@dataclass(frozen=True, slots=True)
class Recipe:
    """An optimizer as flatbed's class, as torch's, and as torch's for sparse gradients."""

    flatbed_class: Callable[..., torch.optim.Optimizer]
    torch_class: Callable[..., torch.optim.Optimizer]
    sparse_class: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, float]
    state: tuple[str, ...]
    """Its tensors in torch's terms."""

    def dense(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return self.torch_class(params, **self.options)


RECIPES = {
    "adam": Recipe(
        flatbed.optim.Adam,
        torch.optim.Adam,
        torch.optim.SparseAdam,
        {"lr": 1e-3},
        ("exp_avg", "exp_avg_sq"),
    ),
    "adagrad": Recipe(
        flatbed.optim.Adagrad, torch.optim.Adagrad, torch.optim.Adagrad, {"lr": 1e-2}, ("sum",)
    ),
    "sgd": Recipe(flatbed.optim.SGD, torch.optim.SGD, torch.optim.SGD, {"lr": 1e-6}, ()),
}


def loss_of(rows: Tensor, target: Tensor) -> Tensor:
    """A large sum: gradients are far above every eps, so that all ways compute the same."""
    return 500 * (rows - target).square().sum()


def make_target(n_ids: int, dim: int, generator: torch.Generator) -> Tensor:
    """What the rows, which begin at zero, are to become: away from zero, on both sides."""
    sides = torch.randint(2, (n_ids, dim), generator=generator) * 2 - 1
    return sides * (1 + torch.rand((n_ids, dim), generator=generator))


class Trainee(Protocol):
    """A table with an optimizer."""

    way: str
    table_bytes: int

    def prepare(self, ids: Tensor) -> Any:
        """Ids on the host, as this way takes them."""

    def step(self, ids: Any, target: Tensor) -> None:
        """Lookup, loss, backward, update."""

    def read(self, rows: Tensor) -> Tensor:
        """Weights of some rows."""

    def further_bytes(self) -> int:
        """Memory of the GPU that torch does not know of."""

    def close(self) -> None:
        """Give memory back."""


class _Torchs:
    """What those have in common that take ids as torch's tensors on the host."""

    def prepare(self, ids: Tensor) -> Tensor:
        return ids

    def further_bytes(self) -> int:
        return 0


class FlatbedTable(_Torchs):
    """`Embedding`, on the host or on the device."""

    def __init__(
        self, n_rows: int, dim: int, recipe: Recipe, *, device: torch.device, n_ids: int, storage: str
    ) -> None:
        self.way = {"host": HOST, "device": DEVICE}[storage]
        self._emb = flatbed.Embedding(n_rows, dim, storage=storage, device=device, init="zeros", cache_rows=0)
        self._optimizer = recipe.flatbed_class(self._emb, **recipe.options)
        self.table_bytes = self._emb.table.nbytes

    def step(self, ids: Tensor, target: Tensor) -> None:
        torch.autograd.backward(loss_of(self._emb(ids), target))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def read(self, rows: Tensor) -> Tensor:
        return self._emb.read_rows(rows)

    def close(self) -> None:
        self._emb.table.close()


class SparseTable(_Torchs):
    """`nn.Embedding(sparse=True)`, all of it where it computes."""

    way = SPARSE

    def __init__(self, n_rows: int, dim: int, recipe: Recipe, *, device: torch.device, n_ids: int) -> None:
        # Off by default; torch warns of it where it was not said.
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        weight = torch.zeros((n_rows, dim), device=device)
        self._emb = nn.Embedding(n_rows, dim, sparse=True, _weight=weight)
        self._optimizer = recipe.sparse_class(list(self._emb.parameters()), **recipe.options)
        self._device = device
        self.table_bytes = (1 + len(recipe.state)) * weight.nbytes

    def step(self, ids: Tensor, target: Tensor) -> None:
        torch.autograd.backward(loss_of(self._emb(ids.to(self._device)), target))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def read(self, rows: Tensor) -> Tensor:
        return self._emb.weight.detach()[rows.to(self._device)]

    def close(self) -> None:
        self._optimizer.state.clear()


class SwitchedTable:
    """Pinned CuPy tables for weight and state; a batch's rows are switched into a small nn.Embedding."""

    way = SPEEDTORCH

    def __init__(self, n_rows: int, dim: int, recipe: Recipe, *, device: torch.device, n_ids: int) -> None:
        self._weight = tables_cupy.PinnedTable(n_rows, dim)
        self._state = {name: tables_cupy.PinnedTable(n_rows, dim) for name in recipe.state}
        self._emb = nn.Embedding(n_ids, dim, device=device)
        self._places = torch.arange(n_ids, device=device)
        self._optimizer = recipe.dense(list(self._emb.parameters()))
        self._held = self._optimizer.state[self._emb.weight]
        if recipe.state:
            self._held["step"] = torch.tensor(0.0)
        self.table_bytes = (1 + len(recipe.state)) * 4 * n_rows * dim

    def prepare(self, ids: Tensor) -> Any:
        """Of numpy in int32, as SpeedTorch recommends."""
        return ids.numpy().astype(np.int32)

    def step(self, ids: Any, target: Tensor) -> None:
        self._emb.weight.data = self._weight.read(ids)
        for name, table in self._state.items():
            self._held[name] = table.read(ids)
        torch.autograd.backward(loss_of(self._emb(self._places), target))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._weight.write(ids, self._emb.weight.data)
        for name, table in self._state.items():
            table.write(ids, self._held[name])

    def read(self, rows: Tensor) -> Tensor:
        return self._weight.read(self.prepare(rows))

    def further_bytes(self) -> int:
        return tables_cupy.pool_bytes()

    def close(self) -> None:
        self._optimizer.state.clear()
        self._state.clear()
        del self._weight, self._held
        tables_cupy.free_pool()


def trainees(
    device: torch.device, *, left_out: Callable[[str, str], object]
) -> dict[str, Callable[..., Trainee]]:
    """The ways that can be taken there, by name; those left out are named."""
    ways: dict[str, Callable[..., Trainee]] = {HOST: partial(FlatbedTable, storage="host")}
    if device.type == "cuda" and tables_cupy.have_cupy():
        ways[SPEEDTORCH] = SwitchedTable
    elif device.type == "cuda":
        left_out(SPEEDTORCH, "CuPy is not installed")
    ways[SPARSE] = SparseTable
    ways[DEVICE] = partial(FlatbedTable, storage="device")
    return ways
