"""Whether parameters and gradients are as they were at the last look, at little cost per parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from flatbed.kernels.step import Grads, stride_of

PATTERNS = 64  # sets of parameters with gradients that are remembered


class Change(Enum):
    """What became of the gradients since the last look."""

    SAME = 0
    MOVED = 1
    NEW = 2  # of another kind, or of parameters that had none


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, tensor.stride()


class _Likeness:
    """Whether tensors are of the same type, dtype, device, shape and strides as the ones given."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [_describe(t) for t in tensors]

    def check(self, *tensors: Tensor) -> bool:
        return len(tensors) == len(self._known) and all(
            t is not None and _describe(t) == known for t, known in zip(tensors, self._known, strict=True)
        )


def metadata_guard(tensors: Sequence[Tensor]) -> Any:
    """Torch has such a check for its own use, in C++. Where it cannot be relied on, Python's will do."""
    return _guards(tensors) if tensors and _guards_work() else _Likeness(tensors)


def _guards(tensors: Sequence[Tensor]) -> Any:
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


@functools.cache
def _guards_work() -> bool:
    """It is torch's private affair, and may become another one: it has to prove that it sees differences."""
    known = torch.zeros(2, 2, device="cpu")
    others = [
        known.t(),
        known.half(),
        known[:1],
        known.to_sparse(),
        nn.Parameter(known),
        known.to("meta"),
        None,
    ]
    try:
        guards = _guards([known])
        return guards.check(torch.ones(2, 2, device="cpu")) and not any(
            guards.check(other) for other in others
        )
    except Exception:
        return False


def addresses_equal() -> Callable[[list[Tensor], list[int], list[int]], bool]:
    """Whether tensors lie at given addresses: (tensors, addresses, positions) → bool."""
    fast = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    return fast or (lambda tensors, addresses, positions: list(map(Tensor.data_ptr, tensors)) == addresses)


class TensorTracker:
    """Remembers parameters and gradients: kinds, and addresses if anyone follows those."""

    def __init__(self, params: list[Tensor], *, addressed: bool) -> None:
        self.params = params
        self._addressed = addressed
        self.unordered: frozenset[int] = frozenset()
        self._equal = addresses_equal()
        self._positions = list(range(len(params)))
        self._params_likeness = metadata_guard(params)
        self._param_addresses = [p.data_ptr() for p in params]
        self._patterns: dict[tuple[bool, ...] | None, tuple[Any, frozenset[int]]] = {}
        self._pattern: tuple[bool, ...] | None = None
        self._grad_addresses: list[int] = []
        self.addresses: list[int] = []

    def params_unchanged(self) -> bool:
        """Whether every parameter lies where it lay, with the same dtype, shape and strides."""
        # For parameters, a subclass of Tensor, this is faster than `_equal`.
        if self._addressed and list(map(Tensor.data_ptr, self.params)) != self._param_addresses:
            return False
        return bool(self._params_likeness.check(*self.params))

    def look(self, grads: Grads) -> Change:
        """Compare with the last look. `addresses` are set then, as a step takes them."""
        pattern, present = None, grads
        known = self._patterns.get(None)
        if known is None or not known[0].check(*grads):
            pattern = tuple([g is None for g in grads])
            present = [g for g in grads if g is not None]
            known = self._patterns.get(pattern)
            if known is None or not known[0].check(*present):
                return Change.NEW
        self.unordered = known[1]
        if not self._addressed:
            self._pattern = pattern
            return Change.SAME
        if pattern == self._pattern:
            positions = self._positions if pattern is None else self._positions[: len(present)]
            if self._equal(present, self._grad_addresses, positions):  # type: ignore[arg-type]
                return Change.SAME
        self._note(grads, present, pattern)
        return Change.MOVED

    @property
    def complete(self) -> bool:
        """Whether every parameter had a gradient at the last look."""
        return self._pattern is None

    def _note(self, grads: Grads, present: Grads, pattern: tuple[bool, ...] | None) -> None:
        self._pattern = pattern
        self._grad_addresses = [g.data_ptr() for g in present]  # type: ignore[union-attr]
        self.addresses = list(self._grad_addresses)
        if pattern is not None:
            found = iter(self._grad_addresses)
            self.addresses = [0 if g is None else next(found) for g in grads]

    def learn(self, grads: Grads) -> None:
        """These gradients have been looked at and are good."""
        present = [g for g in grads if g is not None]
        pattern = None if len(present) == len(grads) else tuple([g is None for g in grads])
        self.unordered = frozenset(
            i for i, (p, g) in enumerate(zip(self.params, grads, strict=True))
            if g is not None and g.numel() > 1 and g.stride() != stride_of(p)
        )  # fmt: skip
        if len(self._patterns) >= PATTERNS:
            self._patterns.clear()
        self._patterns[pattern] = metadata_guard(present), self.unordered
        self._note(grads, present, pattern)
