"""OptimizerFactory and its variants: an optimizer's state of all rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatbed import FlatbedError
from flatbed.compat.speedtorch import storage
from flatbed.compat.speedtorch.optimizer_state import group_of, probe_rows, variable_of
from flatbed.compat.speedtorch.slots import SlotBatch, Slots
from flatbed.compat.speedtorch.storage import RowStorage
from flatbed.compat.speedtorch.switcher import Switcher


class _OptimizerFactory(Switcher):
    """Switcher of an optimizer's state, whose names and first values a trial of its class has found."""

    _required = ("given_optimizer", "total_classes", "embed_dimension", "model", "variable_name")
    _stacked = True
    _init_method = "optInit()"
    given_optimizer: torch.optim.Optimizer
    model: nn.Module
    variable_name: str
    dtype: Any

    def _setup(self) -> None:
        self.datatype = self.dtype
        super()._setup()
        self.dtype = self.datatype
        self._first_values = probe_rows(self.given_optimizer, self._group(), self.datatype)
        self._names = self.optVarList = list(self._first_values)
        if self._spec.kind == "disk":
            self.diskname = self.diskname or f"{self.variable_name}{type(self.given_optimizer).__name__}"
            self._spec = replace(self._spec, diskname=self.diskname)
        self._needs_weights = self._was_loaded = False
        self._stepped = False
        self._hook: Any = None
        self._check_every_step()

    def _variable(self) -> nn.Parameter:
        return self._check_variable(variable_of(self.model, self.variable_name), f"'{self.variable_name}'")

    def _group(self) -> dict[str, Any]:
        """Return the variable's group as it is now: loading a state dict makes new groups."""
        return group_of(self.given_optimizer, self._variable(), self.variable_name)

    @property
    def optimizerKey(self) -> int:
        """Number of the variable in the optimizer's state dict."""
        params = [param for group in self.given_optimizer.param_groups for param in group["params"]]
        return next(at for at, param in enumerate(params) if param is self._variable())

    def _target(self, slots: Slots) -> Any:
        return self.given_optimizer

    def _has_stepped(self, slots: Slots) -> bool:
        return self._stepped

    def optInit(self) -> None:
        """Create the state of all rows with its first values. Do nothing for an optimizer without state."""
        if not self.optVarList:
            return
        group = self._group()
        first = {n: float(group[v]) if isinstance(v, str) else v for n, v in self._first_values.items()}

        def fill(rows: RowStorage) -> None:
            values = torch.tensor([[value or 0.0] for value in first.values()], dtype=self.datatype)
            for start, stop in storage.blocks(rows) if values.any() else ():
                rows.write_(start, values.expand(stop - start, *rows.shape[1:]))

        self._fill_new(fill)
        self._was_loaded, self._needs_weights = False, any(value is None for value in first.values())

    def _adopt(self, rows: RowStorage) -> None:
        super()._adopt(rows)
        Slots.of(self._variable()).loaded.pop(self.given_optimizer, None)
        self._check_every_step()

    def _after_load(self) -> None:
        super()._after_load()
        self._was_loaded, self._needs_weights = True, False
        Slots.of(self._variable()).loaded.pop(self.given_optimizer, None)

    def close(self) -> None:
        """Release the memory, or save and close the file; the optimizer's steps are no longer checked."""
        super().close()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # ---- steps

    def _check_every_step(self) -> None:
        """Make the optimizer refuse steps with the state of other rows than the variable's, until closed."""
        if self._hook is None and self.optVarList:
            reference = weakref.ref(self)

            def check(optimizer: object, args: Any, kwargs: Any) -> None:
                switcher = reference()
                if switcher is not None:
                    switcher._check_step(has_closure=any(map(callable, (*args, *kwargs.values()))))

            self._hook = self.given_optimizer.register_step_pre_hook(check)

    def _check_step(self, *, has_closure: bool) -> None:
        variable = variable_of(self.model, self.variable_name)
        slots = Slots.of(variable)
        weights, state = slots.loaded.get(slots), slots.loaded.get(self.given_optimizer)
        if weights is None or (variable.grad is None and not has_closure):
            return
        if state is None or not (state.batch is weights.batch or state.batch.same(weights.batch.ids)):
            raise FlatbedError(
                f"found a step of {type(self.given_optimizer).__name__} with the state of other rows than "
                f"those in '{self.variable_name}': call {type(self).__name__}.beforeForwardPass() with the "
                "ids of the variable's own switcher, in every batch"
            )
        self._stepped = True

    # ---- the loop

    def _copy_in(self, rows: RowStorage, variable: nn.Parameter, batch: SlotBatch) -> None:
        """Replace the optimizer's state. Before its first step it has none, and makes it itself."""
        self._stepped = False
        if self._needs_weights:
            self._copy_weights(rows, Slots.of(variable))
        state = self.given_optimizer.state.get(variable)
        if not state:
            if self._was_loaded:
                raise FlatbedError(
                    f"rows of state were loaded, but {type(self.given_optimizer).__name__} has no state of "
                    "its own for them: load its state dict, too (optimizer.load_state_dict)"
                )
            return
        self._refuse_new_state(state, variable)
        values = rows.gather(batch.rows, batch.unique)
        n, shape = len(batch), (max(len(variable), len(batch)), self.embed_dimension)
        for at, name in enumerate(self.optVarList):
            state[name] = _installed(state.get(name), values[:, at], shape, n)

    def _copy_out(self, rows: RowStorage, variable: nn.Parameter, batch: SlotBatch) -> None:
        state = self.given_optimizer.state.get(variable)
        if state:  # otherwise there was no step yet
            self._refuse_new_state(state, variable)
            parts = [self._rows_of(state.get(name), name, variable, batch) for name in self.optVarList]
            rows.scatter_(batch.unique.rows, torch.stack(parts, dim=1))

    def _rows_of(self, value: Any, name: str, variable: Tensor, batch: SlotBatch) -> Tensor:
        if value is None:  # state that a later step makes, which begins with zeros
            return variable.new_zeros((len(batch.first), self.embed_dimension))
        if not isinstance(value, Tensor) or value.shape != variable.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise FlatbedError(
                f"the optimizer's state '{name}' is {found}; expected the variable's shape "
                f"{tuple(variable.shape)}; nothing was written"
            )
        dense: Tensor = value.to_dense() if value.is_sparse else value
        return dense.index_select(0, batch.first)

    def _refuse_new_state(self, state: Mapping[str, Any], variable: Tensor) -> None:
        for name, value in state.items():
            per_element = isinstance(value, Tensor) and value.numel() > 1 and value.shape == variable.shape
            if per_element and name not in self.optVarList:
                raise FlatbedError(
                    f"found state '{name}' of {type(self.given_optimizer).__name__}, which it did not have "
                    "when this switcher was made: an option has changed; make the switcher again"
                )

    def _copy_weights(self, rows: RowStorage, slots: Slots) -> None:
        """Start state that begins as the row's weight."""
        weights = None if slots.collection is None else slots.collection()
        names = [at for at, first in enumerate(self._first_values.values()) if first is None]
        if weights is not None:
            for start, stop in storage.blocks(rows):
                values = rows.read(start, stop)
                values[:, names] = weights.read(start, stop)
                rows.write_(start, values)
        self._needs_weights = False

    @property
    def CUPYcorpi(self) -> list[Any]:
        """State of all rows: an array for each name in `optVarList`."""
        return list(self.getCupyMM().values())

    CUPYmemmap = CUPYcorpi


