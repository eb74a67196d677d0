"""The plan of an optimizer's dense steps: slots, steppers, and a fingerprint of what it was built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatbed.cuda.streams import is_capturing
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.step import STEPS, DenseStepper, Grads, ParamSlot, TorchStepper, stride_of
from flatbed.optim.master_weights import MasterWeights
from flatbed.optim.state_builder import Groups, OptimizerSpec, build_slots, publish_state
from flatbed.rule import Rule
from flatbed.tables.table import Table


class StepStats:
    """The vectors of step statistics, one for each device and kind of step; they outlive plans."""

    def __init__(self) -> None:
        self.vectors: dict[tuple[str, torch.device], Tensor] = {}
        self._first_step = 0

    def of(self, kind: str, devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
        """The statistics of these devices. A new device continues those of a former one."""
        held = {device: vector for (other, device), vector in self.vectors.items() if other == kind}
        start = torch.zeros(4, dtype=torch.float64, device="cpu")
        start[STEPS] = self._first_step
        known = next(iter(held.values()), start)
        found = {device: held.get(device, known.to(device, copy=True)) for device in devices}
        if found:
            self.vectors = {key: vector for key, vector in self.vectors.items() if key[0] != kind}
            self.vectors |= {(kind, device): vector for device, vector in found.items()}
        return found

    @property
    def latest(self) -> Tensor | None:
        """The statistics of the last step: those of parameters, if there are any in the plan."""
        return next((self.vectors[key] for key in sorted(self.vectors, key=lambda key: key[0])), None)

    @property
    def n_steps(self) -> int:
        """The number of steps so far, which chooses the noise of stochastic rounding. Waits for the GPU."""
        return max((int(vector[STEPS]) for vector in self.vectors.values()), default=self._first_step)

    def set_steps(self, n_steps: int) -> None:
        """Continue from this number of steps."""
        self._first_step = n_steps
        for vector in self.vectors.values():
            vector[STEPS] = n_steps


class Fingerprint:
    """The groups, state and parameters that a plan was built from, as far as a step depends on them.

    Parameters are compared by identity and address, entries of the state by identity and length. Code that
    converts dtypes, or replaces or moves tensors inside of entries, does so for all parameters: the first and
    the last one are compared in detail.
    """

    def __init__(self, rule: Rule, groups: Groups, state: dict[Any, Any], slots: list[ParamSlot]) -> None:
        self._rule, self._groups, self._state = rule, groups, state
        self._params = [*_params(groups), ...]
        self._has = [rule.has(group) for group in groups]
        self._entries = [*state.values(), ...]
        self._lengths = list(map(len, state.values()))
        self._slotted = [slot.param for slot in slots]
        slotted = set(map(id, self._slotted))
        self._idle = [p for p in _params(groups) if id(p) not in slotted and not isinstance(p, Table)]
        self._addresses = list(map(Tensor.data_ptr, self._slotted))
        self._ends = [(slot.param, slot.published or {}) for slot in (*slots[:1], *slots[1:][-1:])]
        self._details = self._describe_ends()

    def _describe_ends(self) -> list[Any]:
        found: list[Any] = []
        for param, entry in self._ends:
            found += (param.dtype, param.shape, param.stride(), *map(id, entry.values()))
            found += [value.data_ptr() for value in entry.values() if isinstance(value, Tensor)]
        return found

    def matches(self, groups: Groups, state: dict[Any, Any]) -> bool:
        """Compare with the present. An Ellipsis ends each list, so that lengths are compared too."""
        return (
            groups is self._groups
            and state is self._state
            and all(map(is_, self._params, chain(_params(groups), (...,))))
            and self._has == [self._rule.has(group) for group in groups]
            and all(map(is_, self._entries, chain(state.values(), (...,))))
            and self._lengths == list(map(len, state.values()))
            and self._addresses == list(map(Tensor.data_ptr, self._slotted))
            and self._details == self._describe_ends()
            and all(p.grad is None for p in self._idle)
        )


def _params(groups: Groups) -> Iterator[Tensor]:
    return chain.from_iterable([group["params"] for group in groups])


class StepGrads(NamedTuple):
    """The gradients of one step."""

    grads: Grads
    addresses: list[int]
    """One per gradient; 0 where there is none."""
    unordered: frozenset[int]
    """Slots whose gradient is in another order of elements than the parameter."""
    params: list[Tensor]
    """The parameters that have a gradient."""


@dataclass(frozen=True, slots=True)
class DeviceSlots:
    """The stepper of one device, and which slots of the plan it has."""

    stepper: DenseStepper
    indices: list[int]


class Plan:
    """A slot for every parameter with a gradient or state, and a stepper for every device."""

    def __init__(
        self,
        slots: list[ParamSlot],
        devices: list[DeviceSlots],
        masters: MasterWeights,
        fingerprint: Fingerprint,
    ) -> None:
        self.slots, self.devices, self.masters, self.fingerprint = slots, devices, masters, fingerprint
        self.params = [slot.param for slot in slots]
        self._grad_dtypes = [slot.grad_dtype for slot in slots]
        self._grad_sizes = [slot.param.numel() * slot.grad_dtype.itemsize for slot in slots]
        self._mixed_dtypes = any(slot.grad_dtype != slot.param.dtype for slot in slots)
        self._strides = [stride_of(param) for param in self.params]
        self._all_contiguous = all(map(Tensor.is_contiguous, self.params))
        self._addresses: list[int] = []

    def collect_grads(self) -> StepGrads | None:
        """The present gradients. None: some are of another kind than the plan was built for."""
        params = self.params
        grads = [p.grad for p in params]
        present: list[Any] = [g for g in grads if g is not None]
        try:
            unordered = self._find_unordered(grads, present)
            addresses = list(map(Tensor.data_ptr, present))
        except RuntimeError:  # sparse gradients have no strides or no address
            return None
        if self._mixed_dtypes and any(map(_is_other, grads, self._grad_dtypes)):
            return None
        sizes = self._grad_sizes
        if len(present) < len(grads):
            params = [p for p, g in zip(params, grads, strict=True) if g is not None]
            addresses = [0 if g is None else g.data_ptr() for g in grads]
            sizes = [size for size, g in zip(sizes, grads, strict=True) if g is not None]
        if addresses == self._addresses:
            addresses = self._addresses  # lists of the same numbers are compared faster
        elif [g.nbytes for g in present] != sizes:
            return None
        self._addresses = addresses
        return StepGrads(grads, addresses, unordered, params)

    def _find_unordered(self, grads: Grads, present: list[Any]) -> frozenset[int]:
        """Find the slots whose gradient is in another order of elements than the parameter."""
        if self._all_contiguous and all(map(Tensor.is_contiguous, present)):
            return frozenset()
        if len(present) == len(grads) and list(map(Tensor.stride, present)) == self._strides:
            return frozenset()
        return frozenset(
            i
            for i, (grad, stride) in enumerate(zip(grads, self._strides, strict=True))
            if grad is not None and grad.stride() != stride and grad.numel() > 1
        )


def _is_other(grad: Tensor | None, dtype: torch.dtype) -> bool:
    return grad is not None and grad.dtype != dtype


def build_plan(
    spec: OptimizerSpec,
    groups: Groups,
    state: dict[Any, Any],
    stats: StepStats,
    *,
    previous: Plan | None = None,
    everything: bool = False,
    loaded: bool = False,
) -> Plan:
    """Make what is missing of the state, and plan the steps of all parameters that have a gradient or state.

    `previous` has the scalars that torch does not know. `everything`: parameters without a gradient too.
    `loaded`: the state is a checkpoint's. It is copied, and master weights that it lacks are left to the
    next plan, since weights may be loaded later.
    """
    if any(is_capturing(p.device) for group in groups for p in group["params"] if not isinstance(p, Table)):
        raise FlatbedError(
            "take one eager step before the capture, with gradients for all parameters that are to be "
            "trained: state and tables would be made inside the graph, and again at every replay"
        )
    known = () if previous is None else previous.slots
    slots = build_slots(spec, groups, state, previous=known, everything=everything, loaded=loaded)
    by_device: dict[torch.device, list[int]] = {}
    for i, slot in enumerate(slots):
        by_device.setdefault(slot.param.device, []).append(i)
    vectors = stats.of("params", by_device)
    devices = []
    for device, indices in by_device.items():
        stepper = _stepper_class(spec.rule, device)
        own = [slots[i] for i in indices]
        devices.append(DeviceSlots(stepper(spec.rule, groups, own, vectors[device]), indices))
    for slot in slots:
        publish_state(state, slot)
    masters = MasterWeights(slots)
    if not loaded:
        masters.sync_all()
    masters.record_versions()
    return Plan(slots, devices, masters, Fingerprint(spec.rule, groups, state, slots))


def _stepper_class(rule: Rule, device: torch.device) -> Callable[..., DenseStepper]:
    if rule.update is not None and use_triton(device):
        from flatbed.kernels._triton.step import TritonStepper

        return TritonStepper
    return TorchStepper
