"""`shard_state` (ZeRO-1): the state of dense parameters, sharded across the ranks of DDP.

Every rank has whole parameters and whole gradients. It updates its rows of each parameter, and keeps state
for these rows alone. After a step, ranks send each other the updated rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.distributed.dense_shards import Sharding, is_dtensor, local_of
from flatbed.layout import is_dense

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIECE_BYTES = 64 << 20  # of parameters per collective
EDGE = 64
"""Updated ranges of elements begin at multiples of this. Otherwise bits would depend on the rows of a rank.

CPU kernels round the last elements of a tensor, which do not fill a vector, in another way than the others.
GPU kernels need aligned addresses to load vectors.
"""


class StateSharding:
    """The ranks that the state of an optimizer is sharded across."""

    def __init__(self, ranks: Any) -> None:
        """Take True for all ranks, a process group, or a mesh of one dimension."""
        self.given = ranks
        self._mesh: DeviceMesh | None = None

    def mesh_of(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of the ranks, whose collectives run on this kind of device."""
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(self.given, DeviceMesh):
            return self.given
        if self._mesh is None:
            group: Any = dist.group.WORLD if self.given is True else self.given
            self._mesh = DeviceMesh.from_group(group, device.type)
        return self._mesh

    def shard(self, param: Tensor) -> Sharding | None:
        """Return the sharding of a parameter's rows; None if every rank updates the whole parameter.

        Ranks update whole scalars, and whole parameters with rows that are not one piece of memory each.
        """
        if is_dtensor(param) or param.dim() == 0 or param.is_meta:
            return None
        if not is_dense(tuple(param.shape), param.stride()) or param.stride(0) < max(param.stride()):
            return None
        from torch.distributed.tensor import Shard

        mesh = self.mesh_of(param.device)
        return Sharding(mesh, (Shard(0),), param.shape, param.stride()) if mesh.size() > 1 else None


def rows_of(sharding: Sharding, rank: int) -> tuple[int, int]:
    """Return the first row of a rank and the number of its rows, as DTensor shards them."""
    n_rows, n_ranks = sharding.shape[0], sharding.mesh.size()
    chunk = -(-n_rows // n_ranks)
    start = min(rank * chunk, n_rows)
    return start, min(chunk, n_rows - start)


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of a whole parameter whose state is on this rank, as ranges of its elements in memory.

    The computed range includes elements around the rows, which belong to other ranks and are received later.
    """

    begin: int
    end: int
    first: int
    n_elements: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(sharding: Sharding) -> OwnRows:
        row, n_rows = rows_of(sharding, sharding.mesh.get_local_rank())
        n_in_row = sharding.shape[1:].numel()
        first, n_elements = row * n_in_row, n_rows * n_in_row
        begin = first // EDGE * EDGE
        end = min(-(-(first + n_elements) // EDGE) * EDGE, sharding.shape.numel()) if n_elements else begin
        return OwnRows(begin, end, first, n_elements, (n_rows, *sharding.shape[1:]), sharding.stride)

    def computed(self, tensor: Tensor) -> Tensor:
        """Return the elements of a whole tensor that this rank updates, in the order of memory."""
        return tensor.as_strided((self.end - self.begin,), (1,), tensor.storage_offset() + self.begin)

    def rows(self, computed: Tensor) -> Tensor:
        """Return this rank's rows of a tensor of the computed range."""
        offset = computed.storage_offset() + self.first - self.begin
        return computed.as_strided(self.shape, self.stride, offset)

    def around(self, rows: Tensor) -> Tensor:
        """Return a tensor of the computed range with these rows."""
        computed = rows.new_zeros(self.end - self.begin)
        self.rows(computed).copy_(rows)
        return computed


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of some parameters, and their places in a buffer with a line for each rank."""

    group: Any
    buffer: Tensor
    rank: int
    packed: list[Tensor]
    own: list[Tensor]
    unpacked: list[Tensor]
    others: list[Tensor]

    def send(self) -> Any:
        """Begin to exchange rows; return what to wait for."""
        if self.own:
            torch._foreach_copy_(self.packed, self.own)
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        line = self.buffer[self.rank].clone() if self.buffer.device.type == "cpu" else self.buffer[self.rank]
        return gather(self.buffer.view(-1), line, group=self.group, async_op=True)

    def receive(self, work: Any) -> None:
        """Wait for the rows of other ranks, and write them into the parameters."""
        work.wait()
        if self.others:
            torch._foreach_copy_(self.others, self.unpacked)


def plan_pieces(params: Sequence[tuple[Tensor, Sharding]]) -> list[Piece]:
    """Split parameters into pieces, in an order that all ranks share.

    Pieces of one dtype and device take turns in two buffers.
    """
    kinds: dict[Any, list[tuple[Tensor, Sharding]]] = {}
    for param, sharding in params:
        kinds.setdefault((param.dtype, param.device), []).append((param, sharding))
    pieces = []
    for alike in kinds.values():
        batches = [*_batches(alike)]
        n_elements = max(
            sum(_line_size(sharding) * sharding.mesh.size() for _, sharding in b) for b in batches
        )
        buffers = [alike[0][0].detach().new_empty(n_elements) for _ in batches[:2]]
        pieces += [_plan_piece(batch, buffers[i % 2]) for i, batch in enumerate(batches)]
    return pieces


def _batches(params: list[tuple[Tensor, Sharding]]) -> Iterator[list[tuple[Tensor, Sharding]]]:
    """Yield parameters in lists, each with the parameters of one piece."""
    batch: list[tuple[Tensor, Sharding]] = []
    nbytes = 0
    for param, sharding in params:
        if batch and nbytes + param.nbytes > PIECE_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append((param, sharding))
        nbytes += param.nbytes
    yield batch


def _line_size(sharding: Sharding) -> int:
    """Return the size of the largest part of a parameter: it has so many elements in each rank's line."""
    return -(-sharding.shape[0] // sharding.mesh.size()) * sharding.shape[1:].numel()


def _plan_piece(held: Sequence[tuple[Tensor, Sharding]], memory: Tensor) -> Piece:
    mesh = held[0][1].mesh
    n_ranks, rank = mesh.size(), mesh.get_local_rank()
    n_elements = sum(_line_size(sharding) for _, sharding in held)
    buffer = memory[: n_ranks * n_elements].view(n_ranks, -1)
    piece = Piece(mesh.get_group(), buffer, rank, [], [], [], [])
    start = 0
    for param, sharding in held:
        for other in range(n_ranks):
            rows = param.detach().narrow(0, *rows_of(sharding, other))
            if rows.numel():
                room = buffer[other, start : start + rows.numel()].view(rows.shape)
                (piece.packed if other == rank else piece.unpacked).append(room)
                (piece.own if other == rank else piece.others).append(rows)
        start += _line_size(sharding)
    return piece


def own_part(param: Tensor, rows: OwnRows | None) -> Tensor:
    """Return the elements of a parameter that this rank updates, where they are now."""
    return local_of(param) if rows is None else rows.computed(param.detach())


def exchange_pieces(pieces: Sequence[Piece]) -> None:
    """Give all ranks the rows of all ranks. A piece is sent while the piece before it is written."""
    sent: list[tuple[Piece, Any]] = []
    for piece in pieces:
        sent.append((piece, piece.send()))
        if len(sent) > 1:
            earlier, work = sent.pop(0)
            earlier.receive(work)
    for piece, work in sent:
        piece.receive(work)
