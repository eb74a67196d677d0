"""Run an example as two ranks, forked after its imports, which take longer than the example itself."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.distributed.processes import ROOT, SERVER

N_RANKS = 2


def run_on_ranks(name: str, *options: str, folder: Path, imports: Sequence[str] = ()) -> str:
    """Run an example with the environment of torchrun, on CPUs, and return what it prints."""
    output = folder / f"{name}.out"
    process = SERVER.Process(target=_run_ranks, args=([f"examples/{name}", *options], output, imports))
    process.start()
    process.join(300)
    process.kill()
    found = output.read_text()
    assert process.exitcode == 0, f"{process.exitcode}: {found[-5000:]}"
    return found


def _run_ranks(command: list[str], output: Path, imports: Sequence[str]) -> None:
    os.chdir(ROOT)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(N_RANKS)}
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
    sys.exit(int(any(statuses)))
