"""ModelFactory and its variants: all rows of an embedding, switched in and out of a small variable."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.compat.speedtorch.collection import Collection, Column, Home
from flatbed.compat.speedtorch.homes import cupy_home, torch_home
from flatbed.compat.speedtorch.slots import Held, Slots, part_from_graphs
from flatbed.compat.speedtorch.switcher import Switcher, check_variable, dummy_inputs
from flatbed.tables import initializers as initial
from flatbed.tables.record import DTYPES, WEIGHT

REFUSED = {
    "max_norm": (None, "it would renormalise some of a row's slots, and not the others"),
    "padding_idx": (None, "it names a slot here, and a slot holds another row in every batch"),
    "scale_grad_by_freq": (False, "it would count slots, and not rows"),
}


class _ModelFactory(Switcher):
    """All rows of a variable."""

    _first_call = "zerosInit(), uniformDistributionInit(), normalDistributionInit() or customInit()"

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: object, home: Home
    ) -> None:
        super().__init__(total_classes, embed_dimension, datatype, home)
        self.model_variable = model_variable
        self._version = 0
        for option, (harmless, reason) in REFUSED.items():
            if getattr(model_variable, option, harmless) is not harmless:
                raise ValueError(f"an embedding with {option} cannot be switched: {reason}; leave it out")
        self._variable()

    def _variable(self) -> nn.Parameter:
        given = self.model_variable
        variable = given if isinstance(given, nn.Parameter) else getattr(given, "weight", None)
        if not isinstance(variable, nn.Parameter):
            raise TypeError(
                f"model_variable must be a module with a weight, such as nn.Embedding; found "
                f"{type(given).__name__}"
            )
        check_variable(variable, self.embed_dimension, self.datatype, "model_variable")
        return variable

    def _columns(self) -> list[Column]:
        return [Column(WEIGHT, self.datatype, self.embed_dimension)]

    def _adopt(self, made: Collection) -> None:
        super()._adopt(made)
        Slots.of(self._variable()).weights = weakref.ref(made)

    def _held(self, slots: Slots) -> Held | None:
        return slots.model

    def _has_changed(self) -> bool:
        variable = self._variable()
        held = Slots.of(variable).model
        ours = held is not None and held.by() is self and held.batch is self._out
        return ours and variable._version != self._version

    # ---- first values

    def zerosInit(self) -> None:
        """All rows begin as zeros."""
        self._begin()

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """All rows begin uniformly distributed in [low, high)."""
        self._draw(initial.Uniform(low, high))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """All rows begin normally distributed."""
        self._draw(initial.Normal(mean, stdDev))

    def _draw(self, init: initial.Init) -> None:
        seed = int(torch.randint(1 << 62, (), device="cpu"))  # torch.manual_seed decides

        def fill(start: int, stop: int, columns: Mapping[str, Tensor]) -> None:
            initial.fill_(columns[WEIGHT], first_row=start, init=init, seed=seed)

        self._begin(fill)

    def customInit(self, initFunction: Callable[..., object], *args: Any) -> None:
        """All rows begin as `initFunction(tensor, *args)` leaves them, such as nn.init.xavier_uniform_."""
        if not callable(initFunction):
            raise TypeError(
                f"initFunction must be a function such as nn.init.xavier_uniform_, not called yet; found "
                f"{type(initFunction).__name__}"
            )
        rows = self._made()
        try:
            self._fill_by(rows, initFunction, args)
        except BaseException:  # the rows that there were stay
            rows.discard()
            raise
        self._adopt(rows)

    @torch.no_grad()
    def _fill_by(self, rows: Collection, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        whole = rows.whole(WEIGHT)
        if whole is not None:
            function(whole, *args)
            return
        whole = rows.copied(WEIGHT)
        function(whole, *args)
        for start, stop in rows.blocks():
            rows.write_(WEIGHT, start, whole[start:stop])

    # ---- the loop

    def variableTransformer(self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None) -> Any:
        """Static inputs for the forward pass: slots, as numpy arrays of int64.

        (batchSize, posPerBatch); with `negPerBatch` a pair, the second one (batchSize, negPerBatch).
        """
        return dummy_inputs(batchSize, posPerBatch, negPerBatch)

    @torch.no_grad()
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy rows into the variable: those of the positive ids first, then those of the negative ones."""
        rows, variable = self._rows(), self._variable()
        ids = self._ids(retrievedPosIndexes, retrievedNegIndexes)
        self._check_home()
        rows.move(variable.device)
        slots = Slots.of(variable)
        batch = slots.prepare(ids, self.total_classes)
        n = len(batch)
        values = rows.gather(batch.found.rows)[WEIGHT].index_select(0, batch.found.inverse)
        if n > len(variable):
            _grow(variable, n)
            if isinstance(self.model_variable, (nn.Embedding, nn.EmbeddingBag)):
                self.model_variable.num_embeddings = n
        variable[:n].copy_(values)
        variable[n:].zero_()
        slots.hold(batch)
        slots.model = Held(weakref.ref(self), batch)
        self._out, self._version = batch, variable._version

    @torch.no_grad()
    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy rows out of the variable to where they came from."""
        rows, variable = self._rows(), self._variable()
        batch = self._taken(retrievedPosIndexes, retrievedNegIndexes)
        rows.move(variable.device)
        rows.scatter_(batch.found.rows, {WEIGHT: variable.index_select(0, batch.first)})
        self._out = None


def _grow(variable: nn.Parameter, n: int) -> None:
    """More slots. The old graph, which someone may hold, must not tell torch what shape they have."""
    with torch.inference_mode(False):
        new = torch.zeros((n, variable.shape[1]), dtype=variable.dtype, device=variable.device)
    variable.grad = None
    part_from_graphs(variable, new)


class ModelFactory(_ModelFactory):
    """All rows of an embedding: on the variable's device, or with `CPUPinn` in host memory.

    `diskname` names nothing here: only collections on disk (`ModelFactoryMM`) have a file. The order of
    later releases, which had no `diskname`, is understood too.

    >>> import numpy as np
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
        if isinstance(datatype, bool):  # ModelFactory(v, n, d, 'float32', True), as later releases had it
            diskname, datatype, CPUPinn = "variable", diskname, datatype
        elif isinstance(diskname, torch.dtype) or diskname in DTYPES:
            diskname, datatype = "variable", diskname
        self.diskname, self.CPUPinn = diskname, CPUPinn
        super().__init__(model_variable, total_classes, embed_dimension, datatype, cupy_home(CPUPinn))


