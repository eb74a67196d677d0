"""ModelFactory and its variants: all rows of an embedding, and a small variable with those of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from flatbed.compat.speedtorch.slots import SlotBatch, Slots
from flatbed.compat.speedtorch.switcher import DiskSwitcher, Switcher
from flatbed.compat.speedtorch.views import DEVICE_STORAGE, PINNED_STORAGE, FileName

REFUSED = {
    "max_norm": (None, "it would renormalise some of a row's slots and not the others"),
    "padding_idx": (None, "it names a slot, which holds another row in every batch"),
    "scale_grad_by_freq": (False, "it would count slots instead of rows"),
}
WEIGHTS = 0
"""Key of the variable itself in `Slots.switchers`."""


class WeightSwitcher(Switcher):
    """Switcher of a variable's rows."""

    _init_method = "zerosInit(), uniformDistributionInit(), normalDistributionInit() or customInit()"
    _key = WEIGHTS

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = "float32"
    ) -> None:
        self.model_variable = model_variable
        for option, (default, reason) in REFUSED.items():
            if getattr(model_variable, option, default) is not default:
                raise ValueError(f"found an embedding with {option}, but {reason}: leave it out")
        super().__init__(total_classes, embed_dimension, datatype)

    def _variable(self) -> nn.Parameter:
        given = self.model_variable
        variable: nn.Parameter = given if isinstance(given, nn.Parameter) else given.weight
        return variable

    # ---- first values

    def _create(self, *args: Any, **kwargs: Any) -> None:
        super()._create(*args, **kwargs)
        Slots.of(self._variable()).switchers[WEIGHTS] = self

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
        rows = self._read(batch)[:, 0]
        if len(rows) > len(variable):
            variable.data, variable.grad = rows, None
        else:
            variable.data[: len(rows)] = rows
            variable.data[len(rows) :] = 0.0
        Slots.of(variable).load(batch)

    def _copy_out(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        self._write(batch, [variable])


class ModelFactory(WeightSwitcher):
    """All rows of an embedding: on the variable's device, or with `CPUPinn` in host memory.

    `diskname` is the default name for `saveCupy` and `loadCupy`. It may be left out, as in later releases.

    >>> embedding = nn.Embedding(4, 2)  # as many slots as a batch has ids
    >>> switcher = ModelFactory(embedding, total_classes=1000, embed_dimension=2, CPUPinn=True)
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

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        diskname: Any = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        if isinstance(getattr(torch, str(diskname).removeprefix("torch."), None), torch.dtype):
            # Later releases have no diskname: datatype and CPUPinn are one position to the left.
            diskname, datatype, CPUPinn = "variable", diskname, CPUPinn or datatype is True
        self.diskname, self.CPUPinn = diskname, CPUPinn
        self._storage = PINNED_STORAGE[CPUPinn]
        super().__init__(model_variable, total_classes, embed_dimension, datatype)


class ModelFactoryMM(WeightSwitcher, DiskSwitcher):
    """All rows of an embedding in a file: `DISKNAME0.bed`, or the next number that is free.

    `checkpoint()` and `close()` save the rows, `openFile()` continues with them; `CPUPinn` changes nothing.
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        diskname: FileName = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        self.diskname, self.CPUPinn = diskname, CPUPinn
        super().__init__(model_variable, total_classes, embed_dimension, datatype)


class PytorchModelFactory(WeightSwitcher):
    """All rows of an embedding: `deviceType` "cuda" for the variable's device, "cpu" for host memory.

    GPUs address the host memory with any `pinType`.
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        deviceType: str = "cuda",
        pinType: bool = False,
    ) -> None:
        self.deviceType, self.pinType = deviceType, pinType
        self._storage = DEVICE_STORAGE[deviceType]
        super().__init__(model_variable, total_classes, embed_dimension, datatype)


class GPUPytorchModelFactory(WeightSwitcher):
    """All rows of an embedding, on the variable's device."""


class CPUPytorchModelFactory(WeightSwitcher):
    """All rows of an embedding, in host memory."""

    _storage = "host"
