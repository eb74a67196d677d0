"""A text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from flatbed.word2vec.corpus import Corpus, ReadProgress

SKIPPED = {
    *("test", "tests", "idle_test", "idlelib", "turtledemo"),  # not on every machine
    *("site-packages", "dist-packages", "ensurepip", "__pycache__"),  # not the library
    *("lib2to3", "distutils"),  # not in every version
    *("encodings", "pydoc_data"),  # tables of characters, and a copy of the manual
}
WORD = re.compile(r"[^\W\d]\w*")
PARAGRAPH = re.compile(r"\n\s*\n")


def python_corpus(
    *, max_words: int | None = None, progress: ReadProgress | None = None, folder: str | Path | None = None
) -> Corpus:
    """The standard library of this Python as identifiers and words. `progress(files read, files in all)`.

    A sentence is what stands between blank lines: a function, a paragraph of a docstring. Names are kept
    whole and as they are written. `folder` is the library's unless given.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    files = list(source_files(root))
    if not files:
        raise FileNotFoundError(f"there is no Python source in {root}: give text files")
    return Corpus.from_sentences(_sentences(files, progress), max_words=max_words)


def source_files(root: Path) -> Iterator[Path]:
    """Python files, folder by folder in the order of their names, without those that are skipped."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in SKIPPED and name[0] != ".")
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


def _sentences(files: list[Path], progress: ReadProgress | None) -> Iterator[list[str]]:
    for number, file in enumerate(files):
        text = file.read_text(encoding="utf-8-sig", errors="ignore")
        for paragraph in PARAGRAPH.split(text):
            if words := WORD.findall(paragraph):
                yield words
        if progress is not None:
            progress(number + 1, len(files))
