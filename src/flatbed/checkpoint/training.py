"""The arguments of `save_checkpoint` and `load_checkpoint`, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatbed.errors import FlatbedError
from flatbed.tables.embedding import named_tables
from flatbed.tables.table import Table


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that a checkpoint is made of or loaded into."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[Any, ...]
    scalers: tuple[Any, ...]
    """The scaler, if there is one."""
    tables: dict[str, Table]

    @staticmethod
    def of(model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> Training:
        """Check the arguments of `save_checkpoint` and `load_checkpoint`."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}")
        optimizers, schedulers = _several(optimizer), _several(scheduler)
        scalers = () if scaler is None else (scaler,)
        if len(set(map(id, optimizers))) < len(optimizers):
            raise ValueError(f"found an optimizer twice among {len(optimizers)}: give each of them once")
        for one in optimizers:
            if not isinstance(one, Optimizer):
                raise TypeError(
                    f"optimizer must be a torch.optim.Optimizer, or several; found {type(one).__name__} "
                    f"(there are scheduler=, scaler= and, for what JSON can hold, extra={{…}})"
                )
        for one in (*schedulers, *scalers):
            is_class = isinstance(one, type)
            if is_class or isinstance(one, Optimizer | nn.Module) or not hasattr(one, "load_state_dict"):
                found = f"the class {one.__name__}" if is_class else type(one).__name__
                raise TypeError(
                    "scheduler and scaler must be objects with state_dict and load_state_dict, and no model "
                    f"or optimizer; found {found}"
                )
        tables = dict(named_tables(model))
        known = {id(table) for table in tables.values()}
        for one in optimizers:
            if getattr(one, "_averages_in_model", False):
                raise FlatbedError(
                    "the model holds averaged weights (`with ema_weights()`): save and load its checkpoint "
                    "outside of the block. Without the optimizer, the averages can be saved there"
                )
            for param in (p for group in one.param_groups for p in group["params"]):
                if isinstance(param, Table) and id(param) not in known:
                    raise FlatbedError(
                        f"{type(one).__name__} has a table that is not in the model ({param!r}): pass a "
                        "module that holds all of them, nn.ModuleList([model, embedding]) for example"
                    )
        return Training(model, optimizers, schedulers, scalers, tables)


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, Mapping) else (given,)
