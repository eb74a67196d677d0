"""A table as a safetensors file, written and read block by block: weights, optimizer state, step counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.distributed.ranks import Lockstep, world_size
from flatbed.distributed.row_shards import RowShards
from flatbed.errors import FlatbedError
from flatbed.progress import progress
from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.record import DTYPES, NAMES, WEIGHT, Field, Record
from flatbed.tables.storage.base import row_blocks
from flatbed.tables.storage.disk.format import is_disk_table
from flatbed.tables.tensor_file import (
    KINDS,
    RESERVED,
    TensorEntry,
    Writer,
    naming_damage,
    opened,
    writing,
)

if TYPE_CHECKING:
    from flatbed.tables.table import Table

FORMAT, VERSIONS = "flatbed-table", ("1", "2")  # 2: tensors have the table's name in a model
SEGMENT_BYTES = 1 << 24
"""Bytes of records that a rank exchanges at a time: it holds them as read, received, in order and copied."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """Contents of a table's file, checked."""

    path: Path
    n_rows: int
    record: Record
    scalars: dict[str, float]
    about: dict[str, Any]
    """Initialization of the rows: see `Config.describe`."""
    name: str = ""
    """Name of the table in a model, if its tensors have that name."""


def describe(config: Config) -> dict[str, Any]:
    """Return what the file of a table, or its pickle, says of it besides its fields, as JSON values."""
    sizes = {"num_embeddings": config.n_rows, "embedding_dim": config.dim, "dtype": NAMES[config.dtype]}
    return {**config.describe(), **sizes}


def config_of(
    about: Mapping[str, Any], n_rows: int, weight: Field, *, storage: str, path: Path | None = None
) -> Config:
    """Make the config of a table from `describe`, most of which may be missing."""
    padding_idx = about.get("padding_idx")
    if not isinstance(padding_idx, int | None):
        raise ValueError(f"padding_idx is {padding_idx!r}")
    return Config(
        n_rows=n_rows,
        dim=weight.count,
        dtype=weight.dtype,
        storage=storage,
        path=path,
        init=initial.from_json(about["init"]) if "init" in about else initial.parse("normal"),
        seed=int(about.get("seed", 0)),
        padding_idx=padding_idx,
    )


# ---- writing


def save(table: Table, path: Path) -> None:
    """Write a table's weights ("weight", (rows, dim)), state by name, and numbers of state (0-dim).

    If the table is sharded, all ranks call this. They write one file, whose bytes do not depend on their
    number.
    """
    with Lockstep(f"saving {path.name}", alone=table._shards is None) as lockstep:
        write(table, path, lockstep)


def write(table: Table, path: Path, lockstep: Lockstep, *, name: str = "") -> dict[str, str]:
    """Write the file of a table, and return its checksums.

    With the table's `name` in a model, its tensors are `name`, `name.exp_avg` and so on, so that the names in
    a folder of such files are unique.
    """
    entries, metadata, scalars = _contents(table, name)
    record, shards = table._store.record, table._shards
    if shards is not None and shards.channel.ranks != list(range(world_size())):
        raise FlatbedError(
            f"the rows of the table are sharded across the ranks {shards.channel.ranks} of {world_size()}, "
            "and a file is written by all of them: build the table without process_group and mesh"
        )
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # for all copies: new ones would fragment memory
    with (
        writing(path, entries, metadata, None if shards is None else lockstep) as writer,
        progress(f"saving {path.name}", table.num_embeddings, "rows") as advance,
    ):
        for key, value in scalars.items() if shards is None or shards.rank == 0 else ():
            writer.write(key, 0, value)
        for rows, records, n_done in _rows(table) if shards is None else _segments(table, shards, writer):
            for field in record.fields:
                nbytes = len(rows) * field.nbytes
                if len(buffer) < nbytes:
                    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                values = buffer[:nbytes].view(field.dtype).view(len(rows), field.count)
                values.copy_(record.view(records, field.name))
                writer.write(_tensor(name, field.name), rows.start * field.nbytes, values)
            advance(n_done)
    return writer.checksums


def _contents(table: Table, name: str) -> tuple[list[TensorEntry], dict[str, str], dict[str, Tensor]]:
    """Return the tensors of a table's file, its metadata, and the values of its 0-dim tensors."""
    table._deferred_checks.check_graphs()
    store, n_rows = table._store, table.num_embeddings
    store.ensure_layout()
    store.flush()
    fields, scalars = store.record.fields, table.scalars()
    taken = {RESERVED, *(field.name for field in fields)}
    keys = {key: _tensor(name, f"scalar.{key}" if key in taken else key) for key in scalars}
    values = {keys[key]: _scalar(value) for key, value in scalars.items()}
    entries = [TensorEntry(_tensor(name, field.name), field.dtype, (n_rows, field.count)) for field in fields]
    entries += [TensorEntry(key, value.dtype, ()) for key, value in values.items()]
    metadata = {
        "format": FORMAT,
        **({"version": "2", "name": name} if name else {"version": "1"}),
        "table": json.dumps(describe(replace(store.config, n_rows=n_rows, shard_rank=0, n_shards=1))),
        "fields": json.dumps(store.record.describe()),
        "scalars": json.dumps(keys),
    }
    return entries, metadata, values


