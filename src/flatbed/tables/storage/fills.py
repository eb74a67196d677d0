"""Functions that fill the rows of a new storage: first values, rows of an earlier storage, progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from flatbed.progress import progress
from flatbed.tables.config import Config, fill_state, fill_weights
from flatbed.tables.initializers import Zeros
from flatbed.tables.record import Record
from flatbed.tables.storage.base import Fill, Storage


def initial_rows(config: Config, record: Record) -> Fill:
    """Fill rows with their first weights and state."""

    def fill(start: int, stop: int, records: Tensor) -> None:
        fill_weights(record, records, start, config)
        fill_state(record, records)

    return fill


def begins_at_zero(config: Config, record: Record) -> bool:
    """Return True if all first values are zero, so that new memory need not be written."""
    return isinstance(config.init, Zeros) and not any(field.initial for field in record.state)


def kept_rows(old: Storage, record: Record, *, with_state: bool) -> Fill:
    """Fill rows from another storage. Fields that it lacks, and state without `with_state`, begin again."""
    kept = [field.name for field in record.fields if field.name in old.record]
    kept = kept if with_state else kept[:1]

    def fill(start: int, stop: int, records: Tensor) -> None:
        fill_state(record, records)
        before = old.read(start, stop).cpu()
        for name in kept:
            record.view(records, name).copy_(old.record.view(before, name))

    return fill


@contextmanager
def reported(description: str, n_rows: int, fill: Fill) -> Iterator[Fill]:
    """Show a progress bar while a storage calls `fill`."""
    with progress(description, n_rows, "rows") as advance:

        def filling(start: int, stop: int, records: Tensor) -> None:
            fill(start, stop, records)
            advance(stop - start)

        yield filling


def in_turn(*fills: Fill) -> Fill:
    """Fill rows by several functions, one after the other."""

    def fill(start: int, stop: int, records: Tensor) -> None:
        for one in fills:
            one(start, stop, records)

    return fill
