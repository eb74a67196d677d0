"""Mistakes with optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatbed
from flatbed import FlatbedError
from tests.mistakes.mistake import Mistake, backward, embedding, mistake, model, stepped, unchanged, weights

optim: Any = flatbed.optim
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


def of_each(name: str) -> list[Mistake]:
    """Mistakes that can be made with every optimizer."""
    groups = [
        ("", "negative lr", lambda _: made(name, lr=-0.1), ValueError, r"lr.*-0\.1"),
        ("", "a misspelt option", lambda _: made(name, rate=1), TypeError, r"'rate'.*max_norm"),
    ]
    methods = [
        (
            "add_param_group",
            "a module",
            lambda o: o.add_param_group(nn.Linear(2, 2)),
            TypeError,
            "dict.*Linear",
        ),
        (
            "add_param_group",
            "twice the same",
            lambda o: o.add_param_group({"params": list(o.param_groups[0]["params"])}),
            ValueError,
            "more than one|names",
        ),
        ("step", "the loss", lambda o: o.step(torch.ones(())), TypeError, "Tensor.*callable"),
        ("load_state_dict", "a path", lambda o: o.load_state_dict("a.pt"), TypeError, r"str.*torch\.load"),
        (
            "load_state_dict",
            "the model's",
            lambda o: o.load_state_dict(model().state_dict()),
            ValueError,
            r"param_groups.*'0\.weight'",
        ),
        ("ema_weights", "no average", lambda o: o.ema_weights().__enter__(), FlatbedError, "ema_decay"),
        ("max_norm", "a string", lambda o: setattr(o, "max_norm", "1"), ValueError, "max_norm.*'1'"),
    ]
    return [
        *(mistake(f"optim.{name}", *rest) for _, *rest in groups),
        *(
            mistake(f"optim.{name}.{method}", what, kept(name, use), *expected)
            for method, what, use, *expected in methods
        ),
    ]


def given(params: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda _: optim.Adam(params())


def load(kind: Any, module: nn.Module, **options: Any) -> Callable[[Path], object]:
    return kept("Adam", lambda o: o.load_state_dict(stepped(kind, module, **options).state_dict()))


def step_with(prepare: Callable[[Any], object], module: nn.Module) -> None:
    optimizer = optim.Adam(module)
    prepare(module)
    with unchanged(lambda: weights(module)):
        optimizer.step()


def replaced_after_backward(module: Any) -> None:
    backward(module)
    module[0].weight.data = torch.ones(3, 3)


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


def sparse_gradients(folder: Path) -> None:
    layer = nn.Embedding(5, 3, sparse=True)
    step_with(lambda layer: layer(torch.tensor([1])).sum().backward(), layer)


def group_with_clipping(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(2)))], "max_norm": 1.0})


SMALL = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

OTHERS = [
    ("Adam", "nothing", given(lambda: None), TypeError, "NoneType"),
    ("Adam", "a tensor", given(lambda: nn.Linear(2, 2).weight), TypeError, "iterable"),
    ("Adam", "a method", given(lambda: model().parameters), TypeError, "method"),
    ("Adam", "a state dict", given(lambda: model().state_dict()), TypeError, "str"),
    ("Adam", "a list of modules", given(lambda: [embedding()]), TypeError, "Embedding"),
    ("Adam", "emb.weight", given(lambda: [embedding().weight]), TypeError, r"view.*emb\.table"),
    ("Adam", "one beta", lambda _: optim.Adam(model(), betas=0.9), ValueError, r"betas.*0\.9"),
    ("AdamW", "a string", lambda _: made("AdamW", lr="1e-3"), TypeError, "lr.*'1e-3'"),
    (
        "AdamW",
        "a narrow state",
        lambda _: made("AdamW", state_dtype=torch.float16),
        ValueError,
        "state_dtype.*float16",
    ),
    ("AdamW", "a word", lambda _: made("AdamW", master_weights="no"), TypeError, "master_weights.*'no'"),
    ("SGD", "nesterov alone", lambda _: made("SGD", nesterov=True), ValueError, "momentum=0"),
    ("RowwiseAdagrad", "no tables", lambda _: optim.RowwiseAdagrad(model()), TypeError, "Adagrad"),
    ("SparseAdam", "no tables", lambda _: optim.SparseAdam(model()), TypeError, "AdamW"),
    (
        "Adam.add_param_group",
        "clipping",
        kept("Adam", group_with_clipping),
        ValueError,
        r"max_norm.*param group: pass it to the constructor",
    ),
    (
        "Adam.load_state_dict",
        "another optimizer's",
        load(torch.optim.SGD, model(), momentum=0.9),
        FlatbedError,
        "'momentum_buffer'.*Adam",
    ),
    (
        "Adam.load_state_dict",
        "another size",
        load(torch.optim.Adam, SMALL),
        FlatbedError,
        r"\(3, 4\).*\(4, 4\)",
    ),
    (
        "Adam.step",
        "another shape",
        lambda _: step_with(replaced_after_backward, model()),
        FlatbedError,
        r"\(4, 4\).*\(3, 3\)",
    ),
    ("Adam.step", "sparse gradients", sparse_gradients, FlatbedError, "'weight' is sparse.*sparse=False"),
    ("Adam.step", "an untrained table", untrained_table, FlatbedError, "no optimizer"),
    ("Adam.step", "inside the average", step_inside_the_average, FlatbedError, "ema_weights"),
    (
        "from_torch",
        "no class",
        lambda _: optim.from_torch(torch.optim.Rprop(model().parameters()), embedding()),
        TypeError,
        "class.*Rprop",
    ),
    (
        "from_torch",
        "the wrong order",
        lambda _: optim.from_torch(model(), torch.optim.Rprop),
        TypeError,
        "class.*Sequential",
    ),
    (
        "from_torch",
        "a closure",
        lambda _: optim.from_torch(torch.optim.LBFGS, embedding()),
        FlatbedError,
        "LBFGS.*closure",
    ),
]

OPTIM: list[Mistake] = [
    *(one for name in KINDS for one in of_each(name)),
    *(mistake(f"optim.{of}", *rest) for of, *rest in OTHERS),  # type: ignore[arg-type]
    mistake("Table", "in torch's optimizer", torchs_own_optimizer, FlatbedError, "from_torch"),
]
