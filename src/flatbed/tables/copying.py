"""Copies of a table: for deepcopy, for pickled modules (torch.save), and as files for other programs."""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda.host_memory import available_bytes
from flatbed.errors import FlatbedError
from flatbed.progress import progress
from flatbed.tables.config import Config, as_integer
from flatbed.tables.files import check_folder, draft_of, replacing, sync_folder, write_at, write_text
from flatbed.tables.record import DTYPES, NAMES, WEIGHT, Field, Record
from flatbed.tables.row_io import READ
from flatbed.tables.saving import config_of, describe
from flatbed.tables.storage.base import Fill, row_blocks
from flatbed.tables.tensor_file import TensorEntry, writing

if TYPE_CHECKING:
    from flatbed.tables.table import Table

CACHE = ("cache_rows", "cache_bytes", "cache_policy")


def copy(table: Table) -> Table:
    """Copy rows, state and numbers of state to memory of their own.

    No optimizer has the copy. Gradients that no step has used yet are not copied.
    """
    store = table._store
    _check_in_memory(store.config)
    made = type(table)(store.config, device=store.device, replicate=table.replicate)
    if store.is_allocated:
        source = store.ensure_layout()
        store.flush()

        def fill(start: int, stop: int, records: Tensor) -> None:
            records.copy_(source.read(start, stop))

        _fill(made, store.record, fill, table.scalars())
    made.requires_grad_(table.requires_grad)
    return made


def pickled_parts(table: Table) -> tuple[Any, ...]:
    """Return the content of a pickled table: the arguments of `rebuild` after `kind`."""
    store = table._store
    config = store.config
    _check_in_memory(config)
    about = {
        **describe(config),
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
    """Make a table from `pickled_parts`; on the CPU, if the device that computed is missing."""
    weight = Field(WEIGHT, DTYPES[about["dtype"]], about["embedding_dim"])
    cache = {name: about[name] for name in CACHE if name in about}  # pickles from before caches have none
    config = replace(config_of(about, about["num_embeddings"], weight, storage=about["storage"]), **cache)
    device = torch.device(about["device"])
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        device = torch.device("cpu")
    made = kind(config, device=device, replicate=about["replicate"])
    if fields:
        record = Record.from_json(fields)

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


def _check_in_memory(config: Config) -> None:
    if config.path is not None:
        raise FlatbedError(
            f"a table on disk ({config.path}) is neither copied nor pickled: use flatbed.save_checkpoint or "
            "table.save(path), and make copies with flatbed.load_table"
        )


# ---- files for other programs, written block by block


SHARD_BYTES = 5 * 10**9
"""Bytes of a shard, as in Hugging Face's libraries."""
FILES = (".npy", ".safetensors")
FORMAT = {"format": "pt"}  # the metadata that Hugging Face's libraries ask for


def export(table: Table, path: Path, *, shard_bytes: Any = None) -> None:
    """Write a .npy file, a .safetensors file, or a folder of shards, by the suffix of `path`.

    If the table is sharded, all ranks call this, and the first rank writes.
    """
    config = table._store.config
    if path.suffix not in ("", *FILES) and not path.is_dir():
        raise ValueError(
            f"{path.name} ends in {path.suffix}; expected .npy, .safetensors, or the name of a new folder, "
            "without a suffix"
        )
    if shard_bytes is not None and path.suffix in FILES:
        raise ValueError(
            f"shard_bytes is for a folder of shards, and {path.name} is one file: leave it out, or the suffix"
        )
    shard_bytes = SHARD_BYTES if shard_bytes is None else as_integer("shard_bytes", shard_bytes)
    shard_rows = shard_bytes // config.weight.nbytes
    if shard_rows < 1:
        raise ValueError(f"shard_bytes must hold a row of {config.weight.nbytes} bytes; found {shard_bytes}")
    if path.suffix == ".npy" and config.dtype == torch.bfloat16:
        raise FlatbedError(f"numpy has no bfloat16, and {path.name} could not be read: export safetensors")
    n_rows = table.num_embeddings
    file_rows = n_rows if path.suffix in FILES else shard_rows
    files = [range(first, min(first + file_rows, n_rows)) for first in range(0, n_rows, file_rows)]
    if table._shards is not None and table._shards.rank > 0:
        for _ in (block for rows in files for block in _blocks(table, rows)):
            pass  # take part in the reads of the rank that writes
        table.read_rows([])
        return
    table._store.ensure_layout()
    with (
        table._failing_together(READ),
        progress(f"exporting {path.name}", n_rows, "rows") as advance,
    ):
        if path.suffix == ".npy":
            _write_npy(table, path, advance)
        elif path.suffix == ".safetensors":
            _write_rows(table, path, WEIGHT, files[0], advance)
        else:
            _write_shards(table, path, files, advance)
        if table._shards is not None:
            table.read_rows([])  # the other ranks learn that the file is complete


def _blocks(table: Table, rows: range) -> Iterator[tuple[int, Tensor]]:
    """Yield (first byte, weights) of consecutive rows of a file with these rows."""
    size = table._store.config.weight.nbytes
    for first, last in row_blocks(rows.start, rows.stop, table._store.record.nbytes):
        if table._shards is None:
            weights = table._store.read_field(WEIGHT, first, last)
        else:
            n_wanted = 0 if table._shards.rank else last - first
            weights = table.read_rows(torch.arange(first, first + n_wanted, device="cpu")).cpu()
        yield (first - rows.start) * size, weights


def _write_npy(table: Table, path: Path, advance: Callable[[int], None]) -> None:
    config, header = table._store.config, io.BytesIO()
    shape = (table.num_embeddings, config.dim)
    about = {"descr": np.dtype(NAMES[config.dtype]).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    begin = memoryview(header.getvalue())  # Python 3.12.1 crashes if it collects a getbuffer() in a cycle
    with replacing(path, len(begin) + table.num_embeddings * config.weight.nbytes) as descriptor:
        write_at(descriptor, 0, begin)
        for offset, weights in _blocks(table, range(table.num_embeddings)):
            write_at(descriptor, len(begin) + offset, weights.view(torch.uint8).flatten().numpy().data)
            advance(len(weights))


def _write_rows(table: Table, path: Path, name: str, rows: range, advance: Callable[[int], None]) -> None:
    """Write some rows to a safetensors file, as a tensor of this name."""
    entry = TensorEntry(name, table._store.config.dtype, (len(rows), table.embedding_dim))
    with writing(path, [entry], FORMAT) as writer:
        for offset, weights in _blocks(table, rows):
            writer.write(name, offset, weights)
            advance(len(weights))


def _write_shards(table: Table, path: Path, shards: Sequence[range], advance: Callable[[int], None]) -> None:
    """Write `weight` to one file, or `weight.00001`, … to a file each. The index names the file of each."""
    with _new_folder(path) as folder:
        if len(shards) == 1:
            _write_rows(table, folder / "model.safetensors", WEIGHT, shards[0], advance)
            return
        files = {}
        for number, rows in enumerate(shards, start=1):
            name = f"{WEIGHT}.{number:05}"
            files[name] = f"model-{number:05}-of-{len(shards):05}.safetensors"
            _write_rows(table, folder / files[name], name, rows, advance)
        total = table.num_embeddings * table._store.config.weight.nbytes
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` at the end."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FlatbedError(f"{path} exists and is not an empty folder: remove it, or choose another path")
    check_folder(path)
    draft = draft_of(path, secrets.token_hex(4))
    draft.mkdir()
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync_folder(path.parent)
