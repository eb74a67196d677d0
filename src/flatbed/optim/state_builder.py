"""From param groups to rows: where each parameter's state lies, made or moved where need be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatbed.errors import FlatbedError
from flatbed.kernels.dispatch import use_triton
from flatbed.kernels.reference import TorchStepper
from flatbed.kernels.step import STEPS, ParamSlot, Stepper, stride_of
from flatbed.layout import overlaps_itself
from flatbed.optim import checks
from flatbed.optim.state import EMA, MASTER, State, arenas
from flatbed.rule import Group, Rule
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

LOW = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Want:
    """A tensor of state that has to be made, what it starts with, and who takes it."""

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: Tensor | float
    take: Callable[[Tensor], None]


@dataclass
class Builder:
    """Collects what is missing, so that it can be made in few large buffers once all of it is known."""

    optimizer: Optimizer
    anew: bool
    wants: list[Want] = field(default_factory=list)
    rows: list[ParamSlot] = field(default_factory=list)

    def add(self, name: str, param: Tensor, number: int, grad: Tensor | None) -> None:
        """One parameter that has a gradient or state."""
        group = self.optimizer.param_groups[number]
        held = self.optimizer.state.get(param, {})
        row = ParamSlot(name, param, number, param.dtype if grad is None else grad.dtype)
        if overlaps_itself(tuple(param.shape), param.stride()):
            raise FlatbedError(
                f"parameter {name} is expanded: several of its elements are one place in memory"
            )
        if self.optimizer.settings.stochastic_rounding and param.dtype == torch.float16:
            raise FlatbedError(
                f"stochastic_rounding is for bf16; parameter {name} is fp16: use master_weights=True for it"
            )
        if self.anew:
            self._refuse_foreign(row, held)
        self._add_tensors(row, group, held)
        self._add_scalars(row, group, held)
        # What is missing in a checkpoint starts at the weights of the first step, which may be loaded later.
        if self.optimizer.master_weights and param.dtype in LOW and (MASTER in held or not self.anew):
            self._want(row, MASTER, held.get(MASTER), torch.float32, param, _setter(row, "master"))
        if self.optimizer.settings.ema_decay is not None and (EMA in held or not self.anew):
            dtype = torch.promote_types(param.dtype, torch.float32)
            self._want(row, EMA, held.get(EMA), dtype, param, _setter(row, "ema"))
        self.rows.append(row)

    def _refuse_foreign(self, row: ParamSlot, held: dict[str, Any]) -> None:
        """A checkpoint has the keys of its optimizer: all of them, and no others."""
        rule = self.optimizer.rule
        shown = [name for name in rule.scalars if not name.startswith("_")]
        odd = [key for key in held if key not in (*rule.state, *shown, MASTER, EMA)]
        lacking = [name for name in shown if held.get(name) is None] if set(held) - {MASTER, EMA} else []
        if odd or lacking:
            what = f"has {', '.join(map(repr, odd))}" if odd else f"lacks {', '.join(map(repr, lacking))}"
            raise FlatbedError(
                f"the checkpoint's state of parameter {row.name} {what}: it is of another optimizer than "
                f"{type(self.optimizer).__name__}"
            )

    def _add_tensors(self, row: ParamSlot, group: Group, held: dict[str, Any]) -> None:
        rule = self.optimizer.rule
        names = rule.state_names(group)
        if any(held.get(key) is not None for key in (*rule.state, *rule.scalars)):
            for name in names:
                if rule.state[name] is None and held.get(name) is None:
                    found = ", ".join(map(repr, held))
                    raise FlatbedError(
                        f"the state of parameter {row.name} lacks '{name}' and has {found}: it is another "
                        f"optimizer's. Clear it (`del optimizer.state[p]`) to begin anew"
                    )
        dtype = self._state_dtype(row, [held[name] for name in names if isinstance(held.get(name), Tensor)])
        for name in names:
            first = self.optimizer.rule.first_value(self.optimizer.defaults, name)
            row.state[name] = row.param  # keeps the order of names
            self._want(row, name, held.get(name), dtype, first, _item_setter(row.state, name))

    def _state_dtype(self, row: ParamSlot, held: list[Tensor]) -> torch.dtype:
        """As asked; or as it is, which may be more precise than the parameter; or as torch would make it."""
        if self.optimizer.state_dtype is not None:
            return self.optimizer.state_dtype
        if self.optimizer.master_weights and row.param.dtype in LOW:
            return torch.float32
        dtype = row.param.dtype
        for other in held:
            dtype = torch.promote_types(dtype, other.dtype)
        return dtype

    def _add_scalars(self, row: ParamSlot, group: Group, held: dict[str, Any]) -> None:
        known = isinstance(held, State)
        for name in self.optimizer.rule.scalars:
            value = held.get(name)
            if name.startswith("_"):
                value = held.hidden.get(name) if known else None  # type: ignore[attr-defined]
                if value is None:  # state from elsewhere has been through a step
                    known_state = (held.get(key) for key in self.optimizer.rule.state)
                    value = float(any(isinstance(old, Tensor) for old in known_state))
            if value is None:
                value = self.optimizer.rule.first_value(self.optimizer.defaults, name)
            row.scalars[name] = row.param  # keeps the order of names
            if isinstance(value, Tensor) and not self.anew and _is_number(value, row.param.device):
                row.scalars[name] = value
                continue
            take = _item_setter(row.scalars, name)
            self.wants.append(Want(name, (), (), torch.float32, row.param.device, value, take))

    def _want(
        self,
        row: ParamSlot,
        key: str,
        old: Any,
        dtype: torch.dtype,
        first: Tensor | float,
        take: Callable[[Tensor], None],
    ) -> None:
        """Keep the tensor there is, if it is of the right kind; else make one and fill it."""
        shape, stride = tuple(row.param.shape), stride_of(row.param)
        if old is not None and not isinstance(old, Tensor):
            raise FlatbedError(
                f"state '{key}' of parameter {row.name} should be a tensor; found {type(old).__name__}"
            )
        if old is not None and not old.is_floating_point():
            raise FlatbedError(
                f"state '{key}' of parameter {row.name} is {old.dtype}, and no number with a point"
            )
        if old is not None and tuple(old.shape) != shape:
            raise FlatbedError(
                f"state '{key}' of parameter {row.name} has shape {tuple(old.shape)}, the parameter {shape}"
            )
        if old is not None and not self.anew:
            kind = (old.dtype, old.device, old.stride() if old.numel() > 1 else stride)
            if kind == (dtype, row.param.device, stride) and old.data_ptr() % 16 == 0:
                take(old)
                return
        self.wants.append(
            Want(key, shape, stride, dtype, row.param.device, first if old is None else old, take)
        )

    def make(self) -> None:
        """Make all that is missing."""
        if not self.wants:
            return
        numbers = [want for want in self.wants if want.key in self.optimizer.rule.scalars]
        tensors = [want for want in self.wants if want.key not in self.optimizer.rule.scalars]
        made = [
            tensor
            for wants in (numbers, tensors)
            for tensor in arenas([((w.key, w.dtype, w.device), w.shape, w.stride) for w in wants])
        ]
        for want, tensor in zip(numbers + tensors, made, strict=True):
            if isinstance(want.value, Tensor):
                tensor.copy_(want.value, non_blocking=True)
            elif want.value != 0:
                tensor.fill_(want.value)
            want.take(tensor)


def build_rows(optimizer: Optimizer, *, everything: bool, anew: bool) -> list[ParamSlot]:
    """Rows for all parameters with gradient or state. Every gradient is looked at before anything is made."""
    listed = [
        (name, param, number, param.grad)
        for name, param, number in optimizer._everything(optimizer.param_groups, 0)
        if not isinstance(param, Table)
    ]
    for name, param, _, grad in listed:
        if grad is not None:
            checks.check_param(param, name)
            checks.check_grad(param, grad, name)
    builder = Builder(optimizer, anew)
    for name, param, number, grad in listed:
        if everything or grad is not None or optimizer.state.get(param):
            builder.add(name, param, number, grad)
    builder.make()
    return builder.rows


def keep_state(states: Any, row: ParamSlot) -> None:
    """Show a row's tensors under the parameter's state, by torch's keys and in its order."""
    shown = {name: value for name, value in row.scalars.items() if not name.startswith("_")}
    shown.update(row.state)
    for key, value in ((MASTER, row.master), (EMA, row.ema)):
        if value is not None:
            shown[key] = value
    held = states.get(row.param, {})
    # A master or an average that is not kept up would overwrite newer weights one day.
    rest = {key: value for key, value in held.items() if key not in shown and key not in (MASTER, EMA)}
    shown.update(rest)
    if not shown:
        return
    if not isinstance(held, State) or held.flag is not states.flag:
        held = states[row.param] = State(states.flag)
    held.clear()
    held.update(shown)
    held.hidden = {name: value for name, value in row.scalars.items() if name.startswith("_")}


