"""The plan of an optimizer's steps: slots, steppers, and a fingerprint of what it was built from."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from flatbed.cuda.streams import is_capturing
from flatbed.distributed.dense_shards import (
    CPU,
    LOCAL,
    LocalGrads,
    ShardGroups,
    Sharding,
    arrived,
    is_dtensor,
    local_of,
    on_several_meshes,
    reshard,
    version_counters,
)
from flatbed.distributed.state_shards import Piece, exchange_pieces, own_part, plan_pieces
from flatbed.errors import FlatbedError
from flatbed.kernels import use_triton
from flatbed.kernels.step import Grads, ParamSlot, TorchStepper, stride_of
from flatbed.optim.options import Groups
from flatbed.optim.state import build_slots, publish_state
from flatbed.tables.table import Table

if TYPE_CHECKING:
    from flatbed.kernels._triton.step import TritonStepper
    from flatbed.optim.optimizer import Optimizer

GRAD, NBYTES = attrgetter("grad"), attrgetter("nbytes")
PARAMS = itemgetter("params")


class MasterWeights:
    """The slots that have an fp32 master weight, and their parameters' versions after the last step."""

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        self.slots = [slot for slot in slots if slot.master is not None]
        self.versions: list[int] = []

    def record_versions(self) -> None:
        """Record the versions of parameters, which agree with their masters now. Writes change them."""
        self.versions = [_version(slot) for slot in self.slots]

    def sync_written(self) -> None:
        """Update the masters of parameters that were written to since the last step."""
        written = [
            slot
            for slot, version in zip(self.slots, self.versions, strict=True)
            # A flat parameter's version does not count writes to its views.
            if _version(slot) != version
            or type(slot.param) not in (Tensor, nn.Parameter)
            # `model.to` makes other local tensors, even over the same memory, which count writes from 0.
            or (slot.sharding and not slot.own_rows and LOCAL(slot.owner) is not slot.param)
        ]
        if any(is_capturing(slot.param.device) for slot in written):
            raise FlatbedError(
                "parameters were written to since the last step, and every replay would update their fp32 "
                "masters: call optimizer.refresh_masters() before the capture"
            )
        self.sync(written)

    def sync(self, slots: list[ParamSlot]) -> None:
        """Set a master to its parameter wherever the parameter is not the rounded master."""
        for slot in slots:
            master = cast(Tensor, slot.master)
            master.copy_(torch.where(master.to(slot.param.dtype) == slot.param, master, slot.param.float()))


def _are_equal(entries: list[Any], contents: list[dict[str, Any]]) -> bool:
    """Compare dicts of tensors by identity, in C.

    A tensor of one element also equals another one of the same value.
    """
    try:
        return entries == contents
    except Exception:  # tensors of several elements have no truth value; others may be on two devices
        return False


def _version(slot: ParamSlot) -> int:
    """Return the number of writes to a parameter so far. A DTensor and its local tensor count separately."""
    return slot.param._version + slot.owner._version


