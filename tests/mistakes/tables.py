"""Mistakes with tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import flatbed
from flatbed import Embedding, FlatbedError
from tests.mistakes.mistake import Mistake, assign, embedding, mistake, model, on_disk, unchanged

ids = torch.tensor


def kept(use: Callable[[Any], object], **options: Any) -> Callable[[Path], object]:
    """A table that is as it was, whatever is done wrong with it."""

    def attempt(folder: Path) -> None:
        table = embedding(**options).table
        with unchanged(lambda: (table.num_embeddings, table._storage.config, table.read_rows(range(10)))):
            use(table)

    return attempt


def closed(use: Callable[[Any], object]) -> Callable[[Path], object]:
    """A table on disk after its end."""

    def attempt(folder: Path) -> None:
        table = on_disk(folder).table
        table.read_rows([1])
        table.close()
        use(table)

    return attempt


def smaller_file(folder: Path) -> Path:
    Embedding(5, 4).table.save(folder / "five.safetensors")
    return folder / "five.safetensors"


def disk_file(folder: Path) -> Path:
    table = on_disk(folder).table
    table.read_rows([1])
    table.close()
    return folder / "items.bed"


def load_another_size(folder: Path) -> None:
    kept(lambda table: table.load(smaller_file(folder)))(folder)


def failed_inside_with(folder: Path) -> None:
    with suppress(KeyError), on_disk(folder).table as table:
        table.write_rows([1], torch.ones(1, 4))
        raise KeyError


def loaded(**options: Any) -> Callable[[Path], object]:
    """Load the file of a disk table."""
    return lambda folder: flatbed.load_table(disk_file(folder), **options)


TABLES: list[Mistake] = [
    mistake("Table", "by hand", lambda _: flatbed.Table(10, 4), TypeError, r"Table"),
    mistake("Table.grad", "no backward", kept(assign("grad", torch.ones(3))), FlatbedError, r"found \(3,\)"),
    mistake("Table.grad", "a number", kept(assign("grad", 0)), TypeError, r"found 0"),
    mistake(
        "Table.read_rows", "a slice", kept(lambda t: t.read_rows(slice(0, 3))), TypeError, r"found slice"
    ),
    mistake("Table.read_rows", "closed", closed(lambda t: t.read_rows([1])), FlatbedError, r"closed.*load"),
    mistake(
        "Table.read_state", "none", kept(lambda t: t.read_state("exp_avg", [1])), KeyError, r"exp_avg.*none"
    ),
    mistake(
        "Table.write_rows",
        "the wrong way round",
        kept(lambda table: table.write_rows(torch.ones(1, 4), [1])),
        TypeError,
        r"torch.float32",
    ),
    mistake(
        "Table.write_rows",
        "one id too large",
        kept(lambda table: table.write_rows([1, 10], torch.ones(2, 4))),
        IndexError,
        r"id 10 at position 1.*10 rows",
    ),
    mistake(
        "Table.write_rows",
        "integers",
        kept(lambda table: table.write_rows([1], torch.ones(1, 4, dtype=torch.int64))),
        TypeError,
        r"torch.int64.*float",
    ),
    mistake(
        "Table.write_rows", "nothing", kept(lambda t: t.write_rows([1], None)), TypeError, r"found NoneType"
    ),
    mistake("Table.warm", "a large id", kept(lambda t: t.warm([3, 10]), cache_rows=4), IndexError, r"id 10"),
    mistake(
        "Table.warm", "few counts", kept(lambda t: t.warm([1, 2], [5]), cache_rows=4), ValueError, r"1 for 2"
    ),
    mistake("Table.set_cache", "a share", kept(lambda t: t.set_cache(0.1)), TypeError, r"cache_rows.*0\.1"),
    mistake(
        "Table.set_cache", "fifo", kept(lambda t: t.set_cache(5, policy="fifo")), ValueError, r"lru.*'fifo'"
    ),
    mistake("Table.resize", "fewer rows", kept(lambda t: t.resize(5)), ValueError, r"grow; found 5"),
    mistake(
        "Table.resize", "a shape", kept(lambda t: t.resize((20, 4))), TypeError, r"integer; found \(20, 4\)"
    ),
    mistake(
        "Table.checkpoint", "not on disk", kept(lambda t: t.checkpoint()), FlatbedError, r"\"host\".*save"
    ),
    mistake("Table.checkpoint", "closed", closed(lambda t: t.checkpoint()), FlatbedError, r"closed.*load"),
    mistake(
        "Table.save",
        "a missing folder",
        lambda folder: embedding().table.save(folder / "missing" / "items.safetensors"),
        FlatbedError,
        r"missing.*make it",
    ),
    mistake(
        "Table.load", "no file", lambda f: embedding().table.load(f / "none"), FlatbedError, r"check the path"
    ),
    mistake("Table.load", "of another size", load_another_size, FlatbedError, r"5 × 4.*10 × 4"),
    mistake("Table.close", "after an exception", failed_inside_with, UserWarning, r"1 rows.*checkpoint"),
    mistake(
        "load_table", "no file", lambda f: flatbed.load_table(f / "none.bed"), FlatbedError, r"check the path"
    ),
    mistake("load_table", "a wrong device", loaded(device="gpu"), ValueError, r"\"cuda\".*'gpu'"),
    mistake("load_table", "disk into memory", loaded(storage="host"), ValueError, r"'host'.*table.save"),
    mistake(
        "load_table",
        "disk without a name",
        lambda folder: flatbed.load_table(smaller_file(folder), storage="disk"),
        ValueError,
        r"storage='disk', to=None",
    ),
    mistake(
        "tables",
        "a list",
        lambda _: flatbed.tables([embedding(), model()]),
        TypeError,
        r"found list.*nn.ModuleList",
    ),
    mistake(
        "Embedding.weight", "on disk", lambda f: on_disk(f).weight, FlatbedError, r"read_rows.*write_rows"
    ),
    mistake(
        "capture", "numbers", lambda _: flatbed.capture(print, {"n": 3}), ValueError, r"no tensor; found dict"
    ),
]
