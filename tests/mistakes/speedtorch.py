"""Mistakes with SpeedTorch's API: one table for each kind of class, applied to all of its variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import flatbed.compat.speedtorch as SpeedTorch
from flatbed import FlatbedError
from tests.mistakes.mistake import Attempt, Mistake, mistake, unchanged

N, DIM = 10, 4
Make = Callable[..., Any]
Row = tuple[str, str, tuple[Any, ...], type[BaseException], str]
"""Method, what is wrong, its arguments ("{}" is a folder), the error and what its message names."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(4, DIM)


def rows_of(name: str, folder: Path, **given: Any) -> Any:
    arguments = {"model_variable": Model().u_embeddings, "total_classes": N, "embed_dimension": DIM}
    return getattr(SpeedTorch, name)(**arguments | on_disk(name, folder) | given)


def state_of(name: str, folder: Path, **given: Any) -> Any:
    model = Model()
    arguments: dict[str, Any] = {"total_classes": N, "embed_dimension": DIM, "variable_name": "u_embeddings"}
    arguments |= {"model": model, "given_optimizer": torch.optim.Adam(model.parameters())}
    return getattr(SpeedTorch, name)(**arguments | on_disk(name, folder) | given)


def matrix_of(name: str, folder: Path, **given: Any) -> Any:
    return getattr(SpeedTorch, name)(**{"total_classes": N} | on_disk(name, folder) | given)


def data_of(name: str, folder: Path, **given: Any) -> Any:
    np.save(folder / "data.npy", np.ones((N, DIM), np.float32))
    return getattr(SpeedTorch, name)(**{"fileName": folder / "data.npy"} | given)


def on_disk(name: str, folder: Path) -> dict[str, Any]:
    return {"diskname": str(folder / "rows")} if name.endswith("MM") else {}


COMMON: list[Row] = [
    ("saveCupy", "no folder", ("{}/no/x",), FileNotFoundError, r"no/x"),
    ("loadCupy", "no file", ("{}/no",), FileNotFoundError, r"no\.npy"),
    ("openFile", "no file", ("{}/no",), FileNotFoundError, r"/no"),
]
SWITCHERS: list[Row] = [
    *COMMON,
    ("beforeForwardPass", "a large id", ([0, N],), IndexError, r"id 10 .*0 to 9"),
    ("beforeForwardPass", "floats", (np.ones(1),), TypeError, r"integers.*float64"),
    ("afterOptimizerStep", "nothing loaded", ([1],), FlatbedError, r"without a before"),
    ("loadCupy", "another size", ("{}/other.npy",), ValueError, r"3, 4\); expected \("),
    ("saveTorch", "no folder", ("{}/no/x",), RuntimeError, r"no.* does not exist"),
    ("loadTorch", "no file", ("{}/no.pt",), FileNotFoundError, r"no\.pt"),
]
MODELS: list[Row] = [
    *SWITCHERS,
    ("uniformDistributionInit", "high first", (1, -1), ValueError, r"low=1.*high"),
    ("normalDistributionInit", "negative", (0, -1), ValueError, r"std=-1"),
    ("customInit", "too much", (nn.init.ones_, 1, 2), TypeError, r"ones_.* argument"),
    ("variableTransformer", "no integers", (2, 1.5), TypeError, r"float"),
]
ARRAYS: list[Row] = [
    *COMMON,
    ("getData", "a large id", ([0, N],), IndexError, r"index 10 .*size 10"),
    ("getData", "floats", ([0.5],), TypeError, r"integers.*float64"),
    ("insertData", "indexes first", ([1], np.ones(5)), TypeError, r"float64.*data first"),
    ("insertData", "another shape", (np.ones((1, 3)), [1]), RuntimeError, r"shape mismatch.*\[3\]"),
]
MATRICES: list[Row] = [
    *ARRAYS,
    ("addCounts", "a large column", ([1], [N]), IndexError, r"id 10 .*0 to 9"),
    ("addCounts", "too few", ([1, 2], [0]), ValueError, r"2 rows, 1 columns"),
    ("addCounts", "negative", ([2, 1], [2, 0], [1, -1]), ValueError, r"sum of -1 does not fit"),
    ("addCounts", "too many", ([1, 1], [0, 0], [2**32 - 1, 1]), ValueError, r"4294967296.*wider"),
]
EARLY: dict[str, tuple[Any, ...]] = {
    "getNumpyVersion": (),
    "getTorchVar": (),
    "getCupyVar": (),
    "getCupyMM": (),
    "getEntries": (),
    "checkpoint": (),
    "getData": ([1],),
    "addCounts": ([1], [1]),
    "beforeForwardPass": ([1],),
    "saveCupy": ("rows",),
}
"""Methods that need rows, and arguments for them."""


