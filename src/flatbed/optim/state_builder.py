"""Slots of parameters and their state: kept where it fits, created or copied where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from flatbed.distributed.dtensor import Sharding, is_dtensor, local_of, whole
from flatbed.distributed.shard_state import OwnRows
from flatbed.errors import FlatbedError
from flatbed.kernels.step import ParamSlot, stride_of
from flatbed.layout import ALIGNMENT, Spec, overlaps_itself, plan
from flatbed.optim import checks
from flatbed.optim.spec import LOW, OptimizerSpec, named_params
from flatbed.rule import Group
from flatbed.tables.table import Table

MASTER, EMA = "master_weight", "ema"  # keys of state that torch does not have
TORCH_KEYS = frozenset(
    (
        "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "square_avg", "acc_delta",
        "grad_avg", "momentum_buffer", "sum", "prev", "step_size", "ax", "eta", "mu", "row_var", "col_var",
        "variance",
    )
)  # fmt: skip
"""The state of torch's optimizers. Keys that no optimizer of torch has belong to a wrapper, and are kept."""


def lacks_state(
    spec: OptimizerSpec, group: Group, param: Tensor, held: Mapping[str, Any], copies_weights: bool
) -> bool:
    """Tell if a parameter's state is not complete; `copies_weights`: with its master weight and average."""
    needed = [*spec.rule.state_names(group), *spec.rule.shown_scalars]
    if copies_weights and spec.options.ema_decay is not None:
        needed.append(EMA)
    if copies_weights and spec.options.master_weights and param.dtype in LOW:
        needed.append(MASTER)
    return any(name not in held for name in needed)


@dataclass(slots=True)
class MissingTensor:
    """A tensor of state to be made, its first value, and the function that takes it."""

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    value: Tensor | float
    take: Callable[[Tensor], None]


