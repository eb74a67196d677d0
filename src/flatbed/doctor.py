"""`flatbed doctor`: what this machine offers, which storage suits a table, and what a sharded one needs."""

from __future__ import annotations

import mmap
import os
import platform
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from flatbed import cost_model, optim
from flatbed.cuda.host_memory import allocate, available_bytes
from flatbed.tables.embedding import Embedding

GB = cost_model.GB
MIB = 1 << 20
BATCH_ROWS, RECORD_BYTES = 65_536, 3 * 4 * 128
A_BATCH = f"A batch: {BATCH_ROWS:,} rows × 128 with Adam's state ({BATCH_ROWS * RECORD_BYTES / 1e6:.0f} MB)"
ROOM = {"device": 1.25, "host": 1.1, "disk": 1.25}
"""Free bytes that a storage needs per byte of a table. The rest is for the model and its activations, for the
system, and for a journal of changed rows."""
MEMORY_KINDS = {
    "managed": "Kernels read rows of host tables in place.",
    "registered": "Kernels read rows in place, of large tables at a third of managed memory's speed.",
    "pageable": "Kernels cannot address host memory, and rows are staged: update the driver.",
}
PAGE, FILE_BYTES, N_READERS, READ_SECONDS = 4096, 64 * MIB, 16, 0.4


class Finding(NamedTuple):
    """Result of a probe; `ok` is None where it does not apply to this machine."""

    ok: bool | None
    value: str
    meaning: str = ""


def examine(table_bytes: int | None = None) -> dict[str, Finding]:
    """Run all probes, and say where a table fits. A probe that raises becomes a finding."""
    probes: dict[str, Callable[[], Finding]] = {
        "environment": environment,
        "GPU": gpu,
        "host memory": host_memory,
        "bus": bus,
        "disk": disk,
    }
    if table_bytes is not None:
        probes["table"] = partial(fit, table_bytes)
    findings = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings cover what torch warns about
        for name, probe in probes.items():
            try:
                findings[name] = probe()
            except Exception as error:
                first_line = (str(error).splitlines() or [""])[0]
                meaning = "This could not be tried, and may not work in training."
                findings[name] = Finding(False, f"{type(error).__name__}: {first_line}", meaning)
    return findings


# ---- environment


def environment() -> Finding:
    """Describe Python, torch and Triton."""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    value = f"Python {platform.python_version()}, torch {torch.__version__} with {cuda}"
    if find_spec("triton") is not None or not torch.cuda.is_available():
        return Finding(True, value)
    return Finding(False, f"{value}, no Triton", "torch operations run, not kernels: pip install triton.")


def gpu() -> Finding:
    """Describe the first GPU."""
    if not torch.cuda.is_available():
        remedy = "torch sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES."
        if torch.version.cuda is None:
            remedy = "This torch is built without CUDA: for a GPU, install a build from https://pytorch.org."
        return Finding(
            False, "no CUDA GPU", f"flatbed runs on the CPU, with the same results up to rounding. {remedy}"
        )
    free, total = torch.cuda.mem_get_info(0)
    value = f"{torch.cuda.get_device_name(0)}, {free / GB:.1f} of {total / GB:.1f} GB free"
    count = torch.cuda.device_count()
    return Finding(True, value if count == 1 else f"{count} GPUs, the first: {value}")


def host_memory() -> Finding:
    """Describe host memory, and how kernels of the GPU reach it."""
    value = f"{available_bytes() / GB:.1f} GB free"
    if not torch.cuda.is_available():
        return Finding(True, value)
    memory = allocate(MIB, device=torch.device("cuda:0"))
    memory.close()
    return Finding(memory.kind == "managed", f"{value}, {memory.kind}", MEMORY_KINDS.get(memory.kind, ""))


# ---- speeds


