"""Exit of the interpreter in the middle of iterations: without output, with the right exit status."""

from __future__ import annotations

from pathlib import Path

from tests import programs

BEGIN = """
import os, sys, torch, weakref, flatbed
from flatbed.data import Prefetcher
from torch.utils.data import DataLoader

emb = flatbed.Embedding(100, 4)
on_disk = flatbed.Embedding(100, 4, storage="disk", path="a.bed")
ids = {emb: lambda batch: batch, on_disk: lambda batch: batch}
"""
IN_THE_MIDDLE = """
def endless():
    while True:
        yield torch.arange(10)
def slow():
    yield torch.arange(3)
    for _ in range(10_000):
        torch.arange(10_000).sum()
    yield torch.arange(3)

not_begun = iter(Prefetcher([torch.arange(3)], ids))
begun = [iter(Prefetcher(loader, ids)) for loader in (endless(), slow())]
for workers in (2, 1):
    loader = DataLoader(range(100), 2, num_workers=workers, persistent_workers=workers == 1)
    begun.append(iter(Prefetcher(loader, ids)))
for prefetched in begun:
    next(prefetched)
child = os.fork()
if child == 0:
    begun.clear()
    del prefetched
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert next(begun[0]).tolist() == list(range(10))
"""
BY_AN_EXCEPTION = """
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
for batch in prefetched:
    sys.exit(3)
"""

AT_A_SIGNAL = """
import multiprocessing, signal, threading
os.setsid()  # a process group of its own
def ignore_sigterm(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
is_ending = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
loader = DataLoader(range(100), 2, num_workers=2, worker_init_fn=ignore_sigterm)
optimizer = flatbed.optim.Adam(emb)
for number, batch in enumerate(Prefetcher(loader, {emb: lambda batch: batch})):
    emb(batch).sum().backward()
    optimizer.step()
    if number == 10:  # both workers have begun
        os.killpg(0, signal.SIGTERM)
    if number == 40 and is_ending.is_set():  # batches that were not ready at the signal
        flatbed.save_checkpoint("run", emb, optimizer)
        break
assert not multiprocessing.active_children()
print(number)
"""


def check(script: str, folder: Path, *, status: int, printed: list[str]) -> None:
    done = programs.run(BEGIN + script, filters="ignore", finalize=True, cwd=str(folder), ok=False)
    assert (done.stdout.split(), done.stderr, done.returncode) == (printed, "", status)


def test_exit_in_the_middle(tmp_path: Path) -> None:
    """With loops that have not begun, that are inside the loader, with workers, and after a fork."""
    check(IN_THE_MIDDLE, tmp_path, status=0, printed=[])


def test_threads_end_before_tables(tmp_path: Path) -> None:
    """Also before tables that were created after the iteration; their files are closed by finalizers."""
    check(BY_AN_EXCEPTION, tmp_path, status=3, printed=["loader", "table"])


def test_a_save_after_a_signal_to_all_processes(tmp_path: Path) -> None:
    """By the recipe in docs/tables.md."""
    check(AT_A_SIGNAL, tmp_path, status=0, printed=["40"])
    assert (tmp_path / "run" / "CURRENT.json").exists()