@dataclass
class SlotBuilder:
    """Collects what is missing, so that it can be allocated in few large buffers."""

    spec: OptimizerSpec
    loaded: bool
    copies_weights: bool
    """True: master weights and averages that are missing start at the present weights."""
    hidden: dict[int, dict[str, Tensor]]
    """Scalars that torch does not have, by the id of their parameter's entry of `optimizer.state`."""
    missing: list[MissingTensor] = field(default_factory=list)
    slots: list[ParamSlot] = field(default_factory=list)

    def add(self, slot: ParamSlot, group: Group, held: dict[str, Any]) -> None:
        """Add one parameter, given its present state."""
        name, param, options = slot.name, slot.param, self.spec.options
        if overlaps_itself(tuple(param.shape), param.stride()):
            raise FlatbedError(f"parameter {name} is expanded: several of its elements share memory")
        if options.stochastic_rounding and param.dtype == torch.float16:
            raise FlatbedError(
                f"stochastic_rounding is for bf16; parameter {name} is fp16: use master_weights=True for it"
            )
        self._add_tensors(slot, group, held)
        self._add_scalars(slot, held)
        if options.master_weights and param.dtype in LOW and (MASTER in held or self.copies_weights):
            self._add(slot, MASTER, held.get(MASTER), torch.float32, param, partial(setattr, slot, "master"))
        if options.ema_decay is not None and (EMA in held or self.copies_weights):
            dtype = torch.promote_types(param.dtype, torch.float32)
            self._add(slot, EMA, held.get(EMA), dtype, param, partial(setattr, slot, "ema"))
        self.slots.append(slot)

    def _refuse_foreign(self, slot: ParamSlot, held: dict[str, Any], names: Sequence[str]) -> None:
        """Raise for state of another optimizer: its keys, missing tensors, missing scalars."""
        rule = self.spec.rule
        needed = [name for name in names if rule.state[name] is None]
        needed += rule.shown_scalars if self.loaded else ()
        foreign = TORCH_KEYS - {*rule.state, *rule.shown_scalars} if self.loaded else ()
        odd = [key for key in held if key in foreign]
        has_some = any(held.get(key) is not None for key in (*rule.state, *rule.scalars))
        lacking = [name for name in needed if has_some and held.get(name) is None]
        if odd or lacking:
            found = f"has {', '.join(map(repr, odd))}" if odd else f"lacks {', '.join(map(repr, lacking))}"
            raise FlatbedError(
                f"the state of parameter {slot.name} {found}: it belongs to another optimizer than "
                f"{self.spec.name}. Build that one, or clear the state to start again"
            )

    def _add_tensors(self, slot: ParamSlot, group: Group, held: dict[str, Any]) -> None:
        rule = self.spec.rule
        names = rule.state_names(group)
        self._refuse_foreign(slot, held, names)
        dtype = self._state_dtype(slot, [held[name] for name in names if isinstance(held.get(name), Tensor)])
        for name in names:
            first = rule.first_value(self.spec.defaults, name)
            slot.state[name] = slot.param  # keeps the order of names
            self._add(slot, name, held.get(name), dtype, first, partial(slot.state.__setitem__, name))

    def _state_dtype(self, slot: ParamSlot, held: list[Tensor]) -> torch.dtype:
        """The dtype asked for; otherwise the wider one of the present state's and the parameter's."""
        if self.spec.options.state_dtype is not None:
            return self.spec.options.state_dtype
        if self.spec.options.master_weights and slot.param.dtype in LOW:
            return torch.float32
        dtype = slot.param.dtype
        for other in held:
            dtype = torch.promote_types(dtype, other.dtype)
        return dtype

    def _add_scalars(self, slot: ParamSlot, held: dict[str, Any]) -> None:
        rule, device = self.spec.rule, slot.param.device
        for name in rule.scalars:
            is_hidden = name in rule.hidden_scalars
            value: Any = (self.hidden.get(id(held), {}) if is_hidden else held).get(name)
            if value is None and is_hidden:  # state of torch's has been through a step
                is_new = "step" in held and float(held["step"]) == 0
                value = float(any(isinstance(held.get(key), Tensor) for key in rule.state) and not is_new)
            if value is None:
                value = rule.first_value(self.spec.defaults, name)
            slot.scalars[name] = slot.param  # keeps the order of names
            kind = (value.dim(), value.dtype, value.device) if isinstance(value, Tensor) else None
            if kind == (0, torch.float32, device) and not self.loaded:
                slot.scalars[name] = value
                continue
            take = partial(slot.scalars.__setitem__, name)
            self.missing.append(MissingTensor(name, (), (), torch.float32, device, value, take))

    def _add(
        self,
        slot: ParamSlot,
        key: str,
        old: Any,
        dtype: torch.dtype,
        first: Tensor | float,
        take: Callable[[Tensor], None],
    ) -> None:
        """Keep the present tensor if it fits; otherwise note that one is to be made and filled."""
        shape, stride, device = tuple(slot.param.shape), stride_of(slot.param), slot.param.device
        if old is not None:
            if not isinstance(old, Tensor) or not old.is_floating_point():
                found = old.dtype if isinstance(old, Tensor) else type(old).__name__
                raise FlatbedError(
                    f"state '{key}' of parameter {slot.name} must be a float tensor; found {found}"
                )
            if old.shape != slot.owner.shape:
                raise FlatbedError(
                    f"state '{key}' of parameter {slot.name} has shape {tuple(old.shape)}; expected "
                    f"{tuple(slot.owner.shape)}"
                )
            old = whole(old) if slot.sharding is None else slot.sharding.part_of(old)
            if slot.sharding is not None and not is_dtensor(slot.owner):
                old = OwnRows.of(slot.sharding).around(old)
            kind = (old.dtype, old.device, old.stride() if old.numel() > 1 else stride)
            if not self.loaded and kind == (dtype, device, stride) and old.data_ptr() % 16 == 0:
                take(old)
                return
        value = first if old is None else old
        self.missing.append(MissingTensor(key, shape, stride, dtype, device, value, take))

    def allocate(self) -> None:
        """Make and fill all that is missing."""
        scalars = [one for one in self.missing if not one.shape and one.key in self.spec.rule.scalars]
        tensors = [one for one in self.missing if one.key not in self.spec.rule.scalars]
        for missing in (scalars, tensors):
            for one, tensor in zip(missing, _zeros(missing), strict=True):
                if isinstance(one.value, Tensor):
                    tensor.copy_(one.value, non_blocking=True)
                elif one.value != 0:
                    tensor.fill_(one.value)
                one.take(tensor)


