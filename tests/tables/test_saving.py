"""Tables as safetensors files: every storage and dtype, wrong files, full disks, little memory."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import sys
from collections import namedtuple
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import flatbed
from flatbed.checkpoint.load_table import load_table
from flatbed.errors import FlatbedError
from flatbed.tables import tensor_file
from flatbed.tables.embedding import Embedding
from flatbed.tables.record import Field, Record
from flatbed.tables.storage import base
from flatbed.tables.table import Table
from tests.distributed.sharded_checkpoints import Peak
from tests.tables.training import Operations

STORAGES = ("host", "device", "disk")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS, DIM = 50, 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks even for small tables."""
    monkeypatch.setattr(base, "CHUNK_BYTES", 1000)


def embedding(storage: str, folder: Path, *, name: str = "t.bed", **options: Any) -> Embedding:
    path = folder / name if storage == "disk" else None
    return Embedding(ROWS, DIM, storage=storage, path=path, **options)


def train(emb: Embedding, optimizer: torch.optim.Optimizer, *, steps: int = 3, seed: int = 0) -> None:
    chosen = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (20,), generator=chosen)
        emb(ids).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(storage: str, folder: Path, **options: Any) -> tuple[Embedding, torch.optim.Optimizer]:
    emb = embedding(storage, folder, **options)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    train(emb, optimizer)
    return emb, optimizer


def everything(table: Table) -> dict[str, torch.Tensor]:
    """All fields, as bytes so that equal means bitwise."""
    _ = table._store.ensure_layout()
    fields = {
        field.name: table._store.read_field(field.name, 0, table.num_embeddings)
        for field in table._store.record.fields
    }
    return {name: values.view(torch.uint8) for name, values in fields.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- there and back


WAYS = [(*pair, dtype) for pair, dtype in zip(product(STORAGES, STORAGES), cycle(DTYPES), strict=False)]


@pytest.mark.parametrize(("storage", "to", "dtype"), WAYS)
def test_round_trip(storage: str, to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    emb, _ = trained(storage, tmp_path, dtype=dtype, padding_idx=3, init=("uniform", -1, 1), seed=7)
    emb.table.save(tmp_path / "t.safetensors")
    new = load_table(
        tmp_path / "t.safetensors", storage=to, to=tmp_path / "new.bed" if to == "disk" else None
    )
    assert same(everything(new), everything(emb.table))
    assert new.scalars() == emb.table.scalars() == {"step": 3.0}
    assert new.storage == to
    assert new._store.config.describe() == emb.table._store.config.describe()
    if to == "disk":  # opens in place
        before, config = everything(new), new._store.config
        new.close()
        new = load_table(tmp_path / "new.bed")
        assert same(everything(new), before)
        assert (new._store.config, new.scalars()) == (config, {"step": 3.0})
    for table in (emb.table, new):  # new rows begin from the same seed
        table.resize(2 * ROWS)
    assert same(everything(new), everything(emb.table))


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "unowned"])
@pytest.mark.parametrize("into", ["laid out", "new", "load_table"])
@pytest.mark.parametrize("storage", STORAGES)
def test_training_continues_after_loading(storage: str, into: str, owned: bool, tmp_path: Path) -> None:
    emb, optimizer = trained("host", tmp_path)
    path, to = tmp_path / "t.safetensors", tmp_path / "new.bed" if storage == "disk" else None
    emb.table.save(path)
    if into == "load_table":
        other = Embedding.from_table(load_table(path, storage=storage, to=to))
    else:
        other = embedding(storage, tmp_path, seed=9)
    if into == "laid out":
        other(torch.tensor([0]))
    made = flatbed.optim.Adam(other, lr=0.1) if owned else None
    if made is not None and into == "laid out":
        train(other, made, seed=5)
    if into != "load_table":
        other.table.load(path)
    assert same(everything(other.table), everything(emb.table))
    assert other.table.scalars() == {"step": 3.0}
    made = made or flatbed.optim.Adam(other, lr=0.1)
    train(emb, optimizer, seed=1)
    train(other, made, seed=1)
    assert same(everything(other.table), everything(emb.table))


