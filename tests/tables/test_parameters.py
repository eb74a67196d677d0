"""Tables among `model.parameters()`: the usual calls of torch and of frameworks act on them, or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import FlatbedError, Table

ROWS, DIM = 12, 4
IDS = torch.tensor([1, 5, 5, 3])


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """The same model with `flatbed.Embedding` and with `nn.Embedding`."""
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    ours = nn.Sequential(
        flatbed.Embedding.from_pretrained(theirs[0].weight.detach(), freeze=False), nn.Linear(DIM, 2)
    )
    ours[1].load_state_dict(theirs[1].state_dict())
    return ours, theirs


def loss(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).square().sum()
    return result


def table_of(model: nn.Sequential) -> Table:
    table: Table = model[0].table  # type: ignore[assignment]
    return table


def check_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_names_shapes_and_counts_are_those_of_nn_embedding() -> None:
    ours, theirs = pair()
    kinds = [
        [(name, p.shape, p.dtype, p.dim(), p.ndim, p.numel()) for name, p in m.named_parameters()]
        for m in (ours, theirs)
    ]
    assert kinds[0] == kinds[1]
    assert [p.size(0) for p in ours.parameters()] == [p.size(0) for p in theirs.parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("clip", ["torch", "optimizer", "value"])
def test_training_with_the_usual_calls(clip: str) -> None:
    ours, theirs = pair()
    options = {"max_norm": 0.1} if clip == "optimizer" else {}
    optimizers = [
        flatbed.optim.SGD(ours.parameters(), lr=0.1, **options),
        torch.optim.SGD(theirs.parameters(), lr=0.1),
    ]
    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for _ in range(2):  # accumulated
                loss(model, (IDS + step) % ROWS).backward()
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            elif clip == "torch" or model is theirs:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            (model if step % 2 else optimizer).zero_grad(set_to_none=step != 2)
    check_equal(ours, theirs)


def test_averaging_raises() -> None:
    model, _ = pair()
    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(FlatbedError, match="table"):
        average.update_parameters(model)


@pytest.mark.parametrize(
    "copy_all",
    [
        lambda target, source: target.data.copy_(source.data),
        lambda target, source: target.copy_(source),
        lambda target, source: target.data.mul_(0.0).add_(source.data),
    ],
)
def test_target_networks_follow(copy_all: Callable[[Any, Any], object]) -> None:
    source, target = pair()[0], pair()[0]
    nn.init.normal_(target[0].weight)
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            copy_all(one, other)
    check_equal(target, source)


def test_initialisers_act_on_all_rows() -> None:
    model, _ = pair()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    assert torch.equal(table_of(model).read_rows(range(ROWS)), torch.full((ROWS, DIM), 0.5))
    before = table_of(model).read_rows(range(ROWS))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    assert not torch.equal(table_of(model).read_rows(range(ROWS)), before)


@pytest.mark.parametrize(
    "call", [torch.exp, torch.zeros_like, lambda t: t + 1, lambda t: t.view(-1), lambda t: t.detach() + 1]
)
def test_other_operations_raise(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(FlatbedError, match="read_rows"):
        call(flatbed.Embedding(ROWS, DIM).table)


def test_weight_cannot_be_replaced() -> None:
    model, _ = pair()
    with pytest.raises(AttributeError, match="from_pretrained"):
        model[0].weight = nn.Parameter(torch.zeros(ROWS, DIM))
    model[0].weight += 1  # type: ignore[operator]
    with pytest.raises(FlatbedError, match="copy_"):
        table_of(model).data = torch.zeros(ROWS, DIM)


@pytest.mark.filterwarnings("ignore")
def test_fsdp2_ignores_tables_when_told_to(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        ours, theirs = pair()
        fully_shard(ours, mesh=mesh, ignored_params=set(flatbed.tables(ours)))
        dense = [p for p in ours.parameters() if not isinstance(p, Table)]
        for model, optimizers in (
            (ours, [flatbed.optim.SGD(flatbed.tables(ours), lr=0.1), torch.optim.SGD(dense, lr=0.1)]),
            (theirs, [torch.optim.SGD(theirs.parameters(), lr=0.1)]),
        ):
            loss(model).backward()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(table_of(ours).read_rows(range(ROWS)), theirs[0].weight.detach())
        with pytest.raises(FlatbedError, match="ignored_params"):
            fully_shard(pair()[0], mesh=mesh)
    finally:
        dist.destroy_process_group()
