"""Scenarios of `shard_state=True`: the state of DDP's parameters sharded across ranks."""

from __future__ import annotations

import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import flatbed
from flatbed.distributed import state_shards
from tests.distributed.fsdp import full
from tests.distributed.processes import assert_equal_on_all_ranks, assert_raises, main
from tests.optim.optimizers import CASES

STEPS = 3


class Model(nn.Module):
    """A scalar, rows that ranks cannot share evenly, few rows, a transposed parameter, channels last."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 37)
        self.second = nn.Linear(37, 5)
        self.transposed = nn.Parameter(torch.randn(3, 5).T)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1, 3))
        self.image = nn.Parameter(torch.randn(6, 3, 2, 2).to(memory_format=torch.channels_last))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return (y @ self.transposed) * self.one + self.image.mean((0, 2, 3))


def train(
    kind: Any, *, dtype: torch.dtype = torch.float32, overflows: bool = False, **options: Any
) -> tuple[Any, Any]:
    model = Model(dtype)
    called, optimizer = DDP(model), kind(model.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=overflows)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, 7, generator=generator).to(dtype)
        if overflows and step == 1:
            x[0, 0] = float("inf")
        scaler.scale(called(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == (4.0 if overflows else 1.0)
    return model, optimizer


def assert_same_training(left: Any, right: Any) -> None:
    """The same parameters and, gathered, the same state, by the same keys."""
    (model, optimizer), (other, of_other) = left, right
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), (name, (p - q).abs().max())
        expected, found = optimizer.state.get(p, {}), of_other.state.get(q, {})
        assert list(expected) == list(found)
        for key, value in expected.items():
            assert torch.equal(full(value), full(found[key])), (name, key)


def every_optimizer_is_that_of_whole_state(_: Path) -> None:
    for case in CASES if dist.get_world_size() == 2 else CASES[::3]:
        left, right = train(case.ours), train(case.ours, shard_state=True)
        assert_same_training(left, right)


def options_are_those_of_whole_state(_: Path) -> None:
    state_shards.PIECE_BYTES = 256  # several exchanges
    group = dist.new_group(list(range(dist.get_world_size())))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for ranks, options in (
        (group, {"max_norm": 0.05}),
        (mesh, {"max_norm": 0.05, "skip_nonfinite": True}),
        (True, {"dtype": torch.bfloat16, "master_weights": True, "ema_decay": 0.5}),
        (True, {"state_dtype": torch.float64}),
        (True, {"overflows": True, "fused": True}),
    ):
        left = train(flatbed.optim.AdamW, **options)
        right = train(flatbed.optim.AdamW, shard_state=ranks, **options)
        assert_same_training(left, right)
        if "max_norm" in options:
            assert torch.equal(left[1].grad_norm, right[1].grad_norm)
            assert_equal_on_all_ranks(right[1].grad_norm)
        if "ema_decay" in options:
            with left[1].ema_weights(), right[1].ema_weights():
                assert_same_training(left, right)
                left[0].float().bfloat16(), right[0].float().bfloat16()  # new memory
            assert_same_training(left, right)


def state_is_a_part(_: Path) -> None:
    rounded: Any = {"dtype": torch.bfloat16, "stochastic_rounding": True}
    for p in train(flatbed.optim.AdamW, shard_state=True, **rounded)[0].parameters():
        assert_equal_on_all_ranks(p.detach())
    model, optimizer = train(flatbed.optim.AdamW, shard_state=True)
    rows = -(-37 // dist.get_world_size())
    held = optimizer.state[model.first.weight]["exp_avg"]
    assert len(held.to_local()) in (rows, 37 - rows * dist.get_rank())
    assert held.to_local().untyped_storage().nbytes() == held.to_local().nbytes
    assert optimizer.state[model.scale]["exp_avg"].dim() == 0
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    assert not any(grad() is not None for grad in grads), "gradients outlive zero_grad()"


def checkpoints(folder: Path) -> None:
    """4 ranks save, 2 load; so does an optimizer with whole state, and torch's."""
    path, reference = folder / "zero", folder / "zero.pt"
    model, optimizer = train(flatbed.optim.AdamW, shard_state=True, lr=0.1)
    if path.exists():
        whole = torch.load(reference)
        for kind, options in (
            (flatbed.optim.AdamW, {"shard_state": True}),
            (flatbed.optim.AdamW, {}),
            (torch.optim.AdamW, {}),
        ):
            loaded: Any = kind(model.parameters(), **options)
            state = {"optimizer": get_optimizer_state_dict(model, loaded)}
            dcp.load(state, checkpoint_id=path)
            set_optimizer_state_dict(model, loaded, state["optimizer"])
            for name, p in model.named_parameters():
                for key, value in loaded.state[p].items():
                    assert torch.equal(full(value), whole[f"{name}.{key}"]), (kind, name, key)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    state = {f"{n}.{k}": full(v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    if dist.get_rank() == 0:
        torch.save(state, reference)


def state_of_zero_redundancy_optimizer(_: Path) -> None:
    """The consolidated state dict of torch's ZeroRedundancyOptimizer is loaded, and training goes on."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def torchs(params: Any) -> Any:
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01, fused=True)

    model, theirs = train(torchs)
    theirs.consolidate_state_dict(0)
    held = [theirs.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, 0)
    ours = flatbed.optim.AdamW(model.parameters(), lr=0.5, shard_state=True)
    ours.load_state_dict(held[0])
    assert ours.param_groups[0]["lr"] == 0.01
    other = Model()
    other.load_state_dict(model.state_dict())
    alone = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
    alone.load_state_dict(held[0])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    ours.step()
    alone.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def bad_input(_: Path) -> None:
    model, odd = Model(), dist.get_rank() == 1
    kind = flatbed.optim.AdamW
    assert_raises(lambda: kind(model, shard_state=True, lr=0.1 + odd), "lr of group 0", "rank 1")
    params = list(model.parameters())
    assert_raises(lambda: kind(params[odd:], shard_state=True), "differs between ranks")


SCENARIOS = [
    *(every_optimizer_is_that_of_whole_state, options_are_those_of_whole_state, state_is_a_part),
    *(checkpoints, state_of_zero_redundancy_optimizer, bad_input),
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(SCENARIOS)
