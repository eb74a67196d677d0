"""A table as a safetensors file, written and read block by block: weights, optimizer state, step counts."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.progress import progress
from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.record import DTYPES, NAMES, WEIGHT, Field, Record
from flatbed.tables.storage.base import row_blocks
from flatbed.tables.storage.disk.format import is_disk_table
from flatbed.tables.tensor_file import RESERVED, TensorEntry, entries_of, opened, writing

if TYPE_CHECKING:
    from flatbed.tables.table import Table

FORMAT, VERSION = "flatbed-table", "1"
OTHER_KINDS = [
    (b"\x93NUMPY", "numpy", "numpy.load(path)"),
    (b"PK\x03\x04", "torch.save", "torch.load(path)"),
]
"""First bytes of files that are no tables, their kind, and how to read them."""
DAMAGE = (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class TableFile:
    """Contents of a table's file, checked."""

    path: Path
    n_rows: int
    record: Record
    scalars: dict[str, float]
    about: dict[str, Any]
    """Initialization of the rows: see `Config.describe`."""

    def config(self, storage: str, path: Path | None = None) -> Config:
        """The config of a table like this one."""
        weight, padding_idx = self.record.weight, self.about.get("padding_idx")
        if not isinstance(padding_idx, int | None):
            raise ValueError(f"padding_idx is {padding_idx!r}")
        return Config(
            n_rows=self.n_rows,
            dim=weight.count,
            dtype=weight.dtype,
            storage=storage,
            path=path,
            init=initial.described(self.about["init"]) if "init" in self.about else initial.Normal(),
            seed=int(self.about.get("seed", 0)),
            padding_idx=padding_idx,
        )


# ---- writing


def save(table: Table, path: Path) -> dict[str, int]:
    """Write a table's weights ("weight", (rows, dim)), state by name, and numbers of state (0-dim).

    Returns the file's checksums.
    """
    table._deferred_checks.check_graphs()
    store = table._storage
    storage, record, config = store.ensure_layout(), store.record, store.config
    scalars = {name: scalar_tensor(value) for name, value in table.scalars().items()}
    taken = {RESERVED, *(field.name for field in record.fields)}
    keys = {name: f"scalar.{name}" if name in taken else name for name in scalars}
    entries = [TensorEntry(field.name, field.dtype, (config.n_rows, field.count)) for field in record.fields]
    entries += [TensorEntry(keys[name], value.dtype, ()) for name, value in scalars.items()]
    about = {
        **config.describe(),
        "num_embeddings": config.n_rows,
        "embedding_dim": config.dim,
        "dtype": NAMES[config.dtype],
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "table": json.dumps(about),
        "fields": json.dumps(record.describe()),
        "scalars": json.dumps(keys),
    }
    with writing(path, entries, metadata) as writer:
        for name, value in scalars.items():
            writer.write(keys[name], 0, value)
        store.flush()
        with progress(f"saving {path.name}", config.n_rows, "rows") as advance:
            for first, last in row_blocks(0, config.n_rows, record.nbytes):
                records = storage.read(first, last).cpu()
                for field in record.fields:
                    writer.write(field.name, first * field.nbytes, record.view(records, field.name))
                advance(last - first)
    return writer.checksums


def scalar_tensor(value: float) -> Tensor:
    """A number of state as a 0-dim tensor: float32 as in torch, unless that would round it."""
    try:
        is_exact = math.isnan(value) or struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        is_exact = False
    return torch.tensor(value, dtype=torch.float32 if is_exact else torch.float64, device="cpu")


# ---- reading


def load(table: Table, path: Path) -> None:
    """Read a file into a table of any storage; nothing changes if it does not fit.

    Weights and state are converted if their dtypes differ. A file without state, such as one of torch
    with nothing but "weight", leaves the table's state as it is.
    """
    found = inspect(path)
    check_fit(table, found)
    read_into(table, found)


def read_into(table: Table, found: TableFile) -> None:
    """Replace a table's rows by those of a file that fits. A disk table's are durable at once."""
    with ExitStack() as undo:
        begin_read(table, found, undo=undo)()


def inspect(path: Path) -> TableFile:
    """Describe and check a file of `save`, or any safetensors file with nothing but a tensor "weight"."""
    if is_disk_table(path):
        raise FlatbedError(
            f'{path} is the file of a table with storage="disk", which flatbed.load_table opens in place: '
            "save that table (table.save(path)) to copy its rows"
        )
    _refuse_other_kinds(path)
    with opened(path, "table's file") as reader:
        metadata, found = reader.metadata() or {}, entries_of(reader)
        if metadata.get("format") != FORMAT:
            return _weights_of_torch(path, found, len(reader.keys()))
        if metadata.get("version") != VERSION:
            raise FlatbedError(
                f"{path} has version {metadata.get('version')} of the format, and this flatbed knows version "
                f"{VERSION}: read it with the flatbed that wrote it"
            )
        try:
            record = Record.described(json.loads(metadata["fields"]))
            about = dict(json.loads(metadata["table"]))
            n_rows = int(about["num_embeddings"])
            for field in record.fields:
                expected = TensorEntry(field.name, field.dtype, (n_rows, field.count))
                if found[field.name] != expected:
                    raise ValueError(f"{found[field.name]} instead of {expected}")
            keys = dict(json.loads(metadata["scalars"]))
            scalars = {name: float(reader.get_tensor(found[key].name)) for name, key in keys.items()}
            contents = TableFile(path, n_rows, record, scalars, about)
            contents.config("host")
        except (*DAMAGE, RecursionError) as error:
            raise DamagedFileError(
                f"{path} does not hold what it says ({error}): it is damaged; restore it from a copy"
            ) from error
    return contents


