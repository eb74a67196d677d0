"""What `flatbed word2vec` reads and writes. Refuses what would fail late, or write over something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import typer


@dataclass(frozen=True, slots=True)
class Paths:
    """Of one training. `tables` is the folder of tables on disk."""

    texts: Sequence[Path]
    out: Path
    checkpoint: Path
    tables: str | Path | None = None
    pictures: bool = True

    @property
    def draft(self) -> Path:
        """What `out` is called until it is complete."""
        return self.out.with_name(f".{self.out.name}.new")

    @property
    def drawn(self) -> tuple[Path, Path]:
        """The pictures: of the loss, and the map."""
        return self.out.with_suffix(".loss.png"), self.out.with_suffix(".map.png")

    @property
    def written(self) -> list[Path]:
        """All that a training writes."""
        tables = [] if self.tables is None else [*Path(self.tables).glob("*.bed*")]
        return [self.out, self.draft, self.checkpoint, *(self.drawn if self.pictures else ()), *tables]

    @property
    def anew(self) -> str:
        """How to begin again, for messages."""
        folders = [self.checkpoint] if self.tables is None else [self.tables, self.checkpoint]
        return f"delete {' and '.join(map(str, folders))} to start anew"

    def check(self, *, resume: bool) -> None:
        """Refuse wrong paths, and texts that would be written over, by whatever name they are called."""
        for text in self.texts:
            if not text.is_file():
                raise typer.BadParameter(f"{text} is not a file", param_hint="FILES")
        if not self.out.parent.is_dir():
            raise typer.BadParameter(f"the folder {self.out.parent} does not exist", param_hint="--out")
        if self.out.is_dir():
            raise typer.BadParameter(f"{self.out} is a folder", param_hint="--out")
        for text, path in product(self.texts, self.written):
            if path.exists() and path.samefile(text):
                raise typer.BadParameter(
                    f"the text {text} would be overwritten by {path}: give another name", param_hint="FILES"
                )
        if self.checkpoint.resolve() in (path.resolve() for path in (self.out, self.draft, *self.drawn)):
            raise typer.BadParameter(
                f"{self.checkpoint} is where results go: give another folder", param_hint="--checkpoint"
            )
        if self.checkpoint.exists() and not self.checkpoint.is_dir():
            raise typer.BadParameter(f"{self.checkpoint} is a file: give a folder", param_hint="--checkpoint")
        if resume and not self.checkpoint.is_dir():
            raise typer.BadParameter(f"there is no checkpoint {self.checkpoint}", param_hint="--resume")

    def check_begun(self) -> None:
        """Refuse to write over another training."""
        from flatbed import FlatbedError
        from flatbed.words.saved import find

        saved = find(self.checkpoint)
        if saved is not None and saved.done:
            raise FlatbedError(
                f"{self.checkpoint} holds {saved}: {self.anew}; --resume writes its vectors again"
            )
        if saved is not None:
            raise FlatbedError(
                f"{self.checkpoint} holds {saved}: --resume goes on with it; delete it, or give another "
                "--checkpoint, to begin anew"
            )
