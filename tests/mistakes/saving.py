"""Mistakes with contiguous parameters and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatbed
from flatbed import FlatbedError
from tests.mistakes.mistake import Attempt, Mistake, embedding, model, unchanged, weights


def contiguous(what: str, name: str, attempt: Attempt, error: type[Exception], message: str) -> Mistake:
    return Mistake(f"ContiguousParams{name}", what, attempt, error, message)


def moved_away(folder: Path) -> None:
    module = model()
    parameters = flatbed.ContiguousParams(module.parameters())
    module[0].weight.data = torch.ones(4, 4)
    parameters.assert_buffer_is_valid()


def in_groups() -> flatbed.ContiguousParams:
    return flatbed.ContiguousParams([{"params": [p]} for p in model().parameters()])


def saves(what: str, attempt: Attempt, error: type[Exception], message: str) -> Mistake:
    """A mistake of saving, which must leave nothing in the folder."""

    def checked(folder: Path) -> None:
        with unchanged(lambda: list(folder.iterdir())):
            attempt(folder / "run")

    return Mistake("save_checkpoint", what, checked, error, message)


def loads(
    what: str, into: Callable[[], nn.Module], message: str, saved: Callable[[], nn.Module] = model
) -> Mistake:
    """A checkpoint that is loaded into another model, which must stay as it was."""

    def attempt(folder: Path) -> None:
        flatbed.save_checkpoint(folder / "run", saved())
        other = into()
        with unchanged(lambda: weights(other)):
            flatbed.load_checkpoint(folder / "run", other)

    return Mistake("load_checkpoint", what, attempt, FlatbedError, message)


def with_a_scheduler(folder: Path) -> None:
    module = model()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters()), 1)
    flatbed.save_checkpoint(folder, module, schedule)


def load_optimizers(folder: Path) -> None:
    module = model()
    flatbed.save_checkpoint(folder, module, flatbed.optim.Adam(module))
    flatbed.load_checkpoint(folder, module, [flatbed.optim.Adam(module), flatbed.optim.Adam(module)])


def save(*args: Any, **options: Any) -> Attempt:
    return lambda folder: flatbed.save_checkpoint(folder, *args, **options)


SAVING: list[Mistake] = [
    contiguous(
        "a method", "", lambda _: flatbed.ContiguousParams(model().parameters), TypeError, "a method.*module"
    ),
    contiguous(
        "after p.data",
        ".assert_buffer_is_valid",
        moved_away,
        ValueError,
        r"'param 0'.*lies outside.*rebind\(\)",
    ),
    *(
        contiguous("of several", f".{name}", lambda _, n=name: getattr(in_groups(), n), ValueError, message)  # type: ignore[misc]
        for name, message in (
            ("param_buffer", r"4 buffers.*flat.buffers"),
            ("gradient_buffer", r"4 buffers.*flat.grad_buffers"),
        )
    ),
    saves(
        "the wrong way round",
        lambda folder: flatbed.save_checkpoint(model(), folder),  # type: ignore[arg-type]
        TypeError,
        r"folder.*found Sequential",
    ),
    saves("parameters", save(model().parameters()), TypeError, r"nn.Module; found generator"),
    saves("a scheduler", with_a_scheduler, TypeError, r"Optimizer.*found StepLR"),
    saves(
        "a tensor in extra", save(model(), extra={"loss": torch.ones(2)}), TypeError, r"extra.*JSON.*Tensor"
    ),
    saves(
        "without the table",
        lambda folder: flatbed.save_checkpoint(folder, model(), flatbed.optim.Adam(embedding())),
        FlatbedError,
        r"Adam.*table.*pass a module",
    ),
    loads("of another model", lambda: nn.Linear(3, 3), r"lacks \['weight', 'bias'\].*lacks \['0.weight'"),
    loads(
        "a table into nn.Embedding",
        lambda: nn.Sequential(nn.Embedding(10, 4)),
        r"'0.weight' is a table in .*run.*to_torch\(\)",
        saved=lambda: nn.Sequential(embedding()),
    ),
    loads(
        "nn.Embedding into a table",
        lambda: nn.Sequential(embedding()),
        r"'0.weight' is no table in .*run.*from_pretrained",
        saved=lambda: nn.Sequential(nn.Embedding(10, 4)),
    ),
    loads(
        "of DDP",
        model,
        "save and load the model itself, not the wrapper of DDP",
        saved=lambda: nn.ModuleDict({"module": model()}),
    ),
    loads(
        "of another size",
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)),
        r"0.weight.*\(4, 4\).*\(3, 4\)",
    ),
    *(
        Mistake("load_checkpoint", what, attempt, error, message)
        for what, attempt, error, message in (
            (
                "a folder that does not exist",
                lambda folder: flatbed.load_checkpoint(folder / "missing", model()),
                FlatbedError,
                r"missing.*check the path",
            ),
            (
                "no folder",
                lambda _: flatbed.load_checkpoint(None, model()),  # type: ignore[arg-type]
                TypeError,
                r"Path; found NoneType",
            ),
            ("too many optimizers", load_optimizers, FlatbedError, r"1 optimizers; found 2.*Pass as many"),
        )
    ),
]
