"""Entry point of the `flatbed` command, outside of the package: help and version take no import of torch."""

from __future__ import annotations

import sys
from importlib.metadata import version

HELP = """\
Usage: flatbed [OPTIONS] COMMAND [ARGS]...

Train word vectors, check files of flatbed, and see what this machine offers.

Options:
  --version  Print the version.
  --help     Show this message and exit.

Commands:
  word2vec   Train word vectors, over tables in host memory.
  neighbors  Show the words whose vectors have the most similar directions.
  check      Say if a checkpoint, or the file of a table, is damaged. Only --forget changes a file.
  doctor     Look at torch, GPU, memory, bus and disk. With --table-gb, recommend a storage for a table.

flatbed COMMAND --help has the options of a command."""


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] in ([], ["--help"]):
        print(HELP)
    elif sys.argv[1:] == ["--version"]:
        print(f"flatbed {version('flatbed')}")
    else:
        from flatbed.cli import app

        app(prog_name="flatbed")