def steppers_for(optimizer: Optimizer) -> list[tuple[Stepper, list[int]]]:
    """A stepper for each device, with the positions of its rows."""
    devices: dict[torch.device, list[int]] = {}
    for i, row in enumerate(optimizer._rows):
        devices.setdefault(row.param.device, []).append(i)
    made: list[tuple[Stepper, list[int]]] = []
    start = torch.zeros(4, dtype=torch.float64, device="cpu")
    start[STEPS] = optimizer._rounds
    before = next(iter(optimizer._shared.values()), start)
    optimizer._shared = {d: optimizer._shared.get(d, before.to(d, copy=True)) for d in devices}
    for device, held in devices.items():
        shared = optimizer._shared[device]
        kind = _stepper_kind(optimizer.rule, device)
        made.append(
            (kind(optimizer.rule, optimizer.param_groups, [optimizer._rows[i] for i in held], shared), held)
        )
    return made


def _stepper_kind(rule: Rule, device: torch.device) -> Any:
    if rule.update is not None and use_triton(device):
        from flatbed.kernels._triton.stepper import TritonStepper

        return TritonStepper
    return TorchStepper


def _is_number(value: Tensor, device: torch.device) -> bool:
    return value.dim() == 0 and value.dtype == torch.float32 and value.device == device


def _setter(row: ParamSlot, name: str) -> Callable[[Tensor], None]:
    return lambda tensor: setattr(row, name, tensor)


def _item_setter(items: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    return lambda tensor: items.__setitem__(name, tensor)
