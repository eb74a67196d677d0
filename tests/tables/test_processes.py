"""Tables in worker processes, in forked children and at the end of a process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flatbed
from tests import programs
from tests.tables.models import DIM, EVERY, ROWS
from tests.tables.tables import STORAGES, storage_options


class Ids(torch.utils.data.Dataset[Tensor]):
    """A dataset that holds the model; its workers cannot read rows."""

    def __init__(self, emb: flatbed.Embedding) -> None:
        self.emb = emb

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        with pytest.raises(flatbed.FlatbedError, match="in the training process"):
            self.emb.read_rows([index])
        return torch.tensor([index, index + 1])


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("storage", STORAGES)
def test_forked_workers(storage: str, tmp_path: Path) -> None:
    """Workers may hold a table; using one raises, and the training process is not disturbed."""
    emb = flatbed.Embedding(ROWS, DIM, **storage_options(storage, tmp_path))
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb([0])
    expected = emb.read_rows(EVERY)
    loader = torch.utils.data.DataLoader(
        Ids(emb), num_workers=2, multiprocessing_context="fork", batch_size=4
    )
    for ids in loader:
        emb(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected[:9] -= 0.1
    expected[1:8] -= 0.1  # in two of the pairs
    torch.testing.assert_close(emb.read_rows(EVERY), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("storage", STORAGES)
def test_tables_raise_in_a_forked_child(storage: str, tmp_path: Path) -> None:
    emb = flatbed.Embedding(ROWS, DIM, **storage_options(storage, tmp_path))
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    weight = None if storage == "disk" else emb.weight
    before = emb.read_rows(EVERY)
    uses: list[Callable[[], Any]] = [
        lambda: emb([1]),
        lambda: bag([[1]]),
        lambda: emb.read_rows([1]),
        lambda: emb.write_rows([1], torch.zeros(1, DIM)),
        lambda: emb.table.resize(ROWS * 2),
        lambda: emb.state_dict(),
    ]
    if weight is not None:
        uses += [lambda: weight.fill_(0.0), lambda: emb.weight]
    child = os.fork()
    if child == 0:  # no pytest in here
        refused = 0
        for use in uses:
            try:
                use()
            except flatbed.FlatbedError:
                refused += 1
            except BaseException:
                os._exit(100)
        emb.table.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(uses)
    assert torch.equal(emb.read_rows(EVERY), before)


EXIT = """
import gc, os, signal, sys, torch, flatbed
sys.kept = []  # alive until the interpreter exits
end, path, cache_rows = sys.argv[1:]
for storage in ("host", "device", "disk"):
    of_file = {"path": path, "cache_rows": int(cache_rows)} if storage == "disk" else {"cache_rows": 0}
    emb = flatbed.Embedding(1000, 8, storage=storage, **of_file)
    optimizer = flatbed.optim.Adam(emb)
    emb([1, 2]).sum().backward()
    optimizer.step()
    view = None if storage == "disk" else emb.weight
    sys.kept += [emb, optimizer, view, emb([3])]
if end.startswith("saved"):
    emb.table.checkpoint()
if "changed" in end:
    emb([1, 2]).sum().backward()
    optimizer.step()
if end == "forgotten":
    sys.kept.clear()
    del emb, optimizer, view
    gc.collect()
if end == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
if end == "handled":
    os.kill(os.getpid(), signal.SIGTERM)
if "killed" in end:
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("end", "filters", "code", "n_told"),
    [
        ("saved", "error", 3, 0),
        ("exit", "ignore", 3, 1),
        ("forgotten", "ignore", 3, 1),
        ("handled", "error", 4, 1),
    ],
)
def test_lost_rows_are_told_on_stderr(end: str, filters: str, code: int, n_told: int, tmp_path: Path) -> None:
    """Whatever is done with warnings. Processes that lose nothing end quietly."""
    done = programs.run(EXIT, end, tmp_path / "table", 0, filters=filters, finalize=True, ok=False)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    expected = f"2 rows of {tmp_path / 'table'} changed since its last checkpoint and are dropped"
    assert done.stderr.count(expected) == done.stderr.count("\n") == n_told


@pytest.mark.parametrize("cache_rows", [0, 50])
@pytest.mark.parametrize("end", ["killed", "saved and killed", "saved, changed and killed", "exit"])
def test_rows_that_a_kill_has_lost_are_told_at_the_next_opening(
    end: str, cache_rows: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, and not to readers. Rows in the cache never were in the journal."""
    path = tmp_path / "table"
    done = programs.run(EXIT, end, path, cache_rows, ok=False)
    assert done.returncode == (3 if end == "exit" else -signal.SIGKILL), done.stderr
    assert path.with_name("table.journal").exists() == (end != "exit")
    flatbed.load_table(path, read_only=True).close()
    assert capfd.readouterr().err == ""
    for n_told in (int(end in ("killed", "saved, changed and killed")), 0):
        flatbed.load_table(path).close()
        told = capfd.readouterr().err
        assert told.count(f"rows of {path} changed after its last checkpoint and are dropped") == n_told
        assert told.count("\n") == n_told


@pytest.mark.parametrize("cache_rows", [0, 50])
def test_rows_that_a_load_drops_are_not_told(
    cache_rows: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    emb = flatbed.Embedding(100, 4, storage="disk", path=tmp_path / "table", cache_rows=cache_rows)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb([1]).sum().backward()
    flatbed.save_checkpoint(tmp_path / "run", emb, optimizer)
    optimizer.step()
    flatbed.load_checkpoint(tmp_path / "run", emb, optimizer)
    emb.table.close()
    assert capfd.readouterr().err == ""
