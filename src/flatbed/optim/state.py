"""An optimizer's state: collections that notice when they are changed, and the arenas of their tensors."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flatbed.layout import ALIGNMENT, Spec, plan

MASTER, EMA = "master_weight", "ema"  # keys of state that torch does not have


class Flag:
    """Raised when state or a group's parameters are set or deleted by hand: looking costs nothing then."""

    def __init__(self) -> None:
        self.raised = True


def _raising(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    @functools.wraps(method)
    def raising(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.flag.raised = True
        return method(self, *args, **kwargs)

    return raising


MUTATORS = {
    dict: ("__setitem__", "__delitem__", "clear", "pop", "popitem", "setdefault", "update", "__ior__"),
    list: (
        *("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "clear", "extend", "insert"),
        *("pop", "remove", "reverse", "sort"),
    ),
}


class State(dict[str, Any]):
    """One parameter's state by torch's keys; numbers torch does not know of are in `hidden`."""

    def __init__(self, flag: Flag, *args: Any) -> None:
        super().__init__(*args)
        self.flag = flag
        self.hidden: dict[str, Tensor] = {}

    def __reduce__(self) -> Any:
        return _state, (self.flag, dict(self), self.hidden)

    for _name in MUTATORS[dict]:
        locals()[_name] = _raising(dict, _name)


def _state(flag: Flag, items: dict[str, Any], hidden: dict[str, Tensor]) -> State:
    state = State(flag, items)
    state.hidden = hidden
    return state


class States(defaultdict[Any, Any]):
    """`optimizer.state`: what belongs to each parameter."""

    def __init__(self, flag: Flag, *args: Any) -> None:
        super().__init__(functools.partial(State, flag), *args)
        self.flag = flag

    def __reduce__(self) -> Any:
        return States, (self.flag, dict(self))

    for _name in MUTATORS[dict]:
        locals()[_name] = _raising(defaultdict, _name)


class Members(list[Tensor]):
    """The parameters of a group."""

    def __init__(self, flag: Flag, items: Sequence[Tensor]) -> None:
        super().__init__(items)
        self.flag = flag

    def __reduce__(self) -> Any:
        return list, (list(self),)

    for _name in MUTATORS[list]:
        locals()[_name] = _raising(list, _name)


LaunchKey = tuple[str, torch.dtype, torch.device]
"""A key of state, dtype and device: tensors of one kind lie side by side."""


def arenas(wanted: Sequence[tuple[LaunchKey, tuple[int, ...], tuple[int, ...]]]) -> list[Tensor]:
    """Zeros of these kinds, shapes and strides, as views of few large buffers; numbers lie side by side."""
    specs = [Spec(kind[0], shape, stride, kind[1].itemsize, kind) for kind, shape, stride in wanted]
    layout = plan(specs, alignment=ALIGNMENT if any(shape for _, shape, _ in wanted) else 1)
    buffers = []
    for buffer in layout.buffers:
        kind = cast(LaunchKey, buffer.key)
        buffers.append(torch.zeros(buffer.numel, dtype=kind[1], device=kind[2]))
    return [buffers[s.buffer].as_strided(s.shape, s.stride, s.offset) for s in layout.segments]
