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
        try:
            self._check_results()
            self._check_others(resume=resume)
            self._try_draft()
        except OSError as error:
            raise typer.BadParameter(
                f"{self.draft.name} cannot be made in {self.out.parent}, where the vectors would go: "
                f"{error.strerror or error}",
                param_hint="--out",
            ) from error

    def _check_results(self) -> None:
        """What is renamed to a device or a pipe takes its place, and what is written to one is lost."""
        if self.out.is_dir():  # which may have no name to make others of
            raise typer.BadParameter(f"{self.out} is a folder: give another name", param_hint="--out")
        for path in (self.out, self.draft, *(self.drawn if self.pictures else ())):
            if path.exists() and not path.is_file():
                what = "a folder" if path.is_dir() else "not a regular file"
                raise typer.BadParameter(f"{path} is {what}: give another name", param_hint="--out")

    def _try_draft(self) -> None:
        """As the vectors will be written, once it is too late to ask for another folder."""
        if not self.draft.exists():
            self.draft.touch()
            self.draft.unlink()

    def _check_others(self, *, resume: bool) -> None:
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
            raise typer.BadParameter(
                f"there is no checkpoint {self.checkpoint}{self._never_saved()}", param_hint="--resume"
            )

    def _never_saved(self) -> str:
        """What to do about tables on disk without their checkpoint, if there are any."""
        folder = None if self.tables is None else Path(self.tables)
        tables = [] if folder is None else [*folder.glob("inputs.bed*"), *folder.glob("outputs.bed*")]
        if not tables:
            return ""
        return (
            f", and {self.tables} has tables of an earlier training. If that was ended before it saved a "
            f"checkpoint, it cannot be resumed: delete {' and '.join(map(str, tables))} to begin anew. "
            "Otherwise give the --checkpoint that it was saved to, with --resume"
        )

    def check_begun(self, *, resume: bool) -> None:
        """Refuse to write over another training, and to go on with none."""
        from flatbed import FlatbedError
        from flatbed.word2vec.checkpoint_dir import find

        saved = find(self.checkpoint)
        if saved is None and (resume or self._never_saved()):
            raise FlatbedError(f"{self.checkpoint} holds no checkpoint of a training{self._never_saved()}")
        if resume:
            return
        if saved is not None and saved.done:
            raise FlatbedError(
                f"{self.checkpoint} holds {saved}: {self.anew}; --resume writes its vectors again"
            )
        if saved is not None:
            raise FlatbedError(
                f"{self.checkpoint} holds {saved}: --resume goes on with it; delete it, or give another "
                "--checkpoint, to begin anew"
            )
