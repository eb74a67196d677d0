"""Mistakes with tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flatbed
from flatbed import Embedding, FlatbedError
from tests.mistakes.mistake import Mistake, assign, embedding, mistake, model, on_disk, unchanged


def kept(use: Callable[[Any], object], **options: Any) -> Callable[[Path], object]:
    """A table that is as it was, whatever is done wrong with it."""

    def attempt(folder: Path) -> None:
        table = embedding(**options).table
        with unchanged(lambda: (repr(table), table.read_rows(range(10)))):
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


def array_file(folder: Path) -> Path:
    np.save(folder / "items.npy", np.ones((5, 4), np.float32))
    return folder / "items.npy"


def pickled(folder: Path) -> Path:
    torch.save(torch.ones(5, 4), folder / "items.pt")
    return folder / "items.pt"


def disk_file(folder: Path) -> Path:
    table = on_disk(folder).table
    table.read_rows([1])
    table.close()
    return folder / "items.bed"


def load_another_size(folder: Path) -> None:
    kept(lambda table: table.load(smaller_file(folder)))(folder)


def used_after_close(folder: Path) -> None:
    table = on_disk(folder).table
    table.close()
    table.read_rows([1])


def loaded(**options: Any) -> Callable[[Path], object]:
    """Load the file of a disk table."""
    return lambda folder: flatbed.load_table(disk_file(folder), **options)


def of_table(
    method: str,
    what: str,
    use: Callable[[Any], object],
    error: type[BaseException],
    message: str,
    **options: Any,
) -> Mistake:
    return mistake(f"Table.{method}", what, kept(use, **options), error, message)


ONE = torch.ones(1, 4)

TABLES: list[Mistake] = [
    mistake("Table", "by hand", lambda _: flatbed.Table(10, 4), TypeError, r"Table"),
    of_table("grad", "no backward", assign("grad", torch.ones(3)), FlatbedError, r"found \(3,\)"),
    of_table("grad", "a number", assign("grad", 0), TypeError, r"found 0"),
    of_table("read_rows", "a slice", lambda t: t.read_rows(slice(0, 3)), TypeError, r"found slice"),
    mistake("Table.read_rows", "closed", closed(lambda t: t.read_rows([1])), FlatbedError, r"closed.*load"),
    of_table("topk", "ids", lambda t: t.topk([[1, 2, 3, 4]], 2), TypeError, r"int64.*\.float"),
    of_table("topk", "too many", lambda t: t.topk(torch.ones(4), 11), ValueError, r"1 and 10.*found 11"),
    mistake(
        "Table.topk", "closed", closed(lambda t: t.topk(torch.ones(4), 1)), FlatbedError, r"closed.*load"
    ),
    of_table("read_state", "none", lambda t: t.read_state("exp_avg", [1]), KeyError, r"exp_avg.*none"),
    of_table("write_rows", "the wrong way round", lambda t: t.write_rows(ONE, [1]), TypeError, r"float32"),
    of_table(
        "write_rows",
        "one id too large",
        lambda table: table.write_rows([1, 10], torch.ones(2, 4)),
        IndexError,
        r"id 10 at position 1.*10 rows",
    ),
    of_table("write_rows", "integers", lambda t: t.write_rows([1], ONE.long()), TypeError, r"int64.*float"),
    of_table("write_rows", "nothing", lambda t: t.write_rows([1], None), TypeError, r"found NoneType"),
    of_table("warm", "a large id", lambda t: t.warm([3, 10]), IndexError, r"id 10", cache_rows=4),
    of_table("warm", "few counts", lambda t: t.warm([1, 2], [5]), ValueError, r"1 for 2", cache_rows=4),
    of_table("set_cache", "a share", lambda t: t.set_cache(0.1), TypeError, r"cache_rows.*0\.1"),
    of_table("set_cache", "fifo", lambda t: t.set_cache(5, policy="fifo"), ValueError, r"lru.*'fifo'"),
    of_table("resize", "fewer rows", lambda t: t.resize(5), ValueError, r"grow; found 5"),
    of_table("resize", "a shape", lambda t: t.resize((20, 4)), TypeError, r"integer; found \(20, 4\)"),
    of_table("checkpoint", "not on disk", lambda t: t.checkpoint(), FlatbedError, r"\"host\".*save"),
    mistake("Table.checkpoint", "closed", closed(lambda t: t.checkpoint()), FlatbedError, r"closed.*load"),
    mistake(
        "Table.save",
        "a missing folder",
        lambda folder: embedding().table.save(folder / "missing" / "items.safetensors"),
        FlatbedError,
        r"missing.*make it",
    ),
    mistake(
        "Table.export",
        "a missing folder",
        lambda folder: embedding().table.export(folder / "missing" / "items.npy"),
        FlatbedError,
        r"missing.*make it",
    ),
    of_table("load", "no file", lambda t: t.load("none"), FlatbedError, r"check the path"),
    mistake("Table.load", "of another size", load_another_size, FlatbedError, r"5 × 4.*10 × 4"),
    mistake("Table.close", "used later", used_after_close, FlatbedError, r"is closed"),
    mistake("load_table", "no file", lambda f: flatbed.load_table(f / "none"), FlatbedError, r"check the"),
    mistake(
        "load_table",
        "an array",
        lambda f: flatbed.load_table(array_file(f)),
        FlatbedError,
        r"of another kind",
    ),
    mistake(
        "load_table", "a pickle", lambda f: flatbed.load_table(pickled(f)), FlatbedError, "of another kind"
    ),
    mistake("load_table", "a folder", flatbed.load_table, FlatbedError, r"there is no file .*check the"),
    mistake("load_table", "a wrong device", loaded(device="gpu"), ValueError, r"\"cuda\".*'gpu'"),
    mistake("load_table", "disk into memory", loaded(storage="host"), ValueError, r"'host'.*table.save"),
    mistake(
        "load_table",
        "disk without a name",
        lambda folder: flatbed.load_table(smaller_file(folder), storage="disk"),
        ValueError,
        r"storage='disk', to=None",
    ),
    mistake("tables", "a list", lambda _: flatbed.tables([model()]), TypeError, r"found list.*nn.ModuleList"),
    mistake(
        "Embedding.weight", "on disk", lambda f: on_disk(f).weight, FlatbedError, r"read_rows.*write_rows"
    ),
    mistake(
        "capture",
        "no function",
        lambda _: flatbed.capture(3, torch.ones(2)),  # type: ignore[arg-type]
        TypeError,
        r"function of a batch; found int",
    ),
    mistake("capture", "numbers", lambda _: flatbed.capture(print, {"n": 3}), ValueError, r"found dict"),
]
