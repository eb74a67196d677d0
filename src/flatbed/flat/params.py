"""`FlatParams`: a model's parameters in contiguous buffers, under any in-place torch optimizer."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal

import torch
from torch import nn

from flatbed.errors import FlatbedError
from flatbed.flat import checkpoint, hooks, norms
from flatbed.flat import repair as health
from flatbed.flat.buffer import Buffer, view
from flatbed.flat.inputs import Entry, Source, read
from flatbed.flat.parameter import FlatParameter
from flatbed.flat.repair import Problem
from flatbed.layout import Segment, Spec, plan


@dataclass(frozen=True)
class Snapshot:
    """The values of every buffer at one moment; give it back to `FlatParams.restore`."""

    buffers: tuple[torch.Tensor, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Places:
    """Every module attribute that holds a flattened parameter, as three columns to be scanned at C speed."""

    dicts: list[dict[str, Any]]
    names: list[str]
    parameters: list[torch.Tensor]

    @staticmethod
    def of(entries: list[Entry]) -> Places:
        slots = [(owner._parameters, name, e.parameter) for e in entries for owner, name in e.slots]
        return Places([d for d, _, _ in slots], [n for _, n, _ in slots], [p for _, _, p in slots])

    def unchanged(self) -> bool:
        """Whether every attribute still holds the parameter it held."""
        return all(map(is_, map(dict.get, self.dicts, self.names), self.parameters))


class FlatParams:
    """Move parameters into contiguous buffers and hand an optimizer one flat parameter per buffer.

    ``source`` is a module, an iterable of parameters or of (name, parameter), or a list of param-group
    dicts, whose options are kept. Prefer the module: names then appear in errors, and a parameter
    replaced by ``load_state_dict(assign=True)`` is found again. There is one buffer, or several of at
    most 1 GiB, for each group, device and dtype. Frozen parameters are left alone.

    ``grads="follow"`` leaves gradients where autograd put them until someone reads the flat ``.grad``.
    ``grads="bound"`` makes the originals' gradients views from the start, for very many small parameters
    and for CUDA graphs.

    ``missing="raise"``: a parameter without gradient while its neighbours have one stops the step, since
    torch would let its step count fall behind and one flat state cannot. ``missing="zero"`` takes its
    gradient as zero instead: weight decay and momentum then still move it, and its moments decay.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    >>> flat = FlatParams(model)
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
        self._given = read(source)
        self._build()

    def _build(self) -> None:
        trainable = [entry for entry in self._given.entries if entry.parameter.requires_grad]
        layout = plan(_spec(entry) for entry in trainable)
        self._entries = trainable
        self._places = Places.of(trainable)
        self._frozen = [entry for entry in self._given.entries if not entry.parameter.requires_grad]
        self._absence_explained = False
        self._on_loan = False  # an EMA's averages are in the buffers
        self._asked: hooks.Whole | None = None
        self._group_of_buffer = [trainable[held.members[0]].group for held in layout.buffers]
        self._members = [held.members for held in layout.buffers]
        self._buffers: list[Buffer] = []
        for number, held in enumerate(layout.buffers):
            originals = [trainable[i].parameter for i in held.members]
            self._buffers.append(
                Buffer(layout.segments_of(number), originals, held.numel, bound=self.grads == "bound")
            )
            for p in originals:
                _pickle_alone(p)
        hooks.install()

    # ---- what an optimizer and its user see

    def parameters(self) -> list[FlatParameter]:
        """The flat parameters, one per buffer: ``torch.optim.AdamW(flat.parameters(), fused=True)``."""
        return [self._flat(index) for index in range(len(self._buffers))]

    def groups(self) -> list[dict[str, Any]]:
        """The source's param groups with flat parameters in them; one group if the source had none."""
        flats = self.parameters()
        return [
            {
                **options,
                "params": [f for f, g in zip(flats, self._group_of_buffer, strict=True) if g == number],
            }
            for number, options in enumerate(self._given.options)
        ]

    def __iter__(self) -> Iterator[Any]:
        """So that `torch.optim.AdamW(flat)` does what is meant: groups if groups were given."""
        return iter(self.groups() if self._given.grouped else self.parameters())

    def originals(self) -> list[torch.Tensor]:
        """The model's own parameters, now views, in the order of `segments`."""
        return [entry.parameter for entry in self._entries]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Name, shape, strides, offset and buffer of every flattened parameter, in the source's order."""
        placed: list[Segment] = [None] * len(self._entries)  # type: ignore[list-item]
        for members, buffer in zip(self._members, self._buffers, strict=True):
            for position, segment in zip(members, buffer.segments, strict=True):
                placed[position] = segment
        return tuple(placed)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The memory behind the flat parameters, padding included."""
        return [buffer.data for buffer in self._buffers]

    @property
    def grad_buffers(self) -> list[torch.Tensor | None]:
        """The memory behind the flat gradients as it is now; nothing is gathered. None until first needed."""
        return [buffer.grad for buffer in self._buffers]

    # ---- gradients

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients, a tensor on their device; parameters are summed in torch's order."""
        return self._total_norm(self._gathered(), norms.as_norm_type(norm_type))

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, bit for bit, in one pass per buffer; returns the norm."""
        norms.check_max_norm(max_norm)
        norm_type = norms.as_norm_type(norm_type)
        gathered = self._gathered()
        if error_if_nonfinite:
            total = self._total_norm(gathered, norm_type)
            if not torch.isfinite(total):
                raise FlatbedError(
                    f"the total norm of the gradients is {total.item()}; parameters with inf or NaN: "
                    f"{', '.join(self.nonfinite()) or 'none, their norm overflows'}"
                )
        return self._clip(gathered, max_norm, norm_type)

    @torch.no_grad()
    def _clip(self, gathered: list[Buffer], max_norm: float, norm_type: float) -> torch.Tensor:
        total = self._total_norm(gathered, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for buffer in gathered:
            assert buffer.grad is not None
            buffer.grad.mul_(factor.to(buffer.grad.device))
        return total

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> torch.Tensor | None:
        """`clip_grad_norm_(max_norm)`, `optimizer.step()` and `optimizer.zero_grad()` in one call.

        The same numbers as the three, with one look at the parameters instead of three, which is what
        counts when there are thousands of small ones. Returns the norm if `max_norm` was given.
        """
        if max_norm is not None:
            norms.check_max_norm(max_norm)
        norm_type = norms.as_norm_type(norm_type)
        checkpoint.check_optimizer(optimizer)
        held = {id(p) for p in hooks.flat_parameters(optimizer)}
        if not all(id(p) in held for p in self.parameters()):
            raise ValueError(
                "this optimizer does not hold all flat parameters of this FlatParams: build it over "
                "flat.parameters() or flat.groups(), not over model.parameters()"
            )
        whole = hooks.Whole(self, max_norm, norm_type)
        hooks.whole_step(optimizer, whole)
        if len(held) != len(self._buffers) or any(
            len(group["params"]) > 0 and not all(id(p) in held for p in group["params"])
            for group in optimizer.param_groups
        ):
            optimizer.zero_grad()  # what else the optimizer holds
        return whole.total_norm

    def norms(self) -> dict[str, float]:
        """The norm of every parameter, by name; one transfer to the host."""
        return self._by_name([(b, norms.param_norms(b)) for b in self._buffers])

    def grad_norms(self) -> dict[str, float]:
        """The norm of every gradient, by name; 0 where there is none. One transfer to the host."""
        self._gathered()
        return self._by_name([(b, norms.grad_norms(b)) for b in self._buffers])

    def nonfinite(self) -> list[str]:
        """The names of the parameters whose gradient holds inf or NaN."""
        self._gathered()
        largest = self._by_name([(b, norms.grad_norms(b, float("inf"))) for b in self._buffers])
        return [name for name, value in largest.items() if not value < float("inf")]

    def _by_name(self, values: list[tuple[Buffer, torch.Tensor]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for buffer, tensor in values:
            found.update(zip((s.name for s in buffer.segments), tensor.tolist(), strict=True))
        return {entry.name: found[entry.name] for entry in self._entries}

    def _total_norm(self, gathered: list[Buffer], norm_type: float) -> torch.Tensor:
        members = [m for m, b in zip(self._members, self._buffers, strict=True) if b in gathered]
        return norms.total_norm(gathered, members, norm_type)

    def _gathered(self) -> list[Buffer]:
        """Every buffer that has a gradient, gathered."""
        return [b for index, b in enumerate(self._buffers) if self._gather(index) is not None]

    # ---- copies of everything

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """A copy of all values, one per buffer."""
        self._heal()
        return Snapshot(tuple(buffer.data.clone() for buffer in self._buffers), self.segments)

    @torch.no_grad()
    def _put_back(self, snapshot: Snapshot) -> None:
        """Restore, also into a model that was moved or cast since."""
        self._heal()
        if snapshot.segments == self.segments:
            self.restore(snapshot)
            return
        for old, new in zip(snapshot.segments, self.segments, strict=True):
            view(self.buffers[new.buffer], new).copy_(view(snapshot.buffers[old.buffer], old))
        for buffer in self._buffers:
            buffer.bump_versions()

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot's values back, one copy per buffer."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(
                f"restore takes what flat.snapshot() returned; found {type(snapshot).__name__} (a state "
                f"dict is loaded by the model: model.load_state_dict)"
            )
        self._heal()
        if snapshot.segments != self.segments:
            raise ValueError(
                "this snapshot was taken of another layout (another model, or before the model was cast); "
                "take it from the FlatParams it is restored to"
            )
        for buffer, values in zip(self._buffers, snapshot.buffers, strict=True):
            buffer.data.copy_(values)
            buffer.bump_versions()

    # ---- health

    def check(self) -> list[Problem]:
        """Everything that has left its place, with likely cause and remedy. Empty if all is well."""
        return health.check(self)

    def is_valid(self) -> bool:
        """Whether every parameter lies in its buffer."""
        return not self.check()

    def assert_valid(self) -> None:
        """Raise with every problem `check` finds."""
        problems = self.check()
        if problems:
            raise FlatbedError("\n".join(map(str, problems)))

    def rebind(self) -> None:
        """Bring back what left its place; the model's own values are the ones that count.

        Heals `.to()`, `.half()`, `load_state_dict(assign=True)`, `p.data = …` and an RNN's
        `flatten_parameters`. Steps and gathers call it by themselves.
        """
        health.rebind(self, by_hand=True)

    def _heal(self) -> None:
        health.rebind(self, by_hand=False)

    # ---- checkpoints

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What the same optimizer over the original parameters would have returned from `state_dict()`.

        Per-element state is shown as views of the flat state, as torch shows its own.
        """
        return checkpoint.optimizer_state_dict(self, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load what torch's `state_dict()` returned for the original parameters."""
        checkpoint.load_optimizer_state_dict(self, optimizer, state)

    # ---- behind the flat parameters

    def _flat(self, index: int) -> FlatParameter:
        # Held weakly: a flat parameter holds its owner, and a cycle would keep a dropped model's memory.
        buffer = self._buffers[index]
        flat = buffer.flat
        if flat is None:
            flat = FlatParameter.over(buffer.data, self, index)
            buffer.flat_ref = weakref.ref(flat)
        return flat

    def _gather(self, index: int) -> torch.Tensor | None:
        buffer = self._buffers[index]
        self._glance(buffer)
        grad = buffer.gather(look_first=self._heal)
        buffer.touched = buffer.touched or grad is not None
        return grad

    def _glance(self, buffer: Buffer) -> None:
        """Notice a model moved as a whole, or a replaced Parameter, before the flat gradient is touched."""
        if not buffer.spot_check() or not self._places.unchanged():
            self._heal()

    def _add_grad(self, index: int, own: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers[index]
        total = own if buffer.gather() is None else own + buffer.grad  # type: ignore[operator]
        buffer.set_grad(total)
        assert buffer.grad is not None
        return buffer.grad

    def _set_grad(self, index: int, value: torch.Tensor | None) -> None:
        buffer = self._buffers[index]
        self._glance(buffer)
        if value is None:
            buffer.drop_grads()
        else:
            buffer.set_grad(value)

    def _replace(self, entry: Entry, new: torch.Tensor) -> None:
        """Let another Parameter object take over an entry's segment."""
        position = next(i for i, held in enumerate(self._entries) if held is entry)
        for members, buffer in zip(self._members, self._buffers, strict=True):
            if position in members:
                buffer.originals[members.index(position)] = new
        entry.parameter = new
        _pickle_alone(new)
        self._places = Places.of(self._entries)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        return {"grads": self.grads, "missing": self.missing, "given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.grads = state["grads"]
        self.missing = state["missing"]
        self._given = state["given"]
        self._build()

    def __copy__(self) -> FlatParams:
        raise FlatbedError(
            "parameters live in one FlatParams only; use copy.deepcopy for a copy with its own"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParams:
        twin = object.__new__(FlatParams)
        memo[id(self)] = twin
        twin.__setstate__({key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()})
        return twin

    def __repr__(self) -> str:
        n_buffers = len(self._buffers)
        n_elements = sum(entry.parameter.numel() for entry in self._entries)
        return (
            f"FlatParams({len(self._entries)} parameters, {n_elements} elements, "
            f"{n_buffers} buffer{'s' * (n_buffers != 1)}, grads={self.grads!r})"
        )


def _spec(entry: Entry) -> Spec:
    p = entry.parameter
    return Spec(
        entry.name, tuple(p.shape), p.stride(), p.element_size(), key=(entry.group, p.device, p.dtype)
    )


def _pickle_alone(p: torch.Tensor) -> None:
    """Let a view be pickled as a parameter of its own; pickle would write the whole buffer for each."""
    if isinstance(p, nn.Parameter):
        reduce: Callable[[Any], Any] = functools.partial(_reduce_alone, weakref.ref(p))
        p.__reduce_ex__ = reduce  # type: ignore[method-assign]


def _reduce_alone(ref: weakref.ref[nn.Parameter], protocol: Any) -> Any:
    p = ref()
    assert p is not None
    alone = nn.Parameter(p.data.clone(memory_format=torch.preserve_format), p.requires_grad)
    alone.__dict__.update({k: v for k, v in p.__dict__.items() if k != "__reduce_ex__"})
    return alone.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
