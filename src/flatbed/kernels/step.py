"""Inputs of an optimizer step, the stepper protocol, and what steps of parameters and of rows share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from flatbed.layout import dense_stride, is_dense
from flatbed.rule import Group, Rule, Scalars, Tensors

# Entries of the fp64 vector `step_stats`, which all steps of one device share.
SKIP, NORM, SKIPPED, STEPS = range(4)

Grads = Sequence[Tensor | None]
"""One gradient per slot; None where a parameter has none."""


@dataclass(slots=True)
class ParamSlot:
    """One parameter as the step sees it: its memory on this rank, its state, the dtype of its gradient.

    State, master weight and average are dense and have the parameter's order of dimensions.
    """

    name: str
    param: Tensor
    group: int
    grad_dtype: torch.dtype
    owner: Tensor
    """The parameter of the model, which the state belongs to: `param` itself, unless ranks hold shards."""
    sharding: Any = None
    """Sharding of the parameter or its state; None: all of it is here."""
    own_rows: Any = None
    """The rows of a whole parameter whose state is here; None: all of them, or the shard of a DTensor."""
    norm_class: int = 0
    """Gradients of one class are summed over the same ranks."""
    state: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None
    ema: Tensor | None = None
    published: dict[str, Tensor] | None = None
    """The parameter's entry of `optimizer.state`."""

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of all tensors of state."""
        return next((t.dtype for t in self.state.values()), self.param.dtype)


def stride_of(param: Tensor) -> tuple[int, ...]:
    """The parameter's stride; if it has holes, the dense stride nearest to it."""
    return dense_stride(tuple(param.shape), param.stride())


def is_whole(param: Tensor) -> bool:
    """Tell if a parameter has no holes."""
    return is_dense(tuple(param.shape), param.stride())


