"""Mistakes with flat parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatbed
from flatbed import FlatbedError
from tests.mistakes.mistake import Mistake, backward, embedding, mistake, model, stepped, unchanged, weights

Use = Callable[[nn.Module, flatbed.FlatParams, torch.optim.Optimizer], object]


def flat() -> flatbed.FlatParams:
    return flatbed.FlatParams(model())


def with_gradients(use: Use) -> Callable[[Path], object]:
    """A model, its flat parameters and their optimizer, before the first step; nothing may change."""

    def attempt(folder: Path) -> None:
        module = model()
        found = flatbed.FlatParams(module)
        optimizer = torch.optim.Adam(found.parameters())
        backward(module)
        with unchanged(
            lambda: (weights(module), [torch.as_tensor(p.grad).clone() for p in module.parameters()])
        ):
            use(module, found, optimizer)

    return attempt


def iterated_twice(folder: Path) -> None:
    parameters = model().parameters()
    assert sum(p.numel() for p in parameters)
    flatbed.FlatParams(parameters)


def of_another_size(module: nn.Module, found: flatbed.FlatParams, optimizer: Any) -> None:
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    found.load_optimizer_state_dict(optimizer, stepped(torch.optim.Adam, other).state_dict())


def of_another_optimizer(module: nn.Module, found: flatbed.FlatParams, optimizer: Any) -> None:
    state = stepped(torch.optim.SGD, model(), momentum=0.9).state_dict()
    with unchanged(optimizer.state_dict):
        found.load_optimizer_state_dict(optimizer, state)


def replaced_by_hand(call: str) -> Callable[[Path], object]:
    def attempt(folder: Path) -> None:
        module = model()
        found = flatbed.FlatParams(module)
        module[0].weight.data = torch.ones(3, 3)
        getattr(found, call)()

    return attempt


def set_gradient(value: Any) -> Callable[[Path], object]:
    def attempt(folder: Path) -> None:
        flat().parameters()[0].grad = value

    return attempt


FLAT: list[Mistake] = [
    mistake(
        "FlatParams",
        "a tensor",
        lambda _: flatbed.FlatParams(nn.Linear(2, 2).weight),
        TypeError,
        r"found a single Parameter: put it in a list",
    ),
    mistake(
        "FlatParams",
        "a state dict",
        lambda _: flatbed.FlatParams(model().state_dict()),  # type: ignore[arg-type]
        TypeError,
        r"needs a module.*found OrderedDict: give the module itself",
    ),
    mistake(
        "FlatParams",
        "an iterator that was used up",
        iterated_twice,
        ValueError,
        r"no trainable parameter among 0.*model.parameters\(\) can be read once",
    ),
    mistake(
        "FlatParams",
        "all frozen",
        lambda _: flatbed.FlatParams(model().requires_grad_(False)),
        ValueError,
        r"no trainable parameter among 4.*frozen parameters are left alone",
    ),
    mistake(
        "FlatParams",
        "a list of modules",
        lambda _: flatbed.FlatParams([nn.Linear(2, 2)]),  # type: ignore[arg-type]
        TypeError,
        r"item 0 of the source is a Linear, not a parameter: give its \.parameters\(\)",
    ),
    mistake(
        "FlatParams",
        "a table",
        lambda _: flatbed.FlatParams([embedding().table]),
        TypeError,
        r"item 0 of the source is Table\(10 × 4.*give it to an optimizer of flatbed.optim",
    ),
    mistake(
        "FlatParams",
        "a misspelt option",
        lambda _: flatbed.FlatParams(model(), grads="bind"),  # type: ignore[arg-type]
        ValueError,
        r"grads must be 'follow' or 'bound'; found 'bind'",
    ),
    mistake(
        "FlatParams.grad_norm",
        "a word",
        with_gradients(lambda m, f, o: f.grad_norm("fro")),  # type: ignore[arg-type]
        TypeError,
        r"norm_type must be a number such as 2.0, or 'inf'.*found 'fro'",
    ),
    mistake(
        "FlatParams.clip_grad_norm_",
        "the parameters again",
        with_gradients(lambda m, f, o: f.clip_grad_norm_([m[0].bias], 1.0)),  # type: ignore
        TypeError,
        r"max_norm must be a number; found \[Parameter(.|\n)*parameters are not given again",
    ),
    mistake(
        "FlatParams.clip_grad_norm_",
        "negative",
        with_gradients(lambda m, f, o: f.clip_grad_norm_(-1.0)),
        ValueError,
        r"max_norm must not be negative; found -1.0",
    ),
    mistake(
        "FlatParams.step",
        "the model's optimizer",
        with_gradients(lambda m, f, o: f.step(torch.optim.Adam(m.parameters()))),
        ValueError,
        r"not hold all flat parameters.*build it over flat.parameters\(\).*not over model.parameters\(\)",
    ),
    mistake(
        "FlatParams.step",
        "a closure",
        with_gradients(lambda m, f, o: f.step(lambda: None)),  # type: ignore[arg-type]
        TypeError,
        r"optimizer must be one of torch's, built over flat.parameters\(\).*found function",
    ),
    mistake(
        "FlatParams.restore",
        "a state dict",
        with_gradients(lambda m, f, o: f.restore(m.state_dict())),  # type: ignore[arg-type]
        TypeError,
        r"restore takes what flat.snapshot\(\) returned; found OrderedDict.*model.load_state_dict",
    ),
    mistake(
        "FlatParams.restore",
        "of another model",
        with_gradients(lambda m, f, o: f.restore(flatbed.FlatParams(nn.Linear(3, 3)).snapshot())),
        ValueError,
        r"taken of another layout.*take it from the FlatParams it is restored to",
    ),
    mistake(
        "FlatParams.assert_valid",
        "after p.data",
        replaced_by_hand("assert_valid"),
        FlatbedError,
        r"0.weight: its shape is \(3, 3\) and was \(4, 4\).*Remedy: build a new FlatParams",
    ),
    mistake(
        "FlatParams.rebind",
        "another size",
        replaced_by_hand("rebind"),
        FlatbedError,
        r"'0.weight' had shape \(4, 4\) and was given \(3, 3\); build a new FlatParams",
    ),
    mistake(
        "FlatParams.optimizer_state_dict",
        "the model's optimizer",
        with_gradients(lambda m, f, o: f.optimizer_state_dict(torch.optim.Adam(m.parameters()))),
        ValueError,
        r"holds 0 of 1 flat parameters: build it over flat.parameters\(\)",
    ),
    mistake(
        "FlatParams.load_optimizer_state_dict",
        "the wrong way round",
        with_gradients(lambda m, f, o: f.load_optimizer_state_dict(o.state_dict(), o)),  # type: ignore[arg-type]
        TypeError,
        r"optimizer must be one of torch's.*found dict",
    ),
    mistake(
        "FlatParams.load_optimizer_state_dict",
        "the model's state",
        with_gradients(lambda m, f, o: f.load_optimizer_state_dict(o, m.state_dict())),
        ValueError,
        r"expected a dict with 'state' and 'param_groups'.*found '0.weight', '0.bias'",
    ),
    mistake(
        "FlatParams.load_optimizer_state_dict",
        "of another size",
        with_gradients(of_another_size),
        FlatbedError,
        r"the state 'exp_avg' of '0.weight' is neither of its shape \(4, 4\) nor a scalar",
    ),
    mistake(
        "FlatParams.load_optimizer_state_dict",
        "of another optimizer",
        with_gradients(of_another_optimizer),
        FlatbedError,
        r"of another optimizer than Adam: it has 'momentum_buffer', and lacks 'step'; load it into",
    ),
    mistake(
        "FlatParameter",
        "by hand",
        lambda _: flatbed.FlatParameter(torch.ones(3)),
        TypeError,
        r"made by a FlatParams, not by hand: FlatParams\(model\).parameters\(\)",
    ),
    mistake(
        "FlatParameter.grad",
        "of another shape",
        set_gradient(torch.ones(3)),
        ValueError,
        r"of torch.float32 and shape \(256,\) was assigned a tensor of.* shape \(3,\): assign one like it",
    ),
    mistake(
        "FlatParameter.grad",
        "a number",
        set_gradient(0),
        TypeError,
        r"is a tensor of its shape \(256,\), or None; found 0",
    ),
    mistake(
        "Segment",
        "half of it",
        lambda _: flatbed.Segment("weight", (2, 2)),  # type: ignore[call-arg]
        TypeError,
        r"missing 3 required positional arguments: 'stride', 'offset', and 'buffer'",
    ),
    mistake(
        "Problem",
        "half of it",
        lambda _: flatbed.Problem("weight"),  # type: ignore[call-arg]
        TypeError,
        r"missing 3 required positional arguments: 'what', 'cause', and 'remedy'",
    ),
    mistake(
        "Snapshot",
        "by hand",
        lambda _: flatbed.Snapshot(),  # type: ignore[call-arg]
        TypeError,
        r"missing 2 required positional arguments: 'buffers' and 'segments'",
    ),
]
