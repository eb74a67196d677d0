"""What the benchmark commands can be asked, and what of it is refused at once.

Nothing of torch or of the benchmarks themselves is imported before a command runs.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch


class ModelName(str, Enum):
    """The models of flatbed.bench.models."""

    LINEAR100 = "linear100"
    RESNET_LIKE = "resnet-like"
    GPT_LIKE = "gpt-like"
    VIT_B16 = "vit-b16"
    MANY_SMALL = "many-small"


class OptimizerName(str, Enum):
    """The optimizers of flatbed.bench.ways."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


class PrecisionName(str, Enum):
    """The precisions of flatbed.bench.floor."""

    FP32 = "fp32"
    BF16_MASTER = "bf16-master"


class TableCase(str, Enum):
    """The cases of flatbed.bench.tables."""

    MOVE = "move"
    SPEEDTORCH = "speedtorch"
    STEP = "step"
    FIT = "fit"


class TableOptimizer(str, Enum):
    """The optimizers of flatbed.bench.tables_ways."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    SGD = "sgd"


class CacheCase(str, Enum):
    """The cases of flatbed.bench.cache."""

    STEP = "step"
    SIZES = "sizes"
    ROWS = "rows"
    SWAP = "swap"
    DISK = "disk"


class FeedCase(str, Enum):
    """The cases of flatbed.bench.feed."""

    BANDWIDTH = "bandwidth"
    EPOCH = "epoch"
    ROWS = "rows"


class RowsTier(str, Enum):
    """The tiers of flatbed.bench.reach."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class DeviceName(str, Enum):
    """Where to train."""

    CPU = "cpu"
    CUDA = "cuda"


def in_existing_folder(path: Path | None) -> Path | None:
    """Refuse at once what would otherwise fail after minutes of measuring."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist")
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is not None:
        from flatbed.bench.plot import MISSING, have_matplotlib

        if not have_matplotlib():
            raise typer.BadParameter(MISSING)
        if path.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg"):
            raise typer.BadParameter(f"a chart is a .png, .svg, .pdf or .jpg file; found {path.name!r}")
    return in_existing_folder(path)


def drawable_folder(path: Path | None) -> Path | None:
    """Refuse charts that nothing here can draw."""
    if path is not None:
        from flatbed.bench.plot import MISSING, have_matplotlib

        if not have_matplotlib():
            raise typer.BadParameter(MISSING)
    return path


JsonPath = Annotated[
    Path | None,
    typer.Option("--json", help="Store the rows here.", dir_okay=False, callback=in_existing_folder),
]
PngPath = Annotated[
    Path | None,
    typer.Option("--png", help="Draw a bar chart here.", dir_okay=False, callback=_drawable),
]
TracePath = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write Chrome traces: X.json gives X.torch-loop.json, X.torch-fused.json, X.flat.json and "
        "X.optim.json.",
        dir_okay=False,
        callback=in_existing_folder,
    ),
]
PlotsOption = Annotated[
    Path | None,
    typer.Option(
        "--plots",
        help="Draw a chart per case into this folder.",
        exists=True,
        file_okay=False,
        callback=drawable_folder,
    ),
]
DeviceOption = Annotated[
    DeviceName | None, typer.Option("--device", help="Where; cuda if there is a GPU, unless given.")
]


def find_device(device: DeviceName | None) -> torch.device:
    """The one that was asked for, if it is here; else the GPU, if there is one."""
    import torch

    available = torch.cuda.is_available()
    if device is DeviceName.CUDA and not available:
        raise typer.BadParameter("torch sees no CUDA GPU; `flatbed doctor` says more", param_hint="--device")
    return torch.device(device.value if device else "cuda" if available else "cpu")
