"""Copies of tables: for deepcopy, and for pickling whole modules (torch.save)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.cuda.host_memory import available_bytes
from flatbed.errors import FlatbedError
from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.record import DTYPES, NAMES, Record
from flatbed.tables.saving import blank
from flatbed.tables.storage.table_storage import TableStorage

if TYPE_CHECKING:
    from flatbed.tables.table import Table

CACHE = ("cache_rows", "cache_bytes", "cache_policy")
"""What a table was told about its cache."""


def copy(table: Table) -> Table:
    """The same rows, state and numbers in memory of their own; no optimizer has the copy.

    Gradients that wait for a step stay behind.
    """
    from flatbed.tables.table import make

    store = table.store
    if store.config.path is not None:
        raise FlatbedError(
            f"a table on disk ({store.config.path}) is not copied along: save it (table.save(path)) and make "
            "the copy from that (flatbed.load_table), in host memory or in a file of its own"
        )
    if not store.laid_out:
        made = make(store.config, store.device, replicate=table.replicate)
    else:
        source = store.tier  # first of all: it may be laid out anew
        made = blank(store.config, store.record, device=store.device, replicate=table.replicate)
        store.settle()
        for first, last in store.blocks(0, store.config.n_rows, store.record.nbytes):
            made.store.tier.write_(first, source.read(first, last))
        _disown(made.store, table.scalars())
    made.requires_grad_(table.requires_grad)
    return made


def parts(table: Table) -> tuple[Any, ...]:
    """What pickling keeps of a table."""
    store = table.store
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
    if not store.laid_out:
        return about, [], {}, {}
    _ = store.tier  # it may be laid out anew
    needed = config.n_rows * sum(field.nbytes for field in store.record.fields)
    if needed > available_bytes():
        raise FlatbedError(
            f"a copy of this table takes {needed:,} bytes, and {available_bytes():,} bytes of memory are "
            "available: use table.save(path) or flatbed.save_checkpoint, which write it bit by bit"
        )
    fields = {field.name: store.read_field(field.name, 0, config.n_rows) for field in store.record.fields}
    return about, store.record.describe(), fields, table.scalars()


def rebuild(
    about: dict[str, Any],
    fields: list[dict[str, Any]],
    values: dict[str, Tensor],
    scalars: dict[str, float],
) -> Table:
    """The inverse of `parts`; on the CPU, if the device that computed is not here."""
    from flatbed.tables.table import make

    config = Config(
        n_rows=about["num_embeddings"],
        dim=about["embedding_dim"],
        dtype=DTYPES[about["dtype"]],
        storage=about["storage"],
        path=None,
        init=initial.described(about["init"]),
        seed=about["seed"],
        padding_idx=about["padding_idx"],
        **{name: about[name] for name in CACHE if name in about},  # there are copies from before caches
    )
    device = _present(torch.device(about["device"]))
    if not fields:
        made = make(config, device, replicate=about["replicate"])
    else:
        made = blank(config, Record.described(fields), device=device, replicate=about["replicate"])
        for name, tensor in values.items():
            for first, last in made.store.field_blocks(name):
                made.store.write_field(name, first, tensor[first:last])
        _disown(made.store, scalars)
    made.requires_grad_(about["requires_grad"])
    return made


def _disown(store: TableStorage, scalars: dict[str, float]) -> None:
    """Its state is nobody's, and the first optimizer that fits goes on with it."""
    store.scalars = dict(scalars)
    store.claimed = not store.record.state


def _present(device: torch.device) -> torch.device:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return device
