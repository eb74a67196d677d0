"""Rows of a large numpy array, or of a .npy file, on the device that asks for them by number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatbed.data.batches import torch_dtype
from flatbed.data.feeder import device_for
from flatbed.data.row_sources import Way, find_way
from flatbed.data.staging import Array
from flatbed.errors import FlatbedError
from flatbed.tables.ids import as_ids, check_range

if TYPE_CHECKING:
    from typing_extensions import Self

MAGIC = b"\x93NUMPY"  # how .npy files begin


class RowReader:
    """Reads rows, along the first axis, of an array or of a .npy file that is mapped, not loaded.

    `reader[ids]`, with ids of any integer type and any shape in numpy, torch or lists, is a tensor of shape
    (*ids.shape, *row shape) on `device`, by default the current GPU, or the CPU where there is none. An id
    that is no row raises `IndexError`; ids that are on a GPU are looked at first, which waits for them.

    On a GPU a kernel reads the rows from the host's memory, and the CPU gathers nothing. `copy` says which
    memory, and `reader.way` what became of it:

    - None: the array's own, which is pinned where it is ("in place"). If the driver refuses that, as it may
      for files, the array is copied once, if there is room ("copied").
    - True: always a copy, in memory that GPUs read fastest in random order.
    - False: never a copy. Where the array cannot be pinned, threads of the host gather rows ("staged").

    To pin a file brings all of it into memory: one that does not fit is staged. The array must not be
    written to while rows are read. `close()`, or the garbage collector, gives everything back; a process that
    was forked must not use a reader for a GPU.

    >>> import flatbed, numpy as np
    >>> reader = flatbed.data.RowReader(np.arange(12.0).reshape(4, 3), device="cpu")
    >>> reader[np.array([3, 0], np.int32)]
    tensor([[ 9., 10., 11.],
            [ 0.,  1.,  2.]], dtype=torch.float64)
    """

    def __init__(
        self,
        array: Array | str | os.PathLike[str],
        *,
        device: Any = None,
        copy: bool | None = None,
    ) -> None:
        if copy is not None and not isinstance(copy, bool):
            raise TypeError(f"copy must be True, False or None; found {copy!r}")
        self.device = device_for(device)
        found = opened(array)
        self.shape: tuple[int, ...] = found.shape
        self.dtype = _dtype(found)
        self._process = os.getpid()
        self._way: Way | None = find_way(found, self.device, copy=copy)

    @property
    def way(self) -> str:
        """How rows come: "cpu", "in place", "copied" or "staged"; "closed" after the end."""
        return "closed" if self._way is None else self._way.name

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Any) -> Tensor:
        if isinstance(ids, slice):
            ids = range(*ids.indices(len(self)))
        return self(ids)

    def __call__(self, ids: Any) -> Tensor:
        """The rows with these numbers."""
        way = self._usable()
        keys = as_ids(ids)
        check_range(keys, len(self))
        shape = (*keys.shape, *self.shape[1:])
        if not keys.numel() or 0 in shape:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return way.gather(keys.flatten()).view(self.dtype).view(shape)

    def _usable(self) -> Way:
        if self._way is None:
            raise FlatbedError("this reader is closed: make it again to read rows")
        if self.device.type != "cpu" and os.getpid() != self._process:
            raise FlatbedError(
                f"this reader belongs to process {self._process}, not to its forked child {os.getpid()}: "
                "read rows in the process that made it (a DataLoader's workers should hand out ids)"
            )
        return self._way

    def close(self) -> None:
        """Give back what was pinned or copied. The array itself stays; closing twice is allowed."""
        way, self._way = self._way, None
        if way is not None and (self.device.type == "cpu" or os.getpid() == self._process):
            way.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RowReader cannot be copied or pickled: make another one from the array or its path"
        )

    def __repr__(self) -> str:
        size = " × ".join(f"{n:,}" for n in self.shape)
        number = str(self.dtype).removeprefix("torch.")
        how = self.way if self._way is None or self._way.memory is None else f"{self.way}, {self._way.memory}"
        return f"RowReader({size} {number}, device={str(self.device)!r}, {how})"


# ---- checked at the door


def opened(array: Any) -> Array:
    """An array of rows; a file is mapped."""
    if isinstance(array, str | os.PathLike):
        array = _mapped(Path(array))
    if not isinstance(array, np.ndarray):
        hint = ": give tensor.numpy()" if isinstance(array, Tensor) else ""
        raise TypeError(
            f"rows are read from a numpy array or from the path of a .npy file; found "
            f"{type(array).__name__}{hint}"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("rows of a masked array are not read: give array.data, or array.filled()")
    if array.ndim == 0:
        raise ValueError("an array of rows has at least one dimension; found a single number")
    if array.dtype.names is not None:
        raise TypeError(
            f"rows must be numbers of one kind; found a structured array with the fields "
            f"{', '.join(array.dtype.names)}: read one of them, array[{array.dtype.names[0]!r}], or "
            "array.view(numpy.uint8) for all bytes"
        )
    return np.asarray(array)


def _dtype(array: Array) -> torch.dtype:
    dtype = torch_dtype(array.dtype)
    if dtype is None:
        raise TypeError(
            f"rows must be numbers that torch knows; found an array of {array.dtype}: convert it with "
            ".astype() first"
        )
    return dtype


def _mapped(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"there is no file at {path}: check the path")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the path of a .npy file in it")
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # numpy's own advice is to trust the file
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) == MAGIC and "object" not in str(error).lower():
                raise ValueError(
                    f"{path} is a .npy file, but cut short or damaged: write it again"
                ) from error
        raise ValueError(f"{path} is not a .npy file of numbers: write one with numpy.save") from error
    if isinstance(found, np.ndarray):
        return found
    names = ", ".join(found.files)
    found.close()
    raise ValueError(
        f"{path} is an .npz archive (of {names}), which cannot be mapped: save one array with numpy.save, or "
        f"give numpy.load(path)[name]"
    )
