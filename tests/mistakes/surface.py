"""All that is public: what a test of mistakes has to think of. SpeedTorch's API has its own tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import typer

import flatbed
import flatbed.word2vec
from flatbed.cli import app

MODULES: tuple[ModuleType, ...] = (flatbed, flatbed.optim, flatbed.word2vec)
CALLED = ("__call__", "__getitem__", "__setitem__", "__iter__", "__len__")

NO_MISTAKE = {
    "takes no argument, looks at what there is, and changes nothing": (
        "flatbed.ContiguousParams.contiguous",
        "flatbed.ContiguousParams.original",
        "flatbed.ContiguousParams.buffer_is_valid",
        "flatbed.FlatParams.__iter__",
        "flatbed.FlatParams.check",
        "flatbed.FlatParams.grad_norms",
        "flatbed.FlatParams.groups",
        "flatbed.FlatParams.is_valid",
        "flatbed.FlatParams.nonfinite",
        "flatbed.FlatParams.norms",
        "flatbed.FlatParams.originals",
        "flatbed.FlatParams.parameters",
        "flatbed.FlatParams.snapshot",
        "flatbed.Embedding.extra_repr",
        "flatbed.EmbeddingBag.extra_repr",
        "flatbed.Embedding.to_torch",
        "flatbed.EmbeddingBag.to_torch",
        "flatbed.RowReader.__len__",
        "flatbed.Table.cache_stats",
        "flatbed.Table.scalars",
        "flatbed.optim.*.nonfinite",
        "flatbed.optim.*.state_dict",
        "flatbed.word2vec.Corpus.__len__",
        "flatbed.word2vec.Corpus.fingerprint",
        "flatbed.word2vec.Settings.to_dict",
        "flatbed.word2vec.Vectors.__len__",
    ),
    "takes no argument, and can be called at any time and as often as one likes": (
        "flatbed.ContiguousParams.make_params_contiguous",
        "flatbed.Embedding*.reset_parameters",
        "flatbed.RowReader.close",
        "flatbed.Table.drop_state",
        "flatbed.optim.*.refresh_masters",
        "flatbed.optim.*.zero_grad",
        "flatbed.optim.Adagrad.share_memory",
        "flatbed.word2vec.Trainer.close",
        "flatbed.word2vec.Trainer.stop",
    ),
    "is a shape or a count, as of any parameter": (
        "flatbed.Table.__len__",
        "flatbed.Table.dim",
        "flatbed.Table.numel",
        "flatbed.Table.size",
    ),
    "is what is raised": ("flatbed.FlatbedError",),
    "is made by a training, and only read by others": ("flatbed.word2vec.Progress",),
}
"""What needs no mistake, by the reason."""


def public() -> Iterator[str]:
    """Every function, class and method, and every property that can be set."""
    for module in MODULES:
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found):
                yield f"{module.__name__}.{name}"
            if inspect.isclass(found):
                yield from (f"{module.__name__}.{name}.{method}" for method in _methods(found))


def _methods(kind: type) -> Iterator[str]:
    """Those of the package: torch's own are torch's."""
    seen = set()
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("flatbed") else ():
            settable = isinstance(value, property) and value.fset is not None
            function = isinstance(value, staticmethod | classmethod) or inspect.isfunction(value)
            if name not in seen and (settable or function) and (name in CALLED or not name.startswith("_")):
                yield name
            seen.add(name)


def commands(group: typer.Typer = app, before: str = "") -> Iterator[str]:
    """Every command, as it is typed."""
    for command in group.registered_commands:
        function = command.callback
        assert function is not None
        yield f"{before}{command.name or function.__name__}"
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{before}{inner.name} ")
