"""Programs in processes of their own: forked from one process, since the imports of torch take two seconds.

Their interpreters begin with these imports, on a CPU alone.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 300
"""Seconds after which a program is ended."""


@dataclass(frozen=True, slots=True)
class Program:
    """Python code, or the name of a module, with its arguments."""

    code: str
    arguments: Sequence[str] = ()
    filters: str = ""
    """An action for all warnings."""
    finalize: bool = False
    """Ends the interpreter as any other, which takes a second, instead of by functions of atexit alone."""
    cwd: str = str(ROOT)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program, and what it has printed."""

    returncode: int
    stdout: str
    stderr: str


def run(code: str, *arguments: object, ok: bool = True, **options: Any) -> Ended:
    """Run one program, which must end well unless `ok` is false."""
    (ended,) = run_all(Program(code, [str(each) for each in arguments], **options))
    assert not ok or ended.returncode == 0, (
        f"{ended.returncode}: {ended.stdout[-5000:]}{ended.stderr[-5000:]}"
    )
    return ended


def run_all(*programs: Program) -> list[Ended]:
    """Run programs at the same time."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        names = [[f"{folder}/{number}.{name}" for name in ("out", "err")] for number in range(len(programs))]
        tasks = [asdict(each) | {"outputs": outputs} for each, outputs in zip(programs, names, strict=True)]
        server.stdin.write(json.dumps(tasks) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        return [
            Ended(code, *(Path(name).read_text() for name in outputs))
            for code, outputs in zip(codes, names, strict=True)
        ]


@functools.cache
def _server() -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # its end
    return server


# ---- the server


def serve() -> dict[str, Any]:
    """Fork a process for each program, and return the program in that process."""
    import tests.distributed.preloaded  # noqa: F401

    gc.freeze()  # forked processes share this memory
    for line in sys.stdin:
        pids = []
        for task in json.loads(line):
            pid = os.fork()
            if pid == 0:
                return dict(task)
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    os._exit(0)


def begin(task: dict[str, Any]) -> None:
    """Make this process that of the program."""
    signal.alarm(LIMIT)
    if task["finalize"]:
        gc.unfreeze()
    for number, name in enumerate([os.devnull, *task["outputs"]]):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    if task["filters"]:
        warnings.simplefilter(task["filters"])
    sys.argv = [task["code"], *task["arguments"]]


if __name__ == "__main__":
    _task = serve()
    begin(_task)
    if "\n" not in _task["code"]:
        runpy.run_module(_task["code"], run_name="__main__", alter_sys=True)
    else:
        exec(compile(_task["code"], "<program>", "exec"), globals())  # globals live until the very end
    if not _task["finalize"]:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
