"""Optimizer state sharded across the ranks of DDP (ZeRO-1): who updates which rows, and how rows are shared.

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

from flatbed.distributed.dtensor import Sharding, is_dtensor
from flatbed.distributed.peers import Peers, wait_for
from flatbed.layout import is_dense

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIECE_BYTES = 64 << 20  # of parameters per collective
EDGE = 64
"""Ranges of elements that are updated begin at multiples of this, or else bits would depend on the rows.

CPU kernels round the last elements of a tensor, which do not fill a vector, otherwise than all others. GPU
kernels want aligned addresses.
"""


class StateSharding:
    """The ranks that the state of an optimizer is sharded across."""

    def __init__(self, ranks: Any) -> None:
        """Take True for all ranks, a process group, or a mesh of one dimension."""
        self._given = ranks
        self._mesh: DeviceMesh | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSharding:
        return self  # process groups cannot be copied

    def mesh_of(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of the ranks, whose collectives run on this kind of device."""
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(self._given, DeviceMesh):
            return self._given
        if self._mesh is None:
            group: Any = dist.group.WORLD if self._given is True else self._given
            self._mesh = DeviceMesh.from_group(group, device.type)
        return self._mesh

    def shard(self, param: Tensor) -> Sharding | None:
        """Return the sharding of a parameter's rows; None: every rank updates all of it.

        That is so for scalars, and for parameters some of whose rows are not one piece of memory.
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

    def receive(self) -> None:
        """Write the rows of other ranks into the parameters."""
        if self.others:
            torch._foreach_copy_(self.others, self.unpacked)


def plan_pieces(params: Sequence[tuple[Tensor, Sharding]]) -> list[Piece]:
    """Split parameters into pieces, in an order that all ranks share. Pieces take turns in two buffers."""
    batches = [(held, _line_sizes(held)) for held in _batches(params)]
    memory: dict[Any, list[Tensor]] = {}
    for held, lines in batches:
        first, n_ranks = held[0][0], held[0][1].mesh.size()
        kind = first.dtype, first.device
        size = max([n_ranks * sum(lines), *(len(buffer) for buffer in memory.get(kind, ()))])
        memory[kind] = [first.detach().new_empty(size) for _ in range(2)]
    pieces = []
    for held, lines in batches:
        buffers = memory[held[0][0].dtype, held[0][0].device]
        buffers.reverse()
        pieces.append(_plan_piece(held, lines, buffers[0]))
    return pieces


def _line_sizes(held: Sequence[tuple[Tensor, Sharding]]) -> list[int]:
    """Elements that each parameter takes in the line of a rank: those of the largest part."""
    return [-(-len(p) // sharding.mesh.size()) * sharding.shape[1:].numel() for p, sharding in held]


def _plan_piece(held: Sequence[tuple[Tensor, Sharding]], lines: list[int], memory: Tensor) -> Piece:
    mesh = held[0][1].mesh
    n_ranks, rank = mesh.size(), mesh.get_local_rank()
    buffer = memory[: n_ranks * sum(lines)].view(n_ranks, -1)
    piece = Piece(mesh.get_group(), buffer, rank, [], [], [], [])
    start = 0
    for (param, sharding), line in zip(held, lines, strict=True):
        for other in range(n_ranks):
            rows = param.detach().narrow(0, *rows_of(sharding, other))
            if rows.numel():
                room = buffer[other, start : start + rows.numel()].view(rows.shape)
                (piece.packed if other == rank else piece.unpacked).append(room)
                (piece.own if other == rank else piece.others).append(rows)
        start += line
    return piece


def exchange_pieces(pieces: Sequence[Piece], peers: Peers | None = None) -> None:
    """Give all ranks the rows of all. A piece is sent while the one before it is written."""
    sent: list[tuple[Piece, Any]] = []
    for piece in pieces:
        sent.append((piece, piece.send()))
        if len(sent) > 1:
            _finish(*sent.pop(0), peers)
    for last in sent:
        _finish(*last, peers)


def _finish(piece: Piece, work: Any, peers: Peers | None) -> None:
    if piece.buffer.device.type == "cpu":
        wait_for(work, piece.group, peers)
    else:
        work.wait()
    piece.receive()


def _batches(params: Sequence[tuple[Tensor, Sharding]]) -> Iterator[list[tuple[Tensor, Sharding]]]:
    """Parameters of one dtype and device together, up to the size of a piece."""
    kinds: dict[Any, list[tuple[Tensor, Sharding]]] = {}
    for param, sharding in params:
        kinds.setdefault((param.dtype, param.device), []).append((param, sharding))
    for alike in kinds.values():
        batch: list[tuple[Tensor, Sharding]] = []
        nbytes = 0
        for param, sharding in alike:
            if batch and nbytes + param.nbytes > PIECE_BYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append((param, sharding))
            nbytes += param.nbytes
        yield batch
