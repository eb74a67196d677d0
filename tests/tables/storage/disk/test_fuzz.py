"""Files that are wrong in any way: a clear error that leaves them as they are, or the right table."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flatbed
from flatbed.checkpoint.load_table import check_path
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk import format as header
from flatbed.tables.storage.disk import read_only as disk_read_only
from flatbed.tables.storage.disk import storage as disk
from flatbed.tables.storage.disk.format import (
    JOURNAL,
    PAGE,
    RECORDS_AT,
    STATE,
    STATE_AT,
    TABLE,
    VERSION,
    Identity,
    State,
    encode,
    encode_identity,
)
from flatbed.tables.storage.disk.mapped_file import MappedFile
from tests.tables.storage.disk.crash_model import (
    NBYTES,
    RECORD,
    Dense,
    everything,
    files,
    made,
    random_records,
)

N_ROWS = 30
EITHER = {0, 1}


@dataclass(frozen=True, slots=True)
class Found:
    """Files as a process left them, and the checkpoints that they may be opened at."""

    files: dict[str, bytes]
    rows: tuple[Dense, Dense]
    allowed: set[int]


def left(how: str) -> Found:
    """A closed table, one with a sealed journal, and one whose journal was half copied."""

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = Path(tempfile.mkdtemp())
    storage = made(folder, N_ROWS)
    before = everything(storage)
    torch.manual_seed(0)
    storage.scatter_(torch.arange(5, 25), random_records(20))
    after = everything(storage)
    if how == "closed":
        storage.checkpoint({"step": 1})
    else:
        where: Any = (disk, "apply") if how == "sealed" else (MappedFile, "scatter")
        with mock.patch.object(*where, ended), pytest.raises(KeyboardInterrupt):
            storage.checkpoint({"step": 1})
    storage.close()
    found = files(folder)
    shutil.rmtree(folder)
    return Found(found, (before, after), {"closed": {1}, "sealed": EITHER, "half copied": {1}}[how])


FOUND = {how: left(how) for how in ("closed", "sealed", "half copied")}


def opened(found: dict[str, bytes], base: Found, allowed: set[int]) -> str:
    """Open the files; the error's message, or "" if the table was right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in found.items():
            (folder / file).write_bytes(data)
        try:
            storage = DiskStorage.open(folder / "table")
        except FlatbedError as error:
            assert files(folder) == found
            message = str(error)
            assert f"{folder}/table" in message
            return message
        assert storage.generation in allowed
        assert storage.meta == {"step": storage.generation}
        assert np.array_equal(everything(storage), base.rows[storage.generation])
        storage.close()
        return ""


@pytest.mark.parametrize("how", FOUND)
def test_untouched_files(how: str) -> None:
    assert opened(FOUND[how].files, FOUND[how], {1}) == ""


@st.composite
def damage(draw: st.DrawFn, data: bytes, end: int) -> bytes:
    """The file with some bytes before `end` changed, or cut short, or longer."""
    at = st.one_of(st.integers(0, min(end, 700) - 1), st.integers(0, end - 1))
    kind = draw(st.sampled_from(["flip", "flip", "cut", "zero", "noise", "more", "swap"]))
    changed = bytearray(data)
    if kind == "flip":
        for place in draw(st.lists(at, min_size=1, max_size=4)):
            changed[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "cut":
        return data[: draw(st.one_of(at, st.integers(0, len(data))))]
    elif kind == "more":
        return data + draw(st.binary(min_size=1, max_size=5000))
    else:
        start = draw(at)
        stop = min(end, start + draw(st.integers(1, 5000)))
        noise = {
            "zero": bytes(stop - start),
            "noise": np.random.default_rng(start).bytes(stop - start),
            "swap": bytes(changed[start:stop])[::-1],
        }
        changed[start:stop] = noise[kind]
    return bytes(changed)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(data=st.data(), how=st.sampled_from(list(FOUND)), name=st.sampled_from(["table", "table.journal"]))
def test_damaged_header_or_journal(data: st.DataObject, how: str, name: str) -> None:
    base = FOUND[how]
    if name in base.files:
        file = base.files[name]
        changed = data.draw(damage(file, RECORDS_AT if name == "table" else len(file)))
        opened({**base.files, name: changed}, base, base.allowed)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=300), padding=st.sampled_from([0, PAGE, RECORDS_AT + 100_000]))
def test_foreign_files(content: bytes, padding: int) -> None:
    base = FOUND["closed"]
    file = content.ljust(padding, b"\0")
    assert opened({"table": file}, base, set()) != ""
    if content[: len(JOURNAL)].strip(b"\0"):
        assert opened({**base.files, "table.journal": file}, base, set()) != ""
    else:
        assert opened({**base.files, "table.journal": file}, base, {1}) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data(), magic=st.sampled_from([TABLE, STATE, JOURNAL]))
