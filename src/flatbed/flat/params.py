"""`FlatParams`: a model's parameters in contiguous buffers, under any in-place torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flatbed.errors import FlatbedError
from flatbed.flat import hooks, state_dict
from flatbed.flat.buffer import Buffer, FlatParameter, clip, total_norm
from flatbed.flat.model_params import Source, find_problems, read, rebind
from flatbed.layout import Segment, Spec, plan


@dataclass(frozen=True)
class Snapshot:
    """The values of every buffer at one moment, for `FlatParams.restore`."""

    buffers: tuple[torch.Tensor, ...]
    segments: tuple[Segment, ...]


class FlatParams:
    """Move parameters into contiguous buffers and give an optimizer one flat parameter per buffer.

    ``source`` is a module, an iterable of parameters or of (name, parameter), or a list of param-group
    dicts, whose options are kept. Prefer the module: names then appear in errors, and a parameter replaced
    by ``load_state_dict(assign=True)`` is found again. There is at least one buffer, of at most 1 GiB, for
    each group, device and dtype. Frozen parameters and tables are left alone.

    ``grads="follow"`` leaves gradients where autograd puts them until the flat ``.grad`` is read.
    ``grads="bound"`` makes the originals' gradients views from the start, for very many small parameters
    and for CUDA graphs.

    ``missing="raise"``: a parameter without gradient while others in its buffer have one stops the step.
    Torch would skip its step count, which one flat state cannot express. ``missing="zero"`` takes its
    gradient as zero instead: weight decay and momentum then still move it, and its moments decay.

    >>> import flatbed, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    >>> flat = flatbed.FlatParams(model)
    >>> optimizer = torch.optim.AdamW(flat.parameters(), lr=1e-3, fused=True)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> norm = flat.clip_grad_norm_(1.0)
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> flat
    FlatParams(4 parameters, 81 elements, 1 buffer, grads='follow')
    """

    def __init__(
        self,
        source: Source,
        *,
        grads: Literal["follow", "bound"] = "follow",
        missing: Literal["raise", "zero"] = "raise",
    ) -> None:
        if grads not in ("follow", "bound"):
            raise ValueError(f"grads must be 'follow' or 'bound'; found {grads!r}")
        if missing not in ("raise", "zero"):
            raise ValueError(f"missing must be 'raise' or 'zero'; found {missing!r}")
        self.grads: Literal["follow", "bound"] = grads
        self.missing: Literal["raise", "zero"] = missing
        self._inputs = read(source)
        self._build()

    def _build(self) -> None:
        entries = self._inputs.entries
        self._entries = [entry for entry in entries if entry.parameter.requires_grad]
        self._frozen = [entry for entry in entries if not entry.parameter.requires_grad]
        self._no_grads_reported = False
        self._pending_clip: tuple[float, float] | None = None  # max_norm and norm_type of `step`
        self._total_norm: torch.Tensor | None = None
        by_id = {id(entry.parameter): entry for entry in self._entries}
        slots = [  # module attributes that hold a flattened parameter: tied weights have several
            (module._parameters, name, by_id[id(p)])
            for module in (self._inputs.module.modules() if self._inputs.module is not None else ())
            for name, p in module._parameters.items()
            if id(p) in by_id
        ]
        self._slots: Any = tuple(zip(*slots, strict=True)) or ((), (), ())  # columns: C code compares them
        layout = plan(
            Spec(e.name, tuple(p.shape), p.stride(), p.element_size(), (e.group, p.device, p.dtype))
            for e, p in ((entry, entry.parameter) for entry in self._entries)
        )
        self._segments = tuple(layout.segments)
        self._buffers: list[Buffer] = []
        for number, held in enumerate(layout.buffers):
            segments = [layout.segments[i] for i in held.members]
            originals = [self._entries[i].parameter for i in held.members]
            self._buffers.append(Buffer(number, held, segments, originals))
            if self.grads == "bound":
                self._buffers[-1].bind_grads()
        hooks.install()

    # ---- for an optimizer and its user

    def parameters(self) -> list[FlatParameter]:
        """The flat parameters, one per buffer: ``torch.optim.AdamW(flat.parameters(), fused=True)``."""
        pairs = [(buffer, buffer.flat()) for buffer in self._buffers]
        return [FlatParameter.over(self, buffer) if flat is None else flat for buffer, flat in pairs]

    def groups(self) -> list[dict[str, Any]]:
        """The source's param groups with flat parameters in them; one group if the source had none."""
        flats = self.parameters()
        return [
            {**options, "params": [flat for flat in flats if flat.buffer.group == number]}
            for number, options in enumerate(self._inputs.options)
        ]

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what `torch.optim.AdamW(flat)` expects: groups if groups were given."""
        return iter(self.groups() if self._inputs.grouped else self.parameters())

    def originals(self, *, include_frozen: bool = False) -> list[torch.Tensor]:
        """The model's own parameters in the order of `segments`, or of the source with frozen ones."""
        return [entry.parameter for entry in (self._inputs.entries if include_frozen else self._entries)]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Name, shape, strides, offset and buffer of every flattened parameter, in the source's order."""
        return self._segments

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory behind the flat parameters, padding included."""
        return [buffer.data for buffer in self._buffers]

    @property
    def grad_buffers(self) -> list[torch.Tensor | None]:
        """The memory behind the flat gradients, without gathering; None until first needed."""
        return [buffer.grad for buffer in self._buffers]

    # ---- gradients

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients, a tensor on their device; parameters are summed in torch's order."""
        return total_norm(self, self._gathered(), float(norm_type))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, in one pass per buffer; return the norm.

        On the CPU the result is bitwise equal to torch's.
        """
        gathered = self._gathered()
        if error_if_nonfinite:
            total = total_norm(self, gathered, float(norm_type))
            if not torch.isfinite(total):
                raise FlatbedError(
                    f"the total norm of the gradients is {total.item()}; parameters with inf or NaN: "
                    f"{', '.join(self.nonfinite()) or 'none, their norm overflows'}"
                )
        return clip(self, gathered, max_norm, float(norm_type))

    def step(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, norm_type: float = 2.0
    ) -> torch.Tensor | None:
        """Run `clip_grad_norm_(max_norm)`, `optimizer.step()` and `optimizer.zero_grad()` in one call.

        Returns the norm if `max_norm` was given. An optimizer that skips its step (Accelerate's, while it
        accumulates gradients) does not clip either.
        """
        held = {id(p) for p in hooks.flat_parameters(optimizer)}
        if not all(id(p) in held for p in self.parameters()):
            raise ValueError(
                "this optimizer does not hold all flat parameters of this FlatParams: build it over "
                "flat.parameters() or flat.groups(), not over model.parameters()"
            )
        self._total_norm = None
        self._pending_clip = None if max_norm is None else (max_norm, float(norm_type))
        try:
            optimizer.step()
        finally:
            self._pending_clip = None
        optimizer.zero_grad()
        return self._total_norm

    def norms(self) -> dict[str, float]:
        """The norm of every parameter, by name; one transfer to the host per buffer."""
        return self._norms(lambda p: p.detach())

    def grad_norms(self) -> dict[str, float]:
        """The norm of every gradient, by name; 0 where there is none. One transfer per buffer."""
        self._gathered()
        return self._norms(lambda p: p.grad)

    def nonfinite(self) -> list[str]:
        """The names of the parameters whose gradient holds inf or NaN."""
        self._gathered()
        largest = self._norms(lambda p: p.grad, norm_type=float("inf"))
        return [name for name, value in largest.items() if not value < float("inf")]

    def _norms(
        self, tensor_of: Callable[[torch.Tensor], torch.Tensor | None], norm_type: float = 2.0
    ) -> dict[str, float]:
        norms = {entry.name: 0.0 for entry in self._entries}
        for buffer in self._buffers:
            tensors = {s.name: tensor_of(p) for s, p in zip(buffer.segments, buffer.originals, strict=True)}
            filled = {name: t for name, t in tensors.items() if t is not None and t.numel()}
            if filled:
                found = torch.stack(torch._foreach_norm(list(filled.values()), norm_type)).tolist()
                norms.update(zip(filled, found, strict=True))
        return norms

    def _gathered(self) -> list[Buffer]:
        """Gather every buffer and return those that have a gradient."""
        return [flat.buffer for flat in self.parameters() if flat.grad is not None]

    # ---- snapshots

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """Copy all values, one copy per buffer."""
        rebind(self, self._buffers)
        return Snapshot(tuple(buffer.data.clone() for buffer in self._buffers), self.segments)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Write the values of a snapshot back, one copy per buffer."""
        rebind(self, self._buffers)
        if snapshot.segments != self.segments:
            raise ValueError("the snapshot is of another layout; restore takes a snapshot of this FlatParams")
        for buffer, values in zip(self._buffers, snapshot.buffers, strict=True):
            buffer.data.copy_(values)
            # The originals' counters miss writes through the buffer.
            torch.autograd.graph.increment_version(buffer.originals)

    # ---- parameters that left their buffer

    def check(self) -> list[str]:
        """Describe everything that left its buffer, with likely cause and remedy; empty if nothing did."""
        return find_problems(self)

    def is_valid(self) -> bool:
        """Return whether every parameter lies in its buffer."""
        return not self.check()

    def assert_valid(self) -> None:
        """Raise with every problem that `check` finds."""
        problems = self.check()
        if problems:
            raise FlatbedError("\n".join(problems))

    def rebind(self) -> None:
        """Bring back parameters that left their buffer, with the model's own values.

        Mends `.to()`, `.half()`, `load_state_dict(assign=True)`, `p.data = …` and an RNN's
        `flatten_parameters`. Steps and reads of gradients call it by themselves.
        """
        rebind(self, self._buffers)

    def _repair(self, buffer: Buffer) -> None:
        rebind(self, (buffer,))

    # ---- checkpoints

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what the same optimizer over the original parameters would return from `state_dict()`.

        Per-element state shares the memory of the flat state, as torch returns its own tensors.
        """
        return state_dict.optimizer_state_dict(self, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what torch's `state_dict()` returned for the original parameters."""
        state_dict.load_optimizer_state_dict(self, optimizer, state)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        return {"grads": self.grads, "missing": self.missing, "inputs": self._inputs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.grads, self.missing, self._inputs = state["grads"], state["missing"], state["inputs"]
        self._build()

    def __repr__(self) -> str:
        n_buffers = len(self._buffers)
        n_elements = sum(entry.parameter.numel() for entry in self._entries)
        return (
            f"FlatParams({len(self._entries)} parameters, {n_elements} elements, "
            f"{n_buffers} buffer{'s' * (n_buffers != 1)}, grads={self.grads!r})"
        )
