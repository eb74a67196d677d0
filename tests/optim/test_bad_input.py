"""Wrong input: an error that says what was found and what to do, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed import fake_pg

import flatbed
from tests.cases import build
from tests.optim.test_dropin import give_grads


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        ({"lr": math.nan}, ValueError, "lr.*nan"),
        ({"lr": torch.ones(2)}, ValueError, r"lr.*\(2,\)"),
        ({"lr": "1e-3"}, TypeError, "lr.*'1e-3'"),
        ({"betas": 0.9}, ValueError, r"betas.*0\.9"),
        ({"betas": (1.0, 0.999)}, ValueError, r"betas.*1\.0"),
        ({"betas": (0.9, -0.1)}, ValueError, r"betas.*-0\.1"),
        ({"eps": -1e-8}, ValueError, "eps.*-1e-08"),
        ({"weight_decay": -0.1}, ValueError, r"weight_decay.*-0\.1"),
        ({"differentiable": True}, ValueError, r"torch\.optim"),
        ({"max_norm": -1.0}, ValueError, r"max_norm.*-1\.0"),
        ({"max_norm": math.nan}, ValueError, "max_norm.*nan"),
        ({"max_norm": 0.0}, ValueError, r"max_norm.*None.*found 0\.0"),  # frameworks switch clipping off so
        ({"max_norm": True}, ValueError, "max_norm.*found True"),
        ({"ema_decay": 1.0}, ValueError, r"ema_decay.*1\.0"),
        ({"state_dtype": torch.int8}, ValueError, "state_dtype.*int8"),
        ({"state_dtype": torch.float16}, ValueError, "state_dtype.*float16"),
        ({"master_weights": True, "stochastic_rounding": True}, ValueError, "choose one"),
        ({"skip_nonfinite": "False"}, TypeError, "skip_nonfinite.*'False'"),  # as a config file gives it
        ({"per_row_steps": "False"}, TypeError, "per_row_steps.*'False'"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found):
        flatbed.optim.Adam([nn.Parameter(torch.zeros(3))], **options)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match="momentum=0"):
        flatbed.optim.SGD([nn.Parameter(torch.zeros(3))], nesterov=True)


def test_a_bad_group_is_not_added() -> None:
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = flatbed.optim.Adam([first])
    for group, found in (
        ({"params": [second], "lr": -1.0}, "lr"),
        ({"params": [second], "max_norm": 1.0}, "max_norm.*param group: pass it to the constructor"),
        ({"params": [first]}, "more than one"),
    ):
        with pytest.raises(ValueError, match=found):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


def test_a_misspelt_hyperparameter_of_a_group_warns() -> None:
    """Groups may have keys of the user's, as in torch."""
    first, second, third = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    with pytest.warns(UserWarning, match=r"'weight_deacy'.*weight_decay"):
        optimizer = flatbed.optim.AdamW([{"params": [first], "weight_deacy": 0.0}])
    optimizer.add_param_group({"params": [second], "name": "head", "lr_scale": 0.1, "layer_id": 3})
    optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    optimizer.add_param_group({**optimizer.param_groups[1], "params": [third]})


def test_lazy_parameters_are_trained_once_they_have_a_shape() -> None:
    model = nn.LazyLinear(3)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("at_first", [True, False])
def test_a_sparse_gradient_stops_the_step_before_anything_moves(where: str, at_first: bool) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.named_parameters(), lr=0.1)
    give_grads(model)
    if not at_first:
        optimizer.step()
    before = [p.clone() for p in model.parameters()]
    last = model.one
    last.grad = torch.ones_like(last).to_sparse()
    with pytest.raises(flatbed.FlatbedError, match=r"gradient of parameter 'one' is sparse .*SparseAdam"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    give_grads(model)
    optimizer.step()
    assert float(optimizer.state[last]["step"]) == (1 if at_first else 2)


@pytest.mark.parametrize(
    ("values", "options", "found"),
    [
        (torch.zeros(3, dtype=torch.complex64), {}, r"0 of group 0 is torch.complex64.*view_as_real"),
        (torch.zeros(3, dtype=torch.float16), {"stochastic_rounding": True}, "use master_weights=True"),
        (torch.zeros(1, 3).expand(4, 3), {}, "expanded"),
    ],
)
def test_parameters_that_no_step_can_update(values: torch.Tensor, options: Any, found: str) -> None:
    p = values.detach().requires_grad_()
    optimizer = flatbed.optim.Adam([p], **options)
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    with pytest.raises(flatbed.FlatbedError, match=found):
        optimizer.step()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_dtensors_without_values_of_their_own_are_refused(two_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False))
    with pytest.raises(flatbed.FlatbedError, match=r"Partial.*redistribute"):
        flatbed.optim.Adam([p])
    other = DeviceMesh("cpu", [1])
    with pytest.raises(flatbed.FlatbedError, match=r"rank 0 is not part of the mesh.*\[1\]"):
        flatbed.optim.Adam([nn.Parameter(DTensor.from_local(torch.zeros(3), other, [Replicate()]))])


