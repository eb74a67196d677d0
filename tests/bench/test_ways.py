from collections.abc import Callable

import pytest
import torch
from torch import nn

from flatbed.bench import ways
from flatbed.bench.check import compare, take_given_steps, weights_of
from flatbed.bench.rows import FUSED, LOOP
from flatbed.bench.ways import CAPTURED, CUDA_WAYS, OPTIM, OPTIMIZERS, WAYS, Way, find_ways
from tests.bench.samples import CPU, TINY, make_batch

CUDA = torch.device("cuda")
IMPLEMENTATIONS = {
    "torch loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
    "flat following": {"fused": True},
    "flat following, one call": {"fused": True},
    "flat bound": {"fused": True},
    "flat bound, one call": {"fused": True},
    "flatbed.optim": {},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_way_runs_its_own_implementation(way: Way, optimizer: str) -> None:
    (group,) = way.setup(nn.Linear(4, 4), OPTIMIZERS[optimizer]).optimizer.param_groups
    asked = IMPLEMENTATIONS[way.name]
    assert {name: group[name] for name in asked} == asked
    assert not any(group[name] for name in {"foreach", "fused"} - set(asked))
    assert len(group["params"]) == (1 if way.name.startswith("flat ") else 2)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_an_update_moves_the_model_and_drops_its_gradients(way: Way) -> None:
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    trainer = way.setup(model, OPTIMIZERS["adamw"])
    model(torch.ones(2, 4)).square().sum().backward()
    trainer.update()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None or not model.weight.grad.any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_classes_of_a_recipe_have_the_same_hyperparameters(optimizer: str) -> None:
    recipe = OPTIMIZERS[optimizer]
    params = [nn.Parameter(torch.ones(2))]
    theirs = recipe.make_torch(params).param_groups[0]
    ours = recipe.make_flatbed(params, max_norm=2.0)
    assert type(ours).__name__ == type(recipe.make_torch(params)).__name__
    assert ours.max_norm == 2.0
    shared = set(theirs) & set(ours.param_groups[0]) - {"params", "foreach", "fused"}
    assert {"lr", "weight_decay"} <= shared
    assert all(theirs[name] == ours.param_groups[0][name] for name in shared)


def test_ways_are_found_by_name_and_the_reference_is_always_among_them() -> None:
    assert find_ways(CPU) == WAYS
    assert find_ways(CUDA) == WAYS + CUDA_WAYS
    assert [way.name for way in find_ways(CPU, [OPTIM, FUSED])] == [LOOP, FUSED, OPTIM]
    assert [way.name for way in find_ways(CUDA, [CAPTURED])] == [LOOP, CAPTURED]
    assert find_ways(CPU, [LOOP]) == WAYS[:1]


def test_an_unknown_way_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"no way named 'flat' on cpu; there are 'torch loop', .*'flatbed"):
        find_ways(CPU, [OPTIM, "flat"])
    with pytest.raises(ValueError, match=r"no way named 'flatbed\.optim, captured' on cpu"):
        find_ways(CPU, [CAPTURED])


class Called:
    """What stands for a CUDA graph on a CPU: it runs the call, and counts how often it was to begin again."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.n_forgotten = 0
        CALLED.append(self)

    def __call__(self) -> None:
        self.call()

    def forget(self) -> None:
        self.n_forgotten += 1


CALLED: list[Called] = []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_captured_way_keeps_gradients_in_place_and_computes_the_same(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "Captured", Called)
    reference, model = TINY.build(), TINY.build()
    model.load_state_dict(reference.state_dict())
    start = weights_of(model)
    trainer = CUDA_WAYS[0].setup(model, OPTIMIZERS[optimizer])
    weights = take_given_steps(trainer, seed=1)
    expected = take_given_steps(WAYS[0].setup(reference, OPTIMIZERS[optimizer]), seed=1)
    assert compare(weights, expected, start).ok

    places = [p.grad.data_ptr() for p in model.parameters()]
    assert not any(p.grad.any() for p in model.parameters())
    trainer.backward(TINY, make_batch(torch.Generator()))
    assert all(p.grad.any() for p in model.parameters())
    trainer.update()
    trainer.update()
    assert [p.grad.data_ptr() for p in model.parameters()] == places
    assert CALLED[-1].n_forgotten == 2  # for the norm of the check, and for the usual one


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_captured_update_computes_what_the_plain_loop_computes(optimizer: str) -> None:
    reference, model = TINY.build().cuda(), TINY.build().cuda()
    model.load_state_dict(reference.state_dict())
    start = weights_of(model)
    trainers = [way.setup(m, OPTIMIZERS[optimizer]) for way, m in zip(
        (WAYS[0], *CUDA_WAYS), (reference, model), strict=True)]  # fmt: skip
    expected, weights = (take_given_steps(trainer, seed=1) for trainer in trainers)
    assert compare(weights, expected, start).ok
    for seed in range(5):
        for trainer in trainers:
            trainer.backward(TINY, make_batch(torch.Generator("cuda").manual_seed(seed)))
            trainer.update()
    assert compare(weights_of(model), weights_of(reference), start).ok
