"""The record of a row: its weight and its optimizer state, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

WEIGHT = "weight"
LINE = 128  # bytes that a GPU moves at once: records start at multiples of it, or share a line
FIELD = 16  # alignment of fields, for vector loads

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """`count` elements of a row: its weight, a tensor of state, or (count 1) a number of state."""

    name: str
    dtype: torch.dtype
    count: int
    initial: float = 0.0

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.count


@dataclass(frozen=True)
class Record:
    """The fields of every row of a table; the weight is the first."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        """Refuse names that files keep for something else."""
        names = [field.name for field in self.fields]
        taken = [name for name in names[1:] if name in (WEIGHT, "__metadata__", "") or names.count(name) > 1]
        if names[:1] != [WEIGHT] or taken:
            raise ValueError(
                f"a row has a 'weight' and state with names of its own; found {names}: rename the state "
                f"{', '.join(map(repr, taken)) or 'of the optimizer'}"
            )

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each field, in bytes."""
        offsets, at = {}, 0
        for field in self.fields:
            offsets[field.name] = at
            at += -(-field.nbytes // FIELD) * FIELD
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Distance between records: no record spans more lines than needed."""
        last = self.fields[-1]
        size = max(self.offsets[last.name] + last.nbytes, FIELD)
        return -(-size // LINE) * LINE if size > LINE // 2 else 1 << (size - 1).bit_length()

    @property
    def weight(self) -> Field:
        return self.fields[0]

    @property
    def padded(self) -> int:
        """Bytes of the weight with its padding."""
        return -(-self.weight.nbytes // FIELD) * FIELD

    @property
    def state(self) -> tuple[Field, ...]:
        """All fields but the weight."""
        return self.fields[1:]

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def __contains__(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)

    def view(self, records: Tensor, name: str) -> Tensor:
        """View a field of records: (n, nbytes) of uint8 → (n, count)."""
        field, at = self[name], self.offsets[name]
        return records[:, at : at + field.nbytes].view(field.dtype)

    def describe(self) -> list[dict[str, Any]]:
        """Convert to JSON types."""
        return [
            {"name": f.name, "dtype": NAMES[f.dtype], "count": f.count, "initial": f.initial}
            for f in self.fields
        ]

    @staticmethod
    def from_json(fields: Sequence[Mapping[str, Any]]) -> Record:
        """Build a record from the result of `describe`.

        Raises KeyError, TypeError or ValueError for wrong descriptions.
        """
        made = []
        for field in fields:
            count = field["count"]
            if not isinstance(field["name"], str) or not isinstance(count, int) or count < 1:
                raise ValueError(f"no field of a record: {field!r}")
            made.append(Field(field["name"], DTYPES[field["dtype"]], count, float(field["initial"])))
        return Record(tuple(made))