def _tensor(name: str, field: str) -> str:
    """Return the name of a tensor in the file of a table, which may have a name itself."""
    if not name:
        return field
    return name if field == WEIGHT else f"{name}.{field}"


def _rows(table: Table) -> Iterator[tuple[range, Tensor, int]]:
    """Yield (rows, records, number of rows) of blocks of all rows."""
    storage, nbytes = table._store.ensure_layout(), table._store.record.nbytes
    for first, last in row_blocks(0, table.num_embeddings, nbytes):
        yield range(first, last), storage.read(first, last).cpu(), last - first


def _segments(table: Table, shards: RowShards, writer: Writer) -> Iterator[tuple[range, Tensor, int]]:
    """Exchange rows that ranks hold in turn for rows in row order, window by window.

    A window is a run of consecutive rows, and is split into one segment per rank. An all-to-all gives each
    rank the rows of its segment. Yields (rows of the segment, records, number of rows of the window); the
    records are valid until the next window.
    """
    storage, nbytes = table._store.ensure_layout(), table._store.record.nbytes
    rank, n_ranks = shards.rank, shards.n_ranks
    n_most = min(max(1, SEGMENT_BYTES // nbytes), -(-shards.n_rows // n_ranks))
    # Buffers for all windows: new ones would fragment memory.
    buffers = torch.empty((2, n_most, nbytes), dtype=torch.uint8, device="cpu")
    for start in range(0, shards.n_rows, n_ranks * n_most):
        window = range(start, min(start + n_ranks * n_most, shards.n_rows))
        length = -(-len(window) // n_ranks)
        segments = [window[peer * length : (peer + 1) * length] for peer in range(n_ranks)]
        own, local = segments[rank], local_rows(window, rank, n_ranks)
        if storage.memory is not None and storage.device.type == "cpu":
            records = storage.memory[local.start : local.stop]
        else:
            records = storage.read(local.start, local.stop).cpu()
        writer.meet()
        # Local rows are ascending: those of each segment are consecutive.
        n_sent = [len(local_rows(segment, rank, n_ranks)) for segment in segments]
        n_received = [len(local_rows(own, peer, n_ranks)) for peer in range(n_ranks)]
        received, ordered = buffers[:, : len(own)]
        shards.channel.all_to_all_into(
            received, records.contiguous(), n_sent, n_received, doing="saving a table"
        )
        for peer, part in enumerate(torch.split(received, n_received)):
            ordered[(peer - own.start) % n_ranks :: n_ranks] = part
        yield own, ordered, len(window)


def local_rows(rows: range, rank: int, n_ranks: int) -> range:
    """Return the local numbers of a rank's rows among consecutive rows: rank r % n holds row r as r // n."""
    return range(-((rank - rows.start) // n_ranks), -((rank - rows.stop) // n_ranks))


def _scalar(value: float) -> Tensor:
    """A number of state as a 0-dim tensor: float32 as in torch, unless that would round it."""
    wide = torch.tensor(value, dtype=torch.float64, device="cpu")
    return wide.float() if wide.isnan() or wide.float().double() == wide else wide


# ---- reading


def load(table: Table, path: Path) -> None:
    """Read a file into a table of any storage; nothing changes if it does not fit.

    Weights and state are converted if their dtypes differ. A file without state, such as one of torch
    with nothing but "weight", leaves the table's state as it is. A disk table's rows are durable at once. If
    the table is sharded, all ranks call this, and each one reads its own rows.
    """
    with ExitStack() as undo, Lockstep(f"loading {path.name}", alone=table._shards is None) as lockstep:
        found = inspect(path)
        check_fit(table, found)
        finish = begin_read(table, found, undo=undo)
        lockstep.meet()
        finish()


def inspect(path: Path) -> TableFile:
    """Describe and check a file of `save`, or any safetensors file with nothing but a tensor "weight"."""
    if is_disk_table(path):
        raise FlatbedError(
            f'{path} is the file of a table with storage="disk", which flatbed.load_table opens in place: '
            "save that table (table.save(path)) to copy its rows"
        )
    with opened(path) as reader:
        metadata = reader.metadata() or {}
        if metadata.get("format") != FORMAT:
            return _weights_of_torch(path, reader)
        if metadata.get("version") not in VERSIONS:
            raise FlatbedError(
                f"{path} has version {metadata.get('version')} of the format, and this flatbed knows "
                f"{' and '.join(VERSIONS)}: read it with the flatbed that wrote it"
            )
        with naming_damage(path):
            record = Record.from_json(json.loads(metadata["fields"]))
            about = dict(json.loads(metadata["table"]))
            n_rows, name = int(about["num_embeddings"]), metadata.get("name", "")
            for field in record.fields:
                part = reader.get_slice(_tensor(name, field.name))
                found = part.get_dtype(), part.get_shape()
                if found != (KINDS[field.dtype], [n_rows, field.count]):
                    raise ValueError(f"found {found} for {field} of {n_rows} rows")
            keys = dict(json.loads(metadata["scalars"]))
            scalars = {name: float(reader.get_tensor(key)) for name, key in keys.items()}
            config_of(about, n_rows, record.weight, storage="host")  # raises if it does not fit
    return TableFile(path, n_rows, record, scalars, about, name)


def _weights_of_torch(path: Path, reader: Any) -> TableFile:
    """A safetensors file with the weights of an nn.Embedding, and nothing else."""
    parts = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
    found = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    kind, shape = found.get(WEIGHT, ("", []))
    dtypes = [dtype for dtype in NAMES if KINDS[dtype] == kind]
    if len(found) != 1 or not dtypes or len(shape) != 2:
        raise FlatbedError(
            f"{path} is no table: expected a file of table.save(), or one with a tensor 'weight' (rows, dim) "
            f"of {', '.join(DTYPES)} and nothing else; found {str(found)[:200]}: save the weights alone"
        )
    return TableFile(path, shape[0], Record((Field(WEIGHT, dtypes[0], shape[1]),)), {}, {})


def check_fit(table: Table, found: TableFile, *, with_state: bool = True) -> None:
    """Raise unless a file can be read into a table."""
    ours, theirs = (table.num_embeddings, table.embedding_dim), (found.n_rows, found.record.weight.count)
    if ours != theirs:
        raise FlatbedError(
            f"{found.path} holds a table of {theirs[0]} × {theirs[1]}, and this one is of "
            f"{ours[0]} × {ours[1]}: build one with num_embeddings={theirs[0]}, embedding_dim={theirs[1]} "
            "(flatbed.load_table does), and add rows with table.resize after loading"
        )
    if with_state:
        check_state(table, found.path, found.record.state, found.scalars)


def check_state(table: Table, path: object, fields: Iterable[Field], scalars: Iterable[str]) -> None:
    """Raise unless the optimizer that has the table, if any, keeps the same state as a file."""
    kept, held = _listed(table._store.record.state, table.scalars()), _listed(fields, scalars)
    if table._owner is not None and held and kept != held:
        raise FlatbedError(
            f"{path} holds the optimizer state {', '.join(held)}, and {type(table._owner).__name__} "
            f"keeps {', '.join(kept) or 'none'}: build the optimizer that the table was trained with, or "
            f"load the file before an optimizer has the table, and call table.drop_state()"
        )


def _listed(fields: Iterable[Field], scalars: Iterable[str]) -> list[str]:
    """Return names and sizes of state, sorted; nothing without fields."""
    sizes = [f"{field.name} ({field.count})" for field in fields]
    numbers = [f"{name} (1)" for name in scalars if not name.startswith("_")]
    return sorted(sizes + numbers) if sizes else []


def begin_read(
    table: Table, found: TableFile, *, undo: ExitStack, with_state: bool = True
) -> Callable[[], None]:
    """Do what can fail of reading a file into a table, and return the function that does the rest.

    `undo` takes back what is done here, unless the function was called. Without state, a table keeps that of
    its optimizer; without an optimizer, it has none afterwards.
    """
    store, owner, state = table._store, table._owner, found.record.state if with_state else ()
    is_adopted = owner is None and (bool(state) or not with_state)
    record = Record((store.config.weight, *state)) if is_adopted else store.record
    scalars = (found.scalars if with_state else {}) if is_adopted or state else table.scalars()
    reader = undo.enter_context(opened(found.path))
    names = {field.name: _tensor(found.name, field.name) for field in found.record.fields}
    parts = {field: reader.get_slice(name) for field, name in names.items() if field in record}
    if not state:
        parts = {WEIGHT: parts[WEIGHT]}

    rank, n_ranks = store.config.shard_rank, store.config.n_shards

    def fill(start: int, stop: int, records: Tensor) -> None:
        first, last = start * n_ranks + rank, (stop - 1) * n_ranks + rank + 1
        for name, rows in parts.items():  # a slice refers to the mapped file, without a copy
            record.view(records, name).copy_(rows[first:last][::n_ranks])

    replace = store.begin_replace(
        record, fill, fields=parts, scalars=scalars, doing=f"loading {found.path.name}", undo=undo
    )

    def finish() -> None:
        replace()
        if is_adopted:
            store.adopt_state(scalars)
            store.optimizer = None  # the file does not name it
        elif owner is not None and state:
            store.set_scalars(scalars)

    return finish
