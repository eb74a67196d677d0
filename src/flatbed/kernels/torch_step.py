"""The dense step in torch operations: the implementation on a CPU, and the reference for the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.kernels.step import (
    STEPS,
    Grads,
    ParamSlot,
    Scaling,
    StepOptions,
    Update,
    begin_step,
    in_order,
    is_whole,
    round_stochastically,
)
from flatbed.rule import Group, Rule, Scalars, Tensors

CHUNK_BYTES = 1 << 20  # of parameters: temporaries of an update should stay in the CPU's caches
PART_BYTES = 4 << 20  # of a parameter that is larger than a chunk


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
        self.whole_grads: Grads | None = None
        """The gradients that the norm measures, if slots are parts of whole parameters."""
        self._buckets = self._build()

    def _build(self) -> list[Bucket]:
        kinds: dict[Any, list[int]] = {}
        for i, slot in enumerate(self.slots):
            dtypes = slot.param.dtype, slot.grad_dtype, slot.state_dtype
            wide = len(set(dtypes)) > 1 or slot.master is not None
            is_dense_cpu = self.device.type == "cpu" and (wide or is_whole(slot.param))
            fused = self.rule.fused is not None and is_dense_cpu
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
        """Take one gradient per slot. Those in `unordered` differ from their parameter in element order."""
        if unordered:
            grads = [
                in_order(self.slots[i].param, g) if i in unordered and g is not None else g
                for i, g in enumerate(grads)
            ]
        self._grads = grads

    def squares(self, options: StepOptions) -> dict[int, Tensor]:
        found = {}
        for norm_class in self._norm_classes:
            self._norm = self._norm_of(norm_class)  # of all gradients, unless there are several classes
            found[norm_class] = self._norm.double().square().reshape(1)
        return found

    def _norm_of(self, norm_class: int) -> Tensor:
        grads: dict[torch.dtype, list[Tensor]] = {}
        measured = self._grads if self.whole_grads is None else self.whole_grads
        for slot, g in zip(self.slots, measured, strict=True):
            if g is not None and slot.norm_class == norm_class:
                grads.setdefault(g.dtype, []).append(g)
        norms = [torch.zeros((), device=self.device)] if not grads else []
        for dtype, held in grads.items():
            wide = torch.promote_types(dtype, torch.float32)  # a norm is not rounded to the gradients' dtype
            norms += torch._foreach_norm(held, 2.0, dtype=wide)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

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
        self._grads = []

    def _update_bucket(self, bucket: Bucket, update: Update, options: StepOptions) -> None:
        present = [column for column, i in enumerate(bucket.slots) if self._grads[i] is not None]
        wide = bucket.wide
        if self.slots[bucket.slots[0]].param.dtype.itemsize < 4 and not wide:
            # Loss scaling keeps small gradients above zero; unscaled in 16 bits they would vanish.
            wide = options.stochastic_rounding or options.stochastic_state or update.scale is not None
        scales = update.scales_grads and not wide
        # Torch's kernels make no temporaries, so that they may take everything at once.
        at_once = bucket.fused and not (wide or scales)
        for columns, scalars in _equal_columns(bucket.scalars, present):
            after = scalars
            indices = [bucket.slots[column] for column in columns]
            for chunk in [indices] if at_once else self._chunks(indices):
                tensors = self._tensors(chunk, wide)
                for part in _parts(tensors) if scales and bucket.fused else [tensors]:
                    after = update(part, scalars)
                if wide:
                    self._copy_back(chunk, tensors, options)
            for line, value in zip(bucket.scalars, after, strict=True):
                if len(columns) == len(line):
                    line.fill_(value)
                else:
                    line[columns] = value

    def _chunks(self, indices: list[int]) -> Iterator[list[int]]:
        """Group slots into those that one call updates."""
        chunk: list[int] = []
        nbytes = 0
        for i in indices:
            size = self.slots[i].param.nbytes
            if chunk and nbytes + size > CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(i)
            nbytes += size
        if chunk:
            yield chunk

    def _tensors(self, chunk: list[int], wide: bool) -> Tensors:
        slots = [self.slots[i] for i in chunk]
        params = [slot.param for slot in slots]
        grads: list[Tensor] = [self._grads[i] for i in chunk]  # type: ignore[misc]
        state = {name: [slot.state[name] for slot in slots] for name in slots[0].state}
        if wide:
            dtype = torch.promote_types(params[0].dtype, torch.float32)
            params = [
                slot.param.to(dtype, copy=True) if slot.master is None else slot.master for slot in slots
            ]
            grads = [grad.to(dtype) for grad in grads]
            state = {name: [tensor.to(dtype) for tensor in held] for name, held in state.items()}
        return Tensors(params, grads, state)

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


def _parts(tensors: Tensors) -> Iterator[Tensors]:
    """Split a large parameter, so that copies of its gradient stay in the CPU's caches."""
    if len(tensors.params) > 1 or tensors.params[0].nbytes <= PART_BYTES:
        yield tensors
        return
    # Whole vectors, so that an element's bits do not depend on where the parts end.
    size = PART_BYTES // tensors.params[0].itemsize
    held = tensors.params[0], tensors.grads[0], *(state for (state,) in tensors.state.values())
    flat = [torch.split(tensor.as_strided((tensor.numel(),), (1,)), size) for tensor in held]
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
