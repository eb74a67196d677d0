"""What rows should be after a few steps: a dense parameter of the rows of each batch, under torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatbed.bench.tables_ways import Recipe, loss_of

TOLERANCE = 1e-5  # steps are of 1e-3, or larger


class Reference:
    """Rows that begin as zeros, stepped over these batches of ids."""

    def __init__(self, recipe: Recipe, batches: list[Tensor], target: Tensor) -> None:
        self.rows = torch.unique(torch.cat(batches))
        """All that occur, in ascending order, on the host."""
        blank = torch.zeros((len(self.rows), target.shape[1]), device=target.device)
        held = {name: blank.clone() for name in ("weight", *recipe.state)}
        for n_before, ids in enumerate(batches):
            present, inverse = torch.unique(ids, return_inverse=True)
            at = torch.searchsorted(self.rows, present).to(target.device)
            param = nn.Parameter(held["weight"][at])
            optimizer = recipe.dense([param])
            if recipe.state:
                state = {name: held[name][at] for name in recipe.state}
                optimizer.state[param] = {"step": torch.tensor(float(n_before)), **state}
            torch.autograd.backward(loss_of(param[inverse.to(target.device)], target))
            optimizer.step()
            held["weight"][at] = param.detach()
            for name in recipe.state:
                held[name][at] = optimizer.state[param][name]
        self.weights = held["weight"].cpu()


@dataclass(frozen=True, slots=True)
class Difference:
    """How far each row is from where it should be."""

    of_rows: Tensor

    @property
    def n_wrong(self) -> int:
        return len(self.of_rows) - int((self.of_rows <= TOLERANCE).sum())  # nan is wrong

    @property
    def largest(self) -> float:
        return float(self.of_rows.max())


def compare(found: Tensor, expected: Reference) -> Difference:
    """Rows as a way has them after the steps of the reference."""
    return Difference((found.cpu() - expected.weights).abs().amax(1))
