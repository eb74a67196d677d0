"""An optimizer's step in torch operations: its inputs, and the updates of parameters and of rows.

It runs on a CPU, and is the reference for the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from flatbed.layout import ALIGNMENT, dense_stride, is_dense
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
    return dense_stride(param.shape, param.stride())


def has_holes(param: Tensor) -> bool:
    """Tell if a parameter's elements do not fill the memory from the first to the last."""
    return not is_dense(param.shape, param.stride())


def in_order(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient in the order of its parameter's elements; a copy where the orders differ."""
    stride = stride_of(param)
    if grad.stride() == stride or grad.numel() <= 1:
        return grad
    ordered = torch.empty_strided(tuple(grad.shape), stride, dtype=grad.dtype, device=grad.device)
    return ordered.copy_(grad)


@dataclass(frozen=True)
class StepOptions:
    """Options of a whole optimizer, beyond torch's. An optimizer replaces them if `max_norm` changes."""

    max_norm: float | None = None
    skip_nonfinite: bool = False
    master_weights: bool = False
    stochastic_rounding: bool = False
    state_dtype: torch.dtype | None = None
    ema_decay: float | None = None
    per_row_steps: bool = False

    @cached_property
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
        is_async = device.type == "cuda"  # a step on the host reads the values at once
        scale, found_inf = (
            None if t is None else t.to(device, non_blocking=is_async) for t in (self.scale, self.found_inf)
        )
        return Scaling(scale, found_inf)


class Stepper(Protocol):
    """Applies a rule to the parameters or tables of one device. A step calls the methods in this order."""

    device: torch.device

    @property
    def captured(self) -> bool:
        """Tell if CUDA graphs hold launches of this stepper."""

    def squares(self) -> dict[int, Tensor]:
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

    def __call__(self, parts: Iterable[Tensors], scalars: Scalars) -> Scalars:
        """Update parameters and state in place by unscaled, clipped gradients; return the next scalars."""
        function = self.rule.fused if self.fused and self.rule.fused else self.rule.reference
        lr = self.group.get("lr")
        # Torch treats a learning rate of shape (1,) as a number.
        group = {**self.group, "lr": lr.squeeze()} if isinstance(lr, Tensor) and lr.dim() else self.group
        after = scalars
        for at in parts:
            # Scaled gradients have no name here, so that their memory is in the cache for the next ones.
            after = function(group, Tensors(at.params, self._scaled(at.grads), at.state), scalars)
        return after

    def _scaled(self, grads: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor] | tuple[Tensor, ...]:
        if self.scale is not None:
            grads = _as_before(torch._foreach_div(grads, self.scale), grads)
        if self.factor is not None:
            grads = _as_before(torch._foreach_mul(grads, self.factor), grads)
        if self.group.get("maximize") and not (self.fused or self.rule.handles_maximize):
            grads = torch._foreach_neg(grads)
        return grads


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
    rule, after = update.rule, scalars
    for part, own in _equal_rows(fields, row_scalars):
        held = fields if part is None else {name: value[part] for name, value in fields.items()}
        weight, grad, before = held["weight"], grads if part is None else grads[part], scalars | own
        wide = torch.promote_types(weight.dtype, torch.float32)
        p = weight.to(wide)
        state = {name: [held[name]] for name in rule.state_names(update.group)}
        found = update([Tensors([p], [grad.to(wide)], state)], tuple(before[name] for name in rule.scalars))
        after = dict(zip(rule.scalars, found, strict=True))
        seed = None if seeds is None else next(seeds)
        if seed is not None and weight.dtype == torch.bfloat16:
            p = round_stochastically(p, seed=seed)
        held["weight"] = p.to(weight.dtype)
        held |= {name: torch.full_like(held[name], after[name]) for name in row_scalars}
        if part is not None:
            for name, value in held.items():
                fields[name][part] = value
    return after


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


# ---- parameters: the dense step


CHUNK_BYTES = 3 << 20  # of parameters: temporaries of an update should stay in the CPU's caches
MANY = 1 << 16  # elements, from which torch's norm in fp32 is not exact enough for shards


@dataclass(slots=True)
class Bucket:
    """Slots of one group that are updated in the same way. `scalars` has a line for each of the rule's."""

    group: int
    wide: bool  # computed in fp32 copies, since dtypes differ or are rounded in some way
    fused: bool
    slots: list[int]
    scalars: Tensor


class TorchStepper:
    """Applies a rule to parameters of one device, with torch's fused CPU kernel where there is one."""

    captured = False

    def __init__(
        self, rule: Rule, groups: Sequence[Group], slots: list[ParamSlot], step_stats: Tensor
    ) -> None:
        self.rule = rule
        self.groups = groups
        self.slots = slots
        self.step_stats = step_stats
        self.device = slots[0].param.device
        self._grads: Grads = []
        self._norm: Tensor | None = None
        self._norm_classes = sorted({slot.norm_class for slot in slots})
        self._has_shards = any(slot.sharding is not None and slot.own_rows is None for slot in slots)
        self.whole_grads: Grads | None = None
        """The gradients that the norm measures, if slots are parts of whole parameters."""
        self._buckets = self._build()

    def _build(self) -> list[Bucket]:
        kinds: dict[Any, list[int]] = {}
        for i, slot in enumerate(self.slots):
            dtypes = slot.param.dtype, slot.grad_dtype, slot.state_dtype
            wide = len(set(dtypes)) > 1 or slot.master is not None
            is_dense_cpu = self.device.type == "cpu" and (wide or not has_holes(slot.param))
            fused = self.rule.fused is not None and is_dense_cpu
            kinds.setdefault((slot.group, wide, fused, *dtypes, tuple(slot.state)), []).append(i)
        buckets = []
        for (group, wide, fused, *_), held in kinds.items():
            # Scalars lie side by side, so that one operation reads or counts them.
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # as torch's own
            scalars = torch.empty(len(self.rule.scalars), len(held), dtype=dtype, device=self.device)
            for line, name in enumerate(self.rule.scalars):
                for column, i in enumerate(held):
                    scalars[line, column] = self.slots[i].scalars[name]
                    self.slots[i].scalars[name] = scalars[line, column]
            buckets.append(Bucket(group, wide, fused, held, scalars))
        return buckets

    # ---- a step

    def set_grads(self, grads: Grads, addresses: list[int], unordered: frozenset[int]) -> None:
        """Take one gradient per slot. Those in `unordered` differ from their parameter in element order."""
        if unordered:
            grads = [
                in_order(self.slots[i].param, g) if i in unordered and g is not None else g
                for i, g in enumerate(grads)
            ]
        self._grads = grads

    def squares(self) -> dict[int, Tensor]:
        measured = self._grads if self.whole_grads is None else self.whole_grads
        found = {}
        for norm_class in self._norm_classes:
            grads: dict[torch.dtype, list[Tensor]] = {}
            for slot, g in zip(self.slots, measured, strict=True):
                if g is not None and slot.norm_class == norm_class:
                    grads.setdefault(g.dtype, []).append(g)
            norms = [torch.zeros((), device=self.device)] if not grads else []
            for dtype, held in grads.items():
                wide = torch.promote_types(dtype, torch.float32)  # not rounded to the gradients' dtype
                if self._has_shards and max(map(Tensor.numel, held)) > MANY:
                    wide = torch.float64  # torch's norm of so many elements is off by up to 1e-4 in fp32
                norms += torch._foreach_norm(held, 2.0, dtype=wide)
            # That of all gradients, unless there are several classes.
            self._norm = torch.linalg.vector_norm(torch.stack(norms))
            found[norm_class] = self._norm.double().square().reshape(1)
        return found

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        norm = self._norm if squares is None else squares.sum().sqrt().float()
        factor, skip = begin_step(options, scaling, norm, self.step_stats)
        if not skip:
            scale = None if scaling is None else scaling.scale
            for bucket in self._buckets:
                update = Update(self.rule, self.groups[bucket.group], bucket.fused, scale, factor)
                self._update_bucket(bucket, update, options)
            if options.ema_decay is not None:
                self._average(options.ema_decay)
        self._grads, self.whole_grads = [], None  # `zero_grad` frees them

    def _update_bucket(self, bucket: Bucket, update: Update, options: StepOptions) -> None:
        present = [column for column, i in enumerate(bucket.slots) if self._grads[i] is not None]
        wide = bucket.wide
        if self.slots[bucket.slots[0]].param.dtype.itemsize < 4 and not wide:
            # Loss scaling keeps small gradients above zero; unscaled in 16 bits they would vanish.
            wide = options.stochastic_rounding or options.stochastic_state or update.scale is not None
        # Torch's kernels make no temporaries, so that they may take everything at once.
        at_once = bucket.fused and not wide and update.scale is None and update.factor is None
        # Rules without an update of one element may depend on shapes.
        splits = self.rule.update is not None and self.device.type == "cpu" and not (at_once or wide)
        for columns, scalars in _equal_columns(bucket.scalars, present):
            indices = [bucket.slots[column] for column in columns]
            chunks = [indices] if at_once else self._chunks(indices)
            parts = self._copied(chunks, options) if wide else map(self._tensors, chunks)
            if splits:
                parts = chain.from_iterable(map(_split, parts))
            after = update(parts, scalars)
            for line, value in zip(bucket.scalars, after, strict=True):
                if len(columns) == len(line):
                    line.fill_(value)
                else:
                    line[columns] = value

    def _chunks(self, indices: list[int]) -> Iterator[list[int]]:
        """Group slots into those that one call updates: a large one alone, small ones together."""
        chunk: list[int] = []
        nbytes = 0
        for i in indices:
            size = self.slots[i].param.nbytes
            if size > CHUNK_BYTES:
                yield [i]
                continue
            if nbytes + size > CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(i)
            nbytes += size
        if chunk:
            yield chunk

    def _tensors(self, chunk: list[int]) -> Tensors:
        slots = [self.slots[i] for i in chunk]
        grads: list[Tensor] = [self._grads[i] for i in chunk]  # type: ignore[misc]
        state = {name: [slot.state[name] for slot in slots] for name in slots[0].state}
        return Tensors([slot.param for slot in slots], grads, state)

    def _copied(self, chunks: Iterable[list[int]], options: StepOptions) -> Iterator[Tensors]:
        """Yield fp32 copies, or masters, and write them back when the next ones are asked for."""
        for chunk in chunks:
            at, slots = self._tensors(chunk), [self.slots[i] for i in chunk]
            dtype = torch.promote_types(at.params[0].dtype, torch.float32)
            params = [
                slot.param.to(dtype, copy=True) if slot.master is None else slot.master for slot in slots
            ]
            state = {name: [tensor.to(dtype) for tensor in held] for name, held in at.state.items()}
            copies = Tensors(params, [grad.to(dtype) for grad in at.grads], state)
            yield copies
            self._copy_back(chunk, copies, options)

    def _copy_back(self, chunk: list[int], tensors: Tensors, options: StepOptions) -> None:
        for column, i in enumerate(chunk):
            slot, value = self.slots[i], tensors.params[column]
            seed = int(self.step_stats[STEPS]) * 1_000_003 + i
            if options.stochastic_rounding and slot.param.dtype == torch.bfloat16 and slot.master is None:
                value = round_stochastically(value, seed=seed)
            slot.param.copy_(value)
            for bit, (name, held) in enumerate(slot.state.items()):
                new = tensors[name][column]
                if options.stochastic_state and held.dtype == torch.bfloat16:
                    new = round_stochastically(new, seed=seed + 7919 * (bit + 1))
                if held is not new:
                    held.copy_(new)

    def _average(self, decay: float) -> None:
        slots = [slot for slot in self.slots if slot.ema is not None]
        values = [slot.param if slot.master is None else slot.master for slot in slots]
        averages: list[Tensor] = [slot.ema for slot in slots]  # type: ignore[misc]
        values = [value.to(average.dtype) for value, average in zip(values, averages, strict=True)]
        torch._foreach_lerp_(averages, values, 1.0 - decay)


def _split(tensors: Tensors) -> Iterator[Tensors]:
    """Split a large parameter, so that temporaries of its update stay in the CPU's caches."""
    param, grad = tensors.params[0], tensors.grads[0]
    if param.nbytes <= CHUNK_BYTES or len(tensors.params) > 1 or has_holes(param):
        yield tensors
        return
    # Parts of equal size. Whole vectors, so that an element's bits do not depend on where the parts end.
    n_parts = round(param.nbytes / CHUNK_BYTES)
    size = ceil(param.numel() / n_parts / ALIGNMENT) * ALIGNMENT
    held = param, grad, *(state for (state,) in tensors.state.values())
    flat = [tensor.as_strided((tensor.numel(),), (1,)).unsafe_split(size) for tensor in held]
    for param, grad, *state in zip(*flat, strict=True):
        yield Tensors([param], [grad], {name: [one] for name, one in zip(tensors.state, state, strict=True)})


def _equal_columns(scalars: Tensor, columns: list[int]) -> list[tuple[list[int], Scalars]]:
    """Columns with equal scalars, together."""
    if not columns:
        return []
    lines = scalars.tolist()
    if all(line.count(line[0]) == len(line) for line in lines):
        return [(columns, tuple(line[0] for line in lines))]
    alike: dict[Scalars, list[int]] = {}
    for column in columns:
        alike.setdefault(tuple(line[column] for line in lines), []).append(column)
    return [(held, key) for key, held in alike.items()]
