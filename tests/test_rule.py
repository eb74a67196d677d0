"""What a rule may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import flatbed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": dict.fromkeys("abcde")}, "4 tensors of state; found 5"),
        ({"scalars": ("step", "a", "b")}, "2 scalars; found 3"),
        ({"hyperparameters": tuple("abcdefghi")}, "8 hyperparameters; found 9"),
    ],
)
def test_more_than_the_tables_hold_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"a rule may have {message}"):
        replace(flatbed.optim.Adam._rule, **change)
