"""Rows of a large numpy array, or of a .npy file, on the device."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatbed.cuda import host_memory
from flatbed.cuda.streams import stream_for
from flatbed.data.batches import Array, as_tensor
from flatbed.errors import FlatbedError
from flatbed.kernels import RecordLocation, use_triton
from flatbed.kernels import rows as ops
from flatbed.tables.config import device_of
from flatbed.tables.files import as_path
from flatbed.tables.ids import as_ids, check_range, to_device

if TYPE_CHECKING:
    from typing_extensions import Self

ALIGNMENT = 16  # bytes that a kernel reads at once
PIECE_BYTES = 2048  # of a row that a program reads at once: more would take too many registers
COPY_BYTES = 64 << 20  # copied from the array at once
GATHER_BYTES = 4 << 20  # gathered at once: the bus copies one part while the host gathers the next


class RowReader:
    """Reads rows, along the first axis, of an array or of a .npy file that is mapped, not loaded.

    `reader[ids]`, with ids of any integer type and any shape in numpy, torch or lists, is a tensor of shape
    (*ids.shape, *row shape) on `device`, by default the current GPU, or the CPU if there is none. An id out
    of range raises `IndexError`; for ids on a GPU, that check waits for them.

    On a GPU, `copy` chooses how rows are read, and `reader.mode` says what was chosen:

    - True ("copied"): the array is copied once into host memory that kernels can address. A kernel reads the
      rows from there, and the CPU gathers nothing. Each row takes a multiple of 16 bytes.
    - False ("staged"): threads of the CPU gather rows from the array into pinned memory. Nothing is copied
      ahead, so that the file may be larger than memory.
    - None: "copied" if the copy takes less than half of the available memory, otherwise "staged".

    On a CPU ("cpu") rows are read from the array itself. The array must not be written to while rows are
    read. `close()`, or the garbage collector, frees the copy.

    >>> import flatbed, numpy as np
    >>> reader = flatbed.RowReader(np.arange(12.0).reshape(4, 3), device="cpu")
    >>> reader[np.array([3, 0], np.int32)]
    tensor([[ 9., 10., 11.],
            [ 0.,  1.,  2.]], dtype=torch.float64)
    """

    def __init__(
        self, array: Array | str | os.PathLike[str], *, device: Any = None, copy: bool | None = None
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device_of(device)
        rows = _checked(_mapped(as_path(array)) if isinstance(array, str | os.PathLike) else array)
        self.shape: tuple[int, ...] = rows.shape
        self.dtype = _dtype(rows)
        self._source: CopiedRows | GatheredRows | None = _source_for(rows, self.device, copy)

    @property
    def mode(self) -> str:
        """How rows are read: "cpu", "copied" or "staged"; "closed" after `close`."""
        return "closed" if self._source is None else self._source.name

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Any) -> Tensor:
        if isinstance(ids, slice):
            ids = range(*ids.indices(len(self)))
        return self(ids)

    def __call__(self, ids: Any) -> Tensor:
        """Return the rows with these ids."""
        if self._source is None:
            raise FlatbedError("this RowReader is closed: make another one to read rows")
        keys = as_ids(ids)
        check_range(keys, len(self))
        shape = (*keys.shape, *self.shape[1:])
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._source.gather(keys.flatten()).view(self.dtype).view(shape)

    def close(self) -> None:
        """Free the copy of the array, if there is one. The array itself stays."""
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        size = " × ".join(f"{n:,}" for n in self.shape)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"RowReader({size} {dtype}, device={str(self.device)!r}, {self.mode})"


# ---- how rows are read


def _source_for(array: Array, device: torch.device, copy: bool | None) -> CopiedRows | GatheredRows:
    if device.type == "cpu" or not array.nbytes:
        return GatheredRows(array, torch.device("cpu"))
    if copy is None:
        n_pieces, piece_bytes = pieces_of(array[0].nbytes)
        copy = len(array) * n_pieces * piece_bytes < host_memory.available_bytes() // 2
    if copy and use_triton(device):
        return CopiedRows(array, device)
    return GatheredRows(array, device)


def pieces_of(row_bytes: int) -> tuple[int, int]:
    """Return how many pieces of how many bytes a row is copied in."""
    n_pieces = -(-row_bytes // PIECE_BYTES)
    return n_pieces, -(-row_bytes // (n_pieces * ALIGNMENT)) * ALIGNMENT


class CopiedRows:
    """Rows copied to host memory that kernels can address, each in pieces of a multiple of 16 bytes."""

    name = "copied"

    def __init__(self, array: Array, device: torch.device) -> None:
        self._device = device
        self._row_bytes = array[0].nbytes
        self._n_pieces, self._piece_bytes = pieces_of(self._row_bytes)
        nbytes = len(array) * self._n_pieces * self._piece_bytes
        self._memory = host_memory.allocate(nbytes, device=device)
        if not self._memory.addressable:
            self._memory.close()
            raise FlatbedError(f"kernels of {device} cannot address host memory: give copy=False")
        rows = self._memory.tensor.view(len(array), -1)[:, : self._row_bytes].numpy()
        n = max(1, COPY_BYTES // self._row_bytes)
        for first in range(0, len(array), n):
            rows[first : first + n] = as_bytes(array[first : first + n])

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows as bytes, given int64 ids on any device: (n,) → (n, bytes of a row)."""
        keys = to_device(ids, self._device)
        if self._n_pieces > 1:
            pieces = torch.arange(self._n_pieces, device=keys.device)
            keys = (keys.unsqueeze(1) * self._n_pieces + pieces).flatten()
        location = RecordLocation(self._memory.tensor.view(-1, self._piece_bytes))
        found = ops.gather(location, keys, self._piece_bytes).view(len(ids), -1)
        return found[:, : self._row_bytes].contiguous()

    def close(self) -> None:
        """Free the copy."""
        self._memory.close()


