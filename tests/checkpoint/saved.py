"""A training that was saved after its first step, and has gone on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.errors import FlatbedError
from tests.tables.training import build, difference, snapshot, step


def current(folder: Path) -> Path:
    """The valid version of a folder."""
    found: str = json.loads((folder / "CURRENT.json").read_text())["version"]
    return folder / found


class Saved:
    """Its first step is in `folder / "saved"`."""

    def __init__(self, folder: Path, storages: tuple[str, str] = ("host", "disk"), **options: Any) -> None:
        self.folder = folder / "saved"
        self.model, self.optimizer = build(folder, storages)
        self.step(1)
        save_checkpoint(self.folder, self.model, self.optimizer, **options)
        self.saved = self.snapshot()
        self.step(2)
        self.before = self.snapshot()

    @property
    def version(self) -> Path:
        return current(self.folder)

    def step(self, number: int) -> None:
        step(self.model, self.optimizer, number)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self.model, self.optimizer)

    def state(self) -> str:
        """Return "before" or "saved", the state of the training, or "half loaded"."""
        if self.model.first.table._store._is_half_loaded:
            return "half loaded"
        found = self.snapshot()
        if difference(found, self.before) is None:
            return "before"
        assert difference(found, self.saved) is None
        return "saved"

    def load(self, **options: Any) -> dict[str, Any]:
        return load_checkpoint(self.folder, self.model, self.optimizer, **options)

    def assert_loads(self) -> None:
        self.load()
        assert difference(self.snapshot(), self.saved) is None

    def assert_refuses(self, words: str, kind: type[Exception] = FlatbedError) -> None:
        """A load raises, and nothing changes."""
        with pytest.raises(kind, match=words):
            self.load()
        assert difference(self.snapshot(), self.before) is None