def test_wrong_values_under_a_right_checksum(data: st.DataObject, magic: bytes) -> None:
    """Also what no flatbed writes must not be believed, nor cost memory."""
    base = FOUND["sealed"]
    right: dict[bytes, dict[str, Any]] = {
        TABLE: {"table": "0", "replaces": None, "byteorder": "little", "fields": RECORD.describe()},
        STATE: asdict(State(N_ROWS, 0, {"step": 0}, word="0")),
        JOURNAL: {"table": "0", "nbytes": NBYTES, "n_slots": 20, "sealed": 100, "digest": ""},
    }
    wrong = dict(right[magic])
    for key in data.draw(st.sets(st.sampled_from(sorted(wrong)), min_size=1)):
        if data.draw(st.booleans()):
            del wrong[key]
        else:
            wrong[key] = data.draw(JSON | st.sampled_from([2**31, 2**62, 2**70, -1, 10**300]))
    name, at = {TABLE: ("table", 0), STATE: ("table", STATE_AT), JOURNAL: ("table.journal", 0)}[magic]
    block = encode(magic, wrong, PAGE)
    file = base.files[name]
    changed = file[:at] + block + file[at + len(block) :]
    with tempfile.TemporaryDirectory() as folder:
        for other, content in {**base.files, name: changed}.items():
            (Path(folder) / other).write_bytes(content)
        try:
            storage = DiskStorage.open(Path(folder) / "table")
        except FlatbedError:
            assert files(Path(folder)) == {**base.files, name: changed}
        else:
            assert storage.record.nbytes * storage.n_rows <= len(base.files["table"])
            storage.close()


def _block(magic: bytes, text: bytes = b"{}", *, version: int = VERSION) -> bytes:
    """A block with a right checksum."""
    with mock.patch.object(header, "dump", return_value=text), mock.patch.object(header, "VERSION", version):
        return encode(magic, {}, RECORDS_AT)


def _big_endian() -> bytes:
    with mock.patch.object(sys, "byteorder", "big"):
        return encode_identity(Identity("0", RECORD))


def _with(name: str, at: int, block: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda f: {**f, name: f[name][:at] + block + f[name][at + len(block) :]}


CASES: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "empty": (lambda f: {"table": b""}, "no table of flatbed"),
    "text": (lambda f: {"table": b"PK\3\4" * 9999}, "b'PK"),
    "newer": (_with("table", 0, _block(TABLE, version=VERSION + 1)), "version 2"),
    "cut in the header": (lambda f: {"table": f["table"][: PAGE + 20]}, "damaged"),
    "cut by a byte": (lambda f: {"table": f["table"][:-1]}, "30 rows of 64 bytes need 67592"),
    "state": (_with("table", STATE_AT + 60, b"?"), "checksum"),
    "endless list": (_with("table", 0, _block(TABLE, b"[" * 3000)), "is damaged"),
    "endless number": (_with("table", STATE_AT, _block(STATE, b'{"n":' + b"9" * 5000 + b"}")), "is damaged"),
    "other machine": (lambda f: {"table": _big_endian() + f["table"][PAGE:]}, "big-endian"),
    "newer journal": (lambda f: {**f, "table.journal": _block(JOURNAL, version=VERSION + 1)}, "version 2"),
    "foreign journal": (lambda f: {**f, "table.journal": b"dear diary" * 99}, "no journal"),
}


@pytest.mark.parametrize("case", CASES)
def test_messages(case: str) -> None:
    change, message = CASES[case]
    base = FOUND["closed"]
    assert message in opened(change(base.files), base, set())


@pytest.mark.parametrize(
    "wrong",
    [
        {"meta": {"table": 5}},
        {"meta": {"table": {"init": 3, "seed": 0}}},
        {"meta": {"table": {"init": {"kind": "gamma"}, "seed": 0}}},
        {"meta": {"table": {"init": {"kind": "zeros"}, "seed": "x"}}},
        {"meta": {"table": {"padding_idx": "x"}}},
        {"meta": {"scalars": {"step": "x"}}},
        {"meta": {"scalars": 3}},
        *({"n_rows": n_rows} for n_rows in (0, 2**40, 2**60, 2**63 - 1)),
    ],
)
def test_wrong_values_in_a_whole_header_are_damage(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_read_only, "PATIENCE", 0.0)  # no other process is about to write
    path = tmp_path / "a.bed"
    flatbed.Embedding(10, 4, storage="disk", path=path).table.checkpoint()
    raw = path.read_bytes()
    state = replace(header.decode_state(raw[STATE_AT:RECORDS_AT]), **wrong)
    path.write_bytes(_with("", STATE_AT, header.encode_state(state))({"": raw})[""])
    for read in (flatbed.load_table, partial(flatbed.load_table, read_only=True), check_path):
        with pytest.raises(DamagedFileError):
            read(path)
