"""Run an example as two ranks, forked after its imports, which take longer than the example itself."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence

from tests import programs

N_RANKS = 2


def run_on_ranks(name: str, *options: str, imports: Sequence[str] = ()) -> str:
    """Run an example with the environment of torchrun, on CPUs, and return what it prints."""
    return programs.run("tests.scripts.ranks", ",".join(imports), f"examples/{name}", *options).stdout


def main(imports: list[str], command: list[str]) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "WORLD_SIZE": str(N_RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for module in imports:
        importlib.import_module(module)
    ranks = []
    for rank in range(N_RANKS):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(N_RANKS)}
            sys.argv = ["tests/scripts/example.py", *command]
            runpy.run_path(sys.argv[0], run_name="__main__")  # does not return
        ranks.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
    os._exit(int(any(statuses)))


if __name__ == "__main__":
    main(sys.argv[1].split(",") if sys.argv[1] else [], sys.argv[2:])
