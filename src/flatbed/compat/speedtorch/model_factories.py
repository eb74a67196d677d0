"""The model factories: all rows of an embedding, in five kinds of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from flatbed.compat.speedtorch.arrays import FileName
from flatbed.compat.speedtorch.slots import SlotBatch
from flatbed.compat.speedtorch.switcher import DiskSwitcher, Switcher

REFUSED = {
    "max_norm": (None, "it would renormalise some of a row's slots and not the others"),
    "padding_idx": (None, "it names a slot, which holds another row in every batch"),
    "scale_grad_by_freq": (False, "it would count slots instead of rows"),
}
WEIGHTS = 0
"""Key of the variable itself in `Slots.switcher`."""


# A dataclass takes its fields as arguments, in their order: that of SpeedTorch's constructors.


@dataclass(eq=False, repr=False)
class WeightSwitcher(Switcher):
    """Switcher of a variable's rows."""

    model_variable: Any
    total_classes: int
    embed_dimension: int

    _init_method = "zerosInit(), uniformDistributionInit(), normalDistributionInit() or customInit()"
    _key = WEIGHTS

    def __post_init__(self) -> None:
        for option, (default, reason) in REFUSED.items():
            if getattr(self.model_variable, option, default) is not default:
                raise ValueError(f"found an embedding with {option}, but {reason}: leave it out")
        self._set_up()

    def _variable(self) -> nn.Parameter:
        given = self.model_variable
        variable: nn.Parameter = given if isinstance(given, nn.Parameter) else given.weight
        return variable

    # ---- first values

    def zerosInit(self) -> None:
        """Start all rows as zeros."""
        self._create()

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Draw all rows uniformly from [low, high)."""
        self._create(("uniform", low, high))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Draw all rows from a normal distribution."""
        self._create(("normal", mean, stdDev))

    @torch.no_grad()
    def customInit(self, initFunction: Callable[..., object], *args: Any) -> None:
        """Fill all rows by `initFunction(tensor, *args)`, such as nn.init.xavier_uniform_."""
        whole = torch.zeros(self.total_classes, self.embed_dimension, dtype=self.datatype)
        initFunction(whole, *args)
        self._create()
        self._fill(lambda block: whole[None, block])

    # ---- the loop

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """Return static inputs for the forward pass: slots, as numpy arrays of int64.

        Their shape is (batchSize, posPerBatch); with `negPerBatch` a second one is (batchSize, negPerBatch).
        """
        n_positive = batchSize * posPerBatch
        positive = np.arange(n_positive).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return positive
        negative = np.arange(n_positive, n_positive + batchSize * negPerBatch)
        return positive, negative.reshape(batchSize, negPerBatch)

    def _copy_in(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Copy rows through `.data`, so that only steps of the optimizer change the variable's version."""
        if len(batch.ids) > variable.shape[0]:
            with torch.inference_mode(False):
                variable.data = variable.data.new_empty(len(batch.ids), self.embed_dimension)
            variable.grad = None
        self._read(batch, [variable.data])
        self._slots(variable).load(batch)

    def _copy_out(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        self._write(batch, [variable.data])


@dataclass(eq=False, repr=False)
class ModelFactory(WeightSwitcher):
    """All rows of an embedding: on the variable's device, or with `CPUPinn` in host memory.

    `diskname` is the default name for `saveCupy` and `loadCupy`. It may be left out, as in later releases.

    >>> import numpy as np, torch, flatbed.compat.speedtorch as SpeedTorch
    >>> embedding = torch.nn.Embedding(4, 2)  # as many slots as a batch has ids
    >>> switcher = SpeedTorch.ModelFactory(embedding, total_classes=1000, embed_dimension=2, CPUPinn=True)
    >>> switcher.zerosInit()
    >>> slots = torch.from_numpy(switcher.variableTransformer(batchSize=4, posPerBatch=1))
    >>> ids = np.array([7, 999, 7, 3], dtype=np.int32)
    >>> optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    >>> switcher.beforeForwardPass(ids)
    >>> embedding(slots).sum().backward()
    >>> optimizer.step()
    >>> switcher.afterOptimizerStep(ids)
    >>> switcher.getNumpyVersion()[7]  # twice in the batch: both gradients count
    array([-2., -2.], dtype=float32)
    """

    diskname: Any = "variable"
    datatype: Any = "float32"
    CPUPinn: bool = False

    def __post_init__(self) -> None:
        if isinstance(getattr(torch, str(self.diskname).removeprefix("torch."), None), torch.dtype):
            # Later releases have no diskname: datatype and CPUPinn are one position to the left.
            self.CPUPinn = self.CPUPinn or self.datatype is True
            self.diskname, self.datatype = "variable", self.diskname
        super().__post_init__()


@dataclass(eq=False, repr=False)
class ModelFactoryMM(WeightSwitcher, DiskSwitcher):
    """All rows of an embedding in a file: `DISKNAME0.bed`, or the next number that is free.

    `checkpoint()` and `close()` save the rows, `openFile()` continues with them; `CPUPinn` changes nothing.
    """

    diskname: FileName = "variable"
    datatype: Any = "float32"
    CPUPinn: bool = False


@dataclass(eq=False, repr=False)
class PytorchModelFactory(WeightSwitcher):
    """All rows of an embedding: `deviceType` "cuda" for the variable's device, "cpu" for host memory.

    GPUs address the host memory with any `pinType`.
    """

    datatype: Any = "float32"
    deviceType: str = "cuda"
    pinType: bool = False


@dataclass(eq=False, repr=False)
class GPUPytorchModelFactory(WeightSwitcher):
    """All rows of an embedding, on the variable's device."""

    datatype: Any = "float32"


@dataclass(eq=False, repr=False)
class CPUPytorchModelFactory(WeightSwitcher):
    """All rows of an embedding, in host memory."""

    datatype: Any = "float32"
    _storage = "host"
