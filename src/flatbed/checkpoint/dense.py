"""State dicts of models and optimizers without their tables, which are saved as files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flatbed.checkpoint.codec import Packer
from flatbed.errors import FlatbedError
from flatbed.optim.optimizer import Optimizer as FlatbedOptimizer
from flatbed.tables.embedding import DenseStateDict


def dense_state(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` without the rows of tables."""
    return dict(model.state_dict(destination=DenseStateDict()))


def optimizer_parts(optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Encode an optimizer's state without that of tables: JSON, and the tensors it refers to."""
    packer = Packer()
    packed = {key: packer.pack(value, key) for key, value in plain_state(optimizer).items()}
    about = {"class": type(optimizer).__name__, "shapes": shapes_of(optimizer), "state": packed}
    return about, packer.tensors


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of any optimizer, without its tables."""
    if isinstance(optimizer, FlatbedOptimizer):
        return dict(optimizer._state_dict_without_tables())
    return dict(optimizer.state_dict())


def shapes_of(optimizer: Optimizer) -> list[list[list[int]]]:
    """Return the shapes of an optimizer's parameters by group."""
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def check_same(optimizer: Optimizer, state: Any, shapes: Any, *, where: str) -> None:
    """Raise unless state was saved from the same parameters in the same groups."""
    ours = shapes_of(optimizer)
    if shapes != ours:
        raise FlatbedError(
            f"{where} holds state for groups of parameters of the shapes {_shortened(shapes)}; "
            f"{type(optimizer).__name__} has {_shortened(ours)}. Build it over the same parameters"
        )
    for number, (saved, own) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=True)):
        theirs, mine = saved.get("param_names"), own.get("param_names")
        if theirs is not None and mine is not None and list(theirs) != list(mine):
            raise FlatbedError(
                f"{where}, group {number}, is of the parameters {_shortened(theirs)}; "
                f"{type(optimizer).__name__} has {_shortened(mine)}, in this order"
            )


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else text[:200] + "…"


def load_all(optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """Load all states, or none."""
    before = [plain_state(optimizer) for optimizer in optimizers]
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                    saved[key] = value.to(own[key].device)  # the learning rate of a captured step
        try:
            _load(optimizer, state)
        except BaseException:
            for loaded, old in zip(optimizers[:number], before, strict=False):
                _load(loaded, old)
            raise


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state of `plain_state`; tables stay as they are."""
    if isinstance(optimizer, FlatbedOptimizer):
        optimizer._load_state_dict_without_tables(state)
    else:
        optimizer.load_state_dict(state)
