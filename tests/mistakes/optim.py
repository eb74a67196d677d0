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

optim = flatbed.optim
KINDS: dict[str, Any] = {name: getattr(optim, name) for name in optim.__all__ if name != "from_torch"}
FOR_TABLES = ("RowwiseAdagrad", "SparseAdam")


def made(name: str, **options: Any) -> Any:
    """An optimizer with something that it can train."""
    return KINDS[name](embedding() if name in FOR_TABLES else model(), **options)


def kept(name: str, use: Callable[[Any], object]) -> Callable[[Path], object]:
    """An optimizer that is as it was, whatever is done wrong with it."""

    def attempt(folder: Path) -> None:
        optimizer = made(name)
        with unchanged(lambda: (len(optimizer.param_groups), optimizer.state_dict())):
            use(optimizer)

    return attempt


def set_max_norm(optimizer: Any) -> None:
    optimizer.max_norm = "1"


def of_each(name: str) -> list[Mistake]:
    """What can be done wrong with every optimizer."""
    of = f"optim.{name}"
    return [
        mistake(of, "negative lr", lambda _: made(name, lr=-0.1), ValueError, r"lr must be ≥ 0; found -0\.1"),
        mistake(
            of,
            "a misspelt option",
            lambda _: made(name, learning_rate=0.1),
            TypeError,
            rf"{name} has no option 'learning_rate'; it has lr, .*max_norm",
        ),
        mistake(
            f"{of}.add_param_group",
            "a module",
            kept(name, lambda o: o.add_param_group(nn.Linear(2, 2))),
            TypeError,
            r"a param group is a dict with 'params', .*; found Linear",
        ),
        mistake(
            f"{of}.add_param_group",
            "twice the same",
            kept(name, lambda o: o.add_param_group({"params": list(o.param_groups[0]["params"])})),
            ValueError,
            r"more than one parameter group: number 0 of the new one is in group 0 already; leave it out",
        ),
        mistake(
            f"{of}.step",
            "the loss",
            kept(name, lambda o: o.step(torch.ones(()))),
            TypeError,
            r"closure must be a function.*found Tensor: call loss.backward\(\), and then step\(\)",
        ),
        mistake(
            f"{of}.zero_grad",
            "the model",
            kept(name, lambda o: o.zero_grad(model())),
            TypeError,
            r"set_to_none must be True or False; found Sequential: call zero_grad\(\)",
        ),
        mistake(
            f"{of}.load_state_dict",
            "a path",
            kept(name, lambda o: o.load_state_dict("adam.pt")),
            TypeError,
            r"what optimizer.state_dict\(\) returned; found str \(a file is read by torch.load first\)",
        ),
        mistake(
            f"{of}.load_state_dict",
            "the model's",
            kept(name, lambda o: o.load_state_dict(model().state_dict())),
            ValueError,
            r"has 'state' and 'param_groups'; found no state and no param_groups among '0.weight'",
        ),
        mistake(
            f"{of}.load_state_dict_without_tables",
            "of another model",
            kept(name, lambda o: o.load_state_dict_without_tables(two_parameters())),
            ValueError,
            r"of another model: its param groups hold \[2\] parameters, the optimizer's \[[14]\]",
        ),
        mistake(
            f"{of}.ema_weights",
            "without an average",
            kept(name, lambda o: o.ema_weights().__enter__()),
            FlatbedError,
            r"there is no average: build the optimizer with ema_decay=0.999",
        ),
        mistake(
            f"{of}.set_table_scalars",
            "of another's table",
            kept(name, lambda o: o.set_table_scalars(embedding().table, {"step": 1.0})),
            ValueError,
            rf"{name} does not have this table; found Table\(10 × 4.*: give it to it first",
        ),
        mistake(
            f"{of}.max_norm",
            "a string",
            kept(name, set_max_norm),
            ValueError,
            r"max_norm must be a number ≥ 0, or None for no clipping; found '1'",
        ),
    ]


def two_parameters() -> dict[str, Any]:
    return torch.optim.SGD([nn.Parameter(torch.ones(2)) for _ in range(2)]).state_dict()