def initialised(make: Make, name: str, init: str, call: Callable[[Any, Path], object]) -> Attempt:
    """Make the mistake with rows, which must be the same after it."""

    def attempt(folder: Path) -> None:
        np.save(folder / "other.npy", np.ones((3, DIM), np.float32))  # files that fit nothing
        torch.save(torch.ones(2), folder / "other.pt")
        thing = make(name, folder)
        getattr(thing, init)()

        def look() -> Any:
            found = thing.getNumpyVersion()
            return [part.tolist() for part in (found.values() if isinstance(found, dict) else [found])]

        try:
            with unchanged(look):
                call(thing, folder)
        finally:
            thing.close()

    return attempt


def names(kind: str) -> list[str]:
    return [name for name in SpeedTorch.__all__ if kind in name]


def of_methods(kind: str, make: Make, init: str, table: list[Row]) -> Iterator[Mistake]:
    """Make all mistakes with all classes whose name has `kind` in it."""

    def attempt(name: str, method: str, given: tuple[Any, ...]) -> Attempt:
        def call(thing: Any, folder: Path) -> None:
            filled = [one.format(folder) if isinstance(one, str) else one for one in given]
            getattr(thing, method)(*filled)

        return initialised(make, name, init, call)

    for name in names(kind):
        of, methods = f"compat.speedtorch.{name}", dir(getattr(SpeedTorch, name))
        for method, what, given, error, message in table:
            if method in methods:
                yield mistake(f"{of}.{method}", what, attempt(name, method, given), error, message)
        for method in (method for method in EARLY if method in methods):
            use = partial(too_early, make, name, method)
            yield mistake(
                f"{of}.{method}", "too early", use, FlatbedError, rf"{name} has no .*: call \w+Init"
            )


def too_early(make: Make, name: str, method: str, folder: Path) -> None:
    getattr(make(name, folder), method)(*EARLY[method])


def of_arguments(
    kind: str, make: Make, error: type[BaseException], message: str, **given: Any
) -> list[Mistake]:
    """Pass the same wrong argument to all classes whose name has `kind` in it."""
    what = next(iter(given))
    return [
        mistake(f"compat.speedtorch.{name}", what, lambda f, n=name: make(n, f, **given), error, message)
        for name in names(kind)
    ]


def forgotten(name: str, folder: Path) -> None:
    """A step with the state of other rows."""
    state = state_of(name, folder)
    embedding, rows = state.model.u_embeddings, SpeedTorch.ModelFactory(state.model.u_embeddings, N, DIM)
    rows.zerosInit()
    state.optInit()
    rows.beforeForwardPass([1, 2])
    embedding(torch.arange(2)).sum().backward()
    state.given_optimizer.step()
    with unchanged(lambda: rows.getNumpyVersion().tolist()):
        rows.afterOptimizerStep([1, 2])


SPEEDTORCH: list[Mistake] = [
    *of_methods("ModelFactory", rows_of, "zerosInit", MODELS),
    *of_methods("OptimizerFactory", state_of, "optInit", SWITCHERS),
    *of_methods("COM", matrix_of, "comInit", MATRICES),
    *of_methods("Gadget", data_of, "gadgetInit", ARRAYS),
    *of_arguments("ModelFactory", rows_of, ValueError, r"embed_dimension", embed_dimension=DIM + 1),
    *of_arguments("ModelFactory", rows_of, ValueError, r"expected torch.int32", datatype="int32"),
    *of_arguments("OptimizerFactory", state_of, ValueError, r"'w'; found u_emb", variable_name="w"),
    *of_arguments("COM", matrix_of, ValueError, r"'float32'.*found 'uint33'", datatype="uint33"),
    *of_arguments("Gadget", data_of, TypeError, r"fileNme", fileNme="data.npy"),
    *(
        mistake(
            f"compat.speedtorch.{name}.beforeForwardPass",
            "forgotten",
            partial(forgotten, name),
            FlatbedError,
            rf"other rows in {name}.*nothing was written",
        )
        for name in names("OptimizerFactory")
    ),
    *(
        mistake(
            f"compat.speedtorch.{name}.gadgetInit",
            "no file",
            lambda f, n=name: data_of(n, f, fileName=f / "no").gadgetInit(),
            FileNotFoundError,
            r"no\.npy",
        )
        for name in names("Gadget")
    ),
    *(
        mistake(
            f"compat.speedtorch.{name}.comInit",
            "too many classes",
            lambda f, n=name: matrix_of(n, f, total_classes=-1).comInit(),
            ValueError,
            r"negative",
        )
        for name in names("COM")
    ),
    *(
        mistake(
            f"compat.speedtorch.{name}",
            "negative",
            lambda _, n=name: getattr(SpeedTorch, n)(-1),
            RuntimeError,
            r"negative",
        )
        for name in ("PMemory", "my_pinned_allocator")
    ),
]
