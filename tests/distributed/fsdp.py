"""Scenarios of DTensor parameters: every optimizer on FSDP2, norms over all layouts, options, bad input."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatbed
from tests.distributed.processes import assert_equal_on_all_ranks, assert_raises, main
from tests.optim.optimizers import CASES

STEPS = 3


class Model(nn.Module):
    """Shapes that ranks cannot share evenly, some smaller than the number of ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, width)
        self.second = nn.Linear(width, 5)
        self.one = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(3, 5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))) * self.one
        return y @ self.frozen.T


def batch(step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different inputs on every rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 7, generator=generator).to(dtype)


def backward(model: nn.Module, step: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype)).pow(2).mean().backward()


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model, mesh=world_mesh(), **options)
    return model


def trained(params: Any) -> list[Any]:
    return [p for p in params if p.grad is not None]


def shard_like(p: Any, local: Tensor) -> Any:
    """A DTensor placed as another one."""
    placing = {"shape": p.shape, "stride": p.stride(), "run_check": False}
    return DTensor.from_local(local.clone(), p.device_mesh, p.placements, **placing)


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return found


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def assert_same_shards(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(p), local(q))


# ---- every optimizer


def assert_as_plain_shards(
    make: Callable[[Any], Any], make_torch: Callable[[Any], Any] | None, dtype: torch.dtype, *, writes: bool
) -> None:
    """Train copies of local shards, as plain parameters and as DTensors under torch's optimizer."""
    model = sharded(Model(dtype))
    backward(model)
    owners = trained(model.parameters())  # the others would count for the noise of stochastic rounding
    plain = [nn.Parameter(local(p).clone()) for p in owners]
    theirs = [nn.Parameter(shard_like(p, local(p))) for p in owners]
    ours, of_plain = make(owners), make(plain)
    of_torch = None if make_torch is None else make_torch(theirs)
    for step in range(STEPS):
        for p, q, t in zip(owners, plain, theirs, strict=True):
            q.grad, t.grad = local(p.grad).clone(), shard_like(p, local(p.grad))
        if writes and step == 1:  # masters follow writes to the DTensor
            with torch.no_grad():
                for p in (*owners, *plain):
                    p.copy_(p * 0.5)
        if writes and step == 2:  # and writes to its local tensor, also to another one over the same memory
            model.to("cpu")
            for p in (*owners, *plain):
                local(p).mul_(0.5)
        for optimizer in (ours, of_plain) if of_torch is None else (ours, of_plain, of_torch):
            optimizer.step()
        ours.zero_grad()
        for p, q, t in zip(owners, plain, theirs, strict=True):
            assert torch.equal(local(p), q)
            assert of_torch is None or torch.equal(local(p), local(t))
        backward(model, step + 1)
    for p, q in zip(owners, plain, strict=True):
        expected, found = of_plain.state[q], ours.state[p]
        assert list(expected) == list(found)
        for key, value in expected.items():
            assert torch.equal(local(found[key]), value), key
            if value.dim():
                assert (found[key].placements, found[key].shape) == (p.placements, p.shape)


def every_optimizer_is_that_of_plain_shards(_: Path) -> None:
    for case in CASES:
        # Torch's fused SGD and Adagrad do not take DTensors. Its loops are slow: two ranks are enough.
        has_kernel = dist.get_world_size() == 2
        has_kernel = has_kernel and case.torch_kind not in (torch.optim.SGD, torch.optim.Adagrad)
        of_torch = partial(case.theirs, **case.same_rounding()) if has_kernel else None
        assert_as_plain_shards(case.ours, of_torch, torch.float32, writes=False)
    for options in (
        {"master_weights": True, "ema_decay": 0.5},
        {"stochastic_rounding": True},
        {"state_dtype": torch.bfloat16},
    ):
        make = partial(flatbed.optim.AdamW, lr=0.01, **options)
        assert_as_plain_shards(make, None, torch.bfloat16, writes=True)


