"""Compiled kernels, and launches that cost little."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatbed.cuda.streams import another_than, relaxed_capture
from flatbed.kernels._triton import elementary

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@functools.cache
def element(function: Callable[..., Any]) -> Any:
    """A rule's function, compiled: it is written without Triton, which importing flatbed must not load."""
    for name, value in (("tl", tl), ("sqrt", elementary.sqrt)):
        function.__globals__.setdefault(name, value)
    return triton.jit(function)


class Kernel:
    """A kernel and its compiled forms.

    Triton's own launch looks at the type and alignment of every argument. Ours are tables of our own and
    never differ in either, so that a compiled form can be launched as it is, with addresses for tensors.
    """

    def __init__(self, function: Any, *, num_warps: int) -> None:
        self.function = function
        self.num_warps = num_warps
        self.compiled: dict[Any, Any] = {}

    def bind(self, n_programs: int, constants: tuple[Any, ...], *args: Any) -> Callable[..., None]:
        """A launch with these arguments, to be repeated. It takes the stream, and numbers and addresses
        (on the CPU: tensors) in place of the last arguments.
        """
        device = args[0].device
        if n_programs == 0:
            return _nothing
        if device.type != "cuda":  # the interpreter

            def interpret(stream: int, *last: Any) -> None:
                self.function[(n_programs,)](*args[: len(args) - len(last)], *last, *constants)

            return interpret
        key = (device.index, constants)
        with torch.cuda.device(device):
            if key not in self.compiled:
                self.compiled[key] = self.function.warmup(
                    *args, *constants, num_warps=self.num_warps, grid=(n_programs,)
                )
            compiled = self.compiled[key]
            launch = compiled[(n_programs, 1, 1)]  # loads it, too
        fixed = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]

        def through_triton(stream: int, *last: Any) -> None:
            launch(*fixed[: len(fixed) - len(last)], *last, *constants)

        return _direct(compiled, n_programs, args, through_triton) or through_triton


class Bound:
    """A kernel with its constants, launched with other arguments each time.

    Triton's own launch looks at every argument's value. Here its kind is enough, as long as all addresses are
    multiples of 16; if they are not, Triton looks.
    """

    def __init__(self, function: Any, constants: tuple[Any, ...], *, num_warps: int = 4) -> None:
        self.function, self.constants, self.num_warps = function, constants, num_warps
        self.compiled: dict[Any, Callable[..., None]] = {}

    def __call__(self, n_programs: int, device: torch.device, *args: Any) -> None:
        if device.type != "cuda":
            self.function[(n_programs,)](*args, *self.constants)
            return
        values: list[Any] = []
        kinds: list[Any] = [device.index]
        low = 0
        for arg in args:
            if isinstance(arg, Tensor):
                address = arg.data_ptr()
                low |= address
                values.append(address)
                kinds.append(arg.dtype)
            else:
                values.append(arg)
                kinds.append(arg.bit_length() > 31 if isinstance(arg, int) else float)
        if torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                self._launch(n_programs, device, args, values, tuple(kinds), low)
        else:
            self._launch(n_programs, device, args, values, tuple(kinds), low)

    def _launch(
        self,
        n_programs: int,
        device: torch.device,
        args: tuple[Any, ...],
        values: list[Any],
        kinds: tuple[Any, ...],
        low: int,
    ) -> None:
        if low & 15:
            self.function[(n_programs,)](*args, *self.constants, num_warps=self.num_warps)
            return
        launch = self.compiled.get(kinds)
        if launch is None:
            launch = self.compiled[kinds] = self._prepared(n_programs, args)
        launch(n_programs, torch._C._cuda_getCurrentRawStream(device.index), values)

    def _prepared(self, n_programs: int, args: tuple[Any, ...]) -> Callable[..., None]:
        constants = self.constants
        compiled = self.function.warmup(*args, *constants, num_warps=self.num_warps, grid=(n_programs,))
        compiled[(n_programs, 1, 1)]  # loads it

        def through_triton(n_programs: int, stream: int, values: list[Any]) -> None:
            compiled[(n_programs, 1, 1)](*values, *constants)

        call = _launch_kernel_holding_on()
        n_hidden = hidden_parameters(compiled, len(args))
        if call is None or n_hidden is None:
            return through_triton
        function = ctypes.c_void_p(compiled.function)
        n_threads, shared = compiled.metadata.num_warps * 32, compiled.metadata.shared
        # Eight bytes for each parameter, of which the kernel reads as many as it has.
        packing = struct.Struct("<" + "".join("f4x" if isinstance(arg, float) else "q" for arg in args))
        held = (ctypes.c_uint64 * (len(args) + n_hidden))()
        begin = ctypes.addressof(held)
        pointers = (ctypes.c_void_p * len(held))(*(begin + 8 * i for i in range(len(held))))
        pack, in_use = packing.pack_into, threading.Lock()
        take, give = in_use.acquire, in_use.release

        def directly(n_programs: int, stream: int, values: list[Any]) -> None:
            if not take(False):  # another thread has it
                through_triton(n_programs, stream, values)
                return
            try:
                pack(held, 0, *values)
                failed = call(function, n_programs, 1, 1, n_threads, 1, 1, shared, stream, pointers, None)
            finally:
                give()
            if failed:
                through_triton(n_programs, stream, values)

        return directly


