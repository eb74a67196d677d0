"""Rows as .npy and torch.save files. Loading never unpickles."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed import FlatbedError
from flatbed.compat.speedtorch.storage import RowStorage, blocks, copied

Array = np.ndarray[Any, Any]
FileName = str | os.PathLike[str]


def to_numpy(values: Tensor) -> Array:
    """Return a tensor's numbers as a numpy array. numpy has no bfloat16, which becomes float32."""
    values = values.detach().cpu()
    array: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def as_array(tensor: Tensor) -> Any:
    """Return the same memory as a numpy array, or as CuPy's on a GPU; the tensor if there is neither."""
    if not tensor.is_cuda:
        return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return tensor
    return cupy.asarray(tensor)


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return numpy's datatype for one of torch."""
    found: np.dtype[Any] = to_numpy(torch.empty(0, dtype=dtype)).dtype
    return found


def as_path(name: Any, suffix: str = "") -> Path:
    """Return the path of a file, with numpy's suffix if it has none."""
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"the file's name must be a string or a path; found {type(name).__name__}")
    path = Path(name)
    return path if not suffix or path.suffix == suffix else path.with_name(path.name + suffix)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces the file when all is written."""
    if path.is_dir() or not path.parent.is_dir():
        raise FlatbedError(f"cannot write {path}: expected the name of a file in a folder that exists")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def save_npy(name: FileName, array: Array) -> None:
    """Write an array."""
    with replacing(as_path(name, ".npy")) as draft, draft.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def save_rows(name: FileName, rows: RowStorage, *, stacked: bool) -> None:
    """Write rows (n, tensors, dim) block by block, as an array (n, dim) or stacked (tensors, n, dim)."""
    n_rows, n_tensors, dim = rows.shape
    dtype = numpy_dtype(rows.dtype)
    shape = (n_tensors, n_rows, dim) if stacked else (n_rows, dim)
    header: Any = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with replacing(as_path(name, ".npy")) as draft, draft.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for at in range(n_tensors):
            for start, stop in blocks(rows):
                file.write(np.ascontiguousarray(to_numpy(rows.read(start, stop)[:, at])).data)


def npy_path(name: FileName) -> Path:
    """Return the path of a .npy file that exists, with or without numpy's suffix."""
    path = as_path(name) if as_path(name).is_file() else as_path(name, ".npy")
    if not path.is_file():
        raise FlatbedError(f"found no array at {path}: check the path")
    return path


def open_npy(name: FileName, *, mode: Any = "r") -> Array:
    """Map the array of a file into memory."""
    path = npy_path(name)
    try:
        array = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise FlatbedError(f"{path} is not a .npy file of numbers ({error})") from error
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise FlatbedError(f"{path} holds something other than one array of numbers: save one as .npy")
    return array


def load_rows(name: FileName, rows: RowStorage, *, stacked: bool) -> None:
    """Read what `save_rows` has written; change nothing if the file does not fit."""
    array = open_npy(name)
    _check(name, array if stacked else array[None], rows, numpy_dtype(rows.dtype))
    for start, stop in blocks(rows):
        block = np.stack([part[start:stop] for part in (array if stacked else [array])], axis=1)
        rows.write_(start, torch.from_numpy(block))


def save_torch(name: FileName, rows: RowStorage, names: Sequence[str], *, stacked: bool) -> None:
    """Write rows with torch.save: a tensor or, stacked, a dict of tensors."""
    with replacing(as_path(name)) as draft:
        whole = copied(rows)
        values = {one: whole[:, at].contiguous() for at, one in enumerate(names)}
        torch.save(values if stacked else values[names[0]], draft)


def load_torch(name: FileName, rows: RowStorage, names: Sequence[str], *, stacked: bool) -> None:
    """Read what `save_torch` has written, plain tensors only; change nothing if they do not fit."""
    path = as_path(name)
    if not path.is_file():
        raise FlatbedError(f"found no file at {path}: check the path")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FlatbedError(f"{path} does not hold plain tensors only ({error})") from error
    given = found if stacked else {names[0]: found}
    if not isinstance(given, dict) or set(given) != set(names):
        raise ValueError(f"{path} does not hold {', '.join(names)}: load a file of saveTorch")
    tensors = [given[one] for one in names]
    for tensor in tensors:
        _check(path, tensor[None] if isinstance(tensor, Tensor) else tensor, rows, rows.dtype, n_tensors=1)
    for start, stop in blocks(rows):
        rows.write_(start, torch.stack([tensor[start:stop] for tensor in tensors], dim=1))


def _check(name: FileName, array: Any, rows: RowStorage, dtype: Any, n_tensors: int | None = None) -> None:
    expected = (n_tensors or rows.shape[1], rows.shape[0], rows.shape[2])
    found = (tuple(getattr(array, "shape", ())), getattr(array, "dtype", type(array).__name__))
    if found != (expected, dtype):
        raise ValueError(f"{name} holds {found[1]} of shape {found[0]}; expected {dtype} of {expected}")
