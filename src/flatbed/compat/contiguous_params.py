"""The API of `contiguous_params` on current PyTorch: old code only needs another import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from flatbed.flat import FlatParameter, FlatParams, Source


class ContiguousParams:
    """Parameters and gradients stored contiguously, with the names of the original package.

    One check is stricter: a parameter that receives no gradient while others do raises at the step, where
    the original used zeros. ``missing="zero"`` restores that.

    >>> import torch
    >>> from torch import nn
    >>> from flatbed import ContiguousParams
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> parameters = ContiguousParams(model.parameters())
    >>> optimizer = torch.optim.Adam(parameters.contiguous())
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> _ = nn.utils.clip_grad_norm_(parameters.contiguous(), 0.1)
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> parameters.assert_buffer_is_valid()
    """

    def __init__(self, parameters: Source, *, missing: Literal["raise", "zero"] = "raise") -> None:
        self.flat = FlatParams(parameters, grads="bound", missing=missing)

    def contiguous(self) -> list[FlatParameter] | list[dict[str, Any]]:
        """The flat parameters for the optimizer, or param groups if groups were given."""
        return list(self.flat)

    def original(self) -> list[torch.Tensor]:
        """The parameters as they were given, frozen ones included."""
        return self.flat.originals(include_frozen=True)

    def buffer_is_valid(self) -> bool:
        """Return whether every parameter lies in the buffer; gradients may lie elsewhere."""
        return self.flat.is_valid()

    def assert_buffer_is_valid(self) -> None:
        """Raise ValueError with a list of the parameters that are no longer in the buffer."""
        problems = self.flat.check()
        if problems:
            raise ValueError("\n".join(problems))

    def make_params_contiguous(self) -> None:
        """Move parameters that are no longer in the buffer back into it."""
        self.flat.rebind()

    @property
    def data_pointers(self) -> list[int]:
        """The address that each trained parameter of `original()` has in the buffer."""
        return self._pointers(self.flat.buffers)

    @property
    def grad_pointers(self) -> list[int]:
        """The address that the gradient of each trained parameter of `original()` has in the buffer."""
        return self._pointers(self.flat.grad_buffers)

    def _pointers(self, buffers: Sequence[torch.Tensor | None]) -> list[int]:
        pairs = [(buffers[segment.buffer], segment.offset) for segment in self.flat.segments]
        return [b.data_ptr() + offset * b.element_size() for b, offset in pairs if b is not None]

    @property
    def param_buffer(self) -> torch.Tensor:
        """The buffer of all values."""
        return self._only(self.flat.buffers, "flat.buffers")

    @property
    def gradient_buffer(self) -> torch.Tensor:
        """The buffer of all gradients, to read or to `zero_()` by hand."""
        for flat in self.flat.parameters():
            _ = flat.grad  # gathers gradients that DDP or nn.Module.zero_grad put elsewhere
        return self._only(self.flat.grad_buffers, "flat.grad_buffers")

    _param_buffer = param_buffer
    _grad_buffer = gradient_buffer

    @staticmethod
    def _only(buffers: list[Any], plural: str) -> torch.Tensor:
        if len(buffers) != 1:
            raise ValueError(
                f"there are {len(buffers)} buffers, one per group, device and dtype: use {plural} instead"
            )
        only: torch.Tensor = buffers[0]
        return only
