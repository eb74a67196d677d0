"""Cached kernel launches through Triton's own launcher.

Triton's `kernel[grid](...)` inspects the type, value and alignment of every argument. The classes here do
that once per kind of arguments and keep the compiled kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatbed.cuda.streams import distinct_stream, relaxed_capture
from flatbed.kernels._triton import elementary

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@functools.cache
def element(function: Callable[..., Any]) -> Any:
    """Compile a rule's function, which is written without Triton so that importing flatbed stays light."""
    for name, value in (("tl", tl), ("sqrt", elementary.sqrt)):
        function.__globals__.setdefault(name, value)
    return triton.jit(function)


class Kernel:
    """A kernel whose arguments never change type or alignment, and its compiled forms."""

    def __init__(self, function: Any, *, num_warps: int) -> None:
        self.function = function
        self.num_warps = num_warps
        self.compiled: dict[Any, Any] = {}

    def bind(self, n_programs: int, constants: tuple[Any, ...], *args: Any) -> Callable[..., None]:
        """Return a launch with these arguments, in the current stream.

        The launch takes values in place of the last arguments: numbers and tensors.
        """
        device = args[0].device
        if n_programs == 0:
            return lambda *last: None
        if device.type != "cuda":  # the interpreter

            def interpret(*last: Any) -> None:
                self.function[(n_programs,)](*args[: len(args) - len(last)], *last, *constants)

            return interpret
        key = (device.index, constants)
        with torch.cuda.device(device):
            if key not in self.compiled:
                compiled = self.function.warmup(
                    *args, *constants, num_warps=self.num_warps, grid=(n_programs,)
                )
                self.compiled[key] = _launcher(compiled, device)
        run, fixed = self.compiled[key], _addresses(args)

        def launch(*last: Any) -> None:
            run(n_programs, *fixed[: len(fixed) - len(last)], *_addresses(last), *constants)

        return launch


class Bound:
    """A kernel with its constants, launched with other arguments each time.

    Compiled once per types of the arguments, for addresses that are multiples of 16. Other addresses go
    through `kernel[grid]`, which inspects them.
    """

    def __init__(self, function: Any, constants: tuple[Any, ...], *, num_warps: int = 4) -> None:
        self.function, self.constants, self.num_warps = function, constants, num_warps
        self.compiled: dict[Any, Any] = {}

    def __call__(self, n_programs: int, device: torch.device, *args: Any) -> None:
        if device.type != "cuda":
            self.function[(n_programs,)](*args, *self.constants)
            return
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                self(n_programs, device, *args)
            return
        values: list[Any] = []
        kinds: list[Any] = []
        is_aligned = True
        for arg in args:
            if isinstance(arg, Tensor):
                values.append(arg.data_ptr())
                kinds.append(arg.dtype)
                is_aligned = is_aligned and not values[-1] % 16
            else:
                values.append(arg)
                kinds.append(arg.bit_length() > 31 if isinstance(arg, int) else float)
        if not is_aligned:
            self.function[(n_programs,)](*args, *self.constants, num_warps=self.num_warps)
            return
        key = (device.index, *kinds)
        if key not in self.compiled:
            grid = (n_programs,)
            compiled = self.function.warmup(*args, *self.constants, num_warps=self.num_warps, grid=grid)
            self.compiled[key] = _launcher(compiled, device)
        self.compiled[key](n_programs, *values, *self.constants)


def _launcher(compiled: Any, device: torch.device) -> Callable[..., None]:
    """Return a function of the number of programs and the arguments that launches in the current stream.

    It calls the launcher that Triton has compiled for the kernel, without the hooks of its profiler: half of
    the 30 µs that `compiled[grid](...)` takes on a slow host.
    """
    run = compiled.run  # first: Triton loads the module then
    function, metadata, index = compiled.function, compiled.packed_metadata, device.index

    def launch(n_programs: int, *args: Any) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(n_programs, 1, 1, stream, function, metadata, None, None, None, *args)

    return launch


def _addresses(args: Iterable[Any]) -> list[Any]:
    return [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]


@contextmanager
def outside_of_capture(device: torch.device, after: torch.cuda.Event | None) -> Iterator[bool]:
    """Run the body's work at once, after an event, although the current stream is capturing a graph.

    Yields False where the driver does not allow that; the body's work is part of the graph then.
    """
    with relaxed_capture() as relaxed:
        if not relaxed:
            yield False
            return
        aside = distinct_stream(device, {torch.cuda.current_stream(device).cuda_stream})
        with torch.cuda.stream(aside):
            if after is not None:
                aside.wait_event(after)
            yield True
        aside.synchronize()
