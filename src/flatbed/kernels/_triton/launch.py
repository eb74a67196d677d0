"""Kernels that are compiled once and launched through Triton's own launcher.

Triton's `kernel[grid](...)` inspects the type, value and alignment of every argument. `Kernel` does that
once per kind of arguments and keeps the compiled kernel.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

Launch = Callable[..., None]
_triton_lock = threading.RLock()  # Triton compiles, loads and interprets in one thread at a time
INT32 = 1 << 31


@triton.jit
def sqrt(x):
    """The square root, rounded correctly: Triton's own is approximate, its exact one is for fp32 only."""
    if x.dtype == tl.float64:
        root = tl.sqrt(x)
    else:
        root = tl.sqrt_rn(x)
    return root


@functools.cache
def element(function: Callable[..., Any] | None) -> Any:
    """Compile a rule's function, which is written without Triton so that importing flatbed stays light."""
    assert function is not None
    function.__globals__.setdefault("tl", tl)
    function.__globals__.setdefault("sqrt", sqrt)
    return triton.jit(function)


class Kernel:
    """A jit function with its constants, compiled once per device and types of the arguments.

    Addresses are expected to be multiples of 16, unless the function does not specialize the argument.
    """

    def __init__(self, function: Any, *constants: Any, num_warps: int = 4, num_ctas: int = 1) -> None:
        self.function, self.constants = function, constants
        self.options = {"num_warps": num_warps, "num_ctas": num_ctas}
        names = function.arg_names[: len(function.arg_names) - len(constants)]
        self._tensors = [i for i, name in enumerate(names) if name.endswith("_ptr")]
        self._numbers = [i for i, name in enumerate(names) if not name.endswith("_ptr")]
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self, n_programs: int, device: torch.device, *args: Any, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Launch in this stream, or in the current one. Unaligned addresses take Triton's slower path.

        Kernels see addresses and not strides: wrappers make their inputs contiguous.
        """
        if device.type != "cuda":  # the interpreter
            for i in self._tensors:
                assert args[i].is_contiguous(), f"a kernel was given a tensor with stride {args[i].stride()}"
            with _triton_lock:
                self.function[(n_programs,)](*args, *self.constants)
            return
        if torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self(n_programs, device, *args, stream=stream)
            return
        values, addresses = [*args], 0
        kinds: list[Any] = [device.index, *[-INT32 <= args[i] < INT32 for i in self._numbers]]
        for i in self._tensors:
            values[i] = address = args[i].data_ptr()
            addresses |= address
            kinds.append(args[i].dtype)
        if addresses % 16:
            with _triton_lock, torch.cuda.stream(stream):  # None: the current one
                self.function[(n_programs,)](*args, *self.constants, **self.options)
            return
        run, *compiled = self._compiled.get(key := tuple(kinds)) or self._compile(key, args)
        queue = torch._C._cuda_getCurrentRawStream(device.index) if stream is None else stream.cuda_stream
        run(n_programs, 1, 1, queue, *compiled, None, None, None, *values, *self.constants)

    def bind(self, n_programs: int, fixed: tuple[Any, ...], varying: tuple[Any, ...] = ()) -> Launch:
        """Return a launch with these arguments that takes values in place of `varying`."""
        device, function, constants = fixed[0].device, self.function, self.constants
        if n_programs == 0:
            return lambda *varying: None
        if device.type != "cuda":  # the interpreter

            def interpret(*given: Any) -> None:
                for own, bound in zip(given, varying, strict=True):
                    assert not isinstance(bound, Tensor) or own.dtype == bound.dtype, (own.dtype, bound.dtype)
                with _triton_lock:
                    function[(n_programs,)](*fixed, *given, *constants)

            return interpret
        index = device.index
        kinds = tuple(arg.dtype if isinstance(arg, Tensor) else type(arg) for arg in (*fixed, *varying))
        with torch.cuda.device(device):
            found = self._compiled.get((index, *kinds)) or self._compile((index, *kinds), (*fixed, *varying))
        run, *compiled = found
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in fixed]

        def launch(*varying: Any) -> None:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    launch(*varying)
                return
            last = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in varying]
            stream = torch._C._cuda_getCurrentRawStream(index)
            run(n_programs, 1, 1, stream, *compiled, None, None, None, *values, *last, *constants)

        return launch

    def _compile(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return Triton's launcher for the current device, without the hooks of its profiler.

        It takes half of the 30 µs that `compiled[grid](...)` takes on a slow host.
        """
        with _triton_lock:
            compiled = self.function.warmup(*args, *self.constants, **self.options, grid=(1,))
            run = compiled.run  # first: Triton loads the module then
            self._compiled[key] = run, compiled.function, compiled.packed_metadata
        return self._compiled[key]


@functools.cache
def shared_kernel(function: Any, *constants: Any, num_warps: int = 4) -> Kernel:
    """Return the kernel with these constants, always the same one."""
    return Kernel(function, *constants, num_warps=num_warps)
