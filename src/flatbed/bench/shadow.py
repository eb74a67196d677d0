"""Whether many steps came out right where all weights are too many to train twice: a few of them in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatbed.bench.check import Deviation, compare
from flatbed.bench.ways import Recipe

N_PARAMS, N_ELEMENTS = 8, 4096
MASTER = "master_weight"  # the key of state under which flatbed.optim keeps it


class Shadow:
    """The last elements of a few parameters, trained by torch's plain loop in fp64 on the same gradients."""

    def __init__(self, params: Sequence[Tensor], recipe: Recipe, *, max_norm: float) -> None:
        self.params = params
        self.max_norm = max_norm
        last = len(params) - 1
        places = sorted({round(i * last / (N_PARAMS - 1)) for i in range(N_PARAMS)})
        self._originals = [params[place] for place in places]
        self._copies = [nn.Parameter(_end(param).double()) for param in self._originals]
        self._start = [copy.detach().clone() for copy in self._copies]
        self._optimizer = recipe.make_torch(self._copies, foreach=False)

    def see_gradients(self) -> None:
        """Take the gradients as they are, and clip them by the norm of all."""
        grads = [param.grad for param in self.params if param.grad is not None]
        norm = float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]).norm())
        factor = min(1.0, self.max_norm / (norm + 1e-6))
        for copy, original in zip(self._copies, self._originals, strict=True):
            if original.grad is not None:
                copy.grad = _end(original.grad).double() * factor

    def step(self, n_steps: int = 1) -> None:
        """Take steps with the gradients seen last."""
        for _ in range(n_steps):
            self._optimizer.step()

    @torch.no_grad()
    def compare(self, optimizer: torch.optim.Optimizer) -> Deviation:
        """How far the parameters are from where they should be, relative to the way gone since last time.

        The shadow goes on from where they are, so that a few steps can be judged by themselves.
        """
        weights = [_trained(param, optimizer.state[param].get(MASTER)) for param in self._originals]
        deviation = compare(weights, [copy.detach() for copy in self._copies], self._start)
        for copy, weight in zip(self._copies, weights, strict=True):
            copy.copy_(weight)
        self._start = weights
        return deviation


def _trained(param: Tensor, master: Tensor | None) -> Tensor:
    """The end of a parameter in its full precision; infinite, where it is not its master weight, rounded."""
    if master is None:
        return _end(param).double()
    rounded = torch.equal(_end(master).to(param.dtype), _end(param))
    return _end(master).double() if rounded else torch.full_like(_end(master), math.inf).double()


def _end(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[-N_ELEMENTS:]