def _zeros(missing: list[MissingTensor]) -> list[Tensor]:
    """Zeros as views of few large buffers: tensors of one key, dtype and device lie side by side."""
    if not missing:
        return []
    specs = [
        Spec(one.key, one.shape, one.stride, one.dtype.itemsize, (one.key, one.dtype, one.device))
        for one in missing
    ]
    layout = plan(specs, alignment=ALIGNMENT if any(one.shape for one in missing) else 1)
    buffers = []
    for buffer in layout.buffers:
        _, dtype, device = cast(tuple[str, torch.dtype, torch.device], buffer.key)
        buffers.append(torch.zeros(buffer.numel, dtype=dtype, device=device))
    return [own_storage(buffers[s.buffer].as_strided(s.shape, s.stride, s.offset)) for s in layout.segments]


def own_storage(view: Tensor) -> Tensor:
    """A dense view's tensor over the same memory, with a storage object of its own.

    Pickle, `torch.save`, safetensors and Accelerate look at storages: they write a shared one as a whole, or
    keep one of the tensors that share it.
    """
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda"):
        return view
    memory = view.as_strided((view.numel(),), (1,))
    return from_dlpack(memory).as_strided(view.shape, view.stride())


def build_slots(
    spec: OptimizerSpec,
    groups: Sequence[Group],
    state: dict[Any, Any],
    *,
    previous: Sequence[ParamSlot] = (),
    early: Callable[[Tensor], bool] | None = None,
    loaded: bool = False,
    copies_weights: bool = True,
) -> list[ParamSlot]:
    """Slots for all parameters with a gradient or state. Gradients are checked before anything is made.

    `early` chooses parameters that get their state before their first gradient.
    """
    dense = [found for found in named_params(groups) if not isinstance(found[1], Table)]
    grads = [param.grad for _, param, _ in dense]
    for (name, param, _), grad in zip(dense, grads, strict=True):
        if grad is not None:
            checks.check_param(param, name)
            checks.check_norm(spec.options, param, name)  # FSDP may wrap a module later
            checks.check_grad(param, grad, name)
    hidden = {id(slot.published): slot.scalars for slot in previous if slot.published is not None}
    builder = SlotBuilder(spec, loaded, copies_weights, hidden)
    for (name, param, number), grad in zip(dense, grads, strict=True):
        held = state.get(param, {})
        if grad is not None or held or (early is not None and early(param)):
            grad_dtype = param.dtype if grad is None else grad.dtype
            sharding = spec.sharding_of(param)
            local = local_of(param)
            if sharding is not None and not is_dtensor(param):
                local = OwnRows.of(sharding).computed(param.detach())
            slot = ParamSlot(name, local, number, grad_dtype, param, sharding)
            builder.add(slot, groups[number], held)
    builder.allocate()
    return builder.slots


def publish_state(state: dict[Any, Any], slot: ParamSlot) -> None:
    """Show a slot's tensors in `optimizer.state`, by torch's keys and in torch's order."""
    held = state.get(slot.owner, {})
    shown: dict[str, Any] = {}
    for name, value in slot.scalars.items():
        if not name.startswith("_"):
            old = held.get(name)
            is_known = isinstance(old, Tensor) and old.data_ptr() == value.data_ptr()
            shown[name] = old if is_known else own_storage(value)
    tensors = {**slot.state, MASTER: slot.master, EMA: slot.ema}
    for key, tensor in tensors.items():
        if tensor is not None:
            shown[key] = tensor if slot.sharding is None else _wrapped(slot, tensor, held.get(key))
    # A master or an average that is no longer updated would overwrite newer weights later.
    shown.update({k: value for k, value in held.items() if k not in shown and k not in (MASTER, EMA)})
    if shown:
        held = state.setdefault(slot.owner, {})
        held.clear()
        held.update(shown)
        slot.published = held


def _wrapped(slot: ParamSlot, tensor: Tensor, old: Any) -> Tensor:
    """A shard of state as a DTensor; the present one, if it shows the same memory."""
    if is_dtensor(old) and local_of(old) is tensor:
        return cast(Tensor, old)
    if not is_dtensor(slot.owner):
        tensor = own_storage(OwnRows.of(slot.sharding).rows(tensor))
    return cast(Sharding, slot.sharding).wrap(tensor)
