"""Mistakes with flat parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatbed
from flatbed import FlatbedError
from tests.mistakes.mistake import Mistake, backward, embedding, model, stepped, unchanged, weights

Flatten = Callable[[], Any]
Use = Callable[[Any, flatbed.FlatParams, Any], object]


def used_iterator() -> Any:
    parameters = model().parameters()
    assert sum(p.numel() for p in parameters)
    return parameters


def with_gradients(use: Use) -> Callable[[Path], object]:
    """Run `use` with a model, its FlatParams and an optimizer before the first step; nothing may change."""

    def attempt(folder: Path) -> None:
        module = model()
        found = flatbed.FlatParams(module)
        optimizer = torch.optim.Adam(found.parameters())
        backward(module)
        with (
            unchanged(lambda: (weights(module), [p.grad.clone() for p in module.parameters()])),  # type: ignore[union-attr]
            unchanged(optimizer.state_dict),
        ):
            use(module, found, optimizer)

    return attempt


def replaced_by_hand(call: str) -> Callable[[Path], object]:
    def attempt(folder: Path) -> None:
        module = model()
        found = flatbed.FlatParams(module)
        module[0].weight.data = torch.ones(3, 3)
        getattr(found, call)()

    return attempt


SOURCES: list[tuple[str, Flatten, type[Exception], str]] = [
    ("a tensor", lambda: nn.Linear(2, 2).weight, TypeError, r"found a Parameter.*module"),
    ("a state dict", lambda: model().state_dict(), TypeError, r"found a OrderedDict.*module"),
    ("an iterator that was used up", used_iterator, ValueError, r"among 0.*read once"),
    ("all frozen", lambda: model().requires_grad_(False), ValueError, r"among 4.*frozen"),
    ("a list of modules", lambda: [nn.Linear(2, 2)], TypeError, r"item 0.*Linear.*parameters"),
    ("a table", lambda: [embedding().table], ValueError, r"among 0.*tables"),
]
OTHER = nn.Sequential(nn.Linear(4, 1))
HELD = r"flat parameters.*flat.parameters\(\)"
USES: list[tuple[str, str, Use, str]] = [
    ("grad_norm", "a word", lambda m, f, o: f.grad_norm("fro"), "fro"),  # type: ignore[arg-type]
    ("clip_grad_norm_", "negative", lambda m, f, o: f.clip_grad_norm_(-1.0), r"negative.*-1.0"),
    ("step", "the model's optimizer", lambda m, f, o: f.step(torch.optim.Adam(m.parameters())), HELD),
    (
        "restore",
        "of another model",
        lambda m, f, o: f.restore(flatbed.FlatParams(nn.Linear(3, 3)).snapshot()),
        r"another layout.*snapshot of this FlatParams",
    ),
    (
        "optimizer_state_dict",
        "the model's optimizer",
        lambda m, f, o: f.optimizer_state_dict(torch.optim.Adam(m.parameters())),
        f"holds 0 of 1 {HELD}",
    ),
    (
        "load_optimizer_state_dict",
        "of another model",
        lambda m, f, o: f.load_optimizer_state_dict(o, stepped(torch.optim.Adam, OTHER).state_dict()),
        r"with \[2\] parameters.*have \[4\].*same parameters",
    ),
]
FLAT: list[Mistake] = [
    *(
        Mistake("FlatParams", what, lambda _, make=make: flatbed.FlatParams(make()), error, message)  # type: ignore[misc]
        for what, make, error, message in SOURCES
    ),
    *(
        Mistake(f"FlatParams.{of}", what, with_gradients(use), ValueError, said)
        for of, what, use, said in USES
    ),
    Mistake(
        "FlatParams",
        "a misspelt option",
        lambda _: flatbed.FlatParams(model(), grads="bind"),  # type: ignore[arg-type]
        ValueError,
        r"'follow' or 'bound'; found 'bind'",
    ),
    *(
        Mistake(f"FlatParams.{call}", "after p.data", replaced_by_hand(call), FlatbedError, message)
        for call, message in (
            ("assert_valid", r"0.weight.*\(3, 3\).*\(4, 4\).*flatten the parameters again"),
            ("rebind", r"0.weight.*\(3, 3\).*\(4, 4\).*flatten the parameters again"),
        )
    ),
]