def _installed(current: Any, values: Tensor, shape: tuple[int, int], n: int) -> Tensor:
    """Return a tensor of state that begins with these rows; the current one, if it fits."""
    if isinstance(current, Tensor) and current.is_sparse:  # as SGD keeps its momentum of sparse gradients
        at = torch.arange(n, device=values.device).unsqueeze(0)
        return torch.sparse_coo_tensor(at, values, shape, is_coalesced=True, check_invariants=False)
    fits = isinstance(current, Tensor) and tuple(current.shape) == shape
    whole: Tensor = current if fits else values.new_zeros(shape)
    whole[:n].copy_(values)
    return whole


class OptimizerFactory(_OptimizerFactory, dtype="float32", CPUPinn=False):
    """An optimizer's state of all rows: on the variable's device, or with `CPUPinn` in host memory."""


class OptimizerFactoryMM(_OptimizerFactory, storage="disk", dtype="float32", CPUPinn=False, diskname=None):
    """An optimizer's state of all rows in a file: `u_embeddingsAdagrad0.bed`, or another `diskname`.

    `checkpoint()` and `close()` save the rows, `openFile()` continues with them; `CPUPinn` changes nothing.
    """


class PytorchOptimizerFactory(_OptimizerFactory, dtype="float32", deviceType="cuda", pinType=False):
    """An optimizer's state of all rows: `deviceType` "cuda" for the variable's device, "cpu" for the host."""


class GPUPytorchOptimizerFactory(_OptimizerFactory, storage="device", dtype="float32"):
    """An optimizer's state of all rows, on the variable's device."""


class CPUPytorchOptimizerFactory(_OptimizerFactory, storage="host", dtype="float32"):
    """An optimizer's state of all rows, in host memory."""