class ModelFactoryMM(_ModelFactory):
    """All rows of an embedding in a file: `DISKNAME0.bed`, or the next number that is free.

    The file holds the first values until `checkpoint()` makes it hold the trained ones; `CPUPinn` changes
    nothing.
    """

    def __init__(
        self,
        model_variable: Any,
        total_classes: int,
        embed_dimension: int,
        diskname: str = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        self.diskname, self.CPUPinn = diskname, CPUPinn
        super().__init__(model_variable, total_classes, embed_dimension, datatype, Home("disk", diskname))


class PytorchModelFactory(_ModelFactory):
    """All rows of an embedding: `deviceType` "cuda" for the variable's device, "cpu" for host memory.

    Host memory is such that GPUs can address it, whatever `pinType` says.
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
        home = torch_home(deviceType, pinType)
        super().__init__(model_variable, total_classes, embed_dimension, datatype, home)


class GPUPytorchModelFactory(_ModelFactory):
    """All rows of an embedding, on the variable's device."""

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = "float32"
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype, Home("device"))


class CPUPytorchModelFactory(_ModelFactory):
    """All rows of an embedding, in host memory."""

    def __init__(
        self, model_variable: Any, total_classes: int, embed_dimension: int, datatype: Any = "float32"
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype, Home("host"))
