"""Mistakes with SpeedTorch's API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import flatbed.compat.speedtorch as SpeedTorch
from flatbed import FlatbedError
from tests.mistakes.mistake import Mistake, mistake, unchanged

N, DIM = 10, 4
NAMES: list[str] = SpeedTorch.__all__
Use = Callable[[Any, Path], object]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(4, DIM)
        self.head = nn.Linear(DIM, 1)


def of_file(name: str, folder: Path) -> dict[str, Any]:
    return {"diskname": str(folder / "rows")} if name.endswith("MM") else {}


def rows_of(name: str, folder: Path, *given: Any, **options: Any) -> Any:
    default = (Model().u_embeddings, N, DIM)
    return getattr(SpeedTorch, name)(*given, *default[len(given) :], **of_file(name, folder), **options)


def state_of(name: str, folder: Path, **given: Any) -> Any:
    model = Model()
    arguments = {
        "given_optimizer": torch.optim.Adam(model.parameters()),
        "total_classes": N,
        "embed_dimension": DIM,
        "model": model,
        "variable_name": "u_embeddings",
    }
    return getattr(SpeedTorch, name)(**arguments | given, **of_file(name, folder))


def matrix_of(name: str, folder: Path, size: Any = 5) -> Any:
    return getattr(SpeedTorch, name)(size, **of_file(name, folder))


def data_of(name: str, folder: Path) -> Any:
    np.save(folder / "data.npy", np.ones((N, DIM), np.float32))
    return getattr(SpeedTorch, name)(folder / "data.npy")


def begun(make: Callable[[str, Path], Any], name: str, call: str, use: Use) -> Callable[[Path], object]:
    """Something with rows, that has them still after the mistake."""

    def attempt(folder: Path) -> None:
        thing = make(name, folder)
        getattr(thing, call)()

        def look() -> Any:
            found = thing.getNumpyVersion()
            parts = found.values() if isinstance(found, dict) else [found]
            return [torch.from_numpy(part.astype(np.float64)) for part in parts]

        try:
            with unchanged(look):
                use(thing, folder)
        finally:
            if hasattr(thing, "close"):
                thing.close()

    return attempt


def too_early(make: Callable[[str, Path], Any], name: str, use: Use) -> Callable[[Path], object]:
    return lambda folder: use(make(name, folder), folder)


def another_array(folder: Path) -> Path:
    np.save(folder / "other.npy", np.ones((3, DIM), np.float32))
    return folder / "other.npy"


def another_tensor(folder: Path) -> Path:
    torch.save(torch.ones(2), folder / "other.pt")
    return folder / "other.pt"


NO_ROWS = r"{} has no rows yet: call {}"
NO_DATA = r"{} has no data yet: call {}\(\) first"
OUT_OF_RANGE = r"id 10 at position 1 is out of range for a table of 10 rows \(0 to 9\)"
NO_FOLDER = r"there is no folder .*missing to write rows.npy to: make it first"


def of_switchers(name: str, make: Callable[[str, Path], Any], first: str) -> list[Mistake]:
    """What rows and state have in common."""
    of, missing = (
        f"compat.speedtorch.{name}",
        NO_ROWS.format(name, "zerosInit" if first != "optInit" else first),
    )

    def case(method: str, what: str, use: Use, error: type[BaseException], message: str) -> Mistake:
        return mistake(f"{of}.{method}", what, begun(make, name, first, use), error, message)

    early = {
        "getNumpyVersion": lambda thing, folder: thing.getNumpyVersion(),
        "getTorchVar": lambda thing, folder: thing.getTorchVar(),
        "getCupyVar": lambda thing, folder: thing.getCupyVar(),
        "getCupyMM": lambda thing, folder: thing.getCupyMM(),
        "checkpoint": lambda thing, folder: thing.checkpoint(),
        "beforeForwardPass": lambda thing, folder: thing.beforeForwardPass([1]),
    }
    return [
        *(
            mistake(f"{of}.{method}", "too early", too_early(make, name, use), FlatbedError, missing)
            for method, use in early.items()
        ),
        case(
            "beforeForwardPass",
            "an id too large",
            lambda s, _: s.beforeForwardPass([0, N]),
            IndexError,
            OUT_OF_RANGE,
        ),
        case(
            "beforeForwardPass",
            "floats",
            lambda s, _: s.beforeForwardPass(np.array([0.5])),
            TypeError,
            r"ids must be integers; found a numpy array of float64",
        ),
        case(
            "afterOptimizerStep",
            "nothing is out",
            lambda s, _: s.afterOptimizerStep([1]),
            FlatbedError,
            rf"{name}.afterOptimizerStep\(\) without a beforeForwardPass\(\)",
        ),
        case(
            "saveCupy",
            "no such folder",
            lambda s, f: s.saveCupy(f / "missing" / "rows"),
            FlatbedError,
            NO_FOLDER,
        ),
        case(
            "saveTorch",
            "no such folder",
            lambda s, f: s.saveTorch(f / "missing" / "rows.pt"),
            FlatbedError,
            r"rows.pt cannot be written: it must be the name of a file in a folder that exists",
        ),
        case(
            "loadCupy",
            "of another size",
            lambda s, f: s.loadCupy(another_array(f)),
            ValueError,
            r"holds float32 of shape \(3, 4\); expected float32 of \((2, )?10, 4\)",
        ),
        case(
            "loadCupy",
            "no name",
            lambda s, f: s.loadCupy(None),
            TypeError,
            r"the file's name must be a string or a pathlib.Path; found NoneType",
        ),
        case(
            "loadTorch",
            "a file that does not exist",
            lambda s, f: s.loadTorch(f / "missing.pt"),
            FlatbedError,
            r"there is no file at .*missing.pt: check the path",
        ),
        case(
            "loadTorch",
            "of another size",
            lambda s, f: s.loadTorch(another_tensor(f)),
            ValueError,
            r"holds torch.float32 of \(2,\); expected|does not hold exp_avg, exp_avg_sq: load what saveTorch",
        ),
    ]


def of_models(name: str) -> list[Mistake]:
    of = f"compat.speedtorch.{name}"

    def case(method: str, what: str, use: Use, error: type[BaseException], message: str) -> Mistake:
        return mistake(f"{of}.{method}", what, begun(rows_of, name, "zerosInit", use), error, message)

    return [
        mistake(
            of,
            "the wrong way round",
            lambda folder: rows_of(name, folder, N, Model().u_embeddings),
            TypeError,
            r"total_classes must be an integer; found Embedding\(4, 4\)",
        ),
        mistake(
            of,
            "its name",
            lambda folder: rows_of(name, folder, "u_embeddings"),
            TypeError,
            r"must be a module with a weight, such as nn.Embedding; found str",
        ),
        mistake(
            of,
            "integers",
            lambda folder: rows_of(name, folder, datatype="int32"),
            TypeError,
            r"a variable is trained in .*float32.*found datatype 'int32'",
        ),
        case(
            "uniformDistributionInit",
            "high before low",
            lambda s, _: s.uniformDistributionInit(1, -1),
            ValueError,
            r"low must not be above high, found low=1.0, high=-1.0",
        ),
        case(
            "normalDistributionInit",
            "negative",
            lambda s, _: s.normalDistributionInit(0, -1),
            ValueError,
            r"a standard deviation is not negative, found std=-1.0",
        ),
        case(
            "customInit",
            "a tensor",
            lambda s, _: s.customInit(nn.init.ones_(torch.empty(2, 2))),
            TypeError,
            r"initFunction must be a function such as nn.init.xavier_uniform_, not called yet; found Tensor",
        ),
        case(
            "customInit",
            "too many arguments",
            lambda s, _: s.customInit(nn.init.uniform_, 1, 2, 3, 4),
            TypeError,
            r"uniform_\(\) takes from 1 to 4 positional arguments but 5 were given",
        ),
        case(
            "variableTransformer",
            "no batch",
            lambda s, _: s.variableTransformer(0, 1),
            ValueError,
            r"batchSize must be at least 1; found 0",
        ),
        *of_switchers(name, rows_of, "zerosInit"),
    ]


def forgotten(name: str, folder: Path) -> None:
    """A step after which rows would have been updated with the state of others."""
    state = state_of(name, folder)
    embedding, optimizer = state.model.u_embeddings, state.given_optimizer
    rows = SpeedTorch.ModelFactory(embedding, N, DIM)
    rows.zerosInit()
    state.optInit()
    rows.beforeForwardPass([1, 2])
    embedding(torch.arange(2)).sum().backward()
    try:
        with unchanged(lambda: [embedding.weight.detach().clone()]):
            optimizer.step()
    finally:
        state.close()


def of_optimizers(name: str) -> list[Mistake]:
    of = f"compat.speedtorch.{name}"

    def case(what: str, error: type[BaseException], message: str, **given: Any) -> Mistake:
        return mistake(of, what, lambda folder: state_of(name, folder, **given), error, message)

    return [
        case(
            "its class",
            TypeError,
            r"given_optimizer must be an optimizer of torch; found type",
            given_optimizer=torch.optim.Adam,
        ),
        case("parameters", TypeError, r"model must be the module that has.*found list", model=[]),
        case(
            "a name that there is not",
            ValueError,
            r"the model has no variable 'w_embeddings'; found u_embeddings, head, head.bias",
            variable_name="w_embeddings",
        ),
        mistake(
            f"{of}.beforeForwardPass",
            "forgotten",
            lambda folder: forgotten(name, folder),
            FlatbedError,
            rf"a step of Adam with the state of other rows .*: give {name}.beforeForwardPass\(\) the ids",
        ),
        *of_switchers(name, state_of, "optInit"),
    ]


def of_rows(name: str, make: Callable[[str, Path], Any], first: str) -> list[Mistake]:
    """What matrices and gadgets have in common."""
    of = f"compat.speedtorch.{name}"
    early = {
        "getData": lambda thing, folder: thing.getData([1]),
        "getNumpyVersion": lambda thing, folder: thing.getNumpyVersion(),
        "getTorchVar": lambda thing, folder: thing.getTorchVar(),
        "getCupyVar": lambda thing, folder: thing.getCupyVar(),
        "getCupyMM": lambda thing, folder: thing.getCupyMM(),
        "saveCupy": lambda thing, folder: thing.saveCupy(folder / "rows"),
        "getEntries": lambda thing, folder: thing.getEntries(),
    }
    kind = getattr(SpeedTorch, name)

    def case(method: str, what: str, use: Use, error: type[BaseException], message: str) -> Mistake:
        return mistake(f"{of}.{method}", what, begun(make, name, first, use), error, message)

    return [
        *(
            mistake(
                f"{of}.{method}",
                "too early",
                too_early(make, name, use),
                FlatbedError,
                NO_DATA.format(name, first),
            )
            for method, use in early.items()
            if hasattr(kind, method)
        ),
        case(
            "getData",
            "an id too large",
            lambda d, _: d.getData([0, N]),
            IndexError,
            r"id 10 at position 1 is out of",
        ),
        case(
            "getData",
            "floats",
            lambda d, _: d.getData([0.5]),
            TypeError,
            r"indexes must be integers, slices or a mask; found an array of float64",
        ),
        case(
            "insertData",
            "the wrong way round",
            lambda d, _: d.insertData([1], np.ones((1, 5), np.float32)),
            TypeError,
            r"indexes must be integers.*found an array of float32 \(insertData takes the data first\)",
        ),
        case(
            "insertData",
            "words",
            lambda d, _: d.insertData("ones", [1]),
            TypeError,
            r"values must be numbers in a tensor, an array or a list; found str",
        ),
        case(
            "insertData",
            "of another shape",
            lambda d, _: d.insertData(np.ones((1, 3), np.uint8), [1]),
            ValueError,
            r"must have shape \(1, [45]\); found \(1, 3\)",
        ),
        case(
            "saveCupy",
            "no such folder",
            lambda d, f: d.saveCupy(f / "missing" / "rows"),
            FlatbedError,
            NO_FOLDER,
        ),
        case(
            "loadCupy",
            "a file that does not exist",
            lambda d, f: d.loadCupy(f / "missing"),
            FlatbedError,
            r"there is no array at .*missing.npy: check the path",
        ),
    ]


def of_matrices(name: str) -> list[Mistake]:
    of = f"compat.speedtorch.{name}"

    def case(what: str, use: Use, error: type[BaseException], message: str) -> Mistake:
        return mistake(f"{of}.addCounts", what, begun(matrix_of, name, "comInit", use), error, message)

    return [
        mistake(
            of,
            "a word",
            lambda folder: matrix_of(name, folder, "5"),
            TypeError,
            r"total_classes must be an integer; found '5'",
        ),
        mistake(
            f"{of}.comInit",
            "a device",
            lambda folder: matrix_of(name, folder).comInit("cpu"),
            TypeError,
            r"CPUPinn must be True \(host memory\) or False.*found 'cpu'",
        ),
        case(
            "a column too far",
            lambda m, _: m.addCounts([1], [5]),
            IndexError,
            r"id 5 at position 0 is out of range for a table of 5 rows \(0 to 4\)",
        ),
        case(
            "too few columns",
            lambda m, _: m.addCounts([1, 2], [0]),
            ValueError,
            r"rows, columns and counts must be as many; found 2, 1, 2",
        ),
        case(
            "words",
            lambda m, _: m.addCounts([1], [0], "one"),
            TypeError,
            r"values must be numbers in a tensor, an array or a list; found str",
        ),
        case(
            "less than none",
            lambda m, _: m.addCounts([2, 1], [2, 0], [1, -1]),
            ValueError,
            r"counts must not be negative; found -1",
        ),
        case(
            "more than it holds",
            lambda m, _: m.addCounts([2, 1, 1], [2, 0, 0], [1, 2**32 - 1, 1]),
            ValueError,
            r"a sum of 4294967296 does not fit: u?int32 counts to at most \d+; use a wider datatype; nothing",
        ),
        *of_rows(name, matrix_of, "comInit"),
    ]


def of_gadgets(name: str) -> list[Mistake]:
    of = f"compat.speedtorch.{name}"
    return [
        mistake(
            f"{of}.gadgetInit",
            "a file that does not exist",
            lambda folder: getattr(SpeedTorch, name)(folder / "missing").gadgetInit(),
            FlatbedError,
            r"there is no array at .*missing.npy: check the path",
        ),
        *of_rows(name, data_of, "gadgetInit"),
    ]


def old_graph(folder: Path) -> None:
    embedding = Model().u_embeddings
    rows = SpeedTorch.ModelFactory(embedding, N, DIM)
    rows.zerosInit()
    rows.beforeForwardPass([1, 1, 3, 4])
    loss = embedding(torch.arange(4)).sum()
    rows.beforeForwardPass([5, 6, 7, 8])
    loss.backward()


OTHERS = [
    mistake(
        "compat.speedtorch.ModelFactory.beforeForwardPass",
        "before backward",
        old_graph,
        FlatbedError,
        r"backward\(\) of a forward pass over rows that were switched in before.*call backward\(\) before",
    ),
    mistake(
        "compat.speedtorch.DataGadget",
        "a word for a switch",
        lambda folder: SpeedTorch.DataGadget(folder / "data", CPUPinn="yes"),  # type: ignore[arg-type]
        TypeError,
        r"CPUPinn must be True \(host memory\) or False.*found 'yes'",
    ),
    mistake(
        "compat.speedtorch.DataGadgetMM",
        "an array",
        lambda _: SpeedTorch.DataGadgetMM(np.ones((3, 2))),  # type: ignore[arg-type]
        TypeError,
        r"fileName must be the path of a .npy file; found ndarray",
    ),
    mistake(
        "compat.speedtorch.PytorchModelFactory",
        "a wrong device",
        lambda folder: rows_of("PytorchModelFactory", folder, deviceType="gpu"),
        ValueError,
        r"deviceType must be 'cuda' or 'cpu'; found 'gpu'",
    ),
    mistake(
        "compat.speedtorch.ModelFactoryMM",
        "a folder that does not exist",
        lambda f: SpeedTorch.ModelFactoryMM(
            Model().u_embeddings, N, DIM, diskname=str(f / "missing" / "rows")
        ),
        FlatbedError,
        r"there is no folder .*missing to make a file in: make it first",
    ),
    mistake(
        "compat.speedtorch.ModelFactoryMM",
        "no name",
        lambda f: SpeedTorch.ModelFactoryMM(Model().u_embeddings, N, DIM, diskname=None),  # type: ignore[arg-type]
        TypeError,
        r"diskname must be the beginning of a file's path; found NoneType",
    ),
    mistake(
        "compat.speedtorch.ModelFactoryMM.getTorchVar",
        "of a file",
        begun(rows_of, "ModelFactoryMM", "zerosInit", lambda s, _: s.getTorchVar()),
        FlatbedError,
        r"the collection is in .*rows0.bed, not in memory: use getNumpyVersion\(\)",
    ),
]

SPEEDTORCH: list[Mistake] = [
    *(one for name in NAMES if "ModelFactory" in name for one in of_models(name)),
    *(one for name in NAMES if "OptimizerFactory" in name for one in of_optimizers(name)),
    *(one for name in NAMES if "COM" in name for one in of_matrices(name)),
    *(one for name in NAMES if "Gadget" in name for one in of_gadgets(name)),
    *OTHERS,
]
