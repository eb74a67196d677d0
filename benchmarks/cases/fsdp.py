"""Host time of clipping and a step of AdamW on FSDP2's DTensors, one rank, gradients kept.

The model has layers of 64 × 64. Host time ends when the call returns. The weights of flatbed's variants must
be bitwise equal after the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flatbed
from benchmarks.harness import SEED, Options, Plan, each, host_ms, time_in_turns
from benchmarks.rows import Row, percentiles

CASES = ("200", "1000", "2000")
SMALL_CASES = ("20",)
TURNS, WARM_UP, SETTLE, WIDTH, MAX_NORM = 10, 3, 3, 64, 1.0
SHARDED, PLAIN = "flatbed.optim", "flatbed.optim, plain parameters"
TORCH = "torch fused + clip_grad_norm_"


def run(options: Options) -> Iterator[Row]:
    """Measure the numbers of parameters that were asked for."""
    with one_rank(options.device):
        for case in options.cases or (SMALL_CASES if options.is_small else CASES):
            yield from run_size(int(case), options)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Begin a process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined,unused-ignore]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(n_params: int, device: torch.device, *, sharded: bool) -> list[nn.Parameter]:
    """Make parameters with gradients, the same values at every call."""
    torch.manual_seed(SEED)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n_params // 2))).to(device)
    grads = [torch.randn_like(p) for p in model.parameters()]
    if sharded:
        fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    params: Any = list(model.parameters())
    for p, grad in zip(params, grads, strict=True):
        placed = DTensor.from_local(grad, p.device_mesh, p.placements, run_check=False) if sharded else grad
        p.grad = placed
    return list(params)


def with_flatbed(params: list[nn.Parameter]) -> Callable[[Any], None]:
    """Use flatbed.optim, which clips in the step."""
    optimizer = flatbed.optim.AdamW(params, max_norm=MAX_NORM)
    return lambda _: optimizer.step()


def with_torch(params: list[nn.Parameter]) -> Callable[[Any], None]:
    """Use torch's fused step after its clipping."""
    optimizer = torch.optim.AdamW(params, fused=True)

    def step(_: Any) -> None:
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    return step


def run_size(n_params: int, options: Options) -> Iterator[Row]:
    """Time all variants in turns; all of them take the same number of steps."""
    known = {SHARDED: (with_flatbed, True), PLAIN: (with_flatbed, False), TORCH: (with_torch, True)}
    chosen = options.choose(known)
    params = {name: build(n_params, options.device, sharded=sharded) for name, (_, sharded) in chosen.items()}
    steps = {name: each(make(params[name])) for name, (make, _) in chosen.items()}
    # The steps that follow another variant's find a cold cache.
    plan = Plan(TURNS, warm_up=WARM_UP, settle=SETTLE, synchronized=-(-(options.steps or 40) // TURNS))
    found = time_in_turns(steps, lambda n: [None] * n, plan, options, clock=host_ms)
    setting = {"parameters": n_params}
    for name, readings in found.items():
        same = name == TORCH or {SHARDED, PLAIN} - params.keys() or weights_are_equal(params)
        metrics = {"host_ms": percentiles(readings.synchronized)}
        n_samples = len(readings.synchronized)
        yield options.row(f"fsdp {n_params}", name, setting, metrics, n_samples=n_samples, ok=bool(same))


def weights_are_equal(params: dict[str, list[nn.Parameter]]) -> bool:
    """Compare DTensors with plain parameters after the same steps."""
    return all(map(torch.equal, map(local_of, params[SHARDED]), params[PLAIN]))


def local_of(param: Tensor) -> Tensor:
    """Return the shard of a DTensor."""
    return param.to_local() if isinstance(param, DTensor) else param
