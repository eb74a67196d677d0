"""Names, datatypes and copies that switchers, gadgets and matrices share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
FileName = str | os.PathLike[str]
PINNED_STORAGE = {False: "device", True: "host"}
"""Storage by the argument `CPUPinn`."""
DEVICE_STORAGE = {"cuda": "device", "cpu": "host"}
"""Storage by the argument `deviceType`."""


class ArrayViews(ABC):
    """SpeedTorch's names for all rows as an array or a tensor."""

    @abstractmethod
    def getNumpyVersion(self) -> Any:
        """Copy all rows to a numpy array; of an optimizer, to a dict of arrays by name."""

    @abstractmethod
    def getTorchVar(self) -> Any:
        """Return all rows as a tensor over their memory; of an optimizer, as a dict of tensors."""

    def getCupyVar(self) -> Any:
        """Return what `getNumpyVersion` returns."""
        return self.getNumpyVersion()

    def getCupyMM(self) -> Any:
        """Return what `getNumpyVersion` returns."""
        return self.getNumpyVersion()

    CUPYcorpus = CUPYmemmap = property(getCupyVar)

    @property
    def pytorchGPUVar(self) -> Any:
        """All rows, as `getTorchVar` returns them."""
        return self.getTorchVar()


def as_dtype(given: Any) -> torch.dtype:
    """Convert a datatype of torch or numpy, or its name, to torch's."""
    if isinstance(given, torch.dtype):
        return given
    name = given if isinstance(given, str) else np.dtype(given).name
    found: torch.dtype = getattr(torch, name)
    return found


def to_numpy(values: Tensor) -> Array:
    """Return a tensor's numbers as a numpy array. numpy has no bfloat16, which becomes float32."""
    values = values.detach().cpu()
    array: Array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def as_array(values: Any) -> Array:
    """Return lists, tensors and arrays as a numpy array."""
    return to_numpy(values) if isinstance(values, Tensor) else np.asarray(values)


def row_ids(n_rows: int, *parts: Any) -> Array:
    """Copy ids of any integer dtype and shape to one array, part by part."""
    ids = np.concatenate([as_array(part).reshape(-1) for part in parts])
    if len(ids) and ids.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers; found {ids.dtype}")
    bad = ids[(ids < 0) | (ids >= n_rows)]
    if len(bad):
        raise IndexError(f"id {bad[0]} is out of range for {n_rows} rows (0 to {n_rows - 1})")
    return ids.astype(np.int64)


def npy_path(name: FileName) -> Path:
    """Return the path of a .npy file to write; numpy adds its suffix to names without it."""
    path = Path(name)
    return path if path.suffix == ".npy" else path.with_name(f"{path.name}.npy")


def open_npy(name: FileName, mode: Any = "r") -> Array:
    """Map a .npy file into memory, without unpickling. The name may lack numpy's suffix."""
    path = Path(name) if Path(name).is_file() else npy_path(name)
    array: Array = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


def free_path(diskname: FileName, suffix: str) -> Path:
    """Return the first of `DISKNAME0.bed`, `DISKNAME1.bed`, … that does not exist yet."""
    number = 0
    while (path := Path(f"{diskname}{number}{suffix}")).exists():
        number += 1
    return path


def computing_device() -> torch.device:
    """Return the current GPU or, without one, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
