"""Scenarios of one rank that differs from the others or fails: all ranks raise within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import flatbed
from flatbed.distributed import peers, ranks
from flatbed.distributed.ranks import default_store
from tests.distributed.processes import main

AdamW = flatbed.optim.AdamW
peers.PATIENCE = 0.5
ODD = 1
"""The rank that differs."""


def is_odd() -> bool:
    return dist.get_rank() == ODD


def new_mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


def shards(mesh: DeviceMesh) -> list[nn.Parameter]:
    """Two parameters of ones, made without communication."""
    n_rows = 2 * mesh.size()
    local = torch.ones(2, 3)
    placing: Any = {"shape": (n_rows, 3), "stride": (3, 1), "run_check": False}
    return [nn.Parameter(DTensor.from_local(local.clone(), mesh, [Shard(0)], **placing)) for _ in range(2)]


def whole() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3))]


def message_of(action: Callable[[], Any]) -> str:
    """The message of an error that is raised within seconds."""
    begin = time.monotonic()
    with pytest.raises((flatbed.FlatbedError, ValueError)) as caught:
        action()
    assert time.monotonic() - begin < 60
    return str(caught.value)


def train_for_ever(optimizer: torch.optim.Optimizer) -> None:
    """The steps of a rank that has no reason to wait for others."""
    while True:
        optimizer.step()
        time.sleep(0.01)


def assert_next_optimizer_works(mesh: DeviceMesh) -> None:
    dist.barrier()  # a rank that fails early must not build the next one while others wait for it
    params = shards(mesh)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = AdamW(params, max_norm=1.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(12.0 * mesh.size()).sqrt())


def whole_parameters_on_one_rank(_: Path) -> None:
    """It has no reason to wait for others, which have shards, a part of the state, or a common norm."""
    mesh = new_mesh()

    def build_shards() -> Any:
        return AdamW(whole() if is_odd() else shards(mesh), max_norm=1.0)

    def build_sharded_state() -> Any:
        return AdamW(whole(), shard_state=not is_odd())

    group = dist.group.WORLD

    def build_stage() -> Any:
        return AdamW(whole(), max_norm=1.0, norm_group=None if is_odd() else group)

    for build in (build_shards, build_sharded_state, build_stage):
        found = message_of(lambda build=build: train_for_ever(build()))
        assert "rank 1 did not build it" in found
        assert "AdamW of 1 whole parameters" in found
        assert_next_optimizer_works(mesh)


def wrong_argument_on_one_rank(_: Path) -> None:
    mesh = new_mesh()
    found = message_of(lambda: AdamW(shards(mesh), lr=-1.0 if is_odd() else 0.1))
    assert "lr must be" in found
    assert is_odd() or "rank 1:" in found
    assert_next_optimizer_works(mesh)


def mesh_without_one_rank(_: Path) -> None:
    """The rank that is not part of the mesh raises at once, those of the mesh in their first step."""
    others = [rank for rank in range(dist.get_world_size()) if rank != ODD]
    p = shards(DeviceMesh("cpu", others))[0]

    def build_and_step() -> None:
        try:
            optimizer = AdamW([p])
        finally:
            dist.barrier()
        optimizer.step()

    found = message_of(build_and_step)
    assert f"rank 1 is not part of the mesh of parameter 0 of group 0, whose ranks are {others}" in found
    assert_next_optimizer_works(new_mesh())


def other_order_on_one_rank(_: Path) -> None:
    mesh = new_mesh()
    kinds = (AdamW, flatbed.optim.SGD)[:: -1 if is_odd() else 1]
    found = message_of(lambda: [kind(shards(mesh), lr=0.1) for kind in kinds])
    assert "the class of the optimizer differs between ranks: rank 0 has AdamW, rank 1 has SGD" in found


def difference_on_one_of_two_meshes(_: Path) -> None:
    """The last rank shares other parameters with the ranks that differ."""
    mesh, pair = new_mesh(), DeviceMesh("cpu", [0, ODD])

    def build() -> Any:
        params = shards(mesh)
        if dist.get_rank() in (0, ODD):
            params += shards(pair)[is_odd() :]
        return AdamW(params)

    assert "parameter 3 of group 0 differs between ranks: rank 0 has" in message_of(build)
    assert_next_optimizer_works(mesh)


def checkpoint_without_one_rank(folder: Path) -> None:
    """One rank comes when the other one has given up: the second one, and then the first one."""
    ranks.PATIENCE, ranks.TELL_AFTER = 2.0, 0.5
    model, store, timeout = nn.Linear(2, 2), default_store(), default_store().timeout
    store.set_timeout(timedelta(seconds=2))
    for late in (1, 0):
        dist.barrier()
        if dist.get_rank() == late:
            store.wait([f"without {late}"], timeout)
        refused = pytest.raises(flatbed.FlatbedError, match=rf"rank .*{late}.* did not follow .* every rank")
        with redirect_stderr(StringIO()) as said, refused:
            flatbed.save_checkpoint(folder / "checkpoint", model)
        has_waited = dist.get_rank() == 0 and late == 1
        assert ("saving a checkpoint waits for rank 1: all ranks" in said.getvalue()) == has_waited
        store.set(f"without {late}", "")
    dist.barrier()
    ranks.PATIENCE, ranks.TELL_AFTER = 300.0, 5.0
    store.set_timeout(timeout)
    flatbed.save_checkpoint(folder / "checkpoint", model)


SCENARIOS = [
    *(whole_parameters_on_one_rank, wrong_argument_on_one_rank, mesh_without_one_rank),
    *(difference_on_one_of_two_meshes, other_order_on_one_rank, checkpoint_without_one_rank),
]

if __name__ == "__main__":
    main(SCENARIOS)