def steps_are_torchs(_: Path) -> None:
    """Of a class without a rule of ours, clipped by torch, and scaled."""
    adamw = flatbed.optim.AdamW, torch.optim.AdamW
    asgd = partial(flatbed.optim.from_torch, torch.optim.ASGD), torch.optim.ASGD
    for kinds, implementation, how in (
        (asgd, {"foreach": False}, ""),
        (adamw, {"fused": True}, "clipped"),
        (adamw, {"fused": True}, "scaled"),
    ):
        models = [sharded(Model()) for _ in kinds]
        options: list[Any] = [implementation if how == "scaled" else {}, implementation]
        optimizers: list[Any] = [
            kind(model.parameters(), lr=0.01, **more)
            for kind, model, more in zip(kinds, models, options, strict=True)
        ]
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=how == "scaled")
                scaler.scale(model(batch(step)).pow(2).mean()).backward()
                if how == "clipped":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
            assert_same_shards(*models)
            for p, q in zip(*(trained(model.parameters()) for model in models), strict=True):
                torch.testing.assert_close(local(p.grad), local(q.grad))
            for optimizer in optimizers:
                optimizer.zero_grad()


# ---- norms


def fsdp() -> nn.Module:
    return sharded(Model())


def fsdp_gathered() -> nn.Module:
    return sharded(Model(), reshard_after_forward=False)


