"""A model of the step of a table whose rows are shared by many GPUs. Nothing here is measured.

Each rank looks up ids that other ranks own: weights and gradients travel between ranks, and records between
the owner's host memory and its GPU. The terms are added, since each of them waits for the one before.
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
BUS = 80 * GB
"""Bytes per second between host memory and a GPU, both directions together."""
HOST_MEMORY = 400 * GB
"""Bytes per second of a host's memory, shared by its ranks."""
FIXED_SECONDS = 0.3e-3
"""Kernels of a step and their launches."""
HEADER_SECONDS = 60e-6
"""Time of a small message on the host between a rank and each other, before rows travel: 55 to 65 µs of CPU
time with 8 to 32 ranks, measured beside an H200."""
HEADERS_PER_STEP = 2
"""One for a table's lookup, one for its gradients."""
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
    return StepCost(
        n_hosts=-(-n_ranks // RANKS_PER_HOST),
        rank_bytes=rank_bytes,
        host_bytes=rank_bytes * in_host,
        gpu_bytes=CACHED_BATCHES * n_ids * record_bytes
        + INDEX_BYTES * n_rows / n_ranks
        + 3 * n_ids * weight_bytes,
        wire_bytes=nvlink_bytes + nic_bytes,
        bus_bytes=bus_bytes,
        seconds={
            "the bus" if bus >= host_memory else "host memory": max(bus, host_memory),
            "NVLink": nvlink_bytes / NVLINK,
            "the network": nic_bytes / NIC,
            "headers": HEADERS_PER_STEP * HEADER_SECONDS * (n_ranks - 1),
            "kernels": FIXED_SECONDS,
        },
    )


def assumptions() -> str:
    """Describe the constants."""
    return (
        f"{RANKS_PER_HOST} ranks per host; NVLink {NVLINK // GB}, network {NIC // GB}, bus {BUS // GB} GB/s "
        f"per rank; host memory {HOST_MEMORY // GB} GB/s per host; {HEADERS_PER_STEP} headers of "
        f"{1e6 * HEADER_SECONDS:g} µs per other rank; kernels {1e3 * FIXED_SECONDS:g} ms"
    )
