"""An optimizer as a value: hyperparameters, names of its state, and the update of one element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Group = Mapping[str, Any]
"""A param group: hyperparameters by torch's names."""

Scalars = tuple[float, ...]
"""State that is one number per parameter, such as the step count."""

# The room in the kernels' tables.
MAX_STATES = 4  # tensors of state per parameter
MAX_SCALARS = 2
MAX_COEFFICIENTS = 8  # hyperparameters that `prepare` reads, and coefficients that it hands to `update`


@dataclass(frozen=True, slots=True)
class Tensors:
    """Parameters of one group with their gradients and state, as equally long lists."""

    params: list[Tensor]
    grads: list[Tensor] | tuple[Tensor, ...]
    state: Mapping[str, list[Tensor]]

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.state[name]


@dataclass(frozen=True, slots=True)
class Rule:
    """One optimizer's arithmetic, twice: as torch operations on lists of tensors, and for one element.

    `reference` runs on any device. `prepare` and `update` are plain functions that Triton compiles on
    first use, with `tl` in their globals. The steppers handle what all optimizers share: maximize, clipping,
    loss scaling, master weights, rounding, averages.
    """

    hyperparameters: tuple[str, ...]
    """The hyperparameters that `prepare` reads, in its order; beta1 and beta2 are found in `betas`."""

    state: Mapping[str, str | None]
    """The tensors of state by torch's keys, in the order of `update`; with the hyperparameter that must
    be set (true or not zero) for it to exist, if it is optional."""

    reference: Callable[[Group, Tensors, Scalars], Scalars]
    """Updates lists of tensors whose scalars are equal; returns the scalars after the step."""

    prepare: Callable[..., Any] | None = None
    """Triton, once per parameter and step, in fp64: (hyperparameters, scalars) → (scalars, coefficients)."""

    update: Callable[..., Any] | None = None
    """Triton, per element: (p, g, state, coefficients, HAS) → (p, state). Bit i of the constant HAS says
    whether the i-th tensor of state exists; one that does not is passed as some value and not stored.
    Without it the reference runs everywhere."""

    scalars: tuple[str, ...] = ("step",)
    """The state that is one number, by torch's keys. One that begins with _ is not in `optimizer.state`."""

    initial: Mapping[str, float | str] = field(default_factory=dict)
    """First values of state that does not start at 0: a number, or the name of a hyperparameter."""

    fused: Callable[[Group, Tensors, Scalars], Scalars] | None = None
    """The step by torch's fused CPU kernel, where torch has one. It handles `maximize`."""

    eager: bool = False
    """True if torch makes the state at construction instead of at the first gradient."""

    row_scalars: Mapping[str, str | None] = field(default_factory=dict)
    """The scalars that are in the record of each row of a table; with the hyperparameter that must be set,
    if any. All others are one per table."""

    rowwise: bool = False
    """True if tensors of state have one value per row of a table. `update` gets the mean of the row's squared
    gradients as the state after the last."""

    for_tables: str | None = None
    """For an optimizer of tables alone: the remedy for other parameters."""

    handles_maximize: bool = False
    """True if `reference` handles `maximize`."""

    def has(self, group: Group) -> int:
        """Which tensors of state a group's parameters have, as bits."""
        return sum(
            1 << bit for bit, option in enumerate(self.state.values()) if option is None or group[option] > 0
        )

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The tensors of state that a group's parameters have."""
        has = self.has(group)
        return tuple(name for bit, name in enumerate(self.state) if has >> bit & 1)

    @property
    def shown_scalars(self) -> tuple[str, ...]:
        """The scalars that are in `optimizer.state` and in state dicts, as torch's optimizers have them."""
        return tuple(name for name in self.scalars if not name.startswith("_"))

    @property
    def hidden_scalars(self) -> tuple[str, ...]:
        """The scalars that torch's optimizers do not have."""
        return tuple(name for name in self.scalars if name.startswith("_"))

    def scalars_of_rows(self, group: Group, *, per_row_steps: bool) -> tuple[str, ...]:
        """The scalars that a table has in every record."""
        if per_row_steps:
            return self.scalars
        return tuple(
            name
            for name, option in self.row_scalars.items()
            if (option is None or group[option] != 0) and (self.has(group) or not self.state)
        )

    def first_value(self, group: Group, name: str) -> float:
        """The value of a tensor or scalar of state before the first step."""
        value = self.initial.get(name, 0.0)
        return group[value] if isinstance(value, str) else value
