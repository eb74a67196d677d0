"""The kernels on shards, interpreted or on a GPU: empty ones, and gradients at any and at new addresses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

import flatbed
from flatbed.distributed.dense_shards import local_of
from flatbed.errors import FlatbedError
from tests.optim.conftest import kernel_device

__all__ = ["kernel_device"]

SHAPES = [(0, 4), (1100,), (3, 7), (2, 512)]


@pytest.fixture
def mesh(kernel_device: str) -> Iterator[DeviceMesh]:
    """A mesh of one rank, whose shards are what a test says they are."""
    backend = "nccl" if kernel_device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh(kernel_device, [0])
    dist.destroy_process_group()


def shard(local: Tensor, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def at_offset(values: Tensor, n_elements: int) -> Tensor:
    """The same values, a few elements after the beginning of a buffer."""
    buffer = torch.empty(values.numel() + n_elements, dtype=values.dtype, device=values.device)
    return buffer[n_elements:].view(values.shape).copy_(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_gradients_at_any_address(
    kernel_device: str, mesh: DeviceMesh, offset: int, dtype: torch.dtype
) -> None:
    """The same bits as plain parameters with aligned gradients, clipped, at new addresses in every step."""
    values = [torch.randn(shape).to(kernel_device, dtype) for shape in SHAPES]
    plain = [nn.Parameter(value.clone()) for value in values]
    sharded = [nn.Parameter(shard(value.clone(), mesh)) for value in values]
    optimizers = [flatbed.optim.AdamW(params, lr=0.1, max_norm=0.5) for params in (plain, sharded)]
    kept: list[Tensor] = []
    for _ in range(3):
        for p, q in zip(plain, sharded, strict=True):
            p.grad = torch.randn_like(p)
            kept.append(at_offset(p.grad, offset))
            q.grad = shard(kept[-1], mesh)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(*(optimizer.grad_norm for optimizer in optimizers))
    for p, q in zip(plain, sharded, strict=True):
        assert torch.equal(p, q.to_local())
        for key, value in optimizers[0].state[p].items():
            found = optimizers[1].state[q][key]
            assert torch.equal(value, found.to_local() if isinstance(found, DTensor) else found), key


@pytest.mark.parametrize("replaced", ["tensor", "memory"])
def test_a_local_tensor_that_is_replaced(kernel_device: str, mesh: DeviceMesh, replaced: str) -> None:
    """FSDP2 gives a DTensor new memory when the module is moved. Code that offloads layers sets `data`."""
    params: list[Any] = [nn.Parameter(shard(torch.ones(n, device=kernel_device), mesh)) for n in (0, 600, 0)]
    optimizer = flatbed.optim.SGD(params, lr=1.0)
    kept: list[Tensor] = []  # otherwise memory may come back at its old address
    for step in range(3):
        for p in params:
            p.grad = shard(torch.ones_like(p._local_tensor), mesh)
        optimizer.step()
        local = params[1]._local_tensor
        assert torch.equal(local, torch.full_like(local, -float(step)))
        kept.append(local.data)
        if replaced == "tensor":
            params[1]._local_tensor = local.clone()
        else:
            local.data = local.data.clone()


def test_state_whose_local_tensor_is_replaced(kernel_device: str, mesh: DeviceMesh) -> None:
    p: Any = nn.Parameter(shard(torch.zeros(600, device=kernel_device), mesh))
    optimizer = flatbed.optim.SGD([p], lr=1.0, momentum=1.0)
    for expected in (-1.0, -2.0):  # -3, if the step used the buffer that was swapped away
        p.grad = shard(torch.ones(600, device=kernel_device), mesh)
        optimizer.step()
        assert torch.equal(p.to_local(), torch.full_like(p.to_local(), expected))
        buffer = optimizer.state[p]["momentum_buffer"]
        torch.utils.swap_tensors(buffer, torch.zeros_like(buffer))


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_gradients_that_are_still_to_arrive(
    kernel_device: str, mesh: DeviceMesh, is_sharded: bool, skips: bool
) -> None:
    """The results of collectives have no address, as a parameter without a gradient."""
    place = partial(shard, mesh=mesh) if is_sharded else torch.Tensor.detach
    params: list[Any] = [nn.Parameter(place(torch.zeros(600, device=kernel_device))) for _ in range(2)]
    optimizer = flatbed.optim.SGD(params, lr=1.0)
    for p in params:
        p.grad = place(torch.ones(600, device=kernel_device))
    optimizer.step()
    if skips:
        params[1].grad = None
        optimizer.step()
    params[1].grad = place(AsyncCollectiveTensor(torch.ones(600, device=kernel_device)))
    optimizer.step()
    for p, expected in zip(params, (-3.0 if skips else -2.0, -2.0), strict=True):
        assert torch.equal(local_of(p), torch.full_like(local_of(p), expected))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_between_forward_and_backward(kernel_device: str, mesh: DeviceMesh, missing: int) -> None:
    """Autograd raises, as it compares the versions of DTensors; also of those that a module has moved."""
    params: list[Any] = [nn.Parameter(shard(torch.ones(600, device=kernel_device), mesh)) for _ in range(2)]
    optimizer = flatbed.optim.SGD(params, lr=1.0)
    for moved in (False, True):
        for p in params:
            p.grad = shard(torch.ones(600, device=kernel_device), mesh)
        optimizer.step()
        if moved:
            torch.utils.swap_tensors(params[0], nn.Parameter(params[0].detach().clone()))
            params[0].grad = shard(torch.ones(600, device=kernel_device), mesh)
        if missing:
            params[1].grad = None
        loss = (params[0] * params[0]).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss


@pytest.mark.parametrize("has_plain", [False, True])
def test_gradients_of_another_kind(kernel_device: str, mesh: DeviceMesh, has_plain: bool) -> None:
    """A gradient is a sum once, missing once, and in the end no DTensor; also beside plain parameters."""
    ones = torch.ones(600, device=kernel_device)
    params: list[Any] = [nn.Parameter(shard(ones * 0, mesh)) for _ in range(2)]
    if has_plain:
        params.append(nn.Parameter(ones * 0))
    optimizer = flatbed.optim.SGD(params, lr=1.0)
    partial_sum = DTensor.from_local(ones, mesh, [Partial()], run_check=False)
    for grad, expected in ((shard(ones, mesh), -1), (partial_sum, -2), (None, -2), (shard(ones, mesh), -3)):
        params[1].grad = grad
        for p in (params[0], *params[2:]):
            p.grad = shard(ones, mesh) if isinstance(p, DTensor) else ones.clone()
        optimizer.step()
        assert torch.equal(params[1].to_local(), ones * expected)
    assert all(torch.equal(local_of(p), ones * -4) for p in (params[0], *params[2:]))
    params[1].grad = ones.clone()
    with pytest.raises(FlatbedError, match="both must be DTensors"):
        optimizer.step()