def hidden_parameters(compiled: Any, n_args: int) -> int | None:
    """How many parameters a kernel has beside ours: pointers to memory that ours do not use."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", compiled.asm.get("ptx", ""), re.DOTALL)
    if entry is None or getattr(compiled.metadata, "num_ctas", 1) != 1:
        return None
    n_hidden = len(re.findall(r"\.param", entry[1])) - n_args
    return n_hidden if n_hidden >= 0 else None


def _nothing(stream: int, *last: Any) -> None:
    pass


@functools.cache
def _launch_kernel_holding_on() -> Any:
    """The same without letting another thread take over, which would cost more than the launch."""
    return _launch_kernel(ctypes.PyDLL)


@functools.cache
def _launch_kernel(library: Any = ctypes.CDLL) -> Any:
    """The driver's own launch, if there is one to be had."""
    if torch.version.cuda is None:
        return None
    try:
        launch = library("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    sizes = [ctypes.c_uint] * 7
    pointers = [ctypes.c_void_p] * 3
    launch.argtypes = [ctypes.c_void_p, *sizes, *pointers]
    return launch


def _direct(
    compiled: Any, n_programs: int, args: tuple[Any, ...], otherwise: Callable[..., None]
) -> Callable[..., None] | None:
    """A launch by the driver, without Triton's Python in between: 3 µs instead of 10.

    Kernels have parameters of Triton's beside ours, pointers to memory that ours do not use. Where the
    number of parameters cannot be made out, or the driver declines, Triton's way is taken.
    """
    launch, n_hidden = _launch_kernel(), hidden_parameters(compiled, len(args))
    if launch is None or n_hidden is None:
        return None
    values = [*map(_c_value, args), *(ctypes.c_uint64(0) for _ in range(n_hidden))]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    function = ctypes.c_void_p(compiled.function)
    n_threads, shared = compiled.metadata.num_warps * 32, compiled.metadata.shared
    n_args = len(args)

    def directly(stream: int, *last: Any) -> None:
        for at, value in enumerate(last, n_args - len(last)):
            values[at].value = value
        if launch(function, n_programs, 1, 1, n_threads, 1, 1, shared, stream, pointers, None):
            otherwise(
                stream, *last
            )  # a thread without a context, for example: Triton will see to it, or say so

    return directly


def _c_value(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_uint64(arg.data_ptr())
    return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int32(arg)


def address(tensor: Tensor) -> Any:
    """What a launch takes for a tensor."""
    return tensor.data_ptr() if tensor.device.type == "cuda" else tensor


@contextmanager
def outside_of_capture(device: torch.device, after: torch.cuda.Event | None) -> Iterator[bool]:
    """What is issued here, after an event, is done when it ends, though the current stream is capturing.

    Yields whether that can be had: a stream aside, and a thread that may wait for it.
    """
    with relaxed_capture() as relaxed:
        if not relaxed:
            yield False
            return
        aside = another_than(device, {torch.cuda.current_stream(device).cuda_stream})  # which is capturing
        with torch.cuda.stream(aside):
            if after is not None:
                aside.wait_event(after)
            yield True
        aside.synchronize()


class Stream:
    """The stream that a step is issued to. It may be another one each time, and it may be capturing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capturing = False
        self.handle = self._home = self._current()

    def _current(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def enter(self, memory: Callable[[], list[Tensor]]) -> None:
        """Look where we are. Memory that a foreign stream uses must not be given away before it is done."""
        if self.device.type != "cuda":
            return
        self.capturing = torch._C._cuda_isCurrentStreamCapturing()
        self.handle = self._current()
        if self.handle != self._home and not self.capturing:
            for tensor in memory():
                tensor.record_stream(torch.cuda.current_stream(self.device))
