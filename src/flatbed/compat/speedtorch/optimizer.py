"""OptimizerFactory and its variants: an optimizer's state of all rows, switched in and out with them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.compat.speedtorch.collection import Collection, Column, Fill, Home
from flatbed.compat.speedtorch.homes import cupy_home, torch_home
from flatbed.compat.speedtorch.optimizer_state import found_state, group_of, variable_of
from flatbed.compat.speedtorch.slots import Batch, Held, Slots
from flatbed.compat.speedtorch.switcher import Switcher, check_variable
from flatbed.errors import FlatbedError


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
        self._found = found_state(given_optimizer, self._group(), self.datatype)
        self.optVarList = list(self._found.tensors)
        self._begun = self._loaded = self._stepped = False
        self._watch: Any = None
        self._watch_steps()

    def _variable(self) -> nn.Parameter:
        variable = variable_of(self.model, self.variable_name)
        check_variable(variable, self.embed_dimension, self.datatype, f"'{self.variable_name}'")
        return variable

    def _group(self) -> dict[str, Any]:
        """As it is now: loading a state dict makes new groups."""
        return group_of(self.given_optimizer, self._variable(), self.variable_name)

    def _held(self, slots: Slots) -> Held | None:
        return slots.states.get(self.given_optimizer)

    def _has_changed(self) -> bool:
        return self._stepped

    def _columns(self) -> list[Column]:
        if not self.optVarList:
            raise FlatbedError(f"{type(self.given_optimizer).__name__} has no state per row: none is stored")
        return [Column(name, self.datatype, self.embed_dimension) for name in self.optVarList]

    def _begin(self, fill: Fill | None = None) -> Collection:
        """First values of state, by today's options; those that are the row's weight come later."""
        known, group = self._found.tensors.items(), self._group()
        first = {n: float(group[v]) if isinstance(v, str) else v for n, v in known}

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
        self._forget()

    def _forget(self) -> None:
        """What the optimizer holds is no longer from the collection."""
        Slots.of(self._variable()).states.pop(self.given_optimizer, None)

    def _adopt(self, made: Collection) -> None:
        super()._adopt(made)
        self._forget()
        self._watch_steps()

    def close(self) -> None:
        """Give the collection's memory or file back. A file holds its last checkpoint."""
        super().close()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    # ---- steps

    def _watch_steps(self) -> None:
        """Let the optimizer refuse steps with state of other rows than the variable's, until closed."""
        if self._watch is None and self.optVarList:
            me = weakref.ref(self)

            def check(optimizer: object, args: Any, kwargs: Any) -> None:
                switcher = me()
                if switcher is not None:
                    switcher._check_step(has_closure=any(map(callable, (*args, *kwargs.values()))))

            self._watch = self.given_optimizer.register_step_pre_hook(check)

    def _check_step(self, *, has_closure: bool) -> None:
        variable = variable_of(self.model, self.variable_name)
        slots = Slots.of(variable)
        there, here = slots.model, self._held(slots)
        if there is None or (variable.grad is None and not has_closure):
            return
        if here is None or not (here.batch is there.batch or here.batch.same(there.batch.ids)):
            raise FlatbedError(
                f"a step of {type(self.given_optimizer).__name__} with the state of other rows than those in "
                f"'{self.variable_name}': give {type(self).__name__}.beforeForwardPass() the ids that the "
                "variable's own switcher was given, in every batch"
            )
        self._stepped = True

    # ---- the loop

    @torch.no_grad()
    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the state of rows into the optimizer: of the positive ids first, then of the negative ones.

        Before the optimizer's first step there is nothing to do: it makes the state itself.
        """
        rows = self._rows() if self.optVarList else None
        variable = self._variable()
        ids = self._ids(retrievedPosIndexes, retrievedNegIndexes)
        self._check_home()
        slots = Slots.of(variable)
        batch = slots.prepare(ids, self.total_classes)
        if rows is not None:
            self._install(rows, slots, batch)
        slots.hold(batch)
        slots.states[self.given_optimizer] = Held(weakref.ref(self), batch)
        self._out, self._stepped = batch, False

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
