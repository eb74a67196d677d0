"""Groups of gloo processes on one machine: a script of scenarios that all ranks run, one after the other.

Ranks end by `os._exit`: torch's gloo threads may abort an interpreter that ends (`tests/scripts/example.py`).
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import flatbed
from tests import programs


def run_script(module: str, folder: Path, *arguments: str) -> str:
    """Run a script of this folder, which must end well, and return what it prints."""
    return programs.run(f"tests.distributed.{module}", folder, *arguments).stdout


def check_script(module: str, folder: Path, *worlds: int) -> None:
    """Run a script of scenarios with one number of ranks after the other."""
    found = run_script(module, folder, *map(str, worlds))
    assert f"{worlds[-1]} ranks done" in found, found


def main(scenarios: Iterable[Callable[..., None]]) -> None:
    """Start the ranks that the command line asks for. Forked: they share what is imported."""
    folder = Path(sys.argv[1])
    for world in map(int, sys.argv[2:]):
        arguments = (list(scenarios), folder, world)
        mp.start_processes(_worker, args=arguments, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
        print(world, "ranks done", flush=True)


def _worker(rank: int, scenarios: list[Callable[..., None]], folder: Path, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    for scenario in scenarios:
        begin = time.perf_counter()
        torch.manual_seed(0)
        try:
            scenario(folder)
        except BaseException:
            print(f"rank {rank} in {scenario.__name__}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        dist.barrier()
        if rank == 0:
            print(f"{scenario.__name__}: {time.perf_counter() - begin:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def assert_equal_on_all_ranks(tensor: Tensor) -> None:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    assert all(torch.equal(one, everyone[0]) for one in everyone), everyone


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def assert_raises(action: Callable[[], Any], *messages: str) -> None:
    with pytest.raises(flatbed.FlatbedError) as caught:
        action()
    assert all(message in str(caught.value) for message in messages), caught.value


def assert_one_fails(
    culprit: int, action: Callable[[bool], Any], error: type[Exception], *messages: str
) -> None:
    """One rank, which passes True, raises its own error; the others name the rank and the reason."""
    if dist.get_rank() == culprit:
        with pytest.raises(error, match=messages[0]):
            action(True)
    else:
        assert_raises(lambda: action(False), f"rank {culprit} failed", error.__name__, *messages)
