"""OptimizerFactory and its variants: an optimizer's state of all rows, switched in and out with them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.compat.speedtorch.collection import Collection, Column, Fill, Home
from flatbed.compat.speedtorch.homes import cupy_home, torch_home
from flatbed.compat.speedtorch.slots import Batch, Slots
from flatbed.compat.speedtorch.switcher import Switcher, check_variable
from flatbed.engine.optimizer import Optimizer
from flatbed.errors import FlatbedError
from flatbed.rules.trial import Found, try_out

HOW = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that say how a step is computed, and not what it is."""


class _OptimizerFactory(Switcher):
    """The optimizer state of all rows of a variable. It is found out by trying the optimizer's class."""

    _stacked = True
    _first_call = "optInit()"

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: object,
        home: Home,
    ) -> None:
        super().__init__(total_classes, embed_dimension, dtype, home)
        self.dtype = self.datatype
        self.given_optimizer, self.model, self.variable_name = given_optimizer, model, variable_name
        self._group = group_of(given_optimizer, self._variable(), variable_name)
        self._found = found_state(given_optimizer, self._group)
        self.optVarList = list(self._found.tensors)
        self._begun = self._loaded = False

    def _variable(self) -> nn.Parameter:
        variable = variable_of(self.model, self.variable_name)
        check_variable(variable, self.embed_dimension, self.datatype, f"'{self.variable_name}'")
        return variable

    def _columns(self) -> list[Column]:
        if not self.optVarList:
            raise FlatbedError(f"{type(self.given_optimizer).__name__} has no state per row: none is stored")
        return [Column(name, self.datatype, self.embed_dimension) for name in self.optVarList]

    def _begin(self, fill: Fill | None = None) -> Collection:
        """First values of state, by today's options; those that are the row's weight come later."""
        known = self._found.tensors.items()
        first = {n: float(self._group[v]) if isinstance(v, str) else v for n, v in known}

        def constants(start: int, stop: int, columns: Mapping[str, Tensor]) -> None:
            for name, value in first.items():
                columns[name].fill_(value or 0.0)

        self._loaded, self._begun = False, not any(value is None for value in first.values())
        return super()._begin(constants if any(first.values()) else fill)

    def optInit(self) -> None:
        """Lay out state for all rows, with the values that it begins with. Without state, do nothing."""
        if self.optVarList:
            self._begin()

    def _has_loaded(self) -> None:
        self._loaded = self._begun = True

    # ---- the loop

    @torch.no_grad()
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the state of rows into the optimizer: of the positive ids first, then of the negative ones.

        Before the optimizer's first step there is nothing to do: it makes the state itself.
        """
        rows = self._rows() if self.optVarList else None
        variable = self._variable()
        ids = self._ids(retrievedPosIndexes, retrievedNegIndexes)
        slots = Slots.of(variable)
        batch = slots.prepare(ids, self.total_classes)
        if rows is not None:
            self._install(rows, slots, batch)
        slots.hold(batch)
        self._out = batch

    def _install(self, rows: Collection, slots: Slots, batch: Batch) -> None:
        variable = slots.variable
        rows.move(variable.device)
        if not self._begun:
            self._copy_weights(rows, slots)
        state = self.given_optimizer.state.get(variable)
        if not state:
            if self._loaded:
                raise FlatbedError(
                    f"rows of state were loaded, but {type(self.given_optimizer).__name__} has no state of "
                    "its own for them yet: load its state dict, too (optimizer.load_state_dict)"
                )
            return
        self._refuse_more(state, variable)
        values = rows.gather(batch.found.rows)
        n, n_slots = len(batch), max(len(variable), len(batch))
        for name in self.optVarList:
            value = values[name].index_select(0, batch.found.inverse)
            state[name] = _installed(state.get(name), value, (n_slots, self.embed_dimension), n)

    @torch.no_grad()
    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the state of rows out of the optimizer to where it came from."""
        rows = self._rows() if self.optVarList else None
        variable = self._variable()
        batch = self._taken(retrievedPosIndexes, retrievedNegIndexes)
        state = self.given_optimizer.state.get(variable)
        if rows is not None and state:  # else no step was taken so far
            self._refuse_more(state, variable)
            rows.move(variable.device)
            values = {name: self._rows_of(state.get(name), name, variable, batch) for name in self.optVarList}
            rows.scatter_(batch.found.rows, values)
        self._out = None

    def _rows_of(self, value: Any, name: str, variable: Tensor, batch: Batch) -> Tensor:
        if value is None:  # it comes in a later step, and begins with zeros then
            return variable.new_zeros((len(batch.first), self.embed_dimension))
        if not isinstance(value, Tensor) or value.shape != variable.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise FlatbedError(
                f"the optimizer's state '{name}' is {found}; expected the variable's shape "
                f"{tuple(variable.shape)}; nothing was written"
            )
        dense: Tensor = value.to_dense() if value.is_sparse else value
        return dense.index_select(0, batch.first)

    def _refuse_more(self, state: Mapping[str, Any], variable: Tensor) -> None:
        for name, value in state.items():
            per_element = isinstance(value, Tensor) and value.numel() > 1 and value.shape == variable.shape
            if per_element and name not in self.optVarList:
                raise FlatbedError(
                    f"{type(self.given_optimizer).__name__} keeps state ({name}) that it did not have when "
                    "this switcher was made: an option was changed since; make the switcher again"
                )

    def _copy_weights(self, rows: Collection, slots: Slots) -> None:
        """State that begins as the row's weight."""
        weights = None if slots.weights is None else slots.weights()
        if weights is not None:
            for name in (name for name, first in self._found.tensors.items() if first is None):
                for start, stop in rows.blocks():
                    rows.write_(name, start, weights.read(next(iter(weights.columns)), start, stop))
        self._begun = True


