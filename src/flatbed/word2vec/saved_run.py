"""The checkpoint of a training run, described and removed without loading it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbed import FlatbedError

CURRENT, MANIFEST, MARK, LOCK = "CURRENT.json", "checkpoint.json", ".flatbed", ".lock"
"""Files of `flatbed.save_checkpoint`."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The description of a training run in a checkpoint."""

    settings: dict[str, Any]
    text: str
    """The fingerprint of the corpus."""
    step: int
    n_steps: int

    @classmethod
    def find(cls, folder: str | Path) -> SavedRun | None:
        """Read the description from a folder; None for a folder without a checkpoint."""
        folder = Path(folder)
        if not (folder / CURRENT).exists():
            return None
        try:
            version = json.loads((folder / CURRENT).read_text())["version"]
            extra = json.loads((folder / version / MANIFEST).read_text())["extra"]
            return cls(extra["settings"], extra["text"], extra["step"], extra["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FlatbedError(
                f"{folder} holds no intact checkpoint of word vectors ({error!r}): give another folder"
            ) from error

    def __str__(self) -> str:
        names = ("dim", "window", "epochs", "min_count", "optimizer", "storage", "seed")
        settings = ", ".join(f"{name} {self.settings.get(name)}" for name in names)
        return f"a training at step {self.step:,} of {self.n_steps:,} ({settings})"


def remove_checkpoint(folder: str | Path) -> None:
    """Remove a checkpoint, and its folder unless the user has other files there."""
    folder = Path(folder)
    (folder / CURRENT).unlink()
    for mark in folder.glob(f"*/{MARK}"):
        shutil.rmtree(mark.parent)
    (folder / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        folder.rmdir()
