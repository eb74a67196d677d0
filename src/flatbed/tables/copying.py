"""Copies of tables: for deepcopy, and for pickling whole modules (torch.save)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.cuda.host_memory import available_bytes
from flatbed.errors import FlatbedError
from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.record import DTYPES, NAMES, Record
from flatbed.tables.storage.base import Fill

if TYPE_CHECKING:
    from flatbed.tables.table import Table

CACHE = ("cache_rows", "cache_bytes", "cache_policy")


def copy(table: Table) -> Table:
    """Copy rows, state and numbers of state to memory of their own.

    No optimizer has the copy. Gradients that no step has used yet are not copied.
    """
    store = table._store
    if store.config.path is not None:
        raise FlatbedError(
            f"a table on disk ({store.config.path}) is not copied along: save it (table.save(path)) and make "
            "the copy from that (flatbed.load_table), in host memory or in a file of its own"
        )
    made = type(table)(store.config, device=store.device, replicate=table.replicate)
    if store.is_allocated:
        source = store.ensure_layout()
        store.flush()

        def fill(start: int, stop: int, records: Tensor) -> None:
            records.copy_(source.read(start, stop))

        _fill(made, store.record, fill, table.scalars())
    made.requires_grad_(table.requires_grad)
    return made


def parts(table: Table) -> tuple[Any, ...]:
    """Return the content of a pickled table: the arguments of `rebuild` after `kind`."""
    store = table._store
    config = store.config
    if config.path is not None:
        raise FlatbedError(
            f"a table on disk ({config.path}) is not pickled: use flatbed.save_checkpoint or table.save(path)"
        )
    about = {
        **config.describe(),
        "num_embeddings": config.n_rows,
        "embedding_dim": config.dim,
        "dtype": NAMES[config.dtype],
        "storage": config.storage,
        **{name: getattr(config, name) for name in CACHE},
        "device": str(store.device),
        "replicate": table.replicate,
        "requires_grad": table.requires_grad,
    }
    if not store.is_allocated:
        return about, [], {}, {}
    store.ensure_layout()
    needed = config.n_rows * sum(field.nbytes for field in store.record.fields)
    if needed > available_bytes():
        raise FlatbedError(
            f"a copy of this table takes {needed:,} bytes, and {available_bytes():,} bytes of memory are "
            "available: use table.save(path) or flatbed.save_checkpoint, which write it block by block"
        )
    fields = {field.name: store.read_field(field.name, 0, config.n_rows) for field in store.record.fields}
    return about, store.record.describe(), fields, table.scalars()


def rebuild(
    kind: type[Table],
    about: dict[str, Any],
    fields: list[dict[str, Any]],
    values: dict[str, Tensor],
    scalars: dict[str, float],
) -> Table:
    """Make a table from `parts`; on the CPU, if the device that computed is missing."""
    config = Config(
        n_rows=about["num_embeddings"],
        dim=about["embedding_dim"],
        dtype=DTYPES[about["dtype"]],
        storage=about["storage"],
        path=None,
        init=initial.described(about["init"]),
        seed=about["seed"],
        padding_idx=about["padding_idx"],
        **{name: about[name] for name in CACHE if name in about},  # pickles from before caches have none
    )
    device = _present(torch.device(about["device"]))
    made = kind(config, device=device, replicate=about["replicate"])
    if fields:
        record = Record.described(fields)

        def fill(start: int, stop: int, records: Tensor) -> None:
            for name, tensor in values.items():
                record.view(records, name).copy_(tensor[start:stop])

        _fill(made, record, fill, scalars)
    made.requires_grad_(about["requires_grad"])
    return made


def _fill(table: Table, record: Record, fill: Fill, scalars: dict[str, float]) -> None:
    fields = [field.name for field in record.fields]
    with ExitStack() as undo:
        doing = "copying the table"
        table._store.begin_replace(record, fill, fields=fields, scalars=scalars, doing=doing, undo=undo)()
    table._store.adopt_state(scalars)


def _present(device: torch.device) -> torch.device:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return device
