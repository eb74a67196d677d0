"""What a folder holds of a training: seen before anything is loaded, and removed once it is finished."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbed.checkpoint.folder import CURRENT, MARK, NAME, OLD, read_current
from flatbed.checkpoint.load import read_manifest
from flatbed.errors import FlatbedError

SHOWN = ("dim", "window", "epochs", "min_count", "optimizer", "storage", "seed")


@dataclass(frozen=True, slots=True)
class Saved:
    """A training in a folder: a part of the checkpoint's `extra`, and so of the same moment as all of it."""

    settings: dict[str, Any]
    text: str
    """The text's fingerprint."""
    step: int
    n_steps: int
    threads: int | None = None
    """Of torch, on a CPU; None for a GPU."""

    @property
    def done(self) -> bool:
        """Whether all of its steps are trained."""
        return self.step == self.n_steps

    def __str__(self) -> str:
        about = ", ".join(f"{name} {self.settings.get(name)}" for name in SHOWN)
        if self.done:
            return f"a finished training of {self.n_steps:,} steps ({about})"
        return f"a training at step {self.step:,} of {self.n_steps:,} ({about})"

    def extra(self) -> dict[str, Any]:
        """For JSON."""
        about: dict[str, Any] = {"settings": self.settings, "text": self.text, "threads": self.threads}
        return about | {"step": self.step, "steps": self.n_steps}


def find(folder: str | Path) -> Saved | None:
    """The training that a folder holds, if any. Refuses a checkpoint of something else, and a damaged one."""
    folder = Path(folder)
    if not (folder / CURRENT).exists():
        return None
    current = read_current(folder)
    found = read_manifest(folder / current.version, current)["extra"]
    if not {"settings", "text", "step", "steps"} <= found.keys():
        raise FlatbedError(f"{folder} holds a checkpoint of something else: give another --checkpoint")
    return Saved(found["settings"], found["text"], found["step"], found["steps"], found.get("threads"))


def remove(folder: str | Path) -> bool:
    """Remove a training and its folder, but no files of others. Says whether there was one."""
    folder = Path(folder)
    with suppress(FlatbedError):
        if find(folder) is not None:
            (folder / CURRENT).unlink()
            _remove_versions(folder)
            return True
    return False


def _remove_versions(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if NAME.fullmatch(path.name) and (path / MARK).exists():
            # By another name first: half removed it could not be told from somebody's own.
            shutil.rmtree(path.rename(folder / f"{OLD}{path.name}"), ignore_errors=True)
    with suppress(OSError):  # something else is in it
        folder.rmdir()
