"""An exponential moving average of flat parameters: one kernel per buffer and update."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flatbed.errors import FlatbedError
from flatbed.flat.buffer import view
from flatbed.flat.params import FlatParams
from flatbed.layout import Segment


class EMA:
    """The average ``a ← a + (1 − decay)·(p − a)`` of every parameter, started at their present values.

    Averages of bf16 and fp16 parameters are kept in fp32, where small steps are not lost.

    >>> from torch import nn
    >>> flat = FlatParams(nn.Linear(4, 4))
    >>> ema = EMA(flat, decay=0.999)
    >>> ema.update()               # after every optimizer step
    >>> with ema.weights():        # evaluate with the averaged weights
    ...     assert flat.is_valid()
    """

    def __init__(self, flat: FlatParams, decay: float = 0.999) -> None:
        if not isinstance(flat, FlatParams):
            raise TypeError(f"EMA averages a FlatParams; found {type(flat).__name__}: EMA(FlatParams(model))")
        _check_decay(decay)
        self.flat = flat
        self.decay = decay
        self.n_updates = 0
        self._swapped = False
        flat._heal()
        self._segments = flat.segments
        self._averages = [_average_of(b) for b in flat.buffers]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present values."""
        self._refuse_swapped("update()")
        self._follow()
        for average, buffer in zip(self._averages, self.flat.buffers, strict=True):
            average.lerp_(buffer.to(average.dtype), 1.0 - self.decay)
        self.n_updates += 1

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The averaged weights are in the model inside this context; the trained ones return after it."""
        self._refuse_swapped("weights()")
        self._follow()
        trained = self.flat.snapshot()
        self._copy_in()
        self._swapped = self.flat._on_loan = True
        try:
            yield
        finally:
            self._swapped = self.flat._on_loan = False
            self.flat._put_back(trained)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors by parameter name, with decay and number of updates; for `torch.save`."""
        self._follow()
        return {
            "decay": self.decay,
            "n_updates": self.n_updates,
            "weights": {
                s.name: view(self._averages[s.buffer], s).clone(memory_format=torch.preserve_format)
                for s in self._segments
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, for the same parameters."""
        self._refuse_swapped("load_state_dict()")
        keys = ("decay", "n_updates", "weights")
        if not isinstance(state, Mapping) or any(key not in state for key in keys):
            held = list(state)[:6] if isinstance(state, Mapping) else [type(state).__name__]
            raise ValueError(
                f"expected what ema.state_dict() returned, with {', '.join(keys)}; found {', '.join(held)}"
            )
        _check_decay(state["decay"])
        self._follow()
        expected = {s.name: s.shape for s in self._segments}
        found = {name: tuple(t.shape) for name, t in state["weights"].items()}
        if found != expected:
            odd = sorted(dict(expected.items() ^ found.items()))
            raise ValueError(f"the averages are of other parameters: {', '.join(odd[:8])} differ")
        for segment in self._segments:
            view(self._averages[segment.buffer], segment).copy_(state["weights"][segment.name])
        self.decay = state["decay"]
        self.n_updates = state["n_updates"]

    def _refuse_swapped(self, call: str) -> None:
        if self._swapped:
            raise FlatbedError(
                f"{call} inside `with ema.weights()`: the model holds the averages already; call it outside"
            )

    @torch.no_grad()
    def _copy_in(self) -> None:
        for average, buffer in zip(self._averages, self.flat._buffers, strict=True):
            buffer.data.copy_(average)
            buffer.bump_versions()

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the averages after a model that was moved or cast."""
        self.flat._heal()
        same = [(a.device, a.dtype) for a in self._averages] == [
            (b.device, _average_dtype(b)) for b in self.flat.buffers
        ]
        if self.flat.segments == self._segments and same:
            return
        moved = [_average_of(b) for b in self.flat.buffers]
        old: dict[str, Segment] = {s.name: s for s in self._segments}
        for segment in self.flat.segments:
            source = old[segment.name]
            view(moved[segment.buffer], segment).copy_(view(self._averages[source.buffer], source))
        self._averages = moved
        self._segments = self.flat.segments


def _check_decay(decay: Any) -> None:
    if not isinstance(decay, numbers.Real) or not 0.0 <= float(decay) < 1.0:
        raise ValueError(f"decay must be in [0, 1); found {decay!r}")


def _average_of(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().to(_average_dtype(buffer), copy=True)


def _average_dtype(buffer: torch.Tensor) -> torch.dtype:
    return torch.float32 if buffer.dtype.itemsize < 4 else buffer.dtype