def hybrid() -> nn.Module:
    model = Model()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel() -> nn.Module:
    """One mesh of one dimension; parameters that are not named are plain."""
    model = Model()
    parallelize_module(model, world_mesh(), {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return model


def two_dimensions() -> nn.Module:
    """FSDP2 over tensor parallelism: strided shards, replicas, and parameters on a mesh of their own."""
    model = Model(width=10)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def beside_plain() -> nn.Module:
    """A plain parameter, whose gradient is the same on all ranks, beside shards."""
    model = Model()
    ignored = {model.one}
    fully_shard(model, mesh=world_mesh(), ignored_params=ignored)  # type: ignore[arg-type]
    return model


LAYOUTS: list[Callable[[], nn.Module]] = [
    *(fsdp, fsdp_gathered, hybrid, tensor_parallel, two_dimensions, beside_plain)
]


def same_input(model: nn.Module, step: int) -> None:
    """A backward pass whose gradients do not depend on the rank."""
    torch.manual_seed(step)
    model(torch.randn(4, 7)).pow(2).mean().backward()


def norms_are_those_of_whole_gradients(_: Path) -> None:
    for layout in LAYOUTS:
        runs = []
        for _run in range(2):
            model, whole = layout(), Model(width=10 if layout is two_dimensions else 12)
            optimizer = flatbed.optim.AdamW(model, lr=0.1, max_norm=0.05)
            theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
            for step in range(STEPS):
                same_input(model, step)
                same_input(whole, step)
                grads = [full(p.grad) for p in trained(model.parameters())]
                expected = torch.stack([g.double().norm() for g in grads]).norm()
                optimizer.step()
                assert optimizer.grad_norm is not None
                found = optimizer.grad_norm
                assert abs(found.double() - expected) <= 1e-6 * expected, (layout.__name__, found, expected)
                assert_equal_on_all_ranks(found)
                nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
                theirs.step()
                optimizer.zero_grad()
                theirs.zero_grad()
            runs.append([*map(local, model.parameters()), found])
            for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(full(p), q.detach(), rtol=1e-4, atol=1e-5, msg=name)
        assert all(map(torch.equal, *runs)), layout.__name__


def norms_of_large_shards(_: Path) -> None:
    """The sum of a million squares in fp32 would be off by 1e-5."""
    sizes = (3 << 20, 1 << 20)
    model = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in sizes)
    plain = set(model[1:])
    fully_shard(model, mesh=world_mesh(), ignored_params=plain)
    optimizer = flatbed.optim.SGD(model, lr=0.0, max_norm=1.0)
    for p in model:
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    expected = torch.tensor(0.1).double() * sum(sizes) ** 0.5
    assert optimizer.grad_norm is not None
    assert abs(optimizer.grad_norm.double() - expected) <= 1e-6 * expected, optimizer.grad_norm
    assert_equal_on_all_ranks(optimizer.grad_norm)


def collectives_are_for_norms_only(_: Path) -> None:
    for options, expected in (({}, 0), ({"max_norm": 1.0}, 1), ({"skip_nonfinite": True}, 1)):
        model = sharded(Model())
        optimizer = flatbed.optim.AdamW(model, **options)
        for step in range(2):
            backward(model, step)
            held = [*optimizer.state[model.one].values()] if step else []
            with CommDebugMode() as counted:
                optimizer.step()
                optimizer.zero_grad()
            assert counted.get_total_counts() == expected, counted.get_comm_counts()
            assert all(map(operator.is_, held, optimizer.state[model.one].values()))
        assert optimizer.nonfinite() == []


def pipeline_stages(_: Path) -> None:
    """Ranks with other parameters, plain ones or shards, have one norm; a rank without gradients too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = nn.Linear(3, 3 + rank)
    optimizer = flatbed.optim.SGD(layer, lr=0.1, max_norm=1.0, norm_group=dist.group.WORLD)
    if rank:
        layer(torch.full((1, 3), float(rank))).sum().backward()
    optimizer.step()
    squares = sum((3 + r) * (3 * r * r + 1) for r in range(1, world))
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(float(squares)).sqrt())
    assert_equal_on_all_ranks(optimizer.grad_norm)
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.found_inf = torch.tensor(float(rank == 1))  # a GradScaler would scale differently on rank 1
    assert_raises(optimizer.step, "overflowed on some ranks only")
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(before, layer.weight), "an overflow of one stage stops all"


def copied_pipeline_stages(_: Path) -> None:
    """A copy has the same process group; pickles say what to do."""
    layer = nn.Linear(3, 3 + dist.get_rank())
    options = {"lr": 0.1, "max_norm": 0.5}
    optimizer = flatbed.optim.Adam(layer, norm_group=dist.new_group(), **options)
    twin = copy.deepcopy((layer, optimizer))
    for step in range(2):
        for model, owner in ((layer, optimizer), twin):
            model(torch.ones(1, 3)).mul(step + 1).sum().backward()
            owner.step()
            owner.zero_grad()
    assert torch.equal(layer.weight, twin[0].weight)
    assert torch.equal(optimizer.grad_norm, twin[1].grad_norm)
    assert_raises(lambda: pickle.dumps(optimizer), "norm_group", "save optimizer.state_dict() instead")
    sharded = flatbed.optim.Adam([nn.Parameter(torch.ones(2))], shard_state=dist.group.WORLD)
    assert_raises(lambda: pickle.dumps(sharded), "shard_state", "save optimizer.state_dict() instead")
    copy.deepcopy(sharded)


def scaled_pipeline_stages(_: Path) -> None:
    """Loss scaling with stages without gradients, and with stages on several meshes."""
    rank = dist.get_rank()
    for options in ({"max_norm": 1.0, "skip_nonfinite": True}, {}):
        p = nn.Parameter(torch.ones(1))
        optimizer = flatbed.optim.SGD([p], lr=0.1, norm_group=dist.group.WORLD, **options)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
        for grad in (2.0, float("inf")):
            p.grad = torch.full((1,), 4 * grad) if rank == 1 else None
            optimizer.step()
            if options:
                assert float(optimizer.grad_norm) == grad
                assert_equal_on_all_ranks(optimizer.skipped_steps)
        assert int(optimizer.skipped_steps) == len(options) // 2
    params = []
    for name in ("a", "b") if rank == 0 else ("a",):
        mesh = DeviceMesh("cpu", [rank], mesh_dim_names=(name,), _init_backend=False)
        params.append(nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)))
    optimizer = flatbed.optim.SGD(params, lr=0.1, max_norm=1.0, norm_group=dist.group.WORLD)
    for param in params:
        param.grad = shard_like(param, torch.ones(2))
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert_equal_on_all_ranks(optimizer.grad_norm)


# ---- options


def averages(_: Path) -> None:
    """The model computes with averaged weights, and with the trained ones again, gathered or not."""
    for layout in (fsdp, fsdp_gathered):
        model, whole = layout(), Model()
        optimizer = flatbed.optim.AdamW(model, lr=0.1, ema_decay=0.5)
        x = torch.ones(2, 7)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        averaged = {n: optimizer.state[p].get("ema", p) for n, p in model.named_parameters()}
        averaged = {name: full(tensor) for name, tensor in averaged.items()}
        now = model(x).detach()
        with optimizer.ema_weights():
            found = model(x).detach()
        whole.load_state_dict(averaged)
        torch.testing.assert_close(found, whole(x).detach())
        assert torch.equal(model(x).detach(), now)
        with optimizer.ema_weights():
            model.double().float()  # new memory
        assert torch.equal(model(x).detach(), now)
        backward(model)  # until then, FSDP2 shows gathered parameters
        optimizer = flatbed.optim.AdamW(model.parameters(), ema_decay=0.5)
        assert_raises(optimizer.ema_weights().__enter__, "ema_weights(model)")
        with optimizer.ema_weights(model):
            assert torch.equal(model(x).detach(), now)


def overflowing_steps(model: Any, optimizer: Any) -> Iterator[Callable[[], None]]:
    """Make three backward passes, the second of which overflows on one rank; the caller takes the steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        scaler.scale(model(batch(step)).pow(2).mean()).backward()
        if step == 1 and dist.get_rank() == 1:
            model.first.weight.grad.to_local()[0, 0] = float("inf")
        yield partial(scaler.step, optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (8.0 if step < 1 else 4.0)


def is_updated(model: nn.Module, step: Callable[[], None]) -> bool:
    """Take a step; return True if it has changed parameters of all ranks, False if of none."""
    before = [local(p).clone() for p in model.parameters()]
    step()
    moved = torch.tensor([float(not all(map(torch.equal, before, map(local, model.parameters()))))])
    assert_equal_on_all_ranks(moved)
    return bool(moved)


def overflow_on_one_rank(_: Path) -> None:
    for fused in (False, True):
        model = sharded(Model())
        optimizer = flatbed.optim.AdamW(model, fused=fused or None)
        found = [is_updated(model, step) for step in overflowing_steps(model, optimizer)]
        assert found == [True, False, True]
    backward(model)
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == 1))
    assert not is_updated(model, optimizer.step)


