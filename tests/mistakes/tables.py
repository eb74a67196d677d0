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


def without_an_optimizer(folder: Path) -> None:
    emb = embedding()
    emb(ids([1])).sum().backward()
    emb([1])


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


TABLES: list[Mistake] = [
    mistake(
        "Table.grad",
        "without a backward pass",
        kept(assign("grad", torch.ones(3))),
        FlatbedError,
        r"comes from backward passes: it can be set to None.*found \(3,\)",
    ),
    mistake(
        "Table.grad", "a number", kept(assign("grad", 0)), TypeError, r"set to None or to a tensor; found 0"
    ),
    mistake(
        "Embedding.forward",
        "no optimizer",
        without_an_optimizer,
        FlatbedError,
        r"no optimizer has it: give its parameters to an optimizer",
    ),
    mistake(
        "Table.read_rows",
        "a slice",
        kept(lambda table: table.read_rows(slice(0, 3))),
        TypeError,
        r"ids must be integers in a tensor, a numpy array or a list; found slice",
    ),
    mistake(
        "Table.read_rows",
        "after its end",
        closed(lambda table: table.read_rows([1])),
        FlatbedError,
        r"items.bed is closed.*load its file",
    ),
    mistake(
        "Table.read_state",
        "no optimizer",
        kept(lambda table: table.read_state("exp_avg", [1])),
        KeyError,
        r"there is no state 'exp_avg'; found none \(an optimizer that has the table brings it\)",
    ),
    mistake(
        "Table.write_rows",
        "the wrong way round",
        kept(lambda table: table.write_rows(torch.ones(1, 4), [1])),
        TypeError,
        r"ids must be integers; found a tensor of torch.float32",
    ),
    mistake(
        "Table.write_rows",
        "one id too large",
        kept(lambda table: table.write_rows([1, 10], torch.ones(2, 4))),
        IndexError,
        r"id 10 at position 1 is out of range for a table of 10 rows",
    ),
    mistake(
        "Table.write_rows",
        "integers",
        kept(lambda table: table.write_rows([1], torch.ones(1, 4, dtype=torch.int64))),
        TypeError,
        r"values must be floating point numbers; found torch.int64: convert with .float\(\)",
    ),
    mistake(
        "Table.write_rows",
        "nothing",
        kept(lambda table: table.write_rows([1], None)),
        TypeError,
        r"values must be a tensor, an array or lists of numbers, of shape \(1, 4\); found NoneType",
    ),
    mistake(
        "Table.warm",
        "an id too large",
        kept(lambda table: table.warm([3, 10]), cache_rows=4),
        IndexError,
        r"id 10 at position 1 is out of range",
    ),
    mistake(
        "Table.warm",
        "too few counts",
        kept(lambda table: table.warm([1, 2], [5]), cache_rows=4),
        ValueError,
        r"counts are one per id, none of them negative; found 1 for 2 ids",
    ),
    mistake(
        "Table.set_cache",
        "a share of rows",
        kept(lambda table: table.set_cache(0.1)),
        TypeError,
        r"cache_rows must be an integer; found 0\.1",
    ),
    mistake(
        "Table.set_cache",
        "a policy that there is not",
        kept(lambda table: table.set_cache(5, policy="fifo")),
        ValueError,
        r"cache_policy must be one of lru, lfu; found 'fifo'",
    ),
    mistake(
        "Table.resize",
        "fewer rows",
        kept(lambda table: table.resize(5)),
        ValueError,
        r"a table can only grow; found 5 rows asked of 10",
    ),
    mistake(
        "Table.resize",
        "a shape",
        kept(lambda table: table.resize((20, 4))),
        TypeError,
        r"num_embeddings must be an integer; found \(20, 4\)",
    ),
    mistake(
        "Table.checkpoint",
        "not on disk",
        kept(lambda table: table.checkpoint()),
        FlatbedError,
        r'not on disk \(storage="host"\): save it with table.save\(path\)',
    ),
    mistake(
        "Table.checkpoint",
        "after its end",
        closed(lambda table: table.checkpoint()),
        FlatbedError,
        r"items.bed is closed.*load its file",
    ),
    mistake(
        "Table.save",
        "a folder that does not exist",
        lambda folder: embedding().table.save(folder / "missing" / "items.safetensors"),
        FlatbedError,
        r"there is no folder .*missing to write items.safetensors to: make it first",
    ),
    mistake(
        "Table.save",
        "no path",
        lambda _: embedding().table.save(None),  # type: ignore[arg-type]
        TypeError,
        r"path must be a string or a pathlib.Path; found NoneType",
    ),
    mistake(
        "Table.load",
        "a file that does not exist",
        lambda folder: embedding().table.load(folder / "missing.safetensors"),
        FlatbedError,
        r"there is no table's file at .*missing.safetensors: check the path",
    ),
    mistake(
        "Table.load",
        "of another size",
        load_another_size,
        FlatbedError,
        r"holds a table of 5 × 4, and this one is of 10 × 4: make one of the file's size",
    ),
    mistake(
        "Table.close",
        "after an exception",
        failed_inside_with,
        UserWarning,
        r"1 rows of .*items.bed.*ended by KeyError: call table.checkpoint\(\)",
    ),
    mistake(
        "load_table",
        "a file that does not exist",
        lambda folder: flatbed.load_table(folder / "missing.bed"),
        FlatbedError,
        r"missing.bed: check the path",
    ),
    mistake(
        "load_table",
        "a wrong device",
        lambda folder: flatbed.load_table(disk_file(folder), device="gpu"),
        RuntimeError,
        r"device string: gpu",
    ),
    mistake(
        "load_table",
        "a file of a table on disk into memory",
        lambda folder: flatbed.load_table(disk_file(folder), storage="host"),
        ValueError,
        r"items.bed is the file of a table with storage=\"disk\".*found storage='host'.*table.save",
    ),
    mistake(
        "load_table",
        "disk without a name",
        lambda folder: flatbed.load_table(smaller_file(folder), storage="disk"),
        ValueError,
        r"`to` names the new file of storage=\"disk\"; found storage='disk', to=None",
    ),
    mistake(
        "tables",
        "a list",
        lambda _: flatbed.tables([embedding(), model()]),  # type: ignore[arg-type]
        TypeError,
        r"takes a torch.nn.Module; found list: give the model itself, or an nn.ModuleList",
    ),
    mistake(
        "Embedding.weight",
        "on disk",
        lambda folder: on_disk(folder).weight,
        FlatbedError,
        r"has no `weight` tensor: use read_rows\(ids\) and write_rows\(ids, values\)",
    ),
]
