"""The steppers in torch operations: the reference for the kernels, and the implementation on CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatbed.kernels.step import (
    NORM,
    SKIP,
    SKIPPED,
    STEPS,
    Grads,
    ParamSlot,
    Scaling,
    StepOptions,
    in_order,
    is_whole,
    stride_of,
)
from flatbed.rule import Group, Rule, Scalars, Tensors

CHUNK_BYTES = 1 << 20  # of parameters: temporaries of an update should stay in the CPU's caches
PART_BYTES = 4 << 20  # of one large parameter


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
    def changes_grads(self) -> bool:
        """Tell if gradients are unscaled or clipped in place, so that they must be copies."""
        return self.scale is not None or self.factor is not None

    def __call__(self, tensors: Tensors, scalars: Scalars) -> Scalars:
        """Unscale and clip gradients, update parameters and state, all in place; return the next scalars."""
        if self.scale is not None:
            torch._foreach_div_(tensors.grads, self.scale)
        if self.factor is not None:
            torch._foreach_mul_(tensors.grads, self.factor)
        return self.apply(tensors, scalars)

    def scaled(self, grad: Tensor, out: Tensor) -> Tensor:
        """Unscale and clip a gradient into other memory."""
        if self.scale is not None:
            grad = torch.div(grad, self.scale, out=out)
        return grad if self.factor is None else torch.mul(grad, self.factor, out=out)

    def apply(self, tensors: Tensors, scalars: Scalars) -> Scalars:
        """Update parameters and state in place by gradients as they are; return the next scalars."""
        grads = tensors.grads
        if self.group.get("maximize") and not (self.fused or self.rule.handles_maximize):
            grads = torch._foreach_neg(grads)
        function = self.rule.fused if self.fused and self.rule.fused else self.rule.reference
        lr = self.group["lr"]
        # Torch treats a learning rate of shape (1,) as a number.
        group = {**self.group, "lr": lr.squeeze()} if isinstance(lr, Tensor) and lr.dim() else self.group
        return function(group, Tensors(tensors.params, grads, tensors.state), scalars)


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
    p, grads = weight.to(wide), grads.to(wide, copy=update.changes_grads)
    state = {name: [held[name]] for name in rule.state_names(update.group)}
    after = update(Tensors([p], [grads], state), tuple(scalars[name] for name in rule.scalars))
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


# ---- parameters


@dataclass(slots=True)
class Bucket:
    """Slots of one group that are updated in the same way. `scalars` has a line for each of the rule's."""

    group: int
    wide: bool  # computed in fp32 copies, since dtypes differ or are rounded in some way
    fused: bool
    slots: list[int]
    scalars: Tensor
    chunks: dict[tuple[int, ...], list[BucketChunk]] = field(default_factory=dict)  # by slots with gradients