def bus() -> Finding:
    """Measure copies between pinned host memory and the GPU."""
    if not torch.cuda.is_available():
        return Finding(None, "needs a GPU")
    host = torch.ones(256 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.ones_like(host, device="cuda:0")
    to, back = copy_speed(there, host), copy_speed(host, there)
    batch_ms = sum(1e3 * BATCH_ROWS * RECORD_BYTES / speed for speed in (to, back))
    value = f"{to / GB:.1f} GB/s to the GPU, {back / GB:.1f} GB/s back, {batch_ms:.1f} ms a batch"
    return Finding(True, value, f"{A_BATCH}, there and back. The step itself takes 1 to 2 ms more.")


def disk() -> Finding:
    """Measure free space and random reads in the current folder."""
    free = f"{shutil.disk_usage(Path.cwd()).free / GB:.1f} GB free in {Path.cwd()}"
    rate = disk_reads()
    if rate is None:
        return Finding(True, free, "This file system does not allow reads that bypass the page cache.")
    value = f"{free}, {rate:,.0f} random reads per second, {1e3 * BATCH_ROWS / rate:,.0f} ms a batch"
    return Finding(True, value, f"{A_BATCH}. Parts of a file in the page cache are read much faster.")


def copy_speed(target: Tensor, source: Tensor) -> float:
    """Return bytes per second of a copy; the timer waits for the GPU."""
    timer = Timer("target.copy_(source)", globals={"target": target, "source": source})
    return source.nbytes / float(timer.timeit(5).median)


def disk_reads() -> float | None:
    """Return random 4 KiB reads per second, past the page cache; None where the file system refuses them."""
    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
            file.write(os.urandom(FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                return _random_reads(direct)
            finally:
                os.close(direct)
    except (OSError, AttributeError):  # AttributeError: a system without O_DIRECT or preadv
        return None


def _random_reads(file: int) -> float:
    begin = time.perf_counter()

    def read(seed: int) -> int:
        buffer, draw, n_reads = mmap.mmap(-1, PAGE), random.Random(seed), 0  # aligned, as O_DIRECT demands
        while time.perf_counter() - begin < READ_SECONDS:
            os.preadv(file, [buffer], PAGE * draw.randrange(FILE_BYTES // PAGE))
            n_reads += 1
        return n_reads

    with ThreadPoolExecutor(N_READERS) as pool:
        return sum(pool.map(read, range(N_READERS))) / (time.perf_counter() - begin)


# ---- tables


def fit(table_bytes: int) -> Finding:
    """Name the fastest storage that has room for a table."""
    free = {"host": available_bytes(), "disk": shutil.disk_usage(Path.cwd()).free}
    if torch.cuda.is_available():  # otherwise the device is the host
        cached = torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)  # left by the measurements
        free = {"device": torch.cuda.mem_get_info(0)[0] + cached, **free}
    parts = [
        f"{storage} {table_bytes / max(1, nbytes):.0%} of {nbytes / GB:,.1f} GB free"
        for storage, nbytes in free.items()
    ]
    value = f"{table_bytes / GB:,.4g} GB: {'; '.join(parts)}"
    for storage, nbytes in free.items():
        if table_bytes * ROOM[storage] <= nbytes:
            return Finding(True, value, f'The table fits: storage="{storage}".')
    meaning = "No storage has room: use an optimizer with less state, bf16 weights, or fewer rows."
    return Finding(False, value, meaning)


# ---- tables on many GPUs


def plan(
    n_rows: int, dim: int, optimizer: str, *, ranks: int, ids: int, hit_rate: float = 0.0
) -> dict[str, Finding]:
    """Describe what a table with ``shard="row"`` needs, by the model of `cost_model`. Nothing is measured.

    For one rank, the table is also compared with this machine's free memory and disk.
    """
    if n_rows < ranks:
        raise ValueError(f'shard="row" needs a row for each of the {ranks} ranks; found {n_rows} rows')
    record_bytes = _record_bytes(dim, optimizer)
    table_bytes = n_rows * record_bytes
    cost = cost_model.sharded_step(n_rows, 4 * dim, record_bytes, n_ranks=ranks, n_ids=ids, hit_rate=hit_rate)
    size = f"{n_rows:,} rows × {dim} in fp32 with {optimizer}: {record_bytes:,} bytes a row"
    placement = 'Sharded with shard="row". Without shard, each rank holds all rows.'
    memory = f"{cost.rank_bytes / GB:,.1f} GB per rank, {cost.host_bytes / GB:,.1f} GB per host"
    traffic = f"{cost.wire_bytes / 1e6:,.0f} MB between ranks, {cost.bus_bytes / 1e6:,.0f} MB over the bus"
    cached = f"{hit_rate:.0%} of the rows in caches" if hit_rate else "none in a cache: the worst case"
    step = f"{1e3 * cost.step_seconds:.1f} ms for {ids * ranks:,} ids, bound by {cost.bound}"
    terms = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in cost.seconds.items())
    lines = {
        "table": (
            f"{size}, {table_bytes / GB:,.1f} GB",
            placement if ranks > 1 else "On one GPU; --ranks for several.",
        ),
        "host memory": (memory, f"Ranks: {ranks:,}. Hosts: {cost.n_hosts:,}."),
        "GPU memory": (
            f"{cost.gpu_bytes / GB:,.2f} GB per rank",
            "A cache of four batches, its index, and a batch.",
        ),
        "traffic": (traffic, f"Per rank and step of {ids:,} uniform ids, {cached} (--hit-rate)."),
        "step": (step, f"Not measured, but modelled. The table alone, one term after the other: {terms}."),
        "constants": (cost_model.constants(), "python -m benchmarks shards measures a machine."),
    }
    findings = {name: Finding(None, *line) for name, line in lines.items()}
    return findings if ranks > 1 else {**findings, "this machine": fit(table_bytes)}


def _record_bytes(dim: int, optimizer: str) -> int:
    """Return the size of a row with an optimizer's state. Builds the optimizer over an unallocated table."""
    classes = {name.lower(): getattr(optim, name) for name in optim.__all__ if name[0].isupper()}
    if optimizer.lower() not in classes:
        raise ValueError(f"optimizer must be one of {', '.join(classes)}; found {optimizer!r}")
    table = Embedding(1, dim, device="cpu", dtype=torch.float32).table
    owner = classes[optimizer.lower()]([table])
    nbytes = table.nbytes
    del owner
    return nbytes
