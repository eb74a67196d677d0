"""Tables loaded with read_only=True: the last checkpoint's rows, beside a training or after its end."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed.errors import FlatbedError
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.mapped_file import MappedFile
from tests import programs
from tests.tables.storage.disk.crash_model import failing, files

ROWS, DIM = 50, 4
EVERY = torch.arange(ROWS)


def trained(folder: Path, **options: Any) -> Any:
    return flatbed.Embedding(ROWS, DIM, storage="disk", path=folder / "t.bed", device="cpu", **options)


def served(folder: Path) -> flatbed.Table:
    return flatbed.load_table(folder / "t.bed", read_only=True, device="cpu")


def set_to(emb: Any, value: float) -> None:
    emb.write_rows(EVERY, torch.full((ROWS, DIM), value))


def test_rows_are_those_of_the_last_checkpoint(tmp_path: Path) -> None:
    emb = trained(tmp_path)
    set_to(emb, 1.0)
    emb.table.checkpoint()
    first, second = served(tmp_path), served(tmp_path)
    set_to(emb, 2.0)
    assert (first.read_rows(EVERY) == 1).all()
    emb.table.checkpoint()
    for table in (first, second):
        assert (table.read_rows(EVERY) == 2).all()
        assert (flatbed.Embedding.from_table(table)([3, 3, 7]) == 2).all()
        assert not table.requires_grad
    emb.table.resize(2 * ROWS)
    flatbed.optim.Adam(emb, lr=0.1)
    emb(EVERY).sum()  # replaces the file by one with state
    assert (first.read_rows(EVERY) == 2).all()
    set_to(emb, 3.0)
    emb.table.close()
    assert (first.read_rows(EVERY) == 3).all()
    first.close()
    with pytest.raises(FlatbedError, match="closed"):
        first.read_rows(EVERY)
    assert (second.read_rows(EVERY) == 3).all()
    del second, table  # closes the file
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_nothing_is_written_or_locked(tmp_path: Path) -> None:
    emb = trained(tmp_path)
    set_to(emb, 1.0)
    emb.table.close()
    before = files(tmp_path)
    table = served(tmp_path)
    changes = (
        lambda: table.write_rows([1], torch.ones(1, DIM)),
        lambda: table.resize(100),
        lambda: table.checkpoint(),
        lambda: flatbed.save_checkpoint(tmp_path / "run", flatbed.Embedding.from_table(table)),
        lambda: flatbed.Embedding.from_table(table).reset_parameters(),
        lambda: flatbed.optim.Adam([nn.Parameter(torch.ones(2)), table]),
        lambda: flatbed.optim.SGD([table.requires_grad_()]),
        lambda: flatbed.optim.from_torch(torch.optim.Rprop, [table]),
        lambda: flatbed.optim.SGD([nn.Parameter(torch.ones(2))]).add_param_group({"params": [table]}),
    )
    for change in changes:
        with pytest.raises(FlatbedError, match="read_only"):
            change()
        assert (table.read_rows(EVERY) == 1).all()
    assert table.state_names == ()
    with pytest.raises(KeyError, match=r"no state 'exp_avg'.*read_only=True reads weights alone"):
        table.read_state("exp_avg", [1])
    table.close()
    assert files(tmp_path) == before
    trained(tmp_path).table.close()
    program = f"""
import flatbed
table = flatbed.load_table({str(tmp_path / "t.bed")!r}, read_only=True, device="cpu")
print(table.read_rows([1, 2]).tolist())
"""
    assert programs.run(program).stdout.strip() == str([[1.0] * DIM] * 2)


def test_reads_beside_checkpoints_are_whole(tmp_path: Path) -> None:
    emb = trained(tmp_path)
    set_to(emb, 0.0)
    emb.table.checkpoint()
    stop = threading.Event()

    def read() -> None:
        table, last = served(tmp_path), 0.0
        while not stop.is_set():
            found = table.read_rows(EVERY)
            assert (found == found[0, 0]).all(), "rows of two checkpoints"
            assert found[0, 0] >= last, "older rows"
            last = float(found[0, 0])

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for number in range(1, 40):
            set_to(emb, float(number))
            emb.table.checkpoint()
        stop.set()
    for reader in readers:
        reader.result()
    emb.table.close()


def test_threads_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emb = trained(tmp_path)
    set_to(emb, 1.0)
    emb.table.checkpoint()
    table, read, nested = served(tmp_path), MappedFile.read, []

    def read_late(*args: Any) -> int:
        if not nested:
            nested.append(True)
            set_to(emb, 2.0)
            emb.table.checkpoint()
            assert (table.read_rows(EVERY) == 2).all()  # opens the file again
        return read(*args)

    monkeypatch.setattr(MappedFile, "read", read_late)
    assert (table.read_rows(EVERY) == 2).all()
    assert nested


def test_loading_a_checkpoint(tmp_path: Path) -> None:
    emb, folder = trained(tmp_path), tmp_path / "run"
    set_to(emb, 1.0)
    flatbed.save_checkpoint(folder, emb, extra={"step": 1})
    table = served(tmp_path)
    reader = flatbed.Embedding.from_table(table)
    assert flatbed.load_checkpoint(folder, reader) == {"step": 1}
    set_to(emb, 2.0)
    flatbed.save_checkpoint(folder, emb, extra={"step": 2})
    assert flatbed.load_checkpoint(folder, reader) == {"step": 2}
    assert (table.read_rows(EVERY) == 2).all()
    flatbed.save_checkpoint(tmp_path / "copied", emb, copy_disk_tables=True)
    emb.table.save(tmp_path / "t.safetensors")
    with pytest.warns(UserWarning, match="cannot be loaded any more"):
        emb.table.checkpoint()
    with pytest.raises(FlatbedError, match="Load the folder that was saved last"):
        flatbed.load_checkpoint(folder, reader)
    changes = (
        lambda: flatbed.load_checkpoint(tmp_path / "copied", reader),
        lambda: table.load(tmp_path / "t.safetensors"),
    )
    for change in changes:
        with pytest.raises(FlatbedError, match="read_only"):
            change()
    assert (table.read_rows(EVERY) == 2).all()


def test_checkpoint_that_was_half_copied_is_read_from_its_journal(tmp_path: Path) -> None:
    emb = trained(tmp_path)
    set_to(emb, 1.0)
    emb.table.checkpoint()
    emb.write_rows(EVERY[:20], torch.full((20, DIM), 2.0))
    with failing(MappedFile, "scatter", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        emb.table.checkpoint()
    emb.table.close(discard=True)
    before = files(tmp_path)
    assert set(before) == {"t.bed", "t.bed.journal"}
    table = served(tmp_path)
    found = table.read_rows(EVERY)
    assert (found[:20] == 2).all()
    assert (found[20:] == 1).all()
    assert (table.read_rows(EVERY[20:]) == 1).all()  # none of which are in the journal
    assert files(tmp_path) == before
    DiskStorage.open(tmp_path / "t.bed").close()


def test_other_files(tmp_path: Path) -> None:
    flatbed.Embedding(ROWS, DIM).table.save(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="read_only"):
        flatbed.load_table(tmp_path / "t.safetensors", read_only=True)
    with pytest.raises(FlatbedError, match="no"):
        flatbed.load_table(tmp_path / "nothing", read_only=True)
