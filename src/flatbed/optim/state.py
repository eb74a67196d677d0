"""The state of dense parameters: made or taken over for a plan, and shown in `optimizer.state`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined,unused-ignore]

from flatbed.distributed.dense_shards import Sharding, is_dtensor, local_of, whole
from flatbed.distributed.state_shards import OwnRows, own_part
from flatbed.errors import FlatbedError
from flatbed.kernels.step import ParamSlot, stride_of
from flatbed.layout import overlaps_itself
from flatbed.optim.options import LOW, check_grad, check_param, named_params
from flatbed.rule import Group
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

MASTER, EMA = "master_weight", "ema"  # keys of state that torch does not have
TORCH_KEYS = frozenset(
    (
        "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "mu_product", "square_avg", "acc_delta",
        "grad_avg", "momentum_buffer", "sum", "prev", "step_size", "ax", "eta", "mu", "row_var", "col_var",
        "variance",
    )
)  # fmt: skip
"""The state of torch's optimizers. Keys that no optimizer of torch has belong to a wrapper, and are kept."""


def lacks_state(optimizer: Optimizer, group: Group, param: Tensor, *, copies_weights: bool) -> bool:
    """Return whether a parameter lacks state; `copies_weights`: a master weight and an average count, too."""
    rule, options = optimizer._rule, optimizer._options
    needed = [*rule.state_names(group), *rule.shown_scalars]
    if copies_weights and options.ema_decay is not None:
        needed.append(EMA)
    if copies_weights and options.master_weights and param.dtype in LOW:
        needed.append(MASTER)
    return not optimizer.state.get(param, {}).keys() >= set(needed)


@dataclass(frozen=True, slots=True)
class SlotBuilder:
    """Completes slots: state that fits is kept, all other state is made or copied."""

    optimizer: Optimizer
    loaded: bool
    copies_weights: bool
    """True: master weights and averages that are missing start at the present weights."""
    hidden: dict[int, dict[str, Tensor]]
    """Scalars that torch does not have, by the id of their parameter's entry of `optimizer.state`."""

    def complete(self, slot: ParamSlot, group: Group, held: dict[str, Any]) -> None:
        """Give a slot its state, from its parameter's present entry of `optimizer.state`."""
        name, param, rule, options = slot.name, slot.param, self.optimizer._rule, self.optimizer._options
        if overlaps_itself(param.shape, param.stride()):
            raise FlatbedError(f"parameter {name} is expanded: several of its elements share memory")
        if options.stochastic_rounding and param.dtype == torch.float16:
            raise FlatbedError(
                f"stochastic_rounding is for bf16; parameter {name} is fp16: use master_weights=True for it"
            )
        names = rule.state_names(group)
        self._refuse_foreign(slot, held, names)
        dtype = self._state_dtype(slot, [held[name] for name in names if isinstance(held.get(name), Tensor)])
        for key in names:
            slot.state[key] = self._tensor(
                slot, key, held, dtype, rule.first_value(self.optimizer.defaults, key)
            )
        for key in rule.scalars:
            slot.scalars[key] = self._scalar(slot, key, held)
        if options.master_weights and param.dtype in LOW and (MASTER in held or self.copies_weights):
            slot.master = self._tensor(slot, MASTER, held, torch.float32, param)
        if options.ema_decay is not None and (EMA in held or self.copies_weights):
            wide = torch.promote_types(param.dtype, torch.float32)
            slot.ema = self._tensor(slot, EMA, held, wide, param)

    def _refuse_foreign(self, slot: ParamSlot, held: dict[str, Any], names: Sequence[str]) -> None:
        """Raise for state of another optimizer: its keys, missing tensors, missing scalars."""
        rule = self.optimizer._rule
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
                f"{type(self.optimizer).__name__}. Build that one, or clear the state to start again"
            )

    def _state_dtype(self, slot: ParamSlot, held: list[Tensor]) -> torch.dtype:
        """Return the dtype asked for, or else the wider one of the present state's and the parameter's."""
        if self.optimizer._options.state_dtype is not None:
            return self.optimizer._options.state_dtype
        if self.optimizer._options.master_weights and slot.param.dtype in LOW:
            return torch.float32
        return reduce(torch.promote_types, [tensor.dtype for tensor in held], slot.param.dtype)

    def _scalar(self, slot: ParamSlot, key: str, held: dict[str, Any]) -> Tensor:
        rule, device = self.optimizer._rule, slot.param.device
        is_hidden = key in rule.hidden_scalars
        value: Any = (self.hidden.get(id(held), {}) if is_hidden else held).get(key)
        if value is None and is_hidden:  # state of a torch optimizer, mostly after a step
            is_new = "step" in held and float(held["step"]) == 0
            tensors = [held[name] for name in rule.state if isinstance(held.get(name), Tensor)]
            value = float(not is_new and not all(map(_is_negative_zero, tensors)))
        if value is None:
            value = rule.first_value(self.optimizer.defaults, key)
        kind = (value.dim(), value.dtype, value.device) if isinstance(value, Tensor) else None
        if isinstance(value, Tensor) and kind == (0, torch.float32, device) and not self.loaded:
            return value
        return _filled(torch.empty((), dtype=torch.float32, device=device), value)

    def _tensor(
        self, slot: ParamSlot, key: str, held: dict[str, Any], dtype: torch.dtype, first: Tensor | float
    ) -> Tensor:
        """Return the present tensor if it fits; otherwise one with its values, or with the first ones."""
        shape, stride, device = tuple(slot.param.shape), stride_of(slot.param), slot.param.device
        old: Any = held.get(key)
        if old is not None:
            is_float = isinstance(old, Tensor) and old.is_floating_point()
            if not is_float or old.shape != slot.owner.shape:
                found = f"{old.dtype} {tuple(old.shape)}" if isinstance(old, Tensor) else repr(old)
                raise FlatbedError(
                    f"state '{key}' of parameter {slot.name} is {found}; expected floats of shape "
                    f"{tuple(slot.owner.shape)}"
                )
            old = whole(old) if slot.sharding is None else slot.sharding.part_of(old)
            old = old if slot.own_rows is None else slot.own_rows.around(old)
            kind = (old.dtype, old.device, old.stride() if old.numel() > 1 else stride)
            if not self.loaded and kind == (dtype, device, stride) and old.data_ptr() % 16 == 0:
                return cast(Tensor, old)
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return _filled(made, first if old is None else old)


