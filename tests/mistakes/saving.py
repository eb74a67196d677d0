"""Mistakes with contiguous parameters and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatbed
from flatbed import FlatbedError
from tests.mistakes.mistake import Mistake, embedding, mistake, model, unchanged, weights


def contiguous(in_groups: bool = False) -> flatbed.ContiguousParams:
    module = model()
    groups = [{"params": [p]} for p in module.parameters()]
    return flatbed.ContiguousParams(groups if in_groups else module.parameters())


def moved_away(folder: Path) -> None:
    module = model()
    parameters = flatbed.ContiguousParams(module.parameters())
    module[0].weight.data = torch.ones(4, 4)
    parameters.assert_buffer_is_valid()


CONTIGUOUS: list[Any] = [
    (
        "ContiguousParams",
        "a method",
        lambda _: flatbed.ContiguousParams(model().parameters),
        TypeError,
        r"found a method.*module",
    ),
    (
        "ContiguousParams.assert_buffer_is_valid",
        "after p.data",
        moved_away,
        ValueError,
        r"'param 0' lies outside.*rebind\(\)",
    ),
    (
        "ContiguousParams.param_buffer",
        "of several",
        lambda _: contiguous(in_groups=True).param_buffer,
        ValueError,
        r"4 buffers.*flat.buffers",
    ),
    (
        "ContiguousParams.gradient_buffer",
        "of several",
        lambda _: contiguous(in_groups=True).gradient_buffer,
        ValueError,
        r"4 buffers.*flat.grad_buffers",
    ),
]


def load_into(
    make: Callable[[], nn.Module], saved: Callable[[], nn.Module] = model
) -> Callable[[Path], object]:
    def attempt(folder: Path) -> None:
        flatbed.save_checkpoint(folder / "run", saved())
        other = make()
        with unchanged(lambda: weights(other)):
            flatbed.load_checkpoint(folder / "run", other)

    return attempt


def load_optimizers(folder: Path) -> None:
    module = model()
    flatbed.save_checkpoint(folder, module, flatbed.optim.Adam(module))
    flatbed.load_checkpoint(folder, module, [flatbed.optim.Adam(module), flatbed.optim.Adam(module)])


def with_a_scheduler(folder: Path) -> None:
    module = model()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters()), 1)
    with unchanged(lambda: list(folder.iterdir())):
        flatbed.save_checkpoint(folder / "run", module, schedule)


def without_its_table(folder: Path) -> None:
    emb = embedding()
    flatbed.save_checkpoint(folder / "run", model(), flatbed.optim.Adam(emb))


def extra_tensor(folder: Path) -> None:
    with unchanged(lambda: list(folder.iterdir())):
        flatbed.save_checkpoint(folder / "run", model(), extra={"loss": torch.ones(2)})


CHECKPOINTS: list[Any] = [
    (
        "save_checkpoint",
        "the wrong way round",
        lambda folder: flatbed.save_checkpoint(model(), folder),
        TypeError,
        r"folder.*found Sequential",
    ),
    (
        "save_checkpoint",
        "parameters",
        lambda folder: flatbed.save_checkpoint(folder, model().parameters()),
        TypeError,
        r"nn.Module; found generator",
    ),
    ("save_checkpoint", "a scheduler", with_a_scheduler, TypeError, r"Optimizer.*found StepLR"),
    ("save_checkpoint", "a tensor in extra", extra_tensor, TypeError, r"extra.*JSON.*Tensor"),
    ("save_checkpoint", "without the table", without_its_table, FlatbedError, r"Adam.*table.*pass a module"),
    (
        "load_checkpoint",
        "a folder that does not exist",
        lambda folder: flatbed.load_checkpoint(folder / "missing", model()),
        FlatbedError,
        r"missing.*check the path",
    ),
    (
        "load_checkpoint",
        "no folder",
        lambda folder: flatbed.load_checkpoint(None, model()),
        TypeError,
        r"Path; found NoneType",
    ),
    (
        "load_checkpoint",
        "of another model",
        load_into(lambda: nn.Linear(3, 3)),
        FlatbedError,
        r"lacks \['weight', 'bias'\].*lacks \['0.weight'",
    ),
    (
        "load_checkpoint",
        "a table into nn.Embedding",
        load_into(lambda: nn.Sequential(nn.Embedding(10, 4)), lambda: nn.Sequential(embedding())),
        FlatbedError,
        r"'0.weight' is a table in .*run.*to_torch\(\)",
    ),
    (
        "load_checkpoint",
        "nn.Embedding into a table",
        load_into(lambda: nn.Sequential(embedding()), lambda: nn.Sequential(nn.Embedding(10, 4))),
        FlatbedError,
        r"'0.weight' is no table in .*run.*from_pretrained",
    ),
    (
        "load_checkpoint",
        "of DDP",
        load_into(model, lambda: nn.ModuleDict({"module": model()})),
        FlatbedError,
        r"another model.*save and load ddp\.module",
    ),
    (
        "load_checkpoint",
        "of another size",
        load_into(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))),
        FlatbedError,
        r"0.weight.*\(4, 4\).*\(3, 4\)",
    ),
    (
        "load_checkpoint",
        "too many optimizers",
        load_optimizers,
        FlatbedError,
        r"1 optimizers; found 2.*Pass as many",
    ),
]

SAVING: list[Mistake] = [mistake(*row) for row in (*CONTIGUOUS, *CHECKPOINTS)]
