"""Dense parameters that are DTensors (FSDP2, tensor parallelism): local tensors, gradients, sums over ranks.

`torch.distributed.tensor` takes seconds to import. Parameters can only be DTensors if other code has imported
it, so this module looks for it in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatbed.errors import FlatbedError
from flatbed.kernels.step import ParamSlot, in_order

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CPU = torch.device("cpu")
LOCAL = attrgetter("_local_tensor")


def is_dtensor(tensor: object) -> bool:
    """Return whether an object is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the tensor itself, unless it is a DTensor."""
    return arrived(tensor._local_tensor) if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def arrived(local: Tensor) -> Tensor:
    """Wait for a tensor that is the result of a collective, as gradients of tensor parallelism are."""
    return local if type(local) is Tensor or not hasattr(local, "wait") else local.wait()


def version_counters(params: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that share the version counters of DTensors, and the other parameters themselves.

    torch needs twice the time to increment the version of a DTensor: it is faster for objects whose exact
    class is Tensor or Parameter.
    """
    with torch._C._DisableTorchDispatch():
        return [p.detach() if is_dtensor(p) else p for p in params]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is sharded across the ranks of a mesh."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Sharding | None:
        """Return the sharding of a DTensor; None for other tensors."""
        if not is_dtensor(tensor):
            return None
        held: Any = tensor
        return Sharding(held.device_mesh, tuple(held.placements), held.shape, held.stride())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def mesh_dims(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which ranks hold different elements."""
        return tuple(i for i, placement in enumerate(self.placements) if not placement.is_replicate())

    def wrap(self, local: Tensor) -> Tensor:
        """Return this rank's part as a DTensor over the same memory."""
        from torch.distributed.tensor import DTensor

        placing: Any = {"shape": self.shape, "stride": self.stride, "run_check": False}
        return DTensor.from_local(local, self.mesh, self.placements, **placing)

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's part of a tensor that is whole or sharded in any way."""
        from torch.distributed.tensor import DTensor, Replicate

        held: Any = value
        if is_dtensor(value) and held.device_mesh != self.mesh:
            held = held.full_tensor()
        if not is_dtensor(held):
            held = held.to(self.mesh.device_type)
            held = DTensor.from_local(held, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if tuple(held.placements) != self.placements:
            held = held.redistribute(placements=self.placements)
        return local_of(held)


def on_several_meshes(params: Iterable[Tensor]) -> bool:
    """Return whether parameters are sharded over more than one mesh."""
    meshes = {id(p._spec.mesh): p._spec.mesh for p in params if is_dtensor(p)}  # type: ignore[attr-defined]
    return len(set(meshes.values())) > 1


def whole(value: Tensor) -> Tensor:
    """Return all elements of a tensor. If it is sharded, ranks exchange their parts."""
    held: Any = value
    return held.full_tensor() if is_dtensor(value) else value


def check_sharding(param: Tensor, name: str) -> None:
    """Raise for DTensors that no step can update."""
    sharding = Sharding.of(param)
    if sharding is None:
        return
    mesh, local = sharding.mesh, local_of(param)
    if mesh.get_coordinate() is None:
        raise FlatbedError(
            f"rank {dist.get_rank()} is not part of the mesh of parameter {name}, whose ranks are "
            f"{list(sharding.ranks)}: give this parameter to optimizers on those ranks only"
        )
    if any(placement.is_partial() for placement in sharding.placements):
        raise FlatbedError(
            f"parameter {name} is a sum over ranks ({sharding.placements}): redistribute it to Replicate() "
            f"or Shard(dim) first"
        )
    if local.device.type == "cpu" and mesh.device_type != "cpu":
        raise FlatbedError(
            f"parameter {name} is on the CPU and its mesh is of {mesh.device_type}: FSDP2 offloads it. Leave "
            f"out CPUOffloadPolicy, or use torch.optim for it"
        )


class LocalGrads:
    """Finds this rank's part of gradients. Some of the parameters, or their state, are sharded."""

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        self._slots = slots
        self._owners = [slot.owner for slot in slots]
        self._all_sharded = all(map(is_dtensor, self._owners))
        self._specs: list[Any] = [None] * len(slots)
        """The spec of the last gradient whose placement was the same as its parameter's."""

    def __call__(self) -> list[Tensor | None]:
        """Return the local gradients. A collective may not have delivered some of them yet.

        Equal specs are mostly the same object. Comparisons of lists test this first.
        """
        # Reading an attribute of 1,000 DTensors takes half the time if torch does not look for overrides.
        with torch._C.DisableTorchFunctionSubclass():
            grads: list[Any] = [owner.grad for owner in self._owners]
        if self._all_sharded:
            try:
                # Python reads slots in a comprehension in half the time that `attrgetter` takes.
                if [grad._spec for grad in grads] == self._specs:
                    return [grad._local_tensor for grad in grads]
            except AttributeError:  # no gradient, or a plain one
                pass
        return [
            grad._local_tensor
            if spec is not None and getattr(grad, "_spec", None) is spec
            else self._find(i, grad)
            for i, (grad, spec) in enumerate(zip(grads, self._specs, strict=True))
        ]

    def _find(self, i: int, grad: Any) -> Tensor | None:
        slot, owner = self._slots[i], self._owners[i]
        if grad is None:
            return None
        if not is_dtensor(owner):
            part: Tensor = grad if slot.own_rows is None else slot.own_rows.computed(in_order(owner, grad))
            return part
        check_grad_kind(owner, grad, slot.name)
        if self._specs[i] is not grad._spec:
            if grad.placements != owner.placements:  # type: ignore[attr-defined]
                # Gradients of tensor parallelism may be sums that are still to be reduced.
                return local_of(grad.redistribute(placements=owner.placements))  # type: ignore[attr-defined]
            self._specs[i] = grad._spec
        return local_of(grad)


def check_grad_kind(param: Tensor, grad: Tensor, name: str) -> None:
    """Raise if only one of parameter and gradient is a DTensor, or if their shapes or meshes differ."""
    if is_dtensor(param) != is_dtensor(grad):
        raise FlatbedError(
            f"the gradient of parameter {name} is a {type(grad).__name__}, the parameter a "
            f"{type(param).__name__}: both must be DTensors, or none"
        )
    held, owner = Sharding.of(grad), Sharding.of(param)
    if held is not None and owner is not None and (held.mesh, held.shape) != (owner.mesh, owner.shape):
        raise FlatbedError(
            f"the gradient of parameter {name} has shape {tuple(held.shape)} on {held.mesh}, the parameter "
            f"{tuple(owner.shape)} on {owner.mesh}"
        )


class ShardGroups:
    """The process groups over which sums of an optimizer's shards are completed.

    Parameters are of one class if they are sharded over the same dimensions of the same mesh. Class 0 is
    whole on every rank. All ranks find the same classes in the same order.
    """

    def __init__(self, shardings: Iterable[Sharding | None], norm_group: Any, device: torch.device) -> None:
        """Take the sharding of each parameter, and a device of this rank's parameters: a GPU if there is one.

        A process group may have a backend for GPUs and one for CPUs. All ranks must use the same, whether or
        not they have gradients.
        """
        self._device = device
        self._classes: dict[Any, int] = {None: 0}
        gathers: dict[tuple[Any, torch.device], list[int]] = {}
        for sharding in shardings:
            key = _class_key(sharding)
            if sharding is None or key in self._classes:
                continue
            self._classes[key] = index = len(self._classes)
            for dim in sharding.mesh_dims:
                if sharding.mesh.size(dim) > 1:
                    kind = sharding.mesh.device_type
                    its_device = device if device.type == kind else torch.device(kind)
                    gathers.setdefault((sharding.mesh.get_group(dim), its_device), []).append(index)
        self._gathers = [(*group, _as_slice(classes)) for group, classes in gathers.items()]
        """Process groups with the device of their meshes, and the classes whose sums their ranks add up."""
        self._norm_group = norm_group if norm_group is not None and norm_group.size() > 1 else None

    @property
    def many(self) -> bool:
        """Whether sums need other ranks."""
        return bool(self._gathers) or self._norm_group is not None

    def class_of(self, sharding: Sharding | None) -> int:
        """Return the class of a parameter."""
        return self._classes[_class_key(sharding)]

    def total(self, squares: Sequence[dict[int, Tensor]]) -> Tensor:
        """Return a vector whose sum is the sum over all ranks, with the same bits on all ranks.

        `squares` has a vector for each stepper and class. The sum of a vector is the sum of this rank.
        """
        vector = torch.zeros(len(self._classes), dtype=torch.float64, device=self._device)
        for held in squares:
            for index, values in held.items():
                vector[index] += values.to(self._device).sum()
        for group, device, classes in self._gathers:
            vector[classes] = _gather(vector[classes].to(device), group).sum(0).to(self._device)
        if self._norm_group is not None:
            vector = _gather(vector.sum().reshape(1), self._norm_group).flatten()
        return vector

    def any(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag over all ranks."""
        found = flag.detach().to(torch.float32).reshape(1)
        for group, device, _ in (*self._gathers, (self._norm_group, self._device, None)):
            if group is not None:
                found = _gather(found.to(device), group).amax(0)
        return found.to(flag.device)


def _gather(own: Tensor, group: Any) -> Tensor:
    """Return the vectors of all ranks of a group, in rank order."""
    gathered = own.repeat(group.size(), 1)
    dist.all_gather(list(gathered.unbind()), own.contiguous(), group=group)
    return gathered


def _as_slice(indices: list[int]) -> slice | list[int]:
    """Return consecutive indices as a slice: a list of indices would have to be copied to the GPU."""
    first, last = indices[0], indices[-1]
    return slice(first, last + 1) if indices == list(range(first, last + 1)) else indices


def _class_key(sharding: Sharding | None) -> Any:
    if sharding is None or not sharding.mesh_dims:
        return None
    return sharding.mesh, sharding.mesh_dims


def reshard(model: nn.Module) -> None:
    """Make the next forward pass gather the shards of FSDP2 again."""
    for module in model.modules():
        again: Any = getattr(module, "reshard", None)
        if again is not None:
            again()
