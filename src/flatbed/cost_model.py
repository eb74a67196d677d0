"""A model of the step of a table whose rows are shared by many GPUs, from constants that are printed with it.

Each rank looks up ids that other ranks own: weights and gradients travel between ranks, and records between
the owner's host memory and its GPU. With several ranks the terms are added, since each stage waits for the
previous one: the host waits for the GPU to learn how many rows each rank asks for. With one rank, host and
GPU overlap, and the slower of the two counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 10**9

# Assumed, not measured.
RANKS_PER_HOST = 8
NVLINK = 200 * GB
"""Bytes per second of a rank to others of its host."""
NIC = 40 * GB
"""Bytes per second of a rank to other hosts."""
HOST_MEMORY = 400 * GB
"""Bytes per second of a host's memory, shared by its ranks."""
MESSAGE_SECONDS = 2e-6
"""Time of a small message to another rank, inside of an exchange between GPUs."""

# Measured on one machine with an H200; the rows are in benchmarks/results.
BUS = 80 * GB
"""Bytes per second between host memory and a GPU, both directions together: 83 (h200-cache, uniform ids in a
CUDA graph)."""
GPU_MEMORY = 1_800 * GB
"""Bytes per second of rows of 512 bytes in the memory of a GPU (h200-rows)."""
KERNEL_SECONDS = 0.3e-3
"""Kernels of a step: 0.34 ms in a CUDA graph, including 0.09 ms of the bus (h200-cache, Zipf 1.2)."""
HOST_SECONDS = 1.0e-3
"""Python and launches of an eager step on one rank: 0.83 to 1.43 ms with Zipf ids (h200-shards)."""
HEADER_SECONDS = 60e-6
"""Time of a small message on the host between a rank and each other rank, before rows travel. It took 55 to
65 µs of CPU time with 8 to 32 ranks (h200-shards, headers)."""

# Measured on a CPU, as shares of the time of HOST_SECONDS there (benchmarks shards, host).
EXCHANGE_SECONDS = 1.05 * HOST_SECONDS
"""Time of Python and launches that the exchanges of a step add, whatever the number of ranks."""
PEER_SECONDS = 0.6e-3 * HOST_SECONDS
"""Time of Python and launches that the exchanges of a step add for each other rank."""

# Counted in the code of a step.
HEADERS_PER_STEP = 2
"""One for a table's lookup, one for its gradients."""
MESSAGES_PER_STEP = 4
"""Rows and weights of a lookup, rows and gradients of a step; to each other rank."""
EXCHANGE_PASSES = 15
"""Reads and writes of the weights of a batch that exchanges add. Weights: gathered 2, sent 2, zeros 1, put in
order 2. Gradients: put in order 2, sent 2, summed over ranks 2, divided 2."""
CACHED_BATCHES = 4
INDEX_BYTES = 4
"""Bytes per row of the index of a cache, on the GPU."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Memory and traffic of a sharded table, and the modelled time of a step by what it waits for."""

    n_hosts: int
    rank_bytes: float
    """Host memory for the rows of a rank."""
    host_bytes: float
    gpu_bytes: float
    wire_bytes: float
    """Bytes that a rank exchanges with others per step."""
    bus_bytes: float
    seconds: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        """The term that takes longest."""
        return max(self.seconds, key=self.seconds.__getitem__)


def unique_rows(n_ids: float, n_rows: float) -> float:
    """Return the expected number of unique rows among uniform ids.

    >>> round(unique_rows(65_536, 20_000_000))
    65429
    """
    return -n_rows * math.expm1(-n_ids / n_rows)


def sharded_step(
    n_rows: int, weight_bytes: int, record_bytes: int, *, n_ranks: int, n_ids: int, hit_rate: float = 0.0
) -> StepCost:
    """Model a step in which each rank looks up `n_ids` uniform ids.

    `hit_rate` is the share of rows that are in the cache of their owner.
    """
    in_host = min(n_ranks, RANKS_PER_HOST)
    asked = unique_rows(n_ids, n_rows)
    owned = unique_rows(n_ids * n_ranks, n_rows) / n_ranks
    exchanged = 2 * asked * weight_bytes / n_ranks  # with each rank: weights, and gradients back
    nvlink_bytes, nic_bytes = exchanged * (in_host - 1), exchanged * (n_ranks - in_host)
    bus_bytes = 2 * (1 - hit_rate) * owned * record_bytes
    rank_bytes = n_rows / n_ranks * record_bytes
    bus, host_memory = bus_bytes / BUS, in_host * bus_bytes / HOST_MEMORY
    on_gpu = {
        "the bus" if bus >= host_memory else "host memory": max(bus, host_memory),
        "kernels": KERNEL_SECONDS,
    }
    n_others = n_ranks - 1
    exchanges = {
        "the host": HOST_SECONDS + EXCHANGE_SECONDS + PEER_SECONDS * n_others,
        "GPU memory": EXCHANGE_PASSES * asked * weight_bytes / GPU_MEMORY,
        "NVLink": nvlink_bytes / NVLINK,
        "the network": nic_bytes / NIC,
        "headers": HEADERS_PER_STEP * HEADER_SECONDS * n_others,
        "messages": MESSAGES_PER_STEP * MESSAGE_SECONDS * n_others,
    }
    alone = {"the host": max(0.0, HOST_SECONDS - sum(on_gpu.values()))}
    return StepCost(
        n_hosts=-(-n_ranks // RANKS_PER_HOST),
        rank_bytes=rank_bytes,
        host_bytes=rank_bytes * in_host,
        gpu_bytes=CACHED_BATCHES * n_ids * record_bytes
        + INDEX_BYTES * n_rows / n_ranks
        + 3 * n_ids * weight_bytes,
        wire_bytes=nvlink_bytes + nic_bytes,
        bus_bytes=bus_bytes,
        seconds={**on_gpu, **(exchanges if n_others else alone)},
    )


def constants() -> str:
    """Describe the constants: which are assumed, and which were measured."""
    return (
        f"assumed: {RANKS_PER_HOST} ranks per host; NVLink {NVLINK // GB}, network {NIC // GB} GB/s "
        f"per rank; host memory {HOST_MEMORY // GB} GB/s per host; {MESSAGES_PER_STEP} messages of "
        f"{1e6 * MESSAGE_SECONDS:g} µs per other rank. Measured: bus {BUS // GB}, GPU memory "
        f"{GPU_MEMORY // GB:,} GB/s; kernels {1e3 * KERNEL_SECONDS:g} ms; host {1e3 * HOST_SECONDS:g} ms; "
        f"{HEADERS_PER_STEP} headers of {1e6 * HEADER_SECONDS:g} µs per other rank. Scaled from a CPU: "
        f"exchanges {1e3 * EXCHANGE_SECONDS:.2g} ms and {1e6 * PEER_SECONDS:.2g} µs per other rank"
    )