def given(params: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda _: optim.Adam(params())


def iterated_twice() -> Any:
    parameters = model().parameters()
    assert sum(p.numel() for p in parameters)
    return parameters


def another_optimizers_state(folder: Path) -> None:
    optimizer = optim.Adam(model())
    with unchanged(optimizer.state_dict):
        optimizer.load_state_dict(stepped(torch.optim.SGD, model(), momentum=0.9).state_dict())


def another_size(folder: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = optim.Adam(model())
    with unchanged(optimizer.state_dict):
        optimizer.load_state_dict(stepped(torch.optim.Adam, other).state_dict())


def step_with(prepare: Callable[[nn.Module], None], module: nn.Module) -> None:
    optimizer = optim.Adam(module)
    prepare(module)
    with unchanged(lambda: weights(module)):
        optimizer.step()


def replaced_after_backward(module: nn.Module) -> None:
    backward(module)
    module[0].weight.data = torch.ones(3, 3)  # type: ignore[index]


def nobody_trains_the_table(folder: Path) -> None:
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


PARAMETERS = [
    mistake(
        "optim.Adam", "nothing", given(lambda: None), TypeError, r"found NoneType: give the module itself"
    ),
    mistake(
        "optim.Adam",
        "a tensor",
        given(lambda: nn.Linear(2, 2).weight),
        TypeError,
        r"iterable of Tensors or dicts, but got .*: put it in a list",
    ),
    mistake(
        "optim.Adam",
        "a method",
        given(lambda: model().parameters),
        TypeError,
        r"params must be a module.*found method: give the module itself",
    ),
    mistake(
        "optim.Adam",
        "a state dict",
        given(lambda: model().state_dict()),
        TypeError,
        r"params must be a module.*found OrderedDict: give the module itself",
    ),
    mistake(
        "optim.Adam",
        "a list of modules",
        given(lambda: [embedding()]),
        TypeError,
        r"a Embedding is among the parameters.*give its \.parameters\(\), or its \.table",
    ),
    mistake(
        "optim.Adam",
        "emb.parameters",
        given(lambda: embedding().parameters()),
        ValueError,
        r"nothing to train. Tables are not among module.parameters\(\).*give the module itself, or emb.table",
    ),
    mistake(
        "optim.Adam",
        "emb.weight",
        given(lambda: [embedding().weight]),
        TypeError,
        r"parameter 0 of group 0 is a view of a table's weights: give emb.table instead",
    ),
    mistake(
        "optim.Adam",
        "an iterator that was used up",
        given(iterated_twice),
        ValueError,
        r"nothing to train.*module.parameters\(\), which can be read once",
    ),
    mistake(
        "optim.Adam",
        "one beta",
        lambda _: optim.Adam(model(), betas=0.9),  # type: ignore[arg-type]
        ValueError,
        r"betas must be two numbers; found 0\.9",
    ),
    mistake(
        "optim.AdamW",
        "a string",
        lambda _: optim.AdamW(model(), lr="1e-3"),  # type: ignore[arg-type]
        TypeError,
        r"lr must be a number; found '1e-3'",
    ),
    mistake(
        "optim.AdamW",
        "a narrow state",
        lambda _: optim.AdamW(model(), state_dtype=torch.float16),
        ValueError,
        r"state_dtype must be one of torch.float32.*found torch.float16",
    ),
    mistake(
        "optim.AdamW",
        "a word for a switch",
        lambda _: optim.AdamW(model(), master_weights="no"),  # type: ignore[arg-type]
        TypeError,
        r"master_weights must be True or False; found 'no'",
    ),
    mistake(
        "optim.SGD",
        "nesterov alone",
        lambda _: optim.SGD(model(), nesterov=True),
        ValueError,
        r"nesterov needs a momentum and no dampening; found momentum=0, dampening=0",
    ),
    mistake(
        "optim.RowwiseAdagrad",
        "a model without tables",
        lambda _: optim.RowwiseAdagrad(model()),
        TypeError,
        r"for tables, and parameter '0.weight' is none: give it to Adagrad",
    ),
    mistake(
        "optim.SparseAdam",
        "a model without tables",
        lambda _: optim.SparseAdam(model()),
        TypeError,
        r"for tables, and parameter '0.weight' is none: give it to Adam or AdamW",
    ),
]

TRAINING = [
    mistake(
        "optim.Adam.add_param_group",
        "clipping of its own",
        kept("Adam", lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))], "max_norm": 1.0})),
        ValueError,
        r"max_norm: an option of the whole optimizer, not of a param group",
    ),
    mistake(
        "optim.Adam.load_state_dict",
        "of another optimizer",
        another_optimizers_state,
        FlatbedError,
        r"'0.weight' has 'momentum_buffer': it is of another optimizer than Adam",
    ),
    mistake(
        "optim.Adam.load_state_dict",
        "of another size",
        another_size,
        FlatbedError,
        r"state 'exp_avg' of parameter '0.weight' has shape \(3, 4\), the parameter \(4, 4\)",
    ),
    mistake(
        "optim.Adam.step",
        "a parameter of another shape",
        lambda _: step_with(replaced_after_backward, model()),
        FlatbedError,
        r"gradient of parameter '0.weight' has shape \(4, 4\).*the parameter \(3, 3\)",
    ),
    mistake(
        "optim.Adam.step",
        "sparse gradients",
        lambda _: step_with(
            lambda layer: layer(torch.tensor([1])).sum().backward(), nn.Embedding(5, 3, sparse=True)
        ),
        FlatbedError,
        r"gradient of parameter 'weight' is sparse.*sparse=False",
    ),
    mistake(
        "optim.Adam.step",
        "a table that nobody has",
        nobody_trains_the_table,
        FlatbedError,
        r"receives gradients, but no optimizer has it.*flatbed.optim.Adam\(model\)",
    ),
    mistake(
        "optim.Adam.step",
        "inside the average",
        step_inside_the_average,
        FlatbedError,
        r"the model holds averaged weights.*step outside of it",
    ),
    mistake(
        "Table",
        "in an optimizer of torch",
        torchs_own_optimizer,
        FlatbedError,
        r"called on a table, whose rows are no tensor.*flatbed.optim.from_torch",
    ),
    mistake(
        "optim.from_torch",
        "an optimizer, not its class",
        lambda _: optim.from_torch(torch.optim.Rprop(model().parameters()), embedding()),  # type: ignore[arg-type]
        TypeError,
        r"takes a class of torch.optim.*found an object of Rprop",
    ),
    mistake(
        "optim.from_torch",
        "the wrong way round",
        lambda _: optim.from_torch(model(), torch.optim.Rprop),  # type: ignore[arg-type]
        TypeError,
        r"takes a class of torch.optim.*and then what to train; found an object of Sequential",
    ),
    mistake(
        "optim.from_torch",
        "one that needs a closure",
        lambda _: optim.from_torch(torch.optim.LBFGS, embedding()),
        FlatbedError,
        r"LBFGS cannot train a table: its step needs a closure",
    ),
]

OPTIM: list[Mistake] = [*(one for name in KINDS for one in of_each(name)), *PARAMETERS, *TRAINING]
