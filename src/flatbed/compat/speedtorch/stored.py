"""Base of switchers, gadgets and matrices: ways to look at all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from flatbed import FlatbedError
from flatbed.compat.speedtorch import files, storage
from flatbed.compat.speedtorch.storage import RowStorage
from flatbed.compat.speedtorch.variants import Variant

Rows = TypeVar("Rows", bound=RowStorage)


class Stored(Variant, Generic[Rows]):
    """Rows in storage, which an init method of the class creates."""

    _init_method: ClassVar[str] = ""
    _stored: Rows | None = None

    def _rows(self) -> Rows:
        if self._stored is None:
            raise FlatbedError(f"{type(self).__name__} has no rows yet: call {self._init_method} first")
        return self._stored

    def _whole(self) -> Tensor:
        rows = self._rows()
        if rows.tensor is None:
            raise FlatbedError(f"the rows are in the file {rows.path}: use getNumpyVersion() for a copy")
        return rows.tensor

    def _by_name(self, whole: Tensor, convert: Callable[[Tensor], Any]) -> Any:
        """Convert all rows; a switcher with several tensors returns a dict by name."""
        return convert(whole)

    def getNumpyVersion(self) -> Any:
        """Copy all rows to a numpy array; of an optimizer, to a dict of arrays by name."""
        return self._by_name(storage.copied(self._rows()), files.to_numpy)

    def getTorchVar(self) -> Any:
        """Return all rows as a tensor over their memory; of an optimizer, as a dict of tensors."""
        return self._by_name(self._whole(), lambda part: part)

    def getCupyVar(self) -> Any:
        """Return all rows over their memory, as CuPy's array on a GPU if CuPy is installed, or as numpy's."""
        return self._by_name(self._whole(), files.as_array)

    def getCupyMM(self) -> Any:
        """Return what `getCupyVar` returns; of a table's file, a copy."""
        return self.getNumpyVersion() if self._rows().tensor is None else self.getCupyVar()

    @property
    def CUPYcorpus(self) -> Any:
        """All rows, as `getCupyMM` returns them."""
        return self.getCupyMM()

    @property
    def CUPYmemmap(self) -> Any:
        """All rows, as `getCupyMM` returns them; of an optimizer, a list."""
        return self.getCupyMM()

    @property
    def pytorchGPUVar(self) -> Any:
        """All rows, as `getTorchVar` returns them."""
        return self.getTorchVar()