def test_dtypes_are_converted_and_loading_is_durable(tmp_path: Path) -> None:
    emb, _ = trained("host", tmp_path, dtype=torch.float64)
    emb.table.save(tmp_path / "t.safetensors")
    other = embedding("disk", tmp_path, dtype=torch.bfloat16)
    other.table.load(tmp_path / "t.safetensors")
    other.table.close()
    found = load_table(tmp_path / "t.bed")
    assert torch.equal(found.read_rows(range(ROWS)), emb.weight.to(torch.bfloat16))
    assert found._store.record["exp_avg"].dtype == emb.table._store.record["exp_avg"].dtype


def test_table_that_was_never_used(tmp_path: Path) -> None:
    Embedding(ROWS, DIM, seed=3).table.save(tmp_path / "t.safetensors")
    found = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert torch.equal(found["weight"], Embedding(ROWS, DIM, seed=3).weight)
    assert load_table(tmp_path / "t.safetensors")._store.state_owned


def test_scalars_are_kept_exactly_and_do_not_clash(tmp_path: Path) -> None:
    emb = embedding("host", tmp_path)
    owner: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    numbers = {"step": 16777217.0, "product": 0.1, "huge": 1e300, "zero": 0.0, "most": float("inf")}
    emb.table._attach(owner, (Field("step", torch.float32, 1, 2.0), Field("exp_avg", torch.float32, DIM)))
    emb.table._store.scalars = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()
    }
    emb.table.save(tmp_path / "t.safetensors")
    raw = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert raw["step"].shape == (ROWS, 1)
    assert raw["scalar.step"].shape == ()
    assert raw["zero"].dtype == torch.float32
    assert raw["product"].dtype == torch.float64
    new = load_table(tmp_path / "t.safetensors")
    assert new.scalars() == numbers
    assert new._store.record == emb.table._store.record  # first values, too


# ---- without flatbed


