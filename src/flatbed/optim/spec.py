"""An optimizer as its parts see it: rule, options, and the parameters of its groups by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.distributed.dtensor import Sharding, is_dtensor
from flatbed.distributed.peers import Described
from flatbed.distributed.shard_state import StateSharding
from flatbed.kernels.step import StepOptions
from flatbed.rule import Group, Rule
from flatbed.tables.table import Table

Groups = list[dict[str, Any]]
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer's class name, rule, options and default hyperparameters."""

    name: str
    rule: Rule
    options: StepOptions
    defaults: Group
    state_sharding: StateSharding | None = None

    def sharding_of(self, param: Tensor) -> Sharding | None:
        """Sharding of a DTensor, or of the state of a whole parameter."""
        if self.state_sharding is None or is_dtensor(param):
            return Sharding.of(param)
        return self.state_sharding.shard(param)


def named_params(groups: Sequence[Group], first: int = 0) -> Iterator[tuple[str, Tensor, int]]:
    """All parameters and tables with a name for messages and the number of their group."""
    for number, group in enumerate(groups, first):
        given = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield (f"'{given[i]}'" if given else f"{i} of group {number}"), param, number


def named_tables(groups: Sequence[Group], first: int = 0) -> list[tuple[str, Table, int]]:
    """The tables among all parameters."""
    return [(name, p, number) for name, p, number in named_params(groups, first) if isinstance(p, Table)]


def describe(spec: OptimizerSpec, groups: Sequence[Group]) -> list[Described]:
    """Parameters and options as ranks that share DTensors compare them.

    Whole parameters may differ between ranks, unless their gradients are part of a norm.
    """
    found = [Described("the class of the optimizer", spec.name)]
    found += [Described(name, repr(value)) for name, value in asdict(spec.options).items()]
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name not in ("params", "param_names") and not _is_on_gpu(value):
                found.append(Described(f"{name} of group {number}", repr(value)))
    for name, param, _ in named_params(groups):
        sharding = None if isinstance(param, Table) else spec.sharding_of(param)
        if sharding is not None or spec.options.needs_norm:
            placed = f" placed {sharding.placements}" if sharding is not None else ""
            mesh = None if sharding is None else sharding.mesh
            found.append(Described(f"parameter {name}", f"{tuple(param.shape)} {param.dtype}{placed}", mesh))
    return found


def _is_on_gpu(value: Any) -> bool:
    """Tell if a value is a tensor that cannot be read without waiting for a GPU."""
    return isinstance(value, Tensor) and value.device.type != "cpu"
