"""Mistakes with optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Rprop

import flatbed
from flatbed import FlatbedError
from tests.mistakes.mistake import Mistake, backward, embedding, model, unchanged, weights

optim: Any = flatbed.optim
from_torch: Any = flatbed.optim.from_torch
KINDS: dict[str, Any] = {name: getattr(optim, name) for name in optim.__all__ if name != "from_torch"}
FOR_TABLES = ("RowwiseAdagrad", "SparseAdam")


def made(name: str, **options: Any) -> Any:
    """An optimizer with something that it can train."""
    return KINDS[name](embedding() if name in FOR_TABLES else model(), **options)


def kept(name: str, use: Callable[[Any], object]) -> Callable[[Path], object]:
    """An optimizer that a mistake must not change."""

    def attempt(folder: Path) -> None:
        optimizer = made(name)
        with unchanged(lambda: (len(optimizer.param_groups), optimizer.state_dict())):
            use(optimizer)

    return attempt


def of_constructor(name: str) -> list[Mistake]:
    """Mistakes with the arguments of an optimizer."""
    return [
        Mistake(f"optim.{name}", "negative lr", lambda _: made(name, lr=-0.1), ValueError, r"lr.*-0\.1"),
        Mistake(f"optim.{name}", "misspelt", lambda _: made(name, rate=1), TypeError, r"'rate'.*max_norm"),
    ]


def of_methods(name: str) -> list[Mistake]:
    """Mistakes with an optimizer that was built."""

    def add_again(optimizer: Any) -> None:
        optimizer.add_param_group({"params": list(optimizer.param_groups[0]["params"])})

    def load_weights(optimizer: Any) -> None:
        optimizer.load_state_dict(model().state_dict())

    methods = [
        (
            "add_param_group",
            "a module",
            lambda o: o.add_param_group(nn.Linear(2, 2)),
            TypeError,
            "dict.*Linear",
        ),
        ("add_param_group", "twice the same", add_again, ValueError, "more than one|names"),
        ("step", "the loss", lambda o: o.step(torch.ones(())), TypeError, "Tensor.*callable"),
        ("load_state_dict", "a path", lambda o: o.load_state_dict("a.pt"), TypeError, r"str.*torch\.load"),
        ("load_state_dict", "the model's", load_weights, ValueError, r"param_groups.*'0\.weight'"),
        ("ema_weights", "no average", lambda o: o.ema_weights().__enter__(), FlatbedError, "ema_decay"),
        ("max_norm", "a string", lambda o: setattr(o, "max_norm", "1"), ValueError, "max_norm.*'1'"),
    ]
    return [Mistake(f"optim.{name}.{of}", what, kept(name, use), *rest) for of, what, use, *rest in methods]


def given(params: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda _: optim.Adam(params())


def other_shape(folder: Path) -> None:
    module = model()
    optimizer = optim.Adam(module)
    backward(module)
    module[0].weight.data = torch.ones(3, 3)
    with unchanged(lambda: weights(module)):
        optimizer.step()


def untrained_table(folder: Path) -> None:
    emb, head = embedding(), nn.Linear(4, 1)
    optimizer = optim.Adam(head)
    for _ in range(2):
        head(emb(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()


def torchs_own_optimizer(folder: Path) -> None:
    emb = embedding()
    optimizer = torch.optim.SGD([emb.table], lr=0.1)
    emb(torch.tensor([1])).sum().backward()
    with unchanged(lambda: emb.read_rows(range(10))):
        optimizer.step()


def step_inside_the_average(folder: Path) -> None:
    module = model()
    optimizer = optim.Adam(module, ema_decay=0.9)
    backward(module)
    optimizer.step()
    with optimizer.ema_weights():
        optimizer.step()


OTHERS = [
    ("Adam", "nothing", given(lambda: None), TypeError, "NoneType"),
    ("Adam", "a tensor", given(lambda: nn.Linear(2, 2).weight), TypeError, "iterable"),
    ("Adam", "a method", given(lambda: model().parameters), TypeError, "method"),
    ("Adam", "a state dict", given(lambda: model().state_dict()), TypeError, "str"),
    ("Adam", "a list of modules", given(lambda: [embedding()]), TypeError, "Embedding"),
    ("Adam", "emb.weight", given(lambda: [embedding().weight]), TypeError, r"view.*emb\.table"),
    ("RowwiseAdagrad", "no tables", lambda _: optim.RowwiseAdagrad(model()), TypeError, "Adagrad"),
    ("SparseAdam", "no tables", lambda _: optim.SparseAdam(model()), TypeError, "AdamW"),
    ("Adam.step", "another shape", other_shape, FlatbedError, r"\(4, 4\).*\(3, 3\)"),
    ("Adam.step", "an untrained table", untrained_table, FlatbedError, "no optimizer"),
    ("Adam.step", "inside the average", step_inside_the_average, FlatbedError, "ema_weights"),
    ("from_torch", "no class", lambda _: from_torch(nn.Linear, embedding()), TypeError, "class.*Linear"),
    ("from_torch", "the wrong order", lambda _: from_torch(model(), Rprop), TypeError, "class.*Sequential"),
    ("from_torch", "a closure", lambda _: from_torch(LBFGS, embedding()), FlatbedError, "LBFGS.*closure"),
]

OPTIM: list[Mistake] = [
    *(one for name in KINDS for one in of_constructor(name)),
    *(one for name in ("Adam", "SparseAdam") for one in of_methods(name)),  # which all kinds share
    *(Mistake(f"optim.{of}", *rest) for of, *rest in OTHERS),  # type: ignore[arg-type]
    Mistake("Table", "in torch's optimizer", torchs_own_optimizer, FlatbedError, "from_torch"),
]