def test_offloaded_shards_are_refused(two_ranks: None) -> None:
    mesh = DeviceMesh("cpu", [0])
    p = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()], run_check=False))
    mesh._device_type = "cuda"  # as FSDP2's shards with a CPUOffloadPolicy
    with pytest.raises(flatbed.FlatbedError, match=r"on the CPU.*CPUOffloadPolicy"):
        flatbed.optim.Adam([p])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_norms_of_fsdp_shards_are_refused(two_ranks: None, use_orig_params: bool) -> None:
    """Each rank would clip by the norm of its own shards."""
    device = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=use_orig_params, device_id=device)
    for options in ({"max_norm": 1.0}, {"skip_nonfinite": True}):
        with pytest.raises(flatbed.FlatbedError, match=r"shard of FSDP.*clip_grad_norm_"):
            flatbed.optim.Adam(model.parameters(), **options)
    with pytest.raises(ValueError, match="shard of FSDP"):
        flatbed.FlatParams(model)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(flatbed.FlatbedError, match="shard of FSDP"):
        optimizer.max_norm = 1.0
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # elementwise, so that shards are fine
    assert not all(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_zero_redundancy(two_ranks: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

    model = nn.Linear(4, 4)
    arguments: Any = {"optimizer_class": flatbed.optim.AdamW, "lr": 0.1}
    with pytest.raises(ValueError, match=r"max_norm.*ZeroRedundancyOptimizer.*clip_grad_norm_"):
        ZeroRedundancyOptimizer(model.parameters(), max_norm=1.0, **arguments)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), ema_decay=0.9, **arguments)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert any("ema" in state for state in optimizer.optim.state.values())


def test_parameters_without_values() -> None:
    model = nn.Linear(3, 3, device="meta")
    optimizer = flatbed.optim.Adam(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(flatbed.FlatbedError, match=r"'weight' is a meta tensor.*materialize"):
        optimizer.step()
    with FakeTensorMode():
        model = nn.Linear(3, 3)
        optimizer = flatbed.optim.Adam(model)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(flatbed.FlatbedError, match=r"a step under FakeTensorMode.*torch's optimizer"):
            optimizer.step()
        with pytest.raises(ValueError, match="cannot be flattened: it is a FakeTensor"):
            flatbed.FlatParams(model)


def test_parameters_replaced_later() -> None:
    """As `fully_shard` does: an optimizer of the old ones would train nothing, in silence."""
    model = nn.Linear(3, 1)
    optimizer = flatbed.optim.Adam(model)
    optimizer.step()  # without any gradient: nothing to do, as in torch
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(flatbed.FlatbedError, match=r"'weight' of the model.*after fully_shard"):
        optimizer.step()


def test_tables_are_not_traced() -> None:
    from torch._dynamo.exc import Unsupported

    model = nn.Sequential(flatbed.Embedding(5, 3), nn.Linear(3, 1))
    optimizer, ids = flatbed.optim.Adam(model), torch.tensor([1, 2])
    with pytest.raises(flatbed.FlatbedError, match=r"torch\.export.*to_torch"):
        torch.export.export(model, (ids,))
    with pytest.raises(Unsupported):
        torch.export.export(model, (ids,), strict=True)
    model(ids).sum().backward()
    with FakeTensorMode():
        with pytest.raises(flatbed.FlatbedError, match=r"a lookup under FakeTensorMode"):
            model(ids)
        with pytest.raises(flatbed.FlatbedError, match=r"a step under FakeTensorMode"):
            optimizer.step()
    optimizer.step()


class Factored(torch.optim.SGD):
    """Divides by norms of rows, but only in large matrices, as some kinds of Adafactor do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                is_large = p.dim() == 2 and min(p.shape) >= 128
                p.sub_(p.grad / p.grad.norm(dim=1, keepdim=True) if is_large else p.grad, alpha=group["lr"])


def test_from_torch_refuses_what_differs_in_large_matrices() -> None:
    with pytest.raises(flatbed.FlatbedError, match=r"Factored.*other elements"):
        flatbed.optim.from_torch(Factored, flatbed.Embedding(10, 4), lr=0.1)
