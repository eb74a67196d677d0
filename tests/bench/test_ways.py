import pytest
import torch
from torch import nn

from flatbed.bench.ways import OPTIMIZERS, WAYS, Way

IMPLEMENTATIONS = {
    "torch loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
    "flat following": {"fused": True},
    "flat following, one call": {"fused": True},
    "flat bound": {"fused": True},
    "flat bound, one call": {"fused": True},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_way_runs_its_own_implementation(way: Way, optimizer: str) -> None:
    (group,) = way.setup(nn.Linear(4, 4), OPTIMIZERS[optimizer]).optimizer.param_groups
    asked = IMPLEMENTATIONS[way.name]
    assert {name: group[name] for name in asked} == asked
    assert not any(group[name] for name in {"foreach", "fused"} - set(asked))
    assert len(group["params"]) == (1 if way.name.startswith("flat") else 2)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_an_update_moves_the_model_and_drops_its_gradients(way: Way) -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    trainer = way.setup(model, OPTIMIZERS["adamw"])
    model(torch.ones(2, 4)).square().sum().backward()
    trainer.update()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None or not model.weight.grad.any()
