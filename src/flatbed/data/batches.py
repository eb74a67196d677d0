"""Nested batches: their leaves, the ids in them, and the way of their tensors to the device.

Tensors are copied through pinned memory of torch's allocator, which keeps a block until its copy is done.
`cuda.streams` says in which streams batches are allocated and copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flatbed.tables.ids import INTEGERS, as_ids
from flatbed.tables.table import Table

Array = np.ndarray[Any, Any]
Selector: TypeAlias = str | int | Callable[[Any], Any]
"""A key of the batch, or a function of it."""

ID_DTYPES = frozenset({*INTEGERS, torch.uint64})
MAX_KEYS = 8  # keys of a batch that an error names
PIECE_BYTES = 32 << 20  # of a large tensor: the bus copies a piece while the host fills the next
DIRECT_BYTES = 1 << 16  # pinned tensors of this size or more need no staging
SMALL_BYTES = 1 << 20  # smaller tensors may share memory and a copy, if there are more than FEW of them
FEW = 4
ALIGNMENT = 16  # bytes: kernels expect it of addresses


# ---- leaves


def moves_itself(value: Any) -> bool:
    """Check for an object with a method `to(device)` that is neither a tensor nor a mapping."""
    return callable(getattr(type(value), "to", None)) and not isinstance(value, (Tensor, Mapping))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace every tensor, every numpy array and every object that moves itself by `function(leaf)`.

    Containers are mappings, lists, tuples, dataclasses, and those of `torch.utils._pytree`. They are never
    written to: where a leaf changed, its containers are new objects of the same type; otherwise they are the
    same objects.
    """
    given: dict[Any, Any]
    structure = None
    if isinstance(value, (Tensor, np.ndarray)):
        return function(value)
    if isinstance(value, Mapping):
        given = dict(value.items())
    elif moves_itself(value):
        return function(value)
    elif isinstance(value, (list, tuple)):
        given = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    else:
        leaves, structure = tree_flatten(value, is_leaf=moves_itself)
        if structure.is_leaf():
            return value
        given = dict(enumerate(leaves))
    parts = {key: map_leaves(function, part) for key, part in given.items()}
    if all(map(is_, parts.values(), given.values())):
        return value
    return _rebuilt(value, parts) if structure is None else tree_unflatten(parts.values(), structure)


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """Build a container like `value` with other parts."""
    kind: Any = type(value)
    if isinstance(value, tuple):
        return kind._make(parts.values()) if hasattr(kind, "_make") else kind(parts.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return kind(parts)
    made: Any = copy.copy(value)  # with all attributes, and not by `__init__`, which may compute
    if isinstance(value, list):
        made[:] = parts.values()
    elif isinstance(value, MutableMapping):
        made.update(parts)
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # the dataclass may be frozen
    return made


def without_rows(batch: Any) -> Any:
    """Return a batch whose tensors and arrays have no rows; those without a dimension stay as they are."""

    def clear(leaf: Any) -> Any:
        if moves_itself(leaf):
            raise TypeError(
                f'uneven="empty" hands out batches of tensors and arrays without their rows; found '
                f'{type(leaf).__name__}: use uneven="stop"'
            )
        return leaf[:0].clone() if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return map_leaves(clear, batch)


def as_tensor(array: Array) -> Any:
    """Return numbers as a CPU tensor, without a copy where that is possible; other arrays as they are.

    Arrays are copied if they are read-only, in another byte order, or have strides that torch does not know.
    """
    if array.dtype.kind not in "biufc" or isinstance(array, np.ma.MaskedArray):
        return array
    native = _native(array.dtype)
    if array.flags.writeable and array.dtype == native:
        with suppress(TypeError, ValueError):
            return torch.from_numpy(array.view(native))
    try:
        return torch.from_numpy(np.array(array, native, order="C"))
    except TypeError:  # long double
        return array


@cache
def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in the byte order of the machine, with one name for equal types, as long and int64."""
    native: np.dtype[Any] = np.dtype(dtype.newbyteorder("=").str)
    return native


# ---- ids


def select_ids(table: Table, selectors: Sequence[Selector], batch: Any) -> list[Tensor]:
    """Select the ids of a batch: tensors of the batch itself where the selector returns them."""
    ids: list[Tensor] = []
    for selector in selectors:
        try:
            if callable(selector):
                found = selector(batch)
            elif isinstance(selector, str) and not hasattr(batch, "keys"):
                found = getattr(batch, selector)
            else:
                found = batch[selector]
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            if callable(selector):
                raise
            keys = f" with the keys {[*batch.keys()][:MAX_KEYS]}" if hasattr(batch, "keys") else ""
            raise type(error)(
                f"lookups[{table!r}] is the key {selector!r}, which was not found in a batch of type "
                f"{type(batch).__name__}{keys}: give a key of the batch, or a function of it"
            ) from error
        is_list = isinstance(found, (list, tuple))
        are_several = is_list and any(isinstance(one, (Tensor, np.ndarray)) for one in found)
        for one in found if are_several else [found]:
            is_tensor = isinstance(one, Tensor) and one.dtype in ID_DTYPES
            ids.append(one if is_tensor else as_ids(one, name=f"lookups[{table!r}]"))
    return ids


# ---- to the device


@dataclass(slots=True, eq=False)
class HostBatch:
    """A batch whose arrays have become tensors."""

    batch: Any
    leaves: list[Any] = field(default_factory=list)
    """Its leaves, each once."""
    of_arrays: set[int] = field(default_factory=set)
    """The `id()` of tensors that were arrays. Their memory counts as not pinned: asking CUDA takes 10 µs."""


@dataclass(slots=True, eq=False)
class MovedBatch:
    """A batch whose memory on the device is allocated, and the copies that fill it."""

    batch: Any
    tensors: dict[int, Tensor]
    """Tensors on the device, by the `id()` of their host tensor."""
    has_objects: bool
    """The batch may have objects that are to be moved by their own `to`."""
    targets: list[Tensor] = field(default_factory=list)
    """Tensors on a GPU that copies fill. Tensors of the batch may be views of them."""
    others: list[Tensor] = field(default_factory=list)
    """Tensors of the batch on a GPU that no copy fills."""
    copies: list[Copy] = field(default_factory=list)
    """Copies that were not issued yet."""
    arrived: Any = None
    """The event after copies in the stream "batches"; None if they are in another stream."""
    nbytes: int = 0
    """The size of the tensors that are copied to a GPU."""

    def issue_copies(self) -> None:
        """Issue the copies in the current stream. Does not wait."""
        while self.copies:
            self.copies.pop().issue()

    def record_stream(self, stream: torch.cuda.Stream, *, targets_only: bool = False) -> None:
        """Keep the memory, or that of copies alone, until this stream has used it."""
        for tensor in self.targets if targets_only else (*self.targets, *self.others):
            tensor.record_stream(stream)  # type: ignore[arg-type,unused-ignore]


class BatchMover:
    """Moves batches to a device.

    `is_reused`: the loader may write to a batch when it makes the next one. No tensor shares its memory then.
    """

    def __init__(self, device: torch.device, *, is_reused: bool = False) -> None:
        self.device, self.is_reused = device, is_reused
        self.on_gpu = device.type == "cuda"

    def to_host(self, batch: Any) -> HostBatch:
        """Turn arrays into tensors, and pin objects that move themselves."""
        seen: dict[int, tuple[Any, Any]] = {}

        def convert(leaf: Any) -> Any:
            if id(leaf) in seen:
                return seen[id(leaf)][1]
            found = as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
            if isinstance(found, Tensor):
                if not self.on_gpu:
                    is_shared = not self.is_reused or found.requires_grad
                    found = found.cpu() if is_shared else found.cpu().clone()
            elif self.on_gpu and callable(getattr(found, "pin_memory", None)):
                found = found.pin_memory()
            seen[id(leaf)] = (leaf, found)  # with the leaf, so that its id stays its own
            return found

        found = HostBatch(map_leaves(convert, batch))
        for leaf, tensor in seen.values():
            found.leaves.append(tensor)
            if leaf is not tensor and isinstance(leaf, np.ndarray):
                found.of_arrays.add(id(tensor))
        return found

    def move(
        self, host: HostBatch, extra: Sequence[Tensor] = (), stream: torch.cuda.Stream | None = None
    ) -> MovedBatch:
        """Move a batch, and the tensors `extra`, to the device. Does not wait.

        With a stream, the copies to a GPU are issued there. Without one, memory is allocated in the current
        stream, and `MovedBatch.issue_copies` is left to the caller.
        """
        tensors = {id(leaf): leaf for leaf in (*host.leaves, *extra) if isinstance(leaf, Tensor)}
        has_objects = any(not isinstance(leaf, Tensor) for leaf in host.leaves)
        if not self.on_gpu:
            return MovedBatch(host.batch, tensors, has_objects)
        origins = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        nbytes = sum(p.nbytes for tensor in tensors.values() if not tensor.is_cuda for p in _parts(tensor))
        for origin in origins:  # the loader's own work
            copies = stream or torch.cuda.current_stream(self.device)
            copies.wait_stream(torch.cuda.current_stream(origin))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            sent = send([*tensors.values()], self.device, host.of_arrays, is_reused=self.is_reused)
            moved = dict(zip(tensors, sent.tensors, strict=True))
            there = map_leaves(lambda leaf: moved.get(id(leaf), leaf), host.batch)
            targets = [copy.target for copy in sent.copies]
            found = MovedBatch(there, moved, has_objects, targets, sent.others, sent.copies, nbytes=nbytes)
            if stream is not None:
                found.issue_copies()
                found.arrived = stream.record_event()
        if self.is_reused and found.arrived is not None:
            for origin in origins:  # the loader may write there again
                torch.cuda.current_stream(origin).wait_event(found.arrived)
        return found

    def move_object(self, leaf: Any) -> Any:
        """Move a leaf that moves itself, in the current stream; return another leaf as it is."""
        if not moves_itself(leaf):
            return leaf
        if self.on_gpu:
            with suppress(TypeError):  # not all have that argument
                return leaf.to(self.device, non_blocking=True)
        return leaf.to(self.device)


@dataclass(slots=True, eq=False)
class Copy:
    """A copy from the host to memory of a device. Several sources lie one after the other in the target."""

    target: Tensor
    sources: list[Tensor]
    is_direct: bool = False
    """The source is in pinned memory, and does not change after the copy was issued."""

    def issue(self) -> None:
        """Issue the copy in the current stream, from pinned memory, so that it does not wait."""
        source, device = self.sources[0], self.target.device
        if len(self.sources) > 1:
            staging = torch.empty_like(self.target, device="cpu", pin_memory=device.type == "cuda")
            torch.cat([one.view(-1).view(torch.uint8) for one in self.sources], out=staging)
            self.target.copy_(staging, non_blocking=True)
        elif self.is_direct:
            self.target.copy_(source, non_blocking=True)
        elif source.nbytes > PIECE_BYTES and source.is_contiguous():
            n = PIECE_BYTES // source.dtype.itemsize
            pieces = torch.split(self.target.view(-1), n), torch.split(source.view(-1), n)
            for there, here in zip(*pieces, strict=True):
                there.copy_(_staged(here, device), non_blocking=True)
        else:
            self.target.copy_(_staged(source, device), non_blocking=True)


class Sent(NamedTuple):
    """Tensors on a device, and the copies that fill them."""

    tensors: list[Tensor]
    others: list[Tensor]
    """Tensors that own memory that no copy fills."""
    copies: list[Copy]


def send(
    tensors: Sequence[Tensor],
    device: torch.device,
    unpinned: Collection[int] = (),
    *,
    is_reused: bool = False,
) -> Sent:
    """Allocate memory for copies of tensors on the device. The caller issues the copies.

    Many small tensors share memory, and one copy. Pinned ones are copied from where they are, unless their
    memory `is_reused` after that; those with an id in `unpinned` are taken for not pinned. Others (sparse,
    quantized, subclasses) are moved here, by their own `to`. Axes keep their order in memory.
    """
    moved: dict[int, Tensor] = {}
    others: list[Tensor] = []
    copies: list[Copy] = []
    small: dict[int, Tensor] = {}
    for i, tensor in enumerate(tensors):
        if not _is_plain(tensor):
            is_copied = is_reused and not tensor.requires_grad
            moved[i] = tensor.to(device, non_blocking=not is_reused, copy=is_copied)
            others += _parts(moved[i])
            continue
        nbytes = tensor.nbytes
        may_be_direct = nbytes >= DIRECT_BYTES and not is_reused and id(tensor) not in unpinned
        is_direct = may_be_direct and tensor.is_pinned()
        if 0 < nbytes < SMALL_BYTES and not is_direct and nbytes % ALIGNMENT == 0 and tensor.is_contiguous():
            small[i] = tensor
        else:
            moved[i] = torch.empty_like(tensor, device=device)
            copies.append(Copy(moved[i], [tensor], is_direct))
    if len(small) > FEW:
        sources = [*small.values()]
        memory = torch.empty(sum(one.nbytes for one in sources), dtype=torch.uint8, device=device)
        parts = zip(torch.split(memory, [one.nbytes for one in sources]), sources, strict=True)
        # `.data`, since a write to one tensor must not count as a change of the others to autograd.
        together = [part.view(source.dtype).view(source.shape).data for part, source in parts]
        moved.update(zip(small, together, strict=True))
        copies.append(Copy(memory, sources))
    else:
        for i, tensor in small.items():
            moved[i] = torch.empty_like(tensor, device=device)
            copies.append(Copy(moved[i], [tensor]))
    return Sent([moved[i] for i in range(len(tensors))], others, copies)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that own the memory of a tensor."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _staged(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor into memory from which copies to the device do not wait; axes keep their order."""
    return torch.empty_like(tensor, pin_memory=device.type == "cuda").copy_(tensor)


def pinned_batches(batches: Sequence[Any], mover: BatchMover) -> list[Any]:
    """Copy the arrays and tensors of all batches, into pinned memory where that is faster."""
    hosts = [mover.to_host(batch) for batch in batches]
    leaves = [leaf for host in hosts for leaf in host.leaves]
    copies = {id(leaf): pinned(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    return [map_leaves(lambda leaf: copies.get(id(leaf), leaf), host.batch) for host in hosts]


def pinned(tensor: Tensor) -> Tensor:
    """Copy a host tensor, into pinned memory unless it is so small that it is staged anyway."""
    if not _is_plain(tensor):
        return tensor
    is_large = tensor.nbytes >= DIRECT_BYTES and torch.cuda.is_available()
    return torch.empty_like(tensor, pin_memory=is_large).copy_(tensor)
