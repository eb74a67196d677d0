"""ModelFactory and its variants: all rows of an embedding, and a small variable with those of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from flatbed.compat.speedtorch import storage
from flatbed.compat.speedtorch.slots import SlotBatch, Slots, replace_data
from flatbed.compat.speedtorch.storage import RowStorage
from flatbed.compat.speedtorch.switcher import DTYPES, Switcher
from flatbed.compat.speedtorch.variants import natural

REFUSED = {
    "max_norm": (None, "it would renormalise some of a row's slots and not the others"),
    "padding_idx": (None, "it names a slot, which holds another row in every batch"),
    "scale_grad_by_freq": (False, "it would count slots instead of rows"),
}
DTYPE_NAMES = (*DTYPES, *(str(dtype).removeprefix("torch.") for dtype in DTYPES))
VARIABLE = ("model_variable", "total_classes", "embed_dimension")


class _ModelFactory(Switcher):
    """Switcher of a variable's rows."""

    _required = VARIABLE
    _init_method = "zerosInit(), uniformDistributionInit(), normalDistributionInit() or customInit()"
    _names = ("weight",)
    model_variable: Any

    def _setup(self) -> None:
        super()._setup()
        for option, (default, reason) in REFUSED.items():
            if getattr(self.model_variable, option, default) is not default:
                raise ValueError(f"found an embedding with {option}, but {reason}: leave it out")
        self._variable()

    def _variable(self) -> nn.Parameter:
        given = self.model_variable
        variable = given if isinstance(given, nn.Parameter) else getattr(given, "weight", None)
        if not isinstance(variable, nn.Parameter):
            raise TypeError(
                f"model_variable must be a module with a weight, such as nn.Embedding; found "
                f"{type(given).__name__}"
            )
        return self._check_variable(variable, "model_variable")

    def _adopt(self, rows: RowStorage) -> None:
        super()._adopt(rows)
        Slots.of(self._variable()).collection = weakref.ref(rows)

    def _target(self, slots: Slots) -> Any:
        return slots

    def _has_stepped(self, slots: Slots) -> bool:
        found = slots.loaded.get(slots)
        is_ours = found is not None and found.switcher() is self and found.batch is self._batch
        return is_ours and slots.variable._version != self._version

    # ---- first values

    def zerosInit(self) -> None:
        """Start all rows as zeros."""
        self._adopt(self._create())

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Draw all rows uniformly from [low, high)."""
        self._adopt(self._create(("uniform", low, high)))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Draw all rows from a normal distribution."""
        self._adopt(self._create(("normal", mean, stdDev)))

    def customInit(self, initFunction: Callable[..., object], *args: Any) -> None:
        """Fill all rows by `initFunction(tensor, *args)`, such as nn.init.xavier_uniform_."""
        if not callable(initFunction):
            raise TypeError(
                f"initFunction must be a function such as nn.init.xavier_uniform_, not yet called; found "
                f"{type(initFunction).__name__}"
            )

        @torch.no_grad()
        def fill(rows: RowStorage) -> None:
            whole = storage.copied(rows) if rows.tensor is None else rows.tensor
            initFunction(whole[:, 0], *args)
            for start, stop in storage.blocks(rows) if rows.tensor is None else ():
                rows.write_(start, whole[start:stop])

        self._fill_new(fill)

    # ---- the loop

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """Return static inputs for the forward pass: slots, as numpy arrays of int64.

        Their shape is (batchSize, posPerBatch); with `negPerBatch` a second one is (batchSize, negPerBatch).
        """
        size = natural("batchSize", batchSize)
        n_positive = size * natural("posPerBatch", posPerBatch)
        positive = np.arange(n_positive).reshape(size, -1)
        if negPerBatch is None:
            return positive
        n_negative = size * natural("negPerBatch", negPerBatch)
        return positive, np.arange(n_positive, n_positive + n_negative).reshape(size, -1)

    def _copy_in(self, rows: RowStorage, variable: nn.Parameter, batch: SlotBatch) -> None:
        n = len(batch)
        if n > len(variable):
            self._grow(variable, n)
        variable[:n].copy_(rows.gather(batch.rows, batch.unique)[:, 0])
        if n < len(variable):
            variable[n:].zero_()

    def _grow(self, variable: nn.Parameter, n: int) -> None:
        variable.grad = None
        with torch.inference_mode(False):
            data = torch.zeros((n, variable.shape[1]), dtype=variable.dtype, device=variable.device)
        replace_data(variable, data)
        if isinstance(self.model_variable, nn.Embedding | nn.EmbeddingBag):
            self.model_variable.num_embeddings = n

    def _copy_out(self, rows: RowStorage, variable: nn.Parameter, batch: SlotBatch) -> None:
        rows.scatter_(batch.unique.rows, variable.index_select(0, batch.first))


class ModelFactory(_ModelFactory, diskname="variable", datatype="float32", CPUPinn=False):
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(VARIABLE) and args[len(VARIABLE)] in DTYPE_NAMES and "datatype" not in kwargs:
            args = (*args[: len(VARIABLE)], "variable", *args[len(VARIABLE) :])
        super().__init__(*args, **kwargs)


class ModelFactoryMM(_ModelFactory, storage="disk", diskname="variable", datatype="float32", CPUPinn=False):
    """All rows of an embedding in a file: `DISKNAME0.bed`, or the next number that is free.

    `checkpoint()` and `close()` save the rows, `openFile()` continues with them; `CPUPinn` changes nothing.
    """


class PytorchModelFactory(_ModelFactory, datatype="float32", deviceType="cuda", pinType=False):
    """All rows of an embedding: `deviceType` "cuda" for the variable's device, "cpu" for host memory.

    GPUs address the host memory with any `pinType`.
    """


class GPUPytorchModelFactory(_ModelFactory, storage="device", datatype="float32"):
    """All rows of an embedding, on the variable's device."""


class CPUPytorchModelFactory(_ModelFactory, storage="host", datatype="float32"):
    """All rows of an embedding, in host memory."""
