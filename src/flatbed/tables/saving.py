"""A table as a safetensors file, written and read bit by bit: weights, optimizer state, numbers of state."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.progress import progress
from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.record import DTYPES, NAMES, WEIGHT, Field, Record
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.copy_pool import Fill
from flatbed.tables.storage.disk.format import TABLE
from flatbed.tables.storage.table_storage import TableStorage
from flatbed.tables.tensor_file import Entry, as_path, entries_of, opened, writing

if TYPE_CHECKING:
    from flatbed.tables.table import Table

FORMAT, VERSION = "flatbed-table", "1"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a table's file holds."""

    path: Path
    n_rows: int
    record: Record
    scalars: dict[str, float]
    about: dict[str, Any]
    """What is known of where the rows came from: see `Config.describe`."""

    @property
    def size(self) -> tuple[int, int]:
        return self.n_rows, self.record.weight.count


# ---- writing


def save(table: Table, path: Path) -> None:
    """Write a table's weights ("weight", (rows, dim)), state by its names and numbers of state (0-dim)."""
    store = table.store
    tier, record, n_rows = store.tier, store.record, store.config.n_rows
    scalars = {name: scalar_tensor(value) for name, value in table.scalars().items()}
    keys = {name: name if name not in record else f"scalar.{name}" for name in scalars}
    entries = [Entry(field.name, field.dtype, (n_rows, field.count)) for field in record.fields]
    entries += [Entry(keys[name], value.dtype, ()) for name, value in scalars.items()]
    with writing(path, entries, _metadata(store, keys)) as writer:
        for name, value in scalars.items():
            writer.write(keys[name], 0, value)
        store.settle()
        tier.flush()
        with progress(f"saving {path.name}", n_rows, "rows") as advance:
            for first, last in store.blocks(0, n_rows, record.nbytes):
                records = tier.read(first, last).cpu()
                for field in record.fields:
                    writer.write(field.name, first * field.nbytes, record.view(records, field.name))
                advance(last - first)


def scalar_tensor(value: float) -> Tensor:
    """A number of state as a 0-dim tensor: float32 as in torch, unless that would round it."""
    try:
        exact = math.isnan(value) or struct.unpack("<f", struct.pack("<f", value))[0] == value
    except OverflowError:
        exact = False
    return torch.tensor(value, dtype=torch.float32 if exact else torch.float64, device="cpu")


def _metadata(store: TableStorage, scalars: Mapping[str, str]) -> dict[str, str]:
    config = store.config
    about = {
        **config.describe(),
        "num_embeddings": config.n_rows,
        "embedding_dim": config.dim,
        "dtype": NAMES[config.dtype],
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "table": json.dumps(about),
        "fields": json.dumps(store.record.describe()),
        "scalars": json.dumps(scalars),
    }


# ---- reading


def load(table: Table, path: Path) -> None:
    """Read a file into a table of any storage; nothing changes if it does not fit.

    Weights and state are converted if their dtypes differ. A file without state, such as one of torch
    with nothing but "weight", leaves the table's state as it is.
    """
    found = look(path)
    fit_in(table, found)
    read_in(table, found)


def look(path: Path) -> Contents:
    """What a file holds, checked: one that `save` has written, or any with a tensor "weight" alone."""
    if path.is_file() and _begins(path, len(TABLE)) == TABLE:
        raise FlatbedError(f'{path} is the file of a table with storage="disk": use flatbed.open_table')
    with opened(path, "table's file") as reader:
        metadata, found = reader.metadata() or {}, entries_of(reader)
        n_tensors = len(reader.keys())
        if metadata.get("format") != FORMAT:
            return _foreign(path, found, n_tensors)
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
                expected = Entry(field.name, field.dtype, (n_rows, field.count))
                if found[field.name] != expected:
                    raise ValueError(f"{found[field.name]} instead of {expected}")
            keys = dict(json.loads(metadata["scalars"]))
            scalars = {name: float(reader.get_tensor(found[key].name)) for name, key in keys.items()}
            contents = Contents(path, n_rows, record, scalars, about)
            configured(contents, "host", None)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FlatbedError(
                f"{path} does not hold what it says ({error}): it is damaged; restore it from a copy"
            ) from error
    return contents


