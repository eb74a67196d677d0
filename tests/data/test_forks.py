"""Loaders that fork in a thread of the prefetcher."""

from __future__ import annotations

from pathlib import Path

from tests import programs

PROGRAM = """
import os, sys, threading
import flatbed
from torch.utils.data import DataLoader

def epochs():
    for _ in range(3):
        yield from DataLoader(range(4), 2, num_workers=2)

is_in_step, has_forked, found = False, threading.Event(), []
def in_parent():
    found.append(is_in_step)
    has_forked.set()
os.register_at_fork(after_in_parent=in_parent)
emb = flatbed.Embedding(100, 4, storage="disk", path=sys.argv[1])
batches = []
for ids in flatbed.Prefetcher(epochs(), {emb: lambda ids: ids}):
    is_in_step = True
    batches += ids.tolist()
    has_forked.clear()
    has_forked.wait(0.3)  # it would take locks, which the workers would find taken
    is_in_step = False
print(found, batches)
"""


def test_workers_are_forked_while_the_training_thread_waits(tmp_path: Path) -> None:
    """A worker takes the lock of torch's generator. If the training thread had it at the fork, it hung."""
    done = programs.run(PROGRAM, tmp_path / "table")
    assert done.stdout == f"{[False] * 6} {[0, 1, 2, 3] * 3}\n", done.stderr


LEFT = """
import threading
import flatbed
from torch.utils.data import DataLoader

asks = threading.Event()
def epochs():
    yield 0
    asks.set()
    yield from DataLoader(range(4), 2, num_workers=2)
loop = iter(flatbed.Prefetcher(epochs()))
next(loop)
asks.wait()
loop.close()
print([one.name for one in threading.enumerate() if "prefetch" in one.name])
"""


def test_a_loop_can_be_left_while_its_loader_waits_to_fork() -> None:
    done = programs.run(LEFT)
    assert (done.stdout, done.stderr) == ("[]\n", "")