def _is_negative_zero(tensor: Tensor) -> bool:
    local = local_of(tensor)
    return bool(((local == 0) & torch.signbit(local)).all())


def _filled(tensor: Tensor, value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return tensor.copy_(value)  # waits for pinned memory, which the caller may write to again
    return tensor.fill_(value)


def own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of a dense view, with a storage object of its own.

    Pickle, `torch.save`, safetensors and Accelerate look at storages: they write a shared storage as a whole,
    or keep only one of its tensors.
    """
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda"):
        return view
    memory = view.as_strided((view.numel(),), (1,))
    # `from_dlpack(memory)` would refuse memory of a GPU that is not the current one.
    return from_dlpack(to_dlpack(memory)).as_strided(view.shape, view.stride())


def build_slots(
    optimizer: Optimizer, early: Container[int], *, loaded: bool, copies_weights: bool
) -> list[ParamSlot]:
    """Return slots for all parameters with a gradient or state. Gradients are checked first."""
    groups, state = optimizer.param_groups, optimizer.state
    dense = [found for found in named_params(groups) if not isinstance(found[1], Table)]
    grads = [param.grad for _, param, _ in dense]
    for (name, param, _), grad in zip(dense, grads, strict=True):
        if grad is not None:
            check_param(optimizer._options, param, name)  # FSDP may wrap a module later
            check_grad(param, grad, name)
    previous = () if optimizer._plan is None else optimizer._plan.slots
    hidden = {id(slot.published): slot.scalars for slot in previous if slot.published is not None}
    builder = SlotBuilder(optimizer, loaded, copies_weights, hidden)
    slots = []
    for (name, param, number), grad in zip(dense, grads, strict=True):
        held = state.get(param, {})
        if grad is not None or held or id(param) in early:
            grad_dtype = param.dtype if grad is None else grad.dtype
            sharding, rows = optimizer._sharding_of(param), None
            if sharding is not None and not is_dtensor(param):
                rows = OwnRows.of(sharding)
            slot = ParamSlot(name, own_part(param, rows), number, grad_dtype, param, sharding, rows)
            builder.complete(slot, groups[number], held)
            slots.append(slot)
    return slots


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
    """Return a shard of state as a DTensor: the present DTensor, if it is over the same memory."""
    if is_dtensor(old) and local_of(old) is tensor:
        return cast(Tensor, old)
    if slot.own_rows is not None:
        tensor = own_storage(slot.own_rows.rows(tensor))
    return cast(Sharding, slot.sharding).wrap(tensor)