def test_files_are_readable_without_flatbed(tmp_path: Path) -> None:
    emb, _ = trained("host", tmp_path, dtype=torch.float16)
    emb.table.save(tmp_path / "t.safetensors")
    found = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert torch.equal(found["weight"], emb.weight)
    assert (found["step"].item(), found["exp_avg"].shape) == (3, (ROWS, DIM))
    raw = (tmp_path / "t.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "flatbed-table"
    for entry in header.values():  # aligned, as the library writes them
        assert (8 + length + entry["data_offsets"][0]) % {"F16": 2, "F32": 4}[entry["dtype"]] == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_file_of_torch_has_weights_only(storage: str, tmp_path: Path) -> None:
    plain = nn.Embedding(ROWS, DIM)
    safetensors.torch.save_file(dict(plain.state_dict()), tmp_path / "plain.safetensors")
    emb, optimizer = trained(storage, tmp_path)
    before = everything(emb.table)
    emb.table.load(tmp_path / "plain.safetensors")
    after = everything(emb.table)
    assert torch.equal(after["weight"], plain.weight.detach().view(torch.uint8))
    assert torch.equal(after["exp_avg"], before["exp_avg"])
    assert emb.table.scalars() == {"step": 3.0}
    train(emb, optimizer)
    assert torch.equal(load_table(tmp_path / "plain.safetensors").weight, plain.weight)


# ---- files that do not fit


def rewritten(key: str, old: str, new: str) -> Any:
    """Change a value of the header's metadata."""

    def change(path: Path) -> None:
        good = path.read_bytes()
        length = int.from_bytes(good[:8], "little")
        header = json.loads(good[8 : 8 + length])
        header["__metadata__"][key] = header["__metadata__"][key].replace(old, new)
        text = json.dumps(header).encode()
        path.write_bytes((len(text)).to_bytes(8, "little") + text + good[8 + length :])

    return change


def of_torch(**tensors: torch.Tensor) -> Any:
    return partial(safetensors.torch.save_file, tensors)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


WRONG: dict[str, Any] = {
    "pipe": (pipe, "is missing, or no file"),
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), "damaged"),
    "noise": (lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)), "damaged"),
    "version": (rewritten("version", "1", "3"), "version 3"),
    "fields": (rewritten("fields", "float32", "float64"), "damaged"),
    "n_rows": (rewritten("table", f'"num_embeddings": {ROWS}', '"num_embeddings": 49'), "damaged"),
    "init": (rewritten("table", '"kind": "normal"', '"kind": "strange"'), "damaged"),
    "scalars": (rewritten("scalars", '"step"}', '"nowhere"}'), "damaged"),
    "no weight": (of_torch(bias=torch.zeros(3)), "bias"),
    "more": (of_torch(weight=torch.zeros(ROWS, DIM), bias=torch.zeros(3)), "bias"),
    "shape": (of_torch(weight=torch.zeros(ROWS)), "rows, dim"),
    "dtype": (of_torch(weight=torch.zeros(ROWS, DIM, dtype=torch.int64)), "I64"),
    "rows": (of_torch(weight=torch.zeros(ROWS + 1, DIM)), "51 × 5.*50 × 5"),
    "columns": (of_torch(weight=torch.zeros(ROWS, DIM + 1)), "50 × 6.*50 × 5"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_files_that_do_not_fit(change: Any, words: str, tmp_path: Path) -> None:
    emb, _ = trained("host", tmp_path)
    path = tmp_path / "t.safetensors"
    emb.table.save(path)
    change(path)
    before = everything(emb.table)
    for read in (emb.table.load, load_table) if "×" not in words else (emb.table.load,):
        with pytest.raises(FlatbedError, match=words):
            read(path)
    assert same(everything(emb.table), before)
    assert emb.table.scalars() == {"step": 3.0}


def test_any_changed_byte_of_the_header_is_an_error_or_harmless(tmp_path: Path) -> None:
    emb, _ = trained("host", tmp_path)
    path = tmp_path / "t.safetensors"
    emb.table.save(path)
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(0)
    weight, n_errors = emb.read_rows(range(ROWS)), 0
    for at in rng.choice(length, 150, replace=False):
        changed = bytearray(good)
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            table = load_table(path)
        except FlatbedError:
            n_errors += 1
        else:
            assert torch.equal(table.read_rows(range(ROWS)), weight)
    assert n_errors > 0


@pytest.mark.parametrize("storage", STORAGES)
def test_state_of_another_optimizer(storage: str, tmp_path: Path) -> None:
    emb, _ = trained("host", tmp_path)
    emb.table.save(tmp_path / "t.safetensors")
    other = embedding(storage, tmp_path)
    optimizer = flatbed.optim.SGD(other, lr=0.1, momentum=0.9)
    train(other, optimizer)
    before = everything(other.table)
    with pytest.raises(FlatbedError, match=r"exp_avg.*SGD keeps momentum_buffer"):
        other.table.load(tmp_path / "t.safetensors")
    assert same(everything(other.table), before)
    with pytest.raises(FlatbedError, match="drop_state"):
        flatbed.optim.SGD([load_table(tmp_path / "t.safetensors")], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("storage", STORAGES)
def test_loaded_state_is_not_that_of_the_optimizer_before(storage: str, tmp_path: Path) -> None:
    """No warning names an optimizer whose state was replaced (the tests take warnings for errors)."""
    emb = embedding("host", tmp_path)
    train(emb, flatbed.optim.AdamW(emb))
    emb.table.save(tmp_path / "t.safetensors")
    other = embedding(storage, tmp_path)
    train(other, flatbed.optim.Adam(other))
    gc.collect()  # the optimizer
    other.table.load(tmp_path / "t.safetensors")
    train(other, flatbed.optim.AdamW(other))
    assert float(other.table.scalars()["step"]) == 6


# ---- closing a disk table


def changed_table(folder: Path) -> Table:
    table = embedding("disk", folder).table
    table.write_rows([3], torch.full((1, DIM), 2.0))
    return table


def saved_row(folder: Path) -> torch.Tensor:
    with load_table(folder / "t.bed") as table:
        return table.read_rows([3])


@pytest.mark.parametrize("end", [Table.close, lambda table: table.__exit__(None, None, None)])
def test_close_and_with_checkpoint_unless_told_to_discard(end: Any, tmp_path: Path) -> None:
    end(changed_table(tmp_path))
    assert (saved_row(tmp_path) == 2).all()
    table = load_table(tmp_path / "t.bed")
    table.write_rows([3], torch.zeros(1, DIM))
    table.close(discard=True)
    assert (saved_row(tmp_path) == 2).all()
    with pytest.raises(FlatbedError, match="closed"):
        table.read_rows([3])
    table.close()


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_allocated_at_the_first_use(storage: str, tmp_path: Path) -> None:
    emb = embedding(storage, tmp_path)
    flatbed.optim.Adam(emb)
    _ = emb.table.storage, emb.table.nbytes, emb.table.state_names, repr(emb)
    assert emb.table._store.phase == "unallocated"
    assert not list(tmp_path.iterdir())
    emb(torch.tensor([1]))
    assert emb.table._store.phase == "allocated"
    with emb.table:
        pass
    assert emb.table._store.phase == "closed"
    with pytest.raises(FlatbedError, match="closed"):
        emb(torch.tensor([1]))


def test_exception_drops_changes_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They may be half a step."""
    table = changed_table(tmp_path)
    with pytest.raises(KeyError), table:
        raise KeyError
    assert re.search(r"1 rows .*KeyError.*checkpoint", capfd.readouterr().err)
    assert not (saved_row(tmp_path) == 2).any()


def test_close_keeps_state_and_dropped_state(tmp_path: Path) -> None:
    emb, optimizer = trained("disk", tmp_path)
    emb.table.checkpoint()
    emb(torch.empty(0, dtype=torch.int64)).sum().backward()
    optimizer.step()  # without rows, and counted, as in torch
    emb.table.close()
    with load_table(tmp_path / "t.bed") as table:
        assert (table.scalars(), table.state_names) == ({"step": 4.0}, ("exp_avg", "exp_avg_sq"))
        table.drop_state()
    with load_table(tmp_path / "t.bed") as table:
        assert (table.scalars(), table.state_names) == ({}, ())


@pytest.mark.parametrize("name", ["weight", "__metadata__", "moment"])
def test_state_with_a_reserved_name_is_refused(name: str, tmp_path: Path) -> None:
    class Momentum(torch.optim.SGD):
        """Keeps its moment under another name."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.data.sub_(self.state[p].setdefault(name, torch.zeros_like(p)).add_(p.grad), alpha=0.1)

    emb = embedding("host", tmp_path)
    if name == "moment":
        train(emb, flatbed.optim.from_torch(Momentum, emb.parameters()))
    else:
        with pytest.raises(ValueError, match=f"rename the state '{name}'"):
            flatbed.optim.from_torch(Momentum, emb.parameters())


def test_close_does_not_change_a_saved_folder_or_an_unchanged_file(tmp_path: Path) -> None:
    emb, optimizer = trained("disk", tmp_path)
    flatbed.save_checkpoint(tmp_path / "run", emb, optimizer)
    emb.table.close()
    before = (tmp_path / "t.bed").read_bytes()
    again = embedding("disk", tmp_path)
    its = flatbed.optim.Adam(again, lr=0.1)
    flatbed.load_checkpoint(tmp_path / "run", again, its)
    again(torch.tensor([1]))
    again.table.close()
    assert (tmp_path / "t.bed").read_bytes() == before


# ---- what goes wrong while writing


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
def test_failures_leave_the_old_file(number: int, tmp_path: Path) -> None:
    emb, optimizer = trained("host", tmp_path)
    (tmp_path / "saved").mkdir()
    path = tmp_path / "saved" / "t.safetensors"
    emb.table.save(path)
    before, n_failures = files(path.parent), 0
    train(emb, optimizer)
    with Operations() as counted:
        emb.table.save(tmp_path / "t.safetensors")

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at in range(2, counted.count - 1):  # the first looks for a disk table, the last make the name durable
        with Operations(at, fail), pytest.raises(FlatbedError) as caught:
            emb.table.save(path)
        assert re.search("bytes free" if number == errno.EDQUOT else "failed: Input", str(caught.value))
        assert files(path.parent) == before, at
        n_failures += 1
    assert n_failures > 5
    emb.table.save(path)
    assert path.read_bytes() == (tmp_path / "t.safetensors").read_bytes() != before[path.name]


def test_space_is_looked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb, _ = trained("host", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with pytest.raises(FlatbedError, match=r"needs \d,\d+ bytes, and its disk has 1,000 bytes free"):
        emb.table.save(tmp_path / "t.safetensors")
    assert not list(tmp_path.glob("*t.safetensors*"))


def test_drafts_of_killed_processes_are_removed_and_others_are_not(tmp_path: Path) -> None:
    emb = embedding("host", tmp_path)
    (tmp_path / ".t.safetensors.0123abcd.part").write_bytes(b"left behind")
    with tensor_file.replacing(tmp_path / "t.safetensors", 3) as descriptor:
        os.pwrite(descriptor, b"old", 0)
        emb.table.save(tmp_path / "t.safetensors")
        assert len(list(tmp_path.glob(".t.safetensors.*"))) == 1
    assert sorted(files(tmp_path)) == ["t.safetensors"]
    assert files(tmp_path)["t.safetensors"] == b"old"


def test_failing_load_table_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emb = embedding("host", tmp_path)
    emb.table.save(tmp_path / "t.safetensors")
    (tmp_path / "precious").touch()
    with pytest.raises(FlatbedError, match="exists"):
        load_table(tmp_path / "t.safetensors", storage="disk", to=tmp_path / "precious")

    def failing(*_: Any) -> Any:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(Record, "view", failing)
    with pytest.raises(OSError, match="input/output"):
        load_table(tmp_path / "t.safetensors", storage="disk", to=tmp_path / "x.bed")
    assert sorted(files(tmp_path)) == ["precious", "t.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 154 MB, in blocks of 4 MB (32 MB for new files on disk)."""
    monkeypatch.setattr(base, "CHUNK_BYTES", 4 << 20)
    with Embedding(300_000, 128, storage="disk", path=tmp_path / "t.bed", init=1.5).table as table:
        table.read_rows([0])
        with Peak() as saved:
            table.save(tmp_path / "t.safetensors")
    with Peak() as loaded:
        load_table(tmp_path / "t.safetensors", storage="disk", to=tmp_path / "new.bed").close()
    assert saved.nbytes < 40 << 20, saved.nbytes
    assert loaded.nbytes < 100 << 20, loaded.nbytes


@pytest.mark.parametrize("is_open", [True, False])
def test_save_does_not_replace_the_file_of_a_disk_table(is_open: bool, tmp_path: Path) -> None:
    table = embedding("disk", tmp_path).table
    rows = table.read_rows(range(ROWS))
    if not is_open:
        table.close()
    for one in (
        (table, embedding("host", tmp_path).table) if is_open else (embedding("host", tmp_path).table,)
    ):
        with pytest.raises(FlatbedError, match="save to another path"):
            one.save(tmp_path / "t.bed")
    found = table if is_open else load_table(tmp_path / "t.bed")
    assert torch.equal(found.read_rows(range(ROWS)), rows)
    found.close()