def _begins(path: Path, n_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(n_bytes)
    except OSError:
        return b""  # whoever opens it next says why


def _foreign(path: Path, found: Mapping[str, Entry], n_tensors: int) -> Contents:
    """A file that torch has written: the weights of an nn.Embedding, and nothing else."""
    weight = found.get(WEIGHT)
    if weight is None or n_tensors != 1 or len(weight.shape) != 2 or weight.dtype not in NAMES:
        held = ", ".join(f"{e.name} {e.shape} of {e.dtype}" for e in list(found.values())[:4]) or "nothing"
        raise FlatbedError(
            f"{path} is no table: expected a file of table.save(), or one with a tensor 'weight' (rows, dim) "
            f"of {', '.join(DTYPES)} and nothing else; found {held}"
        )
    if 0 in weight.shape:
        raise FlatbedError(f"{path} holds a table of {weight.shape}: it has at least one row and one column")
    return Contents(path, weight.shape[0], Record((Field(WEIGHT, weight.dtype, weight.shape[1]),)), {}, {})


def fit_in(table: Table, found: Contents) -> None:
    """Raise unless a file can be read into a table."""
    config = table.store.config
    if found.size != (config.n_rows, config.dim):
        raise FlatbedError(
            f"{found.path} holds a table of {found.size[0]} × {found.size[1]}, and this one is of "
            f"{config.n_rows} × {config.dim}: make one of the file's size (flatbed.load_table does)"
        )
    if table.owner is None or not found.record.state:
        return
    ours, theirs = (
        {field.name: field.count for field in record.state} for record in (table.store.record, found.record)
    )
    if ours != theirs:
        raise FlatbedError(
            f"{found.path} holds the optimizer state {_listed(theirs)}, and {type(table.owner).__name__} "
            f"keeps {_listed(ours)}: build the optimizer that the table was trained with, or load the file "
            f"before an optimizer has the table, and call table.drop_state()"
        )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def read_in(table: Table, found: Contents) -> None:
    """Replace a table's rows by those of a file that fits. A disk table's are durable at once."""
    store, owner = table.store, table.owner
    adopted = bool(found.record.state) and owner is None
    record = Record((store.config.weight, *found.record.state)) if adopted else store.record
    scalars = found.scalars if found.record.state else table.scalars()
    with (
        opened(found.path) as reader,
        progress(f"loading {found.path.name}", found.n_rows, "rows") as advance,
    ):
        from_file = _filler(reader, found.record, record)

        def fill(start: int, stop: int, records: Tensor) -> None:
            from_file(start, stop, records)
            advance(stop - start)

        if store.config.storage == "disk":
            _rebuild(store, record, fill=fill, whole=_covers(found.record, record), scalars=scalars)
        else:
            _overwrite(store, record, fill=fill, whole=_covers(found.record, record))
    if adopted:
        store.claimed, store.scalars = False, dict(scalars)
    elif owner is not None and found.record.state:
        store.set_scalars(scalars)


def _covers(source: Record, target: Record) -> bool:
    return all(field.name in source for field in target.fields)


def _overwrite(store: TableStorage, record: Record, *, fill: Fill, whole: bool) -> None:
    """Rows in memory, one block after the other."""
    before, config = store.record, store.config
    try:
        if whole and not store.laid_out:
            store.config = replace(config, init=initial.Zeros())  # nobody will see what they begin with
        if record != before:
            store.lay_out(record)
        tier = store.tier
    except BaseException:
        store.record = before
        raise
    finally:
        store.config = config
    store.settle(changing=True)
    for first, last in store.blocks(0, config.n_rows, record.nbytes):
        if whole:
            records = torch.zeros((last - first, record.nbytes), dtype=torch.uint8, device="cpu")
        else:
            records = tier.read(first, last).cpu()
        fill(first, last, records)
        tier.write_(first, records)
    store.writes += 1


def _rebuild(
    store: TableStorage, record: Record, *, fill: Fill, whole: bool, scalars: Mapping[str, float]
) -> None:
    """Rows in a file: a new one takes its place when it is complete."""
    path = store.config.path
    assert path is not None
    meta = {"table": store.config.describe(), "scalars": dict(scalars)}
    if whole and not store.laid_out:
        store._tier = DiskStorage.create(path, record, store.config.n_rows, fill=fill, meta=meta)
    else:
        with store._laying_out:  # a thread may be fetching rows ahead of time
            old = store.disk
            store.forget_cache()

            def over_old(start: int, stop: int, records: Tensor) -> None:
                if not whole:
                    records.copy_(old.read(start, stop))
                fill(start, stop, records)

            store._tier = old.rebuilt(record, fill=over_old, meta=meta)
    store.record = record
    store.version += 1


def _filler(reader: Any, source: Record, target: Record) -> Fill:
    """Fills records with rows of an open file, converted."""
    slices = {field.name: reader.get_slice(field.name) for field in source.fields if field.name in target}

    def fill(start: int, stop: int, records: Tensor) -> None:
        for name, rows in slices.items():
            target.view(records, name).copy_(rows[start:stop])

    return fill


# ---- new tables


def load_table(
    path: str | Path,
    *,
    storage: str = "host",
    to: str | Path | None = None,
    device: Any = None,
    replicate: bool = True,
) -> Table:
    """A new table from a file of `table.save`, in any storage; with ``storage="disk"``, `to` names its file.

    Also from a safetensors file of torch with a tensor "weight" (rows, dim) alone. The first optimizer that
    keeps the file's state goes on with it.
    """
    if (storage == "disk") != (to is not None):
        raise ValueError(f'`to` names the new file of storage="disk"; found storage={storage!r}, to={to}')
    found = look(as_path(path))
    config = configured(found, storage, None if to is None else as_path(to, "to").absolute())
    if config.path is None:
        table = blank(config, found.record, device=device, replicate=replicate)
        read_in(table, found)
        return table
    meta = {"table": config.describe(), "scalars": found.scalars}
    with (
        opened(found.path) as reader,
        progress(f"loading {found.path.name}", found.n_rows, "rows") as advance,
    ):
        rows = _filler(reader, found.record, found.record)

        def fill(start: int, stop: int, records: Tensor) -> None:
            rows(start, stop, records)
            advance(stop - start)

        DiskStorage.create(config.path, found.record, found.n_rows, fill=fill, meta=meta).close()
    return open_table(config.path, device=device, replicate=replicate)


def open_table(path: str | Path, *, device: Any = None, replicate: bool = True) -> Table:
    """The table of a file of ``storage="disk"``, as its last checkpoint left it."""
    from flatbed.tables.table import make

    path = as_path(path).absolute()
    if path.is_file() and _begins(path, 9)[8:] == b"{":
        raise FlatbedError(
            f"{path} is a safetensors file, such as table.save() writes: use flatbed.load_table"
        )
    tier = DiskStorage.open(path)
    weight = tier.record.weight
    about = {"num_embeddings": tier.n_rows, **tier.meta.get("table", {})}
    tier.close()
    found = Contents(path, tier.n_rows, Record((weight,)), {}, about)
    return make(configured(found, "disk", path), device, replicate=replicate)


def configured(found: Contents, storage: str, path: Path | None) -> Config:
    """A table like that of a file."""
    about, weight = found.about, found.record.weight
    padding_idx = about.get("padding_idx")
    if not isinstance(padding_idx, int | None):
        raise ValueError(f"padding_idx is {padding_idx!r}")
    return Config(
        n_rows=found.n_rows,
        dim=weight.count,
        dtype=weight.dtype,
        storage=storage,
        path=path,
        init=initial.described(about["init"]) if "init" in about else initial.Normal(),
        seed=int(about.get("seed", 0)),
        padding_idx=padding_idx,
    )


def blank(config: Config, record: Record, *, device: Any, replicate: bool) -> Table:
    """A table in memory with these records, laid out, its rows yet to be written."""
    from flatbed.tables.table import make

    table = make(replace(config, init=initial.Zeros()), device, replicate=replicate)
    store = table.store
    store.record = record
    _ = store.tier  # laid out with zeros, instead of numbers that nobody will see
    store.config = config
    return table
