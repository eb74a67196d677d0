"""Where a table of some size fits, and what moving a batch of its rows takes: arithmetic on given numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flatbed.tables.record import WEIGHT, Field, Record

ROOM = {"device": 1.25, "host": 1.1, "disk": 1.25}
"""How much must be free for every byte of a table, by storage, those to be preferred first: beside it are a
model and its activations, the system, and a journal of the rows changed since the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Example:
    """A table to speak of: fp32, with so many states of the weight's size and so many single numbers."""

    nbytes: int
    dim: int = 128
    n_states: int = 2
    n_numbers: int = 0

    @property
    def record(self) -> Record:
        states = [Field(f"state {i}", torch.float32, self.dim) for i in range(self.n_states)]
        numbers = [Field(f"number {i}", torch.float32, 1) for i in range(self.n_numbers)]
        return Record((Field(WEIGHT, torch.float32, self.dim), *states, *numbers))

    @property
    def n_rows(self) -> int:
        return self.nbytes // self.record.nbytes


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine moves in a second; None for what it does not have, or what was not measured."""

    host: float | None = None
    """Bytes read and written by copies within host memory."""
    device: float | None = None
    """The same within the GPU's."""
    to_device: float | None = None
    from_device: float | None = None
    disk_records: float | None = None
    """Records read at random."""


def storage_for(nbytes: int, free: Mapping[str, int]) -> str | None:
    """The storage for a table of so many bytes, by what is free for each; None if there is none."""
    fits = (storage for storage, room in ROOM.items() if nbytes * room <= free.get(storage, -1))
    return next(fits, None)


def batch_seconds(storage: str, n_rows: int, record_bytes: int, rates: Rates) -> float | None:
    """How long the rows of a batch travel to where they are updated and back; None if it is not known.

    From disk, the reads alone: what goes back is written when the system likes.
    """
    nbytes = n_rows * record_bytes
    if storage == "disk":
        return None if rates.disk_records is None else n_rows / rates.disk_records
    if storage == "device":
        return None if rates.device is None else 2 * nbytes / rates.device
    if rates.to_device is not None and rates.from_device is not None:
        return nbytes / rates.to_device + nbytes / rates.from_device
    # Without a GPU: they are copied out and back, each byte read and written both times.
    return None if rates.host is None else 4 * nbytes / rates.host