def overflow_on_one_mesh(_: Path) -> None:
    """A GradScaler reduces its flag over the mesh of the first gradient only."""
    if dist.get_world_size() != 4:
        return
    for fused, max_norm in ((None, 1.0), (True, None)):
        model = two_dimensions()
        params = [p for p in reversed([*model.parameters()]) if p.requires_grad]
        optimizer = flatbed.optim.AdamW(params, fused=fused, max_norm=max_norm)
        steps = overflowing_steps(model, optimizer)
        assert is_updated(model, next(steps))
        overflowing = next(steps)
        assert not is_updated(
            model, lambda step=overflowing: assert_raises(step, "overflowed on some ranks only")
        )


def other_ways_to_train(_: Path) -> None:
    """Meta initialisation, mixed precision, accumulation, and a module that is moved after the first step."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = []
    for kind in (flatbed.optim.AdamW, torch.optim.AdamW):
        with torch.device("meta"):
            model = Model()
        sharded(model, mp_policy=policy)
        early = kind(model.parameters(), fused=True)  # before there are values
        model.to_empty(device="cpu")
        for n, p in enumerate(model.parameters()):
            nn.init.constant_(p, 0.1 * n)
        optimizer = kind(model.parameters(), fused=True) if kind is torch.optim.AdamW else early
        for step in range(4):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(step % 2 == 1)
            backward(model, step)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_same_shards(*models)


def parameters_replaced_by_a_framework(_: Path) -> None:
    """Accelerate shards the model after the optimizer was built, and puts the shards into its groups."""
    model, other = Model(), sharded(Model())
    optimizer = flatbed.optim.AdamW(model, lr=0.01, max_norm=0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    sharded(model)
    shards = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [shards[names[id(p)]] for p in group["params"]]
    expected = flatbed.optim.AdamW(other, lr=0.01, max_norm=0.1)
    for step in range(2):
        for trained_model, stepped in ((model, optimizer), (other, expected)):
            backward(trained_model, step)
            stepped.step()
            stepped.zero_grad()
        assert torch.equal(optimizer.grad_norm, expected.grad_norm)
    assert_same_shards(model, other)


def sums_that_are_not_reduced(_: Path) -> None:
    """A gradient placed otherwise than its parameter is redistributed, as torch does."""
    mesh, rank = world_mesh(), dist.get_rank()
    for placement in (Replicate(), Shard(0)):
        p = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [placement]))
        optimizer = flatbed.optim.SGD([p], lr=1.0)
        p.grad = DTensor.from_local(torch.full((5, 3), rank + 1.0), mesh, [Partial()], run_check=False)
        optimizer.step()
        total = sum(range(1, dist.get_world_size() + 1))
        assert torch.equal(full(p), torch.full((5, 3), -float(total)))


# ---- bad input


def bad_input(_: Path) -> None:
    rank, mesh = dist.get_rank(), world_mesh()
    params = [p for p in Model().parameters() if p.dim() > 1]
    params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in params]
    kind = flatbed.optim.AdamW
    odd = rank == 1
    last = dist.get_world_size() - 1
    assert_raises(lambda: kind(params[: 3 - odd], max_norm=1.0), "2 of group 0", "rank 1 has missing")
    assert_raises(lambda: kind(params[: 3 - odd]), "2 of group 0", "rank 1 has missing")
    params[1].requires_grad_(not odd)
    assert_raises(lambda: kind(params), "1 of group 0", "rank 1 has (12, 7)", "requires_grad=False")
    params[1].requires_grad_()
    assert_raises(lambda: kind(params, max_norm=None if odd else 1.0), "max_norm", "rank 1 has None")
    assert_raises(lambda: kind(params, max_norm=1.0 + odd), "max_norm", "rank 1 has 2.0")
    assert_raises(lambda: kind(params, lr=0.1 * (rank == last)), "lr of group 0", f"rank {last}")
    assert_raises(lambda: kind(params) if odd else flatbed.optim.Adam(params), "rank 1 has AdamW")
    bad = DTensor.from_local(torch.zeros(2), mesh, [Partial() if odd else Replicate()], run_check=False)
    assert_raises(lambda: kind([*params, nn.Parameter(bad)]), "a sum over ranks")
    optimizer = kind(params)
    more = {"params": [nn.Parameter(bad)], "lr": 0.1}
    assert_raises(lambda: optimizer.add_param_group(more), "a sum over ranks")
    assert len(optimizer.param_groups) == 1
    assert_raises(lambda: setattr(optimizer, "max_norm", 1.0), "build the optimizer with")
    plain, world = [nn.Parameter(torch.zeros(2 + rank))], dist.group.WORLD
    assert_raises(lambda: kind(plain, norm_group=world, max_norm=None if odd else 1.0), "rank 1 has None")
    assert_raises(lambda: kind(params, norm_group=None if odd else world), "norm_group", "rank 1 has None")
    params[0].grad = torch.zeros_like(full(params[0]))  # type: ignore[assignment]
    assert_raises(optimizer.step, "both must be DTensors")
    params[0].grad = None
    if dist.get_world_size() == 4:
        two = init_device_mesh("cpu", (2, 2))
        placed = [nn.Parameter(distribute_tensor(torch.zeros(4, 4), two, [Shard(0), Replicate()]))]
        assert_raises(lambda: kind(placed, lr=0.1 + (rank == 2)), "lr of group 0")


SCENARIOS = [
    *(every_optimizer_is_that_of_plain_shards, steps_are_torchs, norms_are_those_of_whole_gradients),
    *(
        norms_of_large_shards,
        collectives_are_for_norms_only,
        pipeline_stages,
        copied_pipeline_stages,
        scaled_pipeline_stages,
    ),
    averages,
    *(overflow_on_one_rank, overflow_on_one_mesh),
    *(other_ways_to_train, sums_that_are_not_reduced, parameters_replaced_by_a_framework, bad_input),
]

if __name__ == "__main__":
    main(SCENARIOS)
