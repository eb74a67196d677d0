"""Where batches come from: anything to iterate over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


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