def in_order(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the order of its parameter's elements; a copy where the orders differ."""
    stride = stride_of(param)
    if grad.stride() == stride or grad.numel() <= 1:
        return grad
    ordered = torch.empty_strided(tuple(grad.shape), stride, dtype=grad.dtype, device=grad.device)
    return ordered.copy_(grad)


@dataclass(slots=True)
class StepOptions:
    """Options of a whole optimizer, beyond torch's. Only `max_norm` may change between steps."""

    max_norm: float | None = None
    skip_nonfinite: bool = False
    master_weights: bool = False
    stochastic_rounding: bool = False
    state_dtype: torch.dtype | None = None
    ema_decay: float | None = None
    per_row_steps: bool = False

    @property
    def needs_norm(self) -> bool:
        """Tell if a step measures the norm of all gradients."""
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def stochastic_state(self) -> bool:
        """Tell if state is rounded stochastically.

        A bf16 second moment that changes by a thousandth per step would otherwise never change.
        """
        return self.state_dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scale and the overflow flag of a GradScaler."""

    scale: Tensor | None
    found_inf: Tensor | None

    def to(self, device: torch.device) -> Scaling:
        """Copy the values to the device of a step."""
        scale, found_inf = (
            None if t is None else t.to(device, non_blocking=True) for t in (self.scale, self.found_inf)
        )
        return Scaling(scale, found_inf)


class Stepper(Protocol):
    """Applies a rule to the parameters or tables of one device. A step calls the methods in this order."""

    device: torch.device

    @property
    def captured(self) -> bool:
        """Tell if CUDA graphs hold launches of this stepper."""

    def squares(self, options: StepOptions) -> dict[int, Tensor]:
        """A vector for each norm class, whose sum is the squared norm of its gradients, still scaled."""

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        """Update. `squares` holds the sums of all steppers where there are several."""


def squares_of(slots: Sequence[ParamSlot], grads: Grads) -> dict[int, Tensor]:
    """The squared norms of gradients, for each norm class, in fp64."""
    found = {}
    for norm_class in {slot.norm_class for slot in slots}:
        held = [g for slot, g in zip(slots, grads, strict=True) if slot.norm_class == norm_class]
        present = [g for g in held if g is not None and g.numel()]
        if present:
            found[norm_class] = torch.stack(torch._foreach_norm(present, 2.0, dtype=torch.float64)).square()
        else:
            found[norm_class] = torch.zeros(1, dtype=torch.float64, device=slots[0].param.device)
    return found


# ---- what steps of parameters and of rows share


def begin_step(
    options: StepOptions, scaling: Scaling | None, norm: Tensor | None, step_stats: Tensor
) -> tuple[Tensor | None, bool]:
    """Count a step; return the factor that clips gradients, and whether the step is skipped.

    `norm` is the norm of the gradients before unscaling.
    """
    skip = scaling is not None and scaling.found_inf is not None and bool(scaling.found_inf)
    factor = None
    if options.needs_norm:
        assert norm is not None
        if scaling is not None and scaling.scale is not None:
            norm = norm / scaling.scale.squeeze()
        step_stats[NORM] = norm
        skip = skip or (options.skip_nonfinite and not bool(torch.isfinite(norm)))
        if options.max_norm is not None:
            factor = torch.clamp(options.max_norm / (norm + 1e-6), max=1.0)
            if norm.device.type == "cpu" and float(factor) == 1.0:
                factor = None  # multiplying by 1 changes no bit
    step_stats[STEPS] += 1
    step_stats[SKIP] = float(skip)
    step_stats[SKIPPED] += float(skip)
    return factor, skip


@dataclass(frozen=True, slots=True)
class Update:
    """One rule with one group's hyperparameters, as it is applied to lists of tensors."""

    rule: Rule
    group: Group
    fused: bool
    scale: Tensor | None
    factor: Tensor | None

    @property
    def scales_grads(self) -> bool:
        """Tell if gradients are unscaled or clipped."""
        return self.scale is not None or self.factor is not None

    def __call__(self, tensors: Tensors, scalars: Scalars) -> Scalars:
        """Update parameters and state in place by unscaled, clipped gradients; return the next scalars."""
        grads = tensors.grads
        if self.scale is not None:
            grads = _as_before(torch._foreach_div(grads, self.scale), grads)
        if self.factor is not None:
            grads = _as_before(torch._foreach_mul(grads, self.factor), grads)
        if self.group.get("maximize") and not (self.fused or self.rule.handles_maximize):
            grads = torch._foreach_neg(grads)
        function = self.rule.fused if self.fused and self.rule.fused else self.rule.reference
        lr = self.group["lr"]
        # Torch treats a learning rate of shape (1,) as a number.
        group = {**self.group, "lr": lr.squeeze()} if isinstance(lr, Tensor) and lr.dim() else self.group
        return function(group, Tensors(tensors.params, grads, tensors.state), scalars)


def _as_before(scaled: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Undo promotions: the factor, a tensor, changes the dtype of gradients without dimensions."""
    return [s if s.dtype == g.dtype else s.to(g.dtype) for s, g in zip(scaled, grads, strict=True)]


def round_stochastically(x: Tensor, *, seed: int) -> Tensor:
    """fp32 → bf16, up or down with probabilities that make the expectation exact."""
    generator = torch.Generator(x.device).manual_seed(seed)
    bits = x.view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


# ---- rows of tables


def update_rows(
    update: Update,
    fields: dict[str, Tensor],
    grads: Tensor,
    *,
    scalars: dict[str, float],
    row_scalars: tuple[str, ...],
    seeds: Iterator[int] | None,
) -> dict[str, float]:
    """Apply a rule to records in place, given as one tensor per field; return the scalars after the step.

    `row_scalars` names the fields that hold scalars of a row; rows of equal scalars are updated together.
    `seeds`: round bf16 weights stochastically.
    """
    after = scalars
    for part, own in _equal_rows(fields, row_scalars):
        seed = None if seeds is None else next(seeds)
        held = fields if part is None else {name: value[part] for name, value in fields.items()}
        after = _update_records(update, held, grads if part is None else grads[part], scalars | own, seed)
        held |= {name: torch.full_like(held[name], after[name]) for name in row_scalars}
        if part is not None:
            for name, value in held.items():
                fields[name][part] = value
    return after


def _update_records(
    update: Update, held: dict[str, Tensor], grads: Tensor, scalars: dict[str, float], seed: int | None
) -> dict[str, float]:
    rule, weight = update.rule, held["weight"]
    wide = torch.promote_types(weight.dtype, torch.float32)
    p = weight.to(wide)
    state = {name: [held[name]] for name in rule.state_names(update.group)}
    after = update(Tensors([p], [grads.to(wide)], state), tuple(scalars[name] for name in rule.scalars))
    if seed is not None and weight.dtype == torch.bfloat16:
        p = round_stochastically(p, seed=seed)
    held["weight"] = p.to(weight.dtype)
    return dict(zip(rule.scalars, after, strict=True))


def _equal_rows(
    fields: dict[str, Tensor], names: tuple[str, ...]
) -> Iterator[tuple[Tensor | None, dict[str, float]]]:
    """Positions of the rows whose own scalars are equal, with these scalars; None stands for all rows."""
    if not names or not len(fields[names[0]]):
        yield None, dict.fromkeys(names, 0.0)
        return
    found, which = torch.unique(torch.cat([fields[n] for n in names], dim=1), dim=0, return_inverse=True)
    for i, values in enumerate(found.tolist()):
        part = None if len(found) == 1 else (which == i).nonzero().flatten()
        yield part, dict(zip(names, values, strict=True))