class GatheredRows:
    """Rows that torch's threads gather from the array: for a GPU into pinned memory, and from there."""

    def __init__(self, array: Array, device: torch.device) -> None:
        self.name = "cpu" if device.type == "cpu" else "staged"
        self._source: Tensor | Array | None = source_of(array)
        self._row_bytes = array[0].nbytes if len(array) else 0
        self._device = device

    def gather(self, ids: Tensor) -> Tensor:
        """Return rows as bytes, given int64 ids on any device: (n,) → (n, bytes of a row)."""
        assert self._source is not None
        ids, device, shape = ids.cpu(), self._device, (len(ids), self._row_bytes)
        if device.type == "cpu":
            return gather_(torch.empty(shape, dtype=torch.uint8, device=device), self._source, ids)
        copies, current = stream_for(device, "batches"), torch.cuda.current_stream(device)
        with torch.cuda.stream(copies):  # not behind the work of the current stream
            found = torch.empty(shape, dtype=torch.uint8, device=device)
            n = max(1, GATHER_BYTES // self._row_bytes)
            for there, some in zip(torch.split(found, n), torch.split(ids, n), strict=True):
                memory = torch.empty(there.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
                there.copy_(gather_(memory, self._source, some), non_blocking=True)
        current.wait_stream(copies)
        found.record_stream(current)  # type: ignore[arg-type,unused-ignore]
        return found

    def close(self) -> None:
        """Drop the array."""
        self._source = None


def source_of(array: Array) -> Tensor | Array:
    """Return contiguous rows as a tensor of bytes; others, and those in another byte order, as they are."""
    row = array[0] if len(array) else array
    is_contiguous = row.flags.c_contiguous and array.strides[0] >= row.nbytes > 0
    if not (array.dtype.isnative and is_contiguous):
        return array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arrays that are read-only: the tensor is only read
        return torch.from_numpy(array.reshape(len(array), -1).view(np.uint8))


def gather_(target: Tensor, source: Tensor | Array, ids: Tensor) -> Tensor:
    """Write rows, as bytes, to the lines of a CPU tensor: by torch's threads, or by numpy."""
    if isinstance(source, Tensor):
        return torch.index_select(source, 0, ids, out=target)
    np.copyto(target.numpy(), as_bytes(source[ids.numpy()]))
    return target


def as_bytes(rows: Array) -> Array:
    """Return rows of any array as bytes, in the machine's byte order: (n, bytes of a row)."""
    native = np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
    return native.reshape(len(native), -1).view(np.uint8)


# ---- checks of arguments


def _checked(array: Any) -> Array:
    if not isinstance(array, np.ndarray):
        hint = ": give tensor.numpy()" if isinstance(array, Tensor) else ""
        raise TypeError(
            f"rows are read from a numpy array or from the path of a .npy file; found "
            f"{type(array).__name__}{hint}"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("found a masked array, whose mask would be lost: give array.filled()")
    if array.ndim == 0:
        raise ValueError("an array of rows has at least one dimension; found a single number")
    return np.asarray(array)


def _dtype(array: Array) -> torch.dtype:
    found = as_tensor(np.empty(0, array.dtype))
    if not isinstance(found, Tensor):
        raise TypeError(
            f"rows must be numbers that torch knows; found an array of {array.dtype}: convert it with "
            ".astype(), or give one field of a structured array"
        )
    return found.dtype


def _mapped(path: Path) -> Any:
    """Map a .npy file."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(
            f"{path} is not a .npy file of numbers, or it is cut short ({error}): write it with numpy.save"
        ) from error
