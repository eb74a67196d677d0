"""Exit of the interpreter in the middle of an iteration: without output, with the right exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flatbed

ROOT = Path(__file__).parents[2]
BEGIN = """
import itertools, sys, time, torch, flatbed
from flatbed.data import Prefetcher
from torch.utils.data import DataLoader

emb = flatbed.Embedding(100, 4, OPTIONS)
ids = {emb: lambda batch: batch}
def endless():
    while True:
        yield torch.arange(10)
"""
ENDS = {
    "in the middle": """
prefetched = iter(Prefetcher(endless(), ids))
next(prefetched)
not_begun = iter(Prefetcher([torch.arange(3)], ids))
def slow():
    yield torch.arange(3)
    for _ in range(10_000):
        torch.arange(10_000).sum()
    yield torch.arange(3)
busy = iter(Prefetcher(slow(), ids))
next(busy)
""",
    "by an exception": """
for batch in Prefetcher(endless(), ids):
    sys.exit(3)
""",
    "with workers": """
prefetched = iter(Prefetcher(DataLoader(range(100), 2, num_workers=2), ids))
next(prefetched)
persistent = iter(Prefetcher(DataLoader(range(100), 2, num_workers=1, persistent_workers=True), ids))
next(persistent)
""",
    "in a fork": """
import os
prefetched = iter(Prefetcher(endless(), ids))
next(prefetched)
child = os.fork()
if child == 0:
    del prefetched
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert next(prefetched).tolist() == list(range(10))
""",
}


def run_script(script: str, options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore:.*multi-threaded:DeprecationWarning",
            "-c",
            BEGIN.replace("OPTIONS", options) + script,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(flatbed.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )


@pytest.mark.parametrize(("end", "storage"), [*((end, "host") for end in ENDS), ("in a fork", "disk")])
def test_exit(end: str, storage: str, tmp_path: Path) -> None:
    """With one thread, and with the two that tables on disk have."""
    options = f"storage={storage!r}" + (f", path={str(tmp_path / 'a.bed')!r}" if storage == "disk" else "")
    done = run_script(ENDS[end], options)
    assert done.stderr == ""
    assert done.returncode == (3 if end == "by an exception" else 0)


def test_threads_end_before_tables(tmp_path: Path) -> None:
    """Also before tables that were created after the iteration; their files are closed by finalizers."""
    script = """
import weakref
def loader():
    try:
        while True:
            yield torch.arange(10)
    finally:
        print("loader", flush=True)
prefetched = iter(Prefetcher(loader(), ids))
class Later: pass
later = Later()
weakref.finalize(later, print, "table", flush=True)
next(prefetched)
"""
    done = run_script(script, f"storage='disk', path={str(tmp_path / 'a.bed')!r}")
    assert (done.stdout.split(), done.stderr, done.returncode) == (["loader", "table"], "", 0)
