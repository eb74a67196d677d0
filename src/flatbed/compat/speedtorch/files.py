"""Whole collections as files (.npy, torch.save) and as arrays. Nothing here unpickles."""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatbed.compat.speedtorch.collection import Collection
from flatbed.errors import FlatbedError
from flatbed.tables.tensor_file import as_path, replacing, write_at

BFLOAT = torch.bfloat16  # which numpy does not know: it is given float32 instead, which loses nothing


def as_array(view: Tensor) -> Any:
    """The same memory as numpy has it, or CuPy on a GPU; torch's own tensor where neither can."""
    if view.is_cuda:
        try:
            import cupy  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return view
        return cupy.asarray(view)
    return view if view.dtype == BFLOAT else view.numpy()


def numpy_copy(values: Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as numpy's."""
    array: np.ndarray[Any, Any] = (values.float() if values.dtype == BFLOAT else values).numpy()
    return array


def npy_path(name: str | os.PathLike[str]) -> Path:
    """Numpy adds .npy to names that do not end so."""
    path = as_path(name, "the file's name")
    return path if path.suffix == ".npy" else path.with_name(path.name + ".npy")


def save_npy(
    name: str | os.PathLike[str], rows: Collection, *, stacked: bool, shape: tuple[int, ...] | None = None
) -> None:
    """All rows as an array (n_rows, count), or of another shape; with `stacked`, (columns, n_rows, count)."""
    columns = list(rows.columns.values())
    dtype = numpy_copy(torch.empty(0, dtype=columns[0].dtype)).dtype
    shape = shape or ((len(columns),) if stacked else ()) + (rows.n_rows, columns[0].count)
    head = io.BytesIO()
    about: Any = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, about)
    at = len(head.getvalue())
    with replacing(npy_path(name), at + int(np.prod(shape)) * dtype.itemsize) as descriptor:
        write_at(descriptor, 0, head.getbuffer())
        for column in columns:
            for start, stop in rows.blocks():
                block = numpy_copy(rows.read(column.name, start, stop))
                write_at(descriptor, at, block.reshape(-1).view(np.uint8).data)
                at += block.nbytes


def open_npy(name: str | os.PathLike[str], *, mode: Any = "r") -> np.ndarray[Any, Any]:
    """An array in a file, mapped into memory."""
    path = as_path(name, "the file's name")
    path = path if path.exists() else npy_path(name)
    if not path.is_file():
        raise FlatbedError(f"there is no array at {path}: check the path")
    try:
        found: np.ndarray[Any, Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise FlatbedError(f"{path} is no .npy file that can be used ({error})") from error
    if not isinstance(found, np.ndarray):
        raise FlatbedError(f"{path} holds several arrays: save the one that is wanted as .npy")
    if found.dtype.hasobject:
        raise FlatbedError(f"{path} holds Python objects, which are not loaded: use numbers")
    return found


def load_npy(name: str | os.PathLike[str], rows: Collection, *, stacked: bool) -> None:
    """The inverse of `save_npy`; nothing changes if the file does not fit."""
    found = open_npy(name)
    columns = list(rows.columns.values())
    shape = ((len(columns),) if stacked else ()) + (rows.n_rows, columns[0].count)
    dtype = numpy_copy(torch.empty(0, dtype=columns[0].dtype)).dtype
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"{name} holds {found.dtype} of shape {found.shape}; expected {dtype} of {shape}")
    for at, column in enumerate(columns):
        part = found[at] if stacked else found
        for start, stop in rows.blocks():
            rows.write_(column.name, start, torch.from_numpy(np.array(part[start:stop])))


def save_torch(name: str | os.PathLike[str], rows: Collection, *, stacked: bool) -> None:
    """All rows by torch.save: a tensor, or with `stacked` a dict of them."""
    path = as_path(name, "the file's name")
    if path.is_dir() or not path.parent.is_dir():
        raise FlatbedError(f"{path} cannot be written: it must be the name of a file in a folder that exists")
    values = {column: rows.copied(column) for column in rows.columns}
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        torch.save(values if stacked else next(iter(values.values())), draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load_torch(name: str | os.PathLike[str], rows: Collection, *, stacked: bool) -> None:
    """The inverse of `save_torch`, of plain tensors alone; nothing changes if they do not fit."""
    path = as_path(name, "the file's name")
    if not path.is_file():
        raise FlatbedError(f"there is no file at {path}: check the path")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FlatbedError(
            f"{path} does not hold plain tensors, and nothing else is loaded ({error})"
        ) from error
    given = found if stacked else {next(iter(rows.columns)): found}
    if not isinstance(given, dict) or set(given) != set(rows.columns):
        raise ValueError(f"{path} does not hold {', '.join(rows.columns)}: load what saveTorch has written")
    for column in rows.columns.values():
        value, shape = given[column.name], (rows.n_rows, column.count)
        if not isinstance(value, Tensor) or (tuple(value.shape), value.dtype) != (shape, column.dtype):
            about = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(f"{path} holds {about}; expected {column.dtype} of {shape}")
    for column in rows.columns.values():
        for start, stop in rows.blocks():
            rows.write_(column.name, start, given[column.name][start:stop])
