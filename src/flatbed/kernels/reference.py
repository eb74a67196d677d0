"""A rule over the parameters of one device as torch operations: the reference, and the way on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
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
    Settings,
    in_order,
    is_whole,
    stride_of,
)
from flatbed.rule import Group, Rule, Scalars, Tensors

CHUNK_BYTES = 1 << 20  # of parameters: what a step makes on the way should not leave the caches


@dataclass(slots=True)
class Bucket:
    """Rows of one group that are updated in the same way. `scalars` has a line for each of the rule's."""

    group: int
    wide: bool  # computed in fp32 copies, since dtypes differ or are to be rounded in some way
    fused: bool
    members: list[int]
    scalars: Tensor
    chunks: dict[tuple[int, ...], list[Chunk]] = field(default_factory=dict)  # of members with gradients


@dataclass(slots=True)
class Chunk:
    """Some members of a bunch: as much as is updated at once."""

    members: list[int]
    params: list[Tensor]
    state: dict[str, list[Tensor]]


class TorchStepper:
    """Runs a rule over parameters on one device, with torch's fused CPU kernel where there is one."""

    addressed = False

    def __init__(self, rule: Rule, groups: Sequence[Group], rows: list[ParamSlot], shared: Tensor) -> None:
        self.rule = rule
        self.groups = groups
        self.rows = rows
        self.shared = shared
        self.device = rows[0].param.device
        self._grads: Grads = []
        self._norm: Tensor | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._copies: dict[tuple[int, ...], list[Tensor]] = {}
        self._bunches = self._build()

    def _build(self) -> list[Bucket]:
        members: dict[Any, list[int]] = {}
        for i, row in enumerate(self.rows):
            dtypes = {row.param.dtype, row.grad_dtype, row.state_dtype}
            wide = len(dtypes) > 1 or row.master is not None
            fused = (
                self.rule.fused is not None and self.device.type == "cpu" and (wide or is_whole(row.param))
            )
            key = (row.group, wide, fused, row.param.dtype, row.grad_dtype, row.state_dtype, tuple(row.state))
            members.setdefault(key, []).append(i)
        bunches = []
        for (group, wide, fused, *_), held in members.items():
            # Numbers of state side by side: read and counted up in one operation.
            scalars = torch.empty(len(self.rule.scalars), len(held), device=self.device)
            for line, name in enumerate(self.rule.scalars):
                for column, i in enumerate(held):
                    scalars[line, column] = self.rows[i].scalars[name]
                    self.rows[i].scalars[name] = scalars[line, column]
            bunches.append(Bucket(group, wide, fused, held, scalars))
        return bunches

    # ---- a step

    @property
    def captured(self) -> bool:
        return False

    def place(self, grads: Grads, unordered: frozenset[int], addresses: list[int] | None) -> None:
        if unordered:
            grads = [
                in_order(self.rows[i].param, g) if i in unordered and g is not None else g
                for i, g in enumerate(grads)
            ]
        self._grads = grads

    def squares(self, settings: Settings, scaling: Scaling | None) -> Tensor:
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

    def update(self, settings: Settings, scaling: Scaling | None, squares: Tensor | None) -> None:
        norm = self._norm if squares is None else squares.sum().sqrt().float()
        factor, skip = clip_factor(settings, scaling, norm, self.shared)
        self.shared[STEPS] += 1
        self.shared[SKIP] = float(skip)
        self.shared[SKIPPED] += float(skip)
        if skip:
            self._grads = []
            return
        scale = None if scaling is None else scaling.scale
        for bunch in self._bunches:
            self._run(bunch, settings, scale, factor)
        if settings.ema_decay is not None:
            self._average(settings.ema_decay)
        self._grads = []

    def _run(self, bunch: Bucket, settings: Settings, scale: Tensor | None, factor: Tensor | None) -> None:
        grads = self._grads
        present = [column for column, i in enumerate(bunch.members) if grads[i] is not None]
        wide = bunch.wide
        first = self.rows[bunch.members[0]]
        if first.param.dtype.itemsize < 4 and not wide:
            # Scaled gradients are large so that, in their own dtype, unscaled ones would vanish.
            wide = settings.stochastic_rounding or settings.stochastic_state or scale is not None
        rule = self.rule.fused if bunch.fused and self.rule.fused else self.rule.reference
        # Torch's kernels make nothing on the way, so that they may have all at once.
        at_once = bunch.fused and not (wide or scale is not None or factor is not None)
        group = with_number(self.groups[bunch.group])
        for columns, scalars in _alike(bunch.scalars, present):
            after = scalars
            for chunk in self._chunks(bunch, columns, at_once):
                tensors = self._tensors(bunch, chunk, wide, scale, factor)
                after = rule(group, tensors, scalars)
                if wide:
                    self._copy_back(chunk, tensors, settings)
            _write(bunch.scalars, columns, after)

    def _chunks(self, bunch: Bucket, columns: list[int], at_once: bool) -> list[Chunk]:
        key = (at_once, *columns)
        chunks = bunch.chunks.get(key)
        if chunks is None:
            if len(bunch.chunks) >= 16:
                bunch.chunks.clear()
            parts: list[list[int]] = [[]]
            nbytes = 0
            for column in columns:
                i = bunch.members[column]
                if nbytes + self.rows[i].param.nbytes > CHUNK_BYTES and parts[-1] and not at_once:
                    parts.append([])
                    nbytes = 0
                parts[-1].append(i)
                nbytes += self.rows[i].param.nbytes
            chunks = bunch.chunks[key] = [self._chunk(part) for part in parts]
        return chunks

    def _chunk(self, members: list[int]) -> Chunk:
        rows = [self.rows[i] for i in members]
        state = {name: [row.state[name] for row in rows] for name in rows[0].state}
        return Chunk(members, [row.param for row in rows], state)

    def _tensors(
        self, bunch: Bucket, chunk: Chunk, wide: bool, scale: Tensor | None, factor: Tensor | None
    ) -> Tensors:
        params, state = chunk.params, chunk.state
        grads: list[Tensor] = [self._grads[i] for i in chunk.members]  # type: ignore[misc]
        if wide:
            dtype = torch.promote_types(params[0].dtype, torch.float32)
            rows = [self.rows[i] for i in chunk.members]
            params = [_wide(row.param, dtype) if row.master is None else row.master for row in rows]
            grads = [grad.to(dtype, copy=True) for grad in grads]
            state = {name: [tensor.to(dtype) for tensor in held] for name, held in state.items()}
        elif scale is not None or factor is not None:
            grads = self._copied(chunk.members, grads)
        if scale is not None:
            torch._foreach_div_(grads, scale)
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        alone = bunch.fused or self.rule.sees_to_maximize
        if self.groups[bunch.group].get("maximize") and not alone:
            grads = list(torch._foreach_neg(grads))
        return Tensors(params, grads, state)

    def _copied(self, members: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Copies in memory that is kept: to get it anew from the system takes longer than the copying."""
        key = tuple(members)
        copies = self._copies.get(key)
        if copies is None or copies[0].dtype != grads[0].dtype:
            nbytes = sum(-(-grad.nbytes // 64) * 64 for grad in grads)
            if len(self._scratch) < nbytes:
                self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                self._copies.clear()
            copies, at = [], 0
            for i, grad in zip(members, grads, strict=True):
                place = self._scratch[at : at + grad.nbytes].view(grad.dtype)
                copies.append(place.as_strided(tuple(grad.shape), stride_of(self.rows[i].param)))
                at += -(-grad.nbytes // 64) * 64
            self._copies[key] = copies
        torch._foreach_copy_(copies, grads)
        return copies

    def _copy_back(self, chunk: Chunk, tensors: Tensors, settings: Settings) -> None:
        for column, i in enumerate(chunk.members):
            row, value = self.rows[i], tensors.params[column]
            if settings.stochastic_rounding and row.param.dtype == torch.bfloat16 and row.master is None:
                value = round_stochastically(value, seed=self._seed(i))
            row.param.copy_(value)
            for bit, (name, held) in enumerate(row.state.items()):
                new = tensors[name][column]
                if settings.stochastic_state and held.dtype == torch.bfloat16:
                    new = round_stochastically(new, seed=self._seed(i) + 7919 * (bit + 1))
                if held is not new:
                    held.copy_(new)

    def _seed(self, row: int) -> int:
        return int(self.shared[STEPS]) * 1_000_003 + row

    def _average(self, decay: float) -> None:
        rows = [row for row in self.rows if row.ema is not None]
        values = [row.param if row.master is None else row.master for row in rows]
        averages: list[Tensor] = [row.ema for row in rows]  # type: ignore[misc]
        torch._foreach_lerp_(
            averages, [v.to(a.dtype) for v, a in zip(values, averages, strict=True)], 1.0 - decay
        )


def clip_factor(
    settings: Settings, scaling: Scaling | None, norm: Tensor | None, shared: Tensor
) -> tuple[Tensor | None, bool]:
    """What gradients are multiplied with to clip them, and whether the step is skipped.

    `norm` is that of the gradients as they are: scaled, if there is a scale.
    """
    skip = scaling is not None and scaling.found_inf is not None and bool(scaling.found_inf)
    if not settings.normed:
        return None, skip
    assert norm is not None
    if scaling is not None and scaling.scale is not None:
        norm = norm / scaling.scale.squeeze()
    shared[NORM] = norm
    if settings.skip_nonfinite and not bool(torch.isfinite(norm)):
        skip = True
    if settings.max_norm is None:
        return None, skip
    factor = torch.clamp(settings.max_norm / (norm + 1e-6), max=1.0)
    # Multiplying by 1 changes no bit.
    return (None if norm.device.type == "cpu" and float(factor) == 1.0 else factor), skip


def round_stochastically(x: Tensor, *, seed: int) -> Tensor:
    """fp32 → bf16, up or down with probabilities that make the expectation exact."""
    generator = torch.Generator(x.device).manual_seed(seed)
    bits = x.view(torch.int32)
    noise = torch.empty_like(bits).random_(0, 1 << 16, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _alike(scalars: Tensor, columns: list[int]) -> list[tuple[list[int], Scalars]]:
    """Columns with equal numbers together."""
    if not columns:
        return []
    lines = scalars.tolist()
    if all(line.count(line[0]) == len(line) for line in lines):
        return [(columns, tuple(line[0] for line in lines))]
    alike: dict[Scalars, list[int]] = {}
    for column in columns:
        alike.setdefault(tuple(line[column] for line in lines), []).append(column)
    return [(held, key) for key, held in alike.items()]


def with_number(group: Group) -> Group:
    """As torch has it: a learning rate that is a vector of one counts as a number."""
    lr = group["lr"]
    return {**group, "lr": lr.squeeze()} if isinstance(lr, Tensor) and lr.dim() else group


def _write(scalars: Tensor, columns: list[int], values: Scalars) -> None:
    for line, value in zip(scalars, values, strict=True):
        if len(columns) == len(line):
            line.fill_(value)
        else:
            line[columns] = value


def _wide(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A dense copy."""
    return param.to(dtype) if param.dtype != dtype else param.clone()
