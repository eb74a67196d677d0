"""Where batches come from: anything to iterate over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flatbed.errors import FlatbedError


def check_source(name: str, batches: Any) -> None:
    """Raise for what is no source of batches."""
    if not any(hasattr(type(batches), method) for method in ("__iter__", "__getitem__")):
        raise TypeError(
            f"{name} must be something to iterate over; found {type(batches).__name__}: give a DataLoader, "
            "for example"
        )
    if isinstance(batches, Tensor | np.ndarray | str | bytes | Mapping):
        raise TypeError(
            f"{name} must be a DataLoader or another source of batches, and each item of a "
            f"{type(batches).__name__} would be taken for one: give [batch] if it is one"
        )


def n_batches(batches: Any) -> int:
    """How many there are, if it is known."""
    try:
        return len(batches)
    except TypeError as error:
        raise TypeError(f"how many batches there are is not known: {error}") from None


class Begins:
    """Iterations of a source. One that can be read once, a generator for example, is not read again after its
    end: an epoch without batches would pass for training.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._once: Once | None = None

    def begin(self, batches: Any) -> Iterator[Any]:
        """Another one."""
        found: Iterator[Any] = iter(batches)
        if found is not batches:
            return found
        if self._once is None or self._once.items is not found:
            self._once = Once(found)
        if self._once.ended:
            raise FlatbedError(
                f"{self._name} was read to its end by an earlier loop, and a {type(found).__name__} can be "
                "read once: give a list, a DataLoader or another object that can be iterated over again, or "
                "make a new one of both for each epoch"
            )
        return self._once


class Once(Iterator[Any]):
    """An iterator that knows whether it has come to its end."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items
        self.ended = False

    def __next__(self) -> Any:
        try:
            return next(self.items)
        except StopIteration:
            self.ended = True
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.items, name)  # an iterator of a DataLoader has workers to be ended