@dataclass(slots=True)
class BucketChunk:
    """The slots of a bucket that are updated by one call."""

    slots: list[int]
    params: list[Tensor]
    state: dict[str, list[Tensor]]


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
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._copies: dict[tuple[int, ...], list[Tensor]] = {}
        self._buckets = self._build()

    def _build(self) -> list[Bucket]:
        kinds: dict[Any, list[int]] = {}
        for i, slot in enumerate(self.slots):
            dtypes = slot.param.dtype, slot.grad_dtype, slot.state_dtype
            wide = len(set(dtypes)) > 1 or slot.master is not None
            fused = (
                self.rule.fused is not None and self.device.type == "cpu" and (wide or is_whole(slot.param))
            )
            kinds.setdefault((slot.group, wide, fused, *dtypes, tuple(slot.state)), []).append(i)
        buckets = []
        for (group, wide, fused, *_), held in kinds.items():
            # Scalars lie side by side, so that one operation reads or counts them.
            scalars = torch.empty(len(self.rule.scalars), len(held), device=self.device)
            for line, name in enumerate(self.rule.scalars):
                for column, i in enumerate(held):
                    scalars[line, column] = self.slots[i].scalars[name]
                    self.slots[i].scalars[name] = scalars[line, column]
            buckets.append(Bucket(group, wide, fused, held, scalars))
        return buckets

    # ---- a step

    def set_grads(self, grads: Grads, addresses: list[int], unordered: frozenset[int]) -> None:
        if unordered:
            grads = [
                in_order(self.slots[i].param, g) if i in unordered and g is not None else g
                for i, g in enumerate(grads)
            ]
        self._grads = grads

    def squares(self, options: StepOptions) -> Tensor:
        grads: dict[torch.dtype, list[Tensor]] = {}
        for g in self._grads:
            if g is not None:
                grads.setdefault(g.dtype, []).append(g)
        norms = [torch.zeros((), device=self.device)] if not grads else []
        for dtype, held in grads.items():
            wide = torch.promote_types(dtype, torch.float32)  # a norm is not rounded to the gradients' dtype
            norms += torch._foreach_norm(held, 2.0, dtype=wide)
        self._norm = torch.linalg.vector_norm(torch.stack(norms))
        return self._norm.double().square().reshape(1)

    def update(self, options: StepOptions, scaling: Scaling | None, squares: Tensor | None) -> None:
        norm = self._norm if squares is None else squares.sum().sqrt().float()
        factor, skip = begin_step(options, scaling, norm, self.step_stats)
        if not skip:
            scale = None if scaling is None else scaling.scale
            for bucket in self._buckets:
                self._update_bucket(
                    bucket, Update(self.rule, self.groups[bucket.group], bucket.fused, scale, factor), options
                )
            if options.ema_decay is not None:
                self._average(options.ema_decay)
        self._grads = []

    def _update_bucket(self, bucket: Bucket, update: Update, options: StepOptions) -> None:
        present = [column for column, i in enumerate(bucket.slots) if self._grads[i] is not None]
        wide = bucket.wide
        if self.slots[bucket.slots[0]].param.dtype.itemsize < 4 and not wide:
            # Loss scaling keeps small gradients above zero; unscaled in 16 bits they would vanish.
            wide = options.stochastic_rounding or options.stochastic_state or update.scale is not None
        # Torch's kernels make no temporaries, so that they may take everything at once.
        at_once = bucket.fused and not (wide or update.changes_grads)
        for columns, scalars in _equal_columns(bucket.scalars, present):
            after = scalars
            for chunk in self._chunks(bucket, columns, at_once):
                if bucket.fused and not (wide or at_once) and chunk.params[0].nbytes > PART_BYTES:
                    after = self._update_parts(chunk.slots[0], update, scalars)
                    continue
                tensors = self._tensors(chunk, wide, copied=update.changes_grads)
                after = update(tensors, scalars)
                if wide:
                    self._copy_back(chunk, tensors, options)
            _write(bucket.scalars, columns, after)

    def _update_parts(self, i: int, update: Update, scalars: Scalars) -> Scalars:
        """Update a large dense parameter part by part: copies of its gradient stay in the CPU's caches."""
        slot, grad, after = self.slots[i], self._grads[i], scalars
        assert grad is not None
        if len(self._scratch) < PART_BYTES:
            self._scratch = torch.empty(PART_BYTES, dtype=torch.uint8, device=self.device)
            self._copies.clear()
        copy = self._scratch[:PART_BYTES].view(grad.dtype)
        # Whole vectors, so that an element's bits do not depend on where the parts end.
        tensors = slot.param, grad, *slot.state.values()
        parts = [torch.split(tensor.as_strided((tensor.numel(),), (1,)), len(copy)) for tensor in tensors]
        for param, part, *state in zip(*parts, strict=True):
            grads = [update.scaled(part, out=copy[: len(part)])]
            held = {name: [tensor] for name, tensor in zip(slot.state, state, strict=True)}
            after = update.apply(Tensors([param], grads, held), scalars)
        return after

    def _chunks(self, bucket: Bucket, columns: list[int], at_once: bool) -> list[BucketChunk]:
        key = (at_once, *columns)
        chunks = bucket.chunks.get(key)
        if chunks is None:
            if len(bucket.chunks) >= 16:
                bucket.chunks.clear()
            parts: list[list[int]] = [[]]
            nbytes = 0
            for column in columns:
                i = bucket.slots[column]
                if nbytes + self.slots[i].param.nbytes > CHUNK_BYTES and parts[-1] and not at_once:
                    parts.append([])
                    nbytes = 0
                parts[-1].append(i)
                nbytes += self.slots[i].param.nbytes
            chunks = bucket.chunks[key] = [self._chunk(part) for part in parts]
        return chunks

    def _chunk(self, indices: list[int]) -> BucketChunk:
        slots = [self.slots[i] for i in indices]
        state = {name: [slot.state[name] for slot in slots] for name in slots[0].state}
        return BucketChunk(indices, [slot.param for slot in slots], state)

    def _tensors(self, chunk: BucketChunk, wide: bool, *, copied: bool) -> Tensors:
        params, state = chunk.params, chunk.state
        grads: list[Tensor] = [self._grads[i] for i in chunk.slots]  # type: ignore[misc]
        if wide:
            dtype = torch.promote_types(params[0].dtype, torch.float32)
            slots = [self.slots[i] for i in chunk.slots]
            params = [_wide(slot.param, dtype) if slot.master is None else slot.master for slot in slots]
            grads = [grad.to(dtype, copy=True) for grad in grads]
            state = {name: [tensor.to(dtype) for tensor in held] for name, held in state.items()}
        elif copied:
            grads = self._copied(chunk.slots, grads)
        return Tensors(params, grads, state)

    def _copied(self, indices: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Copies in memory that is kept: allocating it again takes longer than the copying."""
        key = tuple(indices)
        copies = self._copies.get(key)
        if copies is None or copies[0].dtype != grads[0].dtype:
            nbytes = sum(-(-grad.nbytes // 64) * 64 for grad in grads)
            if len(self._scratch) < nbytes:
                self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._copies.clear()
            copies, start = [], 0
            for i, grad in zip(indices, grads, strict=True):
                memory = self._scratch[start : start + grad.nbytes].view(grad.dtype)
                copies.append(memory.as_strided(tuple(grad.shape), stride_of(self.slots[i].param)))
                start += -(-grad.nbytes // 64) * 64
            self._copies[key] = copies
        torch._foreach_copy_(copies, grads)
        return copies

    def _copy_back(self, chunk: BucketChunk, tensors: Tensors, options: StepOptions) -> None:
        for column, i in enumerate(chunk.slots):
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
        torch._foreach_lerp_(
            averages, [v.to(a.dtype) for v, a in zip(values, averages, strict=True)], 1.0 - decay
        )


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


def _write(scalars: Tensor, columns: list[int], values: Scalars) -> None:
    for line, value in zip(scalars, values, strict=True):
        if len(columns) == len(line):
            line.fill_(value)
        else:
            line[columns] = value


def _wide(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense copy."""
    return param.to(dtype) if param.dtype != dtype else param.clone()
