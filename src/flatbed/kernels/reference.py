"""A rule over the parameters of one device as torch operations: the reference, and the way on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatbed.kernels.row import NORM, SKIP, SKIPPED, STEPS, Grads, Row, Scaling, Settings, in_order, is_whole
from flatbed.rule import Group, Rule, Scalars, Tensors

CHUNK_BYTES = 1 << 24  # of gradients, where a step needs copies of them


@dataclass(slots=True)
class Bunch:
    """Rows of one group that are updated in the same way. `scalars` has a line for each of the rule's."""

    group: int
    wide: bool  # computed in fp32 copies, since dtypes differ or are to be rounded in some way
    fused: bool
    members: list[int]
    scalars: Tensor


class TorchStepper:
    """Runs a rule over parameters on one device, with torch's fused CPU kernel where there is one."""

    def __init__(self, rule: Rule, groups: Sequence[Group], rows: list[Row], shared: Tensor) -> None:
        self.rule = rule
        self.groups = groups
        self.rows = rows
        self.shared = shared
        self.device = rows[0].param.device
        self._grads: Grads = []
        self._norm: Tensor | None = None
        self._scratch = torch.empty(0, device=self.device)
        self._bunches = self._build()

    def _build(self) -> list[Bunch]:
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
            bunches.append(Bunch(group, wide, fused, held, scalars))
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
        norms: list[Tensor] = []
        for dtype, held in grads.items():
            if scaling is not None and scaling.scale is not None:
                held = list(torch._foreach_div(held, scaling.scale))
            wide = torch.promote_types(dtype, torch.float32)  # a norm is not rounded to the gradients' dtype
            norms += [*torch._foreach_norm(held, 2.0, dtype=wide)]
        self._norm = torch.linalg.vector_norm(torch.stack(norms))
        return self._norm.double().square().reshape(1)

    def update(self, settings: Settings, scaling: Scaling | None, squares: Tensor | None) -> None:
        factor, skip = self._factor(settings, scaling, squares)
        self.shared[STEPS] += 1
        self.shared[SKIP] = float(skip)
        self.shared[SKIPPED] += float(skip)
        if skip:
            return
        scale = None if scaling is None else scaling.scale
        for bunch in self._bunches:
            self._run(bunch, settings, scale, factor)
        if settings.ema_decay is not None:
            self._average(settings.ema_decay)
        self._grads = []

    def _factor(
        self, settings: Settings, scaling: Scaling | None, squares: Tensor | None
    ) -> tuple[Tensor | None, bool]:
        """What gradients are multiplied with to clip them; and whether the step is skipped."""
        skip = scaling is not None and bool(scaling.found_inf)
        if not settings.normed:
            return None, skip
        norm = self._norm
        if squares is not None:
            norm = squares.sum().sqrt().float()
        assert norm is not None
        self.shared[NORM] = norm
        if settings.skip_nonfinite and not bool(torch.isfinite(norm)):
            skip = True
        if settings.max_norm is None:
            return None, skip
        factor = torch.clamp(settings.max_norm / (norm + 1e-6), max=1.0)
        # Multiplying by 1 changes no bit.
        return (None if self.device.type == "cpu" and float(factor) == 1.0 else factor), skip

    def _run(self, bunch: Bunch, settings: Settings, scale: Tensor | None, factor: Tensor | None) -> None:
        present = [column for column, i in enumerate(bunch.members) if self._grads[i] is not None]
        wide = bunch.wide
        if settings.stochastic_rounding and not wide:
            wide = self.rows[bunch.members[0]].param.dtype == torch.bfloat16
        copied = wide or scale is not None or factor is not None
        for columns, scalars in _alike(bunch.scalars, present):
            members = [bunch.members[column] for column in columns]
            after = scalars
            for part in self._chunks(members) if copied else (members,):
                tensors = self._tensors(bunch, part, wide, scale, factor)
                rule = self.rule.fused if bunch.fused and self.rule.fused else self.rule.reference
                after = rule(_with_number(self.groups[bunch.group]), tensors, scalars)
                if wide:
                    self._copy_back(part, tensors, settings)
            _write(bunch.scalars, columns, after)

    def _tensors(
        self, bunch: Bunch, members: list[int], wide: bool, scale: Tensor | None, factor: Tensor | None
    ) -> Tensors:
        rows = [self.rows[i] for i in members]
        params = [row.param for row in rows]
        grads: list[Tensor] = [self._grads[i] for i in members]  # type: ignore[misc]
        state = {name: [row.state[name] for row in rows] for name in rows[0].state}
        if wide:
            dtype = torch.promote_types(params[0].dtype, torch.float32)
            params = [_wide(row.param, dtype) if row.master is None else row.master for row in rows]
            grads = [grad.to(dtype, copy=True) for grad in grads]
            state = {name: [tensor.to(dtype) for tensor in held] for name, held in state.items()}
        if not wide and (scale is not None or factor is not None):
            grads = self._copied(grads)
        if scale is not None:
            torch._foreach_div_(grads, scale)
        if factor is not None:
            torch._foreach_mul_(grads, factor)
        if self.groups[bunch.group]["maximize"] and not bunch.fused:
            grads = list(torch._foreach_neg(grads))
        return Tensors(params, grads, state)

    def _copied(self, grads: list[Tensor]) -> list[Tensor]:
        """Copies in memory that is kept: to get it anew from the system takes longer than the copying."""
        places = [(math.prod(g.shape), g) for g in grads]
        n_elements = sum(n for n, _ in places)
        if self._scratch.dtype != grads[0].dtype or len(self._scratch) < n_elements:
            self._scratch = torch.empty(n_elements, dtype=grads[0].dtype, device=self.device)
        pieces = torch.split(self._scratch[:n_elements], [n for n, _ in places])
        copies = [piece.as_strided(g.shape, g.stride()) for piece, g in zip(pieces, grads, strict=True)]
        torch._foreach_copy_(copies, grads)
        return copies

    def _copy_back(self, members: list[int], tensors: Tensors, settings: Settings) -> None:
        for column, i in enumerate(members):
            row, value = self.rows[i], tensors.params[column]
            if settings.stochastic_rounding and row.param.dtype == torch.bfloat16 and row.master is None:
                value = round_stochastically(value, seed=int(self.shared[STEPS]) * 1_000_003 + i)
            row.param.copy_(value)
            for name, held in row.state.items():
                if held is not tensors[name][column]:
                    held.copy_(tensors[name][column])

    def _chunks(self, members: list[int]) -> Iterator[list[int]]:
        """Copies are made of a few megabytes at a time."""
        part: list[int] = []
        nbytes = 0
        for i in members:
            part.append(i)
            nbytes += self.rows[i].param.nbytes
            if nbytes >= CHUNK_BYTES:
                yield part
                part, nbytes = [], 0
        if part:
            yield part

    def _average(self, decay: float) -> None:
        rows = [row for row in self.rows if row.ema is not None]
        values = [row.param if row.master is None else row.master for row in rows]
        averages: list[Tensor] = [row.ema for row in rows]  # type: ignore[misc]
        torch._foreach_lerp_(
            averages, [v.to(a.dtype) for v, a in zip(values, averages, strict=True)], 1.0 - decay
        )


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


def _with_number(group: Group) -> Group:
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
