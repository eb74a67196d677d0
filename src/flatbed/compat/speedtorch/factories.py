"""The factories: switchers of rows of an embedding and of state of an optimizer, in five kinds of memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatbed import FlatbedError
from flatbed.compat.speedtorch.arrays import FileName
from flatbed.compat.speedtorch.slots import SlotBatch
from flatbed.compat.speedtorch.switcher import DiskSwitcher, Switcher
from flatbed.optim import from_torch

REFUSED = {
    "max_norm": (None, "it would renormalise some of a row's slots and not the others"),
    "padding_idx": (None, "it names a slot, which holds another row in every batch"),
    "scale_grad_by_freq": (False, "it would count slots instead of rows"),
}
WEIGHTS = 0
"""Key of the variable itself in `Slots.switchers`."""
IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that choose how a step is computed and not its result."""


# A dataclass takes its fields as arguments. They are in the order of SpeedTorch's constructors.


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

        The array has the shape (batchSize, posPerBatch). With `negPerBatch`, a second array of the shape
        (batchSize, negPerBatch) follows.
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
    >>> switcher = SpeedTorch.ModelFactory(embedding, 1000, 2, CPUPinn=True)
    >>> switcher.zerosInit()
    >>> slots = torch.from_numpy(switcher.variableTransformer(4, 1))
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

    `pinType` changes nothing: GPUs address the host memory anyway.
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


# ---- state of optimizers


@dataclass(eq=False, repr=False)
class StateSwitcher(Switcher):
    """Switcher of an optimizer's state. A trial of the optimizer's class finds its names and first values."""

    given_optimizer: torch.optim.Optimizer
    total_classes: int
    embed_dimension: int
    model: nn.Module
    variable_name: str
    dtype: Any = "float32"

    _init_method = "optInit()"
    _is_stacked = True

    def __post_init__(self) -> None:
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        named = (f"{self.variable_name}.weight", self.variable_name)
        self._path = next((name for name in named if name in names), "")
        if not self._path:
            found = ", ".join(name.removesuffix(".weight") for name in names)
            raise ValueError(f"the model has no variable {self.variable_name!r}; found {found}")
        self.datatype, self._key = self.dtype, id(self.given_optimizer)
        self._set_up()
        self.dtype = self.datatype
        self._first_values = first_values(self.given_optimizer, self._group())
        self._names = self.optVarList = list(self._first_values)
        self._needs_state_dict = False
        if self.optVarList:
            self._slots(self._variable()).switchers[self._key] = self

    def _variable(self) -> nn.Parameter:
        variable: nn.Parameter = attrgetter(self._path)(self.model)
        return variable

    def _group(self) -> dict[str, Any]:
        """Return the variable's group. It is looked up each time: `load_state_dict` replaces the groups."""
        for group in self.given_optimizer.param_groups:
            if any(param is self._variable() for param in group["params"]):
                return group
        raise ValueError(
            f"the optimizer does not have '{self.variable_name}' among its parameters: build it with the "
            "model's parameters before the switcher"
        )

    @property
    def optimizerKey(self) -> int:
        """Number of the variable in the optimizer's state dict."""
        params = [param for group in self.given_optimizer.param_groups for param in group["params"]]
        return next(at for at, param in enumerate(params) if param is self._variable())

    def optInit(self) -> None:
        """Create the state of all rows with its first values. Do nothing for an optimizer without state.

        If state starts as a copy of the weights, as ASGD's average does, initialise the ModelFactory first.
        """
        if not self.optVarList:
            return
        group, weights = self._group(), self._slots(self._variable()).switchers.get(WEIGHTS)
        firsts = [float(group[v]) if isinstance(v, str) else v for v in self._first_values.values()]
        if None in firsts and weights is None:
            raise FlatbedError("found no rows of the variable: initialise its ModelFactory before optInit()")
        self._create()
        self._needs_state_dict = False

        def first_rows(block: slice) -> Tensor:
            rows = self._read_block(block)
            for part, first in zip(rows, firsts, strict=True):
                part[:] = weights._read_block(block)[0] if weights and first is None else first
            return rows

        if any(firsts) or None in firsts:
            self._fill(first_rows)

    def _load(self, values: Tensor) -> None:
        super()._load(values)
        self._needs_state_dict = True

    def close(self) -> None:
        """Release the memory, or save and close the file; training continues without this switcher."""
        super().close()
        switchers = self._slots(self._variable()).switchers
        if switchers.get(self._key) is self:
            del switchers[self._key]

    # ---- the loop

    def _copy_in(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Replace the optimizer's state. Before its first step, the optimizer has none, and will make it."""
        state = self.given_optimizer.state.get(variable)
        if not state:
            self._table()  # raises before optInit()
            if self._needs_state_dict:
                raise FlatbedError(
                    f"rows of state were loaded, but {type(self.given_optimizer).__name__} has no state of "
                    "its own for them: load its state dict, too (optimizer.load_state_dict)"
                )
            return
        shape = (max(variable.shape[0], len(batch.ids)), self.embed_dimension)
        tensors = [state[name] for name in self.optVarList]
        # SGD keeps the momentum of sparse gradients as a sparse tensor.
        dense = [
            t.new_empty(shape, layout=torch.strided) if t.is_sparse or t.shape != shape else t
            for t in tensors
        ]
        self._read(batch, dense)
        for name, before, now in zip(self.optVarList, tensors, dense, strict=True):
            state[name] = now.to_sparse(1) if before.is_sparse else now

    def _copy_out(self, variable: nn.Parameter, batch: SlotBatch) -> None:
        state = self.given_optimizer.state.get(variable)
        if state:
            self._write(batch, [state[name].to_dense() for name in self.optVarList])

    @property
    def CUPYcorpi(self) -> list[Any]:
        """State of all rows: an array for each name in `optVarList`."""
        return list(self.getNumpyVersion().values())

    CUPYmemmap = CUPYcorpi


def first_values(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, float | str | None]:
    """Find state per element by a trial of the optimizer's class with the group's options.

    Returns first values by name: a number, the name of an option, or None for the weight itself.
    """
    kind = type(optimizer)
    if kind is torch.optim.SparseAdam:  # it only takes sparse gradients; it has the state of Adam
        kind = torch.optim.Adam
    known = inspect.signature(kind).parameters
    options = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name in known and name not in IMPLEMENTATION
    }
    rule = from_torch(kind, [nn.Parameter(torch.zeros(1, 1))], **options)._rule
    firsts = {name: rule.initial.get(name) for name in rule.state}
    # The trial ran in float32, which makes 0.1 into 0.10000000149. `str` of a float32 gives 0.1 back.
    return {n: float(str(np.float32(v))) if isinstance(v, float) else v for n, v in firsts.items()}


