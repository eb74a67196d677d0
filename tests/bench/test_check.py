import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flatbed.bench.check import TOLERANCE, Deviation, compare, take_given_steps, weights_of, worst
from flatbed.bench.ways import OPTIMIZERS, WAYS, Recipe, Trainer, Way


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.Linear(48, 4))


def deviation_of(setup: Callable[[nn.Module, Recipe], Trainer], optimizer: str = "adamw") -> Deviation:
    recipe = OPTIMIZERS[optimizer]
    start = weights_of(make_model())
    reference = take_given_steps(WAYS[0].setup(make_model(), recipe), seed=1)
    return compare(take_given_steps(setup(make_model(), recipe), seed=1), reference, start)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_way_computes_what_the_plain_loop_computes(way: Way, optimizer: str) -> None:
    deviation = deviation_of(way.setup, optimizer)
    assert deviation.ok
    assert deviation.max_rel_error < TOLERANCE / 10
    if way is WAYS[0]:
        assert deviation == Deviation(0.0, 0.0)


def without_clipping(model: nn.Module, recipe: Recipe) -> Trainer:
    return Trainer(model, recipe.make_torch(list(model.parameters())), lambda limit: None)


def with_another_learning_rate(model: nn.Module, recipe: Recipe) -> Trainer:
    trainer = WAYS[0].setup(model, recipe)
    trainer.optimizer.param_groups[0]["lr"] *= 1.01
    return trainer


def without_the_last_bias(model: nn.Module, recipe: Recipe) -> Trainer:
    params = list(model.parameters())
    clip = lambda limit: nn.utils.clip_grad_norm_(params, limit)  # noqa: E731
    return Trainer(model, recipe.make_torch(params[:-1]), clip)


def stopping_after_one_step(model: nn.Module, recipe: Recipe) -> Trainer:
    trainer = WAYS[0].setup(model, recipe)
    step = trainer.optimizer.step
    remaining = iter([step])
    trainer.optimizer.step = lambda: next(remaining, lambda: None)()  # type: ignore[method-assign,assignment]
    return trainer


def training_on_nothing(model: nn.Module, recipe: Recipe) -> Trainer:
    trainer = WAYS[0].setup(model, recipe)
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    return trainer


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "wrong",
    [
        without_clipping,
        with_another_learning_rate,
        without_the_last_bias,
        stopping_after_one_step,
        training_on_nothing,
    ],
)
def test_a_wrong_way_is_found_out(wrong: Callable[[nn.Module, Recipe], Trainer], optimizer: str) -> None:
    assert not deviation_of(wrong, optimizer).ok


def test_the_worst_parameter_counts() -> None:
    start = [torch.zeros(1000), torch.zeros(2)]
    reference = [torch.ones(1000), torch.ones(2)]
    weights = [torch.ones(1000), torch.tensor([1.0, 1.5])]
    assert compare(weights, reference, start) == Deviation(0.5 / math.sqrt(2), 0.5)
    assert compare(start, start, start) == Deviation(0.0, 0.0)
    assert compare(reference, start, start).max_rel_error == math.inf
    with pytest.raises(ValueError):
        compare(weights, reference, start[:1])


def test_the_worst_of_several_comparisons_counts() -> None:
    assert worst([Deviation(0.1, 3.0), Deviation(0.2, 1.0)]) == Deviation(0.2, 3.0)
    assert not worst([Deviation(math.nan, 0.0), Deviation(0.0, 0.0)]).ok
    assert worst([]) == Deviation(0.0, 0.0)
