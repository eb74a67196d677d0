"""A disk that forgets: records writes and syncs, and makes folders as a loss of power might leave them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from numpy.random import Generator

from flatbed.tables.storage.disk.mapped_file import MappedFile


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened; `site` is the function that asked for it, and which of its syncs it was."""

    kind: str
    file: str = ""
    offset: int = 0
    data: bytes = b""
    target: str = ""
    site: str = ""


@dataclass(slots=True)
class Log:
    """Everything that happened, in order."""

    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, path: Path | str = "", **more: Any) -> None:
        self.events.append(Event(kind, Path(path).name if path else "", **more))

    def mark(self, kind: str, about: str = "") -> None:
        self.events.append(Event(kind, about))


def _site() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_name}:{frame.f_lineno}"


@contextmanager
def recorded(log: Log) -> Iterator[None]:
    """Record all that storages do to files; nothing is really synced, which saves time."""
    names = ("__init__", "write", "scatter", "scatter_sums", "reserve", "truncate")
    real = {name: getattr(MappedFile, name) for name in names}

    def opened(self: MappedFile, path: Path, *, create: bool = False, **options: Any) -> None:
        real["__init__"](self, path, create=create, **options)
        if create or path.name.endswith(".part"):
            log.add("create", path)

    def write(self: MappedFile, offset: int, data: Any) -> None:
        before = self.size
        real["write"](self, offset, data)
        if self.size != before:
            log.add("size", self.path, offset=self.size)
        log.add("write", self.path, offset=offset, data=bytes(data))

    def scatter(self: MappedFile, at: Any, records: Any) -> None:
        real["scatter"](self, at, records)
        for row, record in zip(at.tolist(), records, strict=True):
            offset = self.offset + row * records.dtype.itemsize
            log.add("write", self.path, offset=offset, data=record.tobytes())

    def scatter_sums(self: MappedFile, at: Any, sums: Any) -> None:
        real["scatter_sums"](self, at, sums)
        for row, value in zip(at.tolist(), sums, strict=True):
            log.add("write", self.path, offset=self.sums_offset + 4 * row, data=value.tobytes())

    def resized(name: str) -> Callable[[MappedFile, int], None]:
        def resize(self: MappedFile, size: int) -> None:
            before = self.size
            real[name](self, size)
            if self.size != before:
                log.add("size", self.path, offset=self.size)

        return resize

    changes: dict[str, Any] = {
        "__init__": opened,
        "write": write,
        "scatter": scatter,
        "scatter_sums": scatter_sums,
        "reserve": resized("reserve"),
        "truncate": resized("truncate"),
        "sync": lambda self: log.add("sync", self.path, site=_site()),
    }
    rename, remove = MappedFile.rename, MappedFile.remove

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        log.add("rename", source, target=target.name)

    def removed(path: Path) -> None:
        remove(path)
        log.add("remove", path)

    changes["rename"] = staticmethod(renamed)
    changes["remove"] = staticmethod(removed)
    changes["sync_folder"] = staticmethod(lambda folder: log.add("sync_folder", site=_site()))
    with mock.patch.multiple(MappedFile, **changes):
        yield


@dataclass(slots=True)
class Content:
    """A file's bytes: those on the disk, and what was written since the last sync."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)

    def sync(self) -> None:
        for event in self.pending:
            _change(self.synced, event)
        self.pending.clear()

    def left(self, choice: Choice) -> bytes:
        """Files that a loss of power might leave."""
        found = bytearray(self.synced)
        n_sizes = choice.up_to(sum(event.kind == "size" for event in self.pending))
        n_writes = choice.up_to(len(self.pending)) if choice.how == "prefix" else len(self.pending)
        for event in self.pending[:n_writes]:
            if event.kind == "size":
                n_sizes -= 1
                if n_sizes >= 0:
                    _change(found, event)
                continue
            for piece in _pieces(event, choice.grain):
                if choice.keeps():
                    _change(found, piece)
        return bytes(found)


@dataclass(frozen=True, slots=True)
class Choice:
    """Kept parts of unsynced writes: all, none, the first, or any, in pieces of `grain` bytes."""

    generator: Generator
    how: str
    grain: int
    share: float

    @staticmethod
    def random(generator: Generator, how: str | None = None) -> Choice:
        how = how or str(generator.choice(["all", "none", "prefix", "any", "any", "any"]))
        share = float(generator.choice([0.03, 0.5, 0.97]))
        return Choice(generator, how, int(generator.choice([512, 4096])), share)

    def keeps(self) -> bool:
        return self.how in ("all", "prefix") or (self.how == "any" and self.generator.random() < self.share)

    def up_to(self, n: int) -> int:
        if self.how in ("all", "none"):
            return n if self.how == "all" else 0
        return int(self.generator.integers(0, n + 1))


def _change(content: bytearray, event: Event) -> None:
    if event.kind == "size":
        del content[event.offset :]
        content.extend(bytes(event.offset - len(content)))
        return
    room = max(0, len(content) - event.offset)  # beyond a size that was not kept, there is nothing
    content[event.offset : event.offset + len(event.data)] = event.data[:room]


def _pieces(event: Event, grain: int) -> Iterator[Event]:
    start, end = event.offset, event.offset + len(event.data)
    while start < end:
        stop = min(end, (start // grain + 1) * grain)
        yield Event("write", event.file, start, event.data[start - event.offset : stop - event.offset])
        start = stop


class Disk:
    """A folder of files as events leave them; syncs asked for at the sites `deaf` are not heard."""

    def __init__(self, deaf: str | None = None, files: dict[str, bytes] | None = None) -> None:
        self.deaf = deaf
        self.names = {name: Content(bytearray(data)) for name, data in (files or {}).items()}
        self.synced_names = dict(self.names)
        self.pending: list[dict[str, Content]] = []

    def happen(self, event: Event) -> None:
        if event.site and event.site == self.deaf:
            return
        if event.kind in ("write", "size"):
            self.names[event.file].pending.append(event)
        elif event.kind == "sync":
            self.names[event.file].sync()
        elif event.kind == "sync_folder":
            self.synced_names, self.pending = dict(self.names), []
        elif event.kind == "create" and event.file not in self.names:
            self._name(self.names | {event.file: Content()})
        elif event.kind == "remove" and event.file in self.names:
            self._name({name: file for name, file in self.names.items() if name != event.file})
        elif event.kind == "rename":
            kept = {name: file for name, file in self.names.items() if name != event.file}
            self._name(kept | {event.target: self.names[event.file]})

    def _name(self, names: dict[str, Content]) -> None:
        self.names = names
        self.pending.append(names)

    def left(self, choice: Choice) -> dict[str, bytes]:
        """Files that a loss of power might leave."""
        names = [self.synced_names, *self.pending][choice.up_to(len(self.pending))]
        return {name: file.left(choice) for name, file in names.items()}