class Plan:
    """A slot for every parameter with a gradient or state, and a stepper for every device."""

    def __init__(
        self,
        optimizer: Optimizer,
        slots: list[ParamSlot],
        steppers: list[TorchStepper | TritonStepper],
        shard_groups: ShardGroups,
    ) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        self.slots, self.steppers, self.shard_groups = slots, steppers, shard_groups
        self.built_from: list[Any] | None = None
        """The fingerprint of what the plan was built from. None: a step needs another plan."""
        self._needs_addresses = not all(isinstance(stepper, TorchStepper) for stepper in steppers)
        positions = {id(slot): i for i, slot in enumerate(slots)}
        self._indices = [[positions[id(slot)] for slot in stepper.slots] for stepper in steppers]
        self.masters = MasterWeights(slots)
        self.owners = [slot.owner for slot in slots]
        self.counters = version_counters(self.owners)
        self._whole = [owner for owner in self.owners if not is_dtensor(owner)]
        self._sharded: list[Any] = [owner for owner in self.owners if is_dtensor(owner)]
        self.has_dtensors = bool(self._sharded)
        self.has_several_meshes = on_several_meshes(self.owners)
        self._has_state_shards = any(slot.own_rows is not None for slot in slots)
        self.pieces = self._plan_pieces()
        """The updated rows that ranks exchange after a step."""
        self._local_grads = LocalGrads(slots) if self._sharded or self._has_state_shards else None
        self._grad_dtypes = [slot.grad_dtype for slot in slots]
        self._grad_sizes = [slot.param.numel() * slot.grad_dtype.itemsize for slot in slots]
        self._mixed_dtypes = any(slot.grad_dtype != slot.param.dtype for slot in slots)
        self._param_strides = [slot.param.stride() for slot in slots]
        self._strides = [stride_of(slot.param) for slot in slots]
        self._all_contiguous = all(slot.param.is_contiguous() for slot in slots)
        self._addresses: list[int] = []
        self._groups, self._state, self._entries = groups, state, list(state.values())
        self._contents = [dict(entry) for entry in self._entries]
        self._params = [param for group in groups for param in group["params"]]
        slotted = set(map(id, self.owners))
        self._idle = [p for p in self._params if id(p) not in slotted and not isinstance(p, Table)]
        self._switches = [name for name in optimizer._rule.state.values() if name is not None]
        self._ends = [(slot.owner, slot.published or {}) for slot in (*slots[:1], *slots[1:][-1:])]

    def _plan_pieces(self) -> list[Piece]:
        return plan_pieces([(s.owner, s.sharding) for s in self.slots if s.own_rows is not None])

    def fingerprint(self, groups: Groups, state: dict[Any, Any]) -> list[Any]:
        """Return the present groups, state and parameters, as far as a step depends on them.

        Parameters are compared by identity and address; the address of a DTensor is that of its local tensor,
        which FSDP2 may replace. Entries of the state and the tensors in them are compared by identity.

        Only the first and the last parameter are compared in detail. Code that converts dtypes, or moves the
        memory of state, does so for all parameters. Comparing 200 parameters would make a step on a CPU 3 %
        slower. For the others, `collect_grads` notices new strides if gradients have them, too, as autograd's
        do.
        """
        entries = list(state.values())
        found: list[Any] = [
            groups is self._groups,
            state is self._state,
            *map(len, map(PARAMS, groups)),
            len(entries),
            _are_equal(entries, self._contents),
            *map(is_, chain.from_iterable(map(PARAMS, groups)), self._params),
            *map(is_, entries, self._entries),
            *map(Tensor.data_ptr, chain(self._whole, [param._local_tensor for param in self._sharded])),
            *map(is_, map(GRAD, self._idle), repeat(None)),
            *[group[name] > 0 for group in groups for name in self._switches],
        ]
        for param, entry in self._ends:
            local = local_of(param)
            values = map(local_of, entry.values())
            found += local.dtype, local.shape, local.stride()
            found += [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        return found

    def collect_grads(self) -> list[Tensor] | None:
        """Give the present gradients to the steppers; return the parameters that have one.

        Returns None if some gradients, or strides of their parameters, differ from those of the plan.
        """
        owners, sizes = self.owners, self._grad_sizes
        grads = list(map(GRAD, owners)) if self._local_grads is None else self._local_grads()
        present: list[Any] = grads
        if list(map(type, grads)).count(Tensor) < len(grads):  # some are missing, or still to arrive
            grads = [None if g is None else arrived(g) for g in grads]
            present = [g for g in grads if g is not None]
            owners = [p for p, g in zip(owners, grads, strict=True) if g is not None]
            sizes = [size for size, g in zip(sizes, grads, strict=True) if g is not None]
        try:
            in_order = self._all_contiguous and all(map(Tensor.is_contiguous, present))
            unordered = frozenset() if in_order else self._find_unordered(grads, present)
            if any(self.slots[i].param.stride() != self._param_strides[i] for i in unordered):
                return None
            addresses = list(map(Tensor.data_ptr, present)) if self._needs_addresses else []
            if self._needs_addresses and len(present) < len(grads):
                addresses = [0 if g is None else g.data_ptr() for g in grads]
            is_known = bool(addresses) and addresses == self._addresses
            if not is_known and list(map(NBYTES, present)) != sizes:
                return None
        except RuntimeError:  # sparse gradients have no strides, no address or no size
            return None
        if self._mixed_dtypes and any(
            g is not None and g.dtype != dtype for g, dtype in zip(grads, self._grad_dtypes, strict=True)
        ):
            return None
        if not is_known:
            self._addresses = addresses  # a known list is kept: steppers compare it faster than an equal copy
        if len(self.steppers) == 1 and not self._has_state_shards:
            self.steppers[0].set_grads(grads, self._addresses, unordered)
        elif self.steppers:
            self._set_parts(grads, unordered)
        return owners

    def _find_unordered(self, grads: Grads, present: list[Any]) -> frozenset[int]:
        if len(present) == len(grads) and list(map(Tensor.stride, present)) == self._strides:
            return frozenset()
        return frozenset(
            i
            for i, (grad, stride) in enumerate(zip(grads, self._strides, strict=True))
            if grad is not None and grad.stride() != stride and grad.numel() > 1
        )

    def _set_parts(self, grads: Grads, unordered: frozenset[int]) -> None:
        """Give gradients to several steppers, or to a stepper of parts of whole parameters."""
        for stepper, indices in zip(self.steppers, self._indices, strict=True):
            if self._has_state_shards:
                stepper.whole_grads = [
                    grads[i] if slot.own_rows is None else slot.owner.grad
                    for slot, i in zip(stepper.slots, indices, strict=True)
                ]
            addresses = [self._addresses[i] for i in indices] if self._addresses else []
            own = frozenset(n for n, i in enumerate(indices) if i in unordered)
            stepper.set_grads([grads[i] for i in indices], addresses, own)

    def averaged_params(self) -> list[Tensor]:
        """Return the parameters that have an average, of this rank. Found again: `model.cpu()` moves them."""
        return [own_part(slot.owner, slot.own_rows) for slot in self.slots if slot.ema is not None]

    def write_averaged(self, values: Sequence[Tensor], model: nn.Module | None) -> None:
        """Write values into the parameters that have an average.

        Modules of FSDP2 in the model gather their weights again.
        """
        for param, value in zip(self.averaged_params(), values, strict=True):
            param.copy_(value)
        exchange_pieces(self._plan_pieces())
        if self.has_dtensors and model is not None:
            reshard(model)


def build_plan(
    optimizer: Optimizer,
    *,
    early: Container[int] = (),
    loaded: bool = False,
    copies_weights: bool = True,
) -> Plan:
    """Make what is missing of the state, and plan the steps of all parameters that have a gradient or state.

    `early`: ids of parameters that get their state before their first gradient. `loaded`: the state is a
    checkpoint's, and is copied. Without `copies_weights`, master weights and averages are left to the next
    plan, since weights may be loaded later.
    """
    rule, groups, state = optimizer._rule, optimizer.param_groups, optimizer.state
    params = [p for group in groups for p in group["params"] if not isinstance(p, Table)]
    if any(is_capturing(p.device) for p in params):
        raise FlatbedError(
            "take one eager step before the capture, with gradients for all parameters that are to be "
            "trained: state and tables would be made inside the graph, and again at every replay"
        )
    devices = (p.device for group in groups for p in group["params"])
    device = next((device for device in devices if device.type not in ("cpu", "meta")), CPU)
    shard_groups = ShardGroups(map(Sharding.of, params), optimizer._norm_group, device)
    slots = build_slots(optimizer, early, loaded=loaded, copies_weights=copies_weights)
    by_device: dict[torch.device, list[ParamSlot]] = {}
    for slot in slots:
        slot.norm_class = shard_groups.class_of(Sharding.of(slot.owner))
        by_device.setdefault(slot.param.device, []).append(slot)
    vectors = optimizer._stats.of("params", by_device)
    steppers: list[TorchStepper | TritonStepper] = []
    for device, own in by_device.items():
        stepper: type[TorchStepper | TritonStepper] = TorchStepper
        if rule.update is not None and use_triton(device):
            from flatbed.kernels._triton.step import TritonStepper

            stepper = TritonStepper
        steppers.append(stepper(rule, groups, own, vectors[device]))
    for slot in slots:
        publish_state(state, slot)
    plan = Plan(optimizer, slots, steppers, shard_groups)
    if copies_weights:
        plan.built_from = plan.fingerprint(groups, state)
        plan.masters.sync(plan.masters.slots)
    plan.masters.record_versions()
    return plan
