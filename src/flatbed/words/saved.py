"""What a folder holds of a training: seen before anything is loaded, and removed once it is finished."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatbed.checkpoint import CURRENT, MARK, NAME, OLD
from flatbed.errors import FlatbedError

ABOUT = "words.json"
"""Beside the checkpoint: whose it is, and how far it is."""
SHOWN = ("dim", "window", "epochs", "min_count", "optimizer", "storage", "seed")


@dataclass(frozen=True, slots=True)
class Saved:
    """A training in a folder."""

    settings: dict[str, Any]
    text: str
    """The text's fingerprint."""
    step: int
    n_steps: int

    @property
    def done(self) -> bool:
        """Whether all of its steps are trained."""
        return self.step == self.n_steps

    def __str__(self) -> str:
        about = ", ".join(f"{name} {self.settings.get(name)}" for name in SHOWN)
        if self.done:
            return f"a finished training of {self.n_steps:,} steps ({about})"
        return f"a training at step {self.step:,} of {self.n_steps:,} ({about})"

    def write(self, folder: str | Path) -> None:
        """Beside the checkpoint that was just saved."""
        about = {"settings": self.settings, "text": self.text, "step": self.step, "steps": self.n_steps}
        (Path(folder) / ABOUT).write_text(json.dumps(about))


def find(folder: str | Path) -> Saved | None:
    """The training that a folder holds, if any. Refuses a checkpoint of something else."""
    about = Path(folder) / ABOUT
    if not about.is_file():
        if (Path(folder) / CURRENT).exists():
            raise FlatbedError(f"{folder} holds a checkpoint of something else: give another --checkpoint")
        return None
    try:
        found = json.loads(about.read_text())
        return Saved(found["settings"], found["text"], found["step"], found["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise FlatbedError(f"{about} is damaged ({error!r}): restore it, or delete {folder}") from error


def remove(folder: str | Path) -> bool:
    """Remove a training and its folder, but no files of others. Says whether there was one."""
    folder = Path(folder)
    if not (folder / ABOUT).is_file():
        return False
    for name in (CURRENT, ABOUT):
        (folder / name).unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if NAME.fullmatch(path.name) and (path / MARK).exists():
            # By another name first: half removed it could not be told from somebody's own.
            shutil.rmtree(path.rename(folder / f"{OLD}{path.name}"), ignore_errors=True)
    with suppress(OSError):  # something else is in it
        folder.rmdir()
    return True