def _refuse_other_kinds(path: Path) -> None:
    """Raise for what users take for a table's file: folders, and files of numpy and torch."""
    if path.is_dir():
        raise FlatbedError(
            f"{path} is a folder, and not a table's file: flatbed.load_checkpoint(folder, model) loads a "
            "checkpoint"
        )
    if not path.is_file():  # opening a pipe would wait for its writer
        return
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(6)
        for magic, kind, read in OTHER_KINDS:
            if begin.startswith(magic):
                raise FlatbedError(
                    f"{path} is a file of {kind}, and not of a table: read its weights with {read}, and give "
                    "them to flatbed.Embedding.from_pretrained"
                )


def _weights_of_torch(path: Path, found: Mapping[str, TensorEntry], n_tensors: int) -> TableFile:
    """A safetensors file with the weights of an nn.Embedding, and nothing else."""
    weight = found.get(WEIGHT)
    if weight is None or n_tensors != 1 or len(weight.shape) != 2 or weight.dtype not in NAMES:
        held = ", ".join(f"{e.name} {e.shape} of {e.dtype}" for e in list(found.values())[:4]) or "nothing"
        raise FlatbedError(
            f"{path} is no table: expected a file of table.save(), or one with a tensor 'weight' (rows, dim) "
            f"of {', '.join(DTYPES)} and nothing else; found {held}"
        )
    if 0 in weight.shape:
        raise FlatbedError(f"{path} holds a table of {weight.shape}: it has at least one row and one column")
    return TableFile(path, weight.shape[0], Record((Field(WEIGHT, weight.dtype, weight.shape[1]),)), {}, {})


def check_fit(table: Table, found: TableFile, *, with_state: bool = True) -> None:
    """Raise unless a file can be read into a table."""
    config, (n_rows, dim) = table._storage.config, (found.n_rows, found.record.weight.count)
    if (n_rows, dim) != (config.n_rows, config.dim):
        raise FlatbedError(
            f"{found.path} holds a table of {n_rows} × {dim}, and this one is of "
            f"{config.n_rows} × {config.dim}: make one of the file's size (flatbed.load_table does)"
        )
    ours = _counts(table._storage.record.state, table.scalars())
    theirs = _counts(found.record.state, found.scalars)
    if with_state and table._owner is not None and theirs and ours != theirs:
        raise FlatbedError(
            f"{found.path} holds the optimizer state {_listed(theirs)}, and {type(table._owner).__name__} "
            f"keeps {_listed(ours)}: build the optimizer that the table was trained with, or load the file "
            f"before an optimizer has the table, and call table.drop_state()"
        )


def _counts(fields: Iterable[Field], scalars: Iterable[str]) -> dict[str, int]:
    """Return the size of each state, and 1 for each number of state; nothing without state."""
    counts = {field.name: field.count for field in fields}
    numbers = {name: 1 for name in scalars if not name.startswith("_")}
    return counts | numbers if counts else {}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def begin_read(
    table: Table, found: TableFile, *, undo: ExitStack, with_state: bool = True
) -> Callable[[], None]:
    """Do what can fail of reading a file into a table, and return the function that does the rest.

    `undo` takes back what is done here, unless the function was called. Without state, a table keeps that of
    its optimizer; without an optimizer, it has none afterwards.
    """
    store, owner, state = table._storage, table._owner, found.record.state if with_state else ()
    is_adopted = owner is None and (bool(state) or not with_state)
    record = Record((store.config.weight, *state)) if is_adopted else store.record
    scalars = (found.scalars if with_state else {}) if is_adopted or state else table.scalars()
    reader = undo.enter_context(opened(found.path))
    parts = {f.name: reader.get_slice(f.name) for f in found.record.fields if f.name in record}
    if not state:
        parts = {WEIGHT: parts[WEIGHT]}

    def fill(start: int, stop: int, records: Tensor) -> None:
        for name, rows in parts.items():
            record.view(records, name).copy_(rows[start:stop])

    replace = store.begin_replace(
        record, fill, fields=parts, scalars=scalars, doing=f"loading {found.path.name}", undo=undo
    )

    def finish() -> None:
        replace()
        if is_adopted:
            store.adopt_state(scalars)
        elif owner is not None and state:
            store.set_scalars(scalars)

    return finish
