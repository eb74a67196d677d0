"""Header of a table's file: its identity and the state of its last checkpoint.

The first page has the identity and never changes. The pages after it have the state, which changes with
every checkpoint. Both are blocks: magic, version, length, checksum, JSON.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.files import open_regular
from flatbed.tables.initializers import from_json
from flatbed.tables.record import Record
from flatbed.tables.storage.disk.mapped_file import MappedFile

PAGE = 4096
STATE_AT = PAGE
RECORDS_AT = 16 * PAGE  # a multiple of a page, with room for some 60 kB of state before it
VERSION = 1

TABLE = b"flatbed-table\r\n\x1a"
STATE = b"flatbed-state\r\n\x1a"
JOURNAL = b"flatbed-journal3"

_PREFIX = struct.Struct("<16sII32s")


class OtherVersion(FlatbedError):
    """A block of another version of the format."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a table: written once, when its file is made."""

    table: str
    """Random name that ties a journal to its table."""
    record: Record
    replaces: str | None = None
    """Name of the table whose journal may still be next to this file."""


@dataclass(frozen=True, slots=True)
class State:
    """State of a table at a checkpoint."""

    n_rows: int
    generation: int
    meta: dict[str, Any]
    word: str
    """Random, and new with every checkpoint. It distinguishes copies that have the same generation."""
    applying: bool = False
    """Records are being copied from the journal; without the journal the table is unusable."""


def encode(magic: bytes, payload: Mapping[str, Any], room: int) -> bytes:
    """Encode a block of at most `room` bytes."""
    text = dump(payload)
    if len(text) > room - _PREFIX.size:
        raise ValueError(
            f"{len(text)} bytes of JSON do not fit into the {room - _PREFIX.size} that a table's header has "
            "for them; keep large values in a file of their own"
        )
    return _PREFIX.pack(magic, VERSION, len(text), _checksum(magic, text)) + text


def decode(magic: bytes, block: bytes) -> dict[str, Any]:
    """Decode a block, which may be followed by other bytes."""
    if len(block) < _PREFIX.size:
        raise DamagedFileError(f"it ends after {len(block)} bytes")
    found, version, length, checksum = _PREFIX.unpack_from(block)
    if found != magic:
        raise DamagedFileError(f"it begins with {found!r} instead of {magic!r}")
    text = block[_PREFIX.size : _PREFIX.size + length]
    is_right = len(text) == length and _checksum(magic, text) == checksum  # it covers the version
    if version != VERSION and not is_right:
        raise OtherVersion(
            f"it has version {version} of the format, and this flatbed knows version {VERSION}"
        )
    if version != VERSION or not is_right:
        raise DamagedFileError("its checksum is wrong")
    return load(text)


def dump(payload: Mapping[str, Any]) -> bytes:
    """Encode as compact JSON."""
    return json.dumps(payload, separators=(",", ":")).encode("ascii")


def load(text: bytes) -> dict[str, Any]:
    """Decode a JSON object; raises `DamagedFileError`."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"its JSON is wrong ({error})") from None
    if not isinstance(payload, dict):
        raise DamagedFileError("its JSON is no object")
    return payload


def normal(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return meta as it will be read from the file."""
    return load(dump(dict(meta or {})))


def encode_identity(identity: Identity) -> bytes:
    """Encode a file's first page."""
    payload = {
        "table": identity.table,
        "replaces": identity.replaces,
        "byteorder": sys.byteorder,
        "fields": identity.record.describe(),
    }
    return encode(TABLE, payload, PAGE).ljust(PAGE, b"\0")


def decode_identity(path: Path, page: bytes) -> Identity:
    """Decode a file's first page; anything but a table raises `FlatbedError`."""
    try:
        payload = decode(TABLE, page)
        record = Record.from_json(payload["fields"])
        table, replaces, order = payload["table"], payload["replaces"], payload["byteorder"]
        is_named = isinstance(table, str) and isinstance(replaces, str | None)
        if not is_named or record.nbytes >= 2**31:
            raise DamagedFileError("its values are wrong")
    except OtherVersion as error:
        raise FlatbedError(f"cannot open {path}: {error}; open it with the flatbed that wrote it") from None
    except (KeyError, TypeError, ValueError, OverflowError, DamagedFileError) as error:
        raise DamagedFileError(
            f"{path} is no table of flatbed, or its header is damaged: {error}; check the path, or restore "
            "the file from a copy"
        ) from None
    if order != sys.byteorder:
        raise FlatbedError(
            f"{path} was written on a {order}-endian machine, and this one is {sys.byteorder}-endian; "
            "save the table there and load it here instead"
        )
    return Identity(table, record, replaces)


def state_of(payload: Mapping[str, Any]) -> State:
    """Convert JSON types to a state; raises `DamagedFileError`, also for a wrong description of the table."""
    try:
        names = ("n_rows", "generation", "meta", "word", "applying")
        n_rows, generation, meta, word, applying = (payload[name] for name in names)
        about, scalars = meta.get("table", {}), meta.get("scalars", {})
        if "init" in about:
            from_json(about["init"])
        is_right = (
            all(type(count) is int and 0 <= count < 2**63 for count in (n_rows, generation))
            and n_rows > 0
            and isinstance(applying, bool)
            and isinstance(word, str)
            and isinstance(about.get("seed", 0), int)
            and isinstance(about.get("padding_idx"), int | None)
            and all(type(value) in (int, float) for value in scalars.values())
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise DamagedFileError("its values are wrong")
    return State(n_rows, generation, meta, word, applying)


def encode_state(state: State) -> bytes:
    """Encode the pages between the first and the records; ValueError if meta is too large."""
    return encode(STATE, asdict(state), RECORDS_AT - STATE_AT)


def decode_state(block: bytes) -> State:
    """Decode the state; raises `DamagedFileError`, also if a crash has torn the pages."""
    return state_of(decode(STATE, block))


def read_header(file: MappedFile) -> tuple[Identity, State | None]:
    """Read a table's identity and its state, which is None if it is damaged or being written."""
    head = np.zeros(RECORDS_AT, np.uint8)
    length = file.read(0, head)
    identity = decode_identity(file.path, head[: min(length, PAGE)].tobytes())
    try:
        return identity, decode_state(head[STATE_AT:length].tobytes())
    except DamagedFileError:
        return identity, None


def _checksum(magic: bytes, text: bytes) -> bytes:
    return hashlib.sha256(magic + struct.pack("<II", VERSION, len(text)) + text).digest()


def is_disk_table(path: Path) -> bool:
    """Return whether a file holds a table with storage="disk"."""
    try:
        with open_regular(path) as file:
            return file.read(len(TABLE)) == TABLE
    except (OSError, DamagedFileError):
        return False  # the code that opens the file next raises the error
