"""Run an example as several ranks, forked after its imports, which take longer than the example itself."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence

from tests import programs


def run_on_ranks(name: str, *options: str, n_ranks: int = 2, imports: Sequence[str] = ()) -> str:
    """Run an example with the environment of torchrun, on CPUs, and return what it prints."""
    arguments = [n_ranks, ",".join(imports), f"examples/{name}", *options]
    return programs.run("tests.scripts.ranks", *arguments).stdout


def main(n_ranks: int, imports: list[str], command: list[str]) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(n_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for module in imports:
        importlib.import_module(module)
    ranks = []
    for rank in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n_ranks)}
            sys.argv = ["tests/scripts/example.py", *command]
            runpy.run_path(sys.argv[0], run_name="__main__")  # does not return
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    os._exit(int(any(statuses)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(",") if sys.argv[2] else [], sys.argv[3:])