@dataclass(eq=False, repr=False)
class OptimizerFactory(StateSwitcher):
    """An optimizer's state of all rows: on the variable's device, or with `CPUPinn` in host memory."""

    CPUPinn: bool = False


@dataclass(eq=False, repr=False)
class OptimizerFactoryMM(StateSwitcher, DiskSwitcher):
    """An optimizer's state of all rows in a file: `u_embeddingsAdagrad0.bed`, or another `diskname`.

    `checkpoint()` and `close()` save the rows, `openFile()` continues with them; `CPUPinn` changes nothing.
    """

    CPUPinn: bool = False
    diskname: FileName | None = None

    def __post_init__(self) -> None:
        self.diskname = self.diskname or f"{self.variable_name}{type(self.given_optimizer).__name__}"
        super().__post_init__()

    def openFile(self, fileName: FileName) -> None:
        """Continue with the rows in the file of another switcher, as its last checkpoint left them."""
        super().openFile(fileName)
        self._needs_state_dict = True


@dataclass(eq=False, repr=False)
class PytorchOptimizerFactory(StateSwitcher):
    """An optimizer's state of all rows: `deviceType` "cuda" for the variable's device, "cpu" for the host."""

    deviceType: str = "cuda"
    pinType: bool = False


class GPUPytorchOptimizerFactory(StateSwitcher):
    """An optimizer's state of all rows, on the variable's device."""


class CPUPytorchOptimizerFactory(StateSwitcher):
    """An optimizer's state of all rows, in host memory."""

    _storage = "host"