def _installed(held: Any, value: Tensor, shape: tuple[int, int], n: int) -> Tensor:
    """A tensor of state with these rows at its beginning; in place, if it can be."""
    if isinstance(held, Tensor) and held.is_sparse:  # as SGD keeps its momentum of sparse gradients
        at = torch.arange(n, device=value.device).unsqueeze(0)
        return torch.sparse_coo_tensor(at, value, shape, is_coalesced=True, check_invariants=False)
    fits = isinstance(held, Tensor) and tuple(held.shape) == shape
    whole: Tensor = held if fits else value.new_zeros(shape)
    whole[:n].copy_(value)
    return whole


def variable_of(model: nn.Module, name: str) -> nn.Parameter:
    """The weight of the module of this name, or the parameter itself."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the module that has the variable; found {type(model).__name__}")
    known = dict(model.named_parameters(remove_duplicate=False))
    found = known.get(f"{name}.weight", known.get(name))
    if found is None:
        names = ", ".join(n.removesuffix(".weight") for n in known) or "no parameters"
        raise ValueError(f"the model has no variable {name!r}; found {names}")
    return found


def group_of(optimizer: torch.optim.Optimizer, variable: Tensor, name: str) -> dict[str, Any]:
    """The param group that a variable is in."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"given_optimizer must be an optimizer of torch; found {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        if any(param is variable for param in group["params"]):
            return group
    raise ValueError(
        f"the optimizer does not have '{name}' among its parameters: build it with the model's, "
        "and the switcher after that"
    )


def found_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Found:
    """What an optimizer keeps for each element, by a trial of its class with the same options."""
    kind = type(optimizer)
    if isinstance(optimizer, Optimizer):
        raise FlatbedError(
            f"{kind.__name__} of flatbed.optim keeps its state where it wants it: use torch.optim's here, or "
            "flatbed.HostEmbedding instead of switchers"
        )
    wanted = inspect.signature(kind).parameters
    options = {n: _plain(v) for n, v in group.items() if n in wanted and n not in HOW}
    try:
        try:
            return try_out(kind, options)
        except FlatbedError as error:
            dense = error
        try:
            return try_out(_given_sparse(kind), options)
        except FlatbedError:
            raise dense from None
    except FlatbedError as error:
        reason = str(error).partition(": ")[2]
        raise FlatbedError(f"{kind.__name__} cannot be switched row by row: {reason}") from error
    except Exception as error:
        raise FlatbedError(
            f"{kind.__name__} cannot be switched row by row: it could not be tried "
            f"({type(error).__name__}: {error})"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(one) for one in value)
    return value.item() if isinstance(value, Tensor) else value


def _given_sparse(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class as it is with sparse gradients, which some insist on."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None and not param.grad.is_sparse:
                at = torch.arange(len(param)).unsqueeze(0)
                param.grad = torch.sparse_coo_tensor(
                    at, param.grad, param.shape, is_coalesced=True, check_invariants=False
                )
        return kind.step(self, closure)

    made: type[torch.optim.Optimizer] = type(kind.__name__, (kind,), {"step": step})
    return made


class OptimizerFactory(_OptimizerFactory):
    """An optimizer's state of all rows: on the variable's device, or with `CPUPinn` in host memory.

    >>> from flatbed.compat.speedtorch import ModelFactory
    >>> model = nn.Sequential(nn.Embedding(4, 2))
    >>> optimizer = torch.optim.Adamax(model.parameters())
    >>> rows = ModelFactory(model[0], 1000, 2)
    >>> state = OptimizerFactory(optimizer, 1000, 2, model, "0")
    >>> rows.normalDistributionInit(0.0, 1.0)
    >>> state.optInit()
    >>> for ids in ([7, 999, 7, 3], [3, 3, 5, 7]):
    ...     rows.beforeForwardPass(ids)
    ...     state.beforeForwardPass(ids)
    ...     optimizer.zero_grad()
    ...     model(torch.arange(4)).square().sum().backward()
    ...     optimizer.step()
    ...     rows.afterOptimizerStep(ids)
    ...     state.afterOptimizerStep(ids)
    >>> list(state.getNumpyVersion())
    ['exp_avg', 'exp_inf']
    """

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        self.CPUPinn = CPUPinn
        super().__init__(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            cupy_home(CPUPinn),
        )


class OptimizerFactoryMM(_OptimizerFactory):
    """An optimizer's state of all rows in a file: the variable's name, the optimizer's, and a number.

    `u_embeddingsAdagrad0.bed`, for example. `CPUPinn` changes nothing; `diskname` names it otherwise.
    """

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
        *,
        diskname: str | None = None,
    ) -> None:
        self.CPUPinn = CPUPinn
        self.diskname = f"{variable_name}{type(given_optimizer).__name__}" if diskname is None else diskname
        home = Home("disk", self.diskname)
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, home)


class PytorchOptimizerFactory(_OptimizerFactory):
    """An optimizer's state of all rows: `deviceType` "cuda" for the variable's device, "cpu" for the host."""

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        deviceType: str = "cuda",
        pinType: bool = False,
    ) -> None:
        self.deviceType, self.pinType = deviceType, pinType
        home = torch_home(deviceType, pinType)
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, home)


class GPUPytorchOptimizerFactory(_OptimizerFactory):
    """An optimizer's state of all rows, on the variable's device."""

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
    ) -> None:
        home = Home("device")
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, home)


class CPUPytorchOptimizerFactory(_OptimizerFactory):
    """An optimizer's state of all rows, in host memory."""

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
    ) -> None:
        home = Home("host")
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype, home)
