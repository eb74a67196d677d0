"""CUDA graphs that are launched in no time: those that are a chain of kernels, and nothing else.

The driver has a short cut for them. A sort as torch captures it does not qualify, since it clears its memory
by nodes of another kind; so its graph is built once more, with kernels in their place.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from flatbed.kernels._triton import row_kernels
from flatbed.kernels._triton.launch import hidden_parameters

KERNEL, COPY, FILL = range(3)  # CU_GRAPH_NODE_TYPE_…
ON_DEVICE = 2  # CU_MEMORYTYPE_…
BLOCK = 4096  # bytes per program


class FillNode(Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("item_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class CopySide(Structure):
    """Half of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("level", c_size_t),
        ("kind", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class CopyNode(Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", CopySide),
        ("target", CopySide),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


class KernelNode(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("parameters", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


SIGNATURES = {
    "cuGraphGetRootNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphNodeGetDependentNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphNodeGetType": (c_void_p, POINTER(c_int)),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, POINTER(KernelNode)),
    "cuGraphMemsetNodeGetParams": (c_void_p, POINTER(FillNode)),
    "cuGraphMemcpyNodeGetParams": (c_void_p, POINTER(CopyNode)),
    "cuGraphKernelNodeCopyAttributes": (c_void_p, c_void_p),
    "cuGraphCreate": (POINTER(c_void_p), c_uint),
    "cuGraphAddKernelNode_v2": (
        POINTER(c_void_p),
        c_void_p,
        POINTER(c_void_p),
        c_size_t,
        POINTER(KernelNode),
    ),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
}


class Chain:
    """A graph that is ready to be launched."""

    def __init__(self, calls: dict[str, Any], handle: int) -> None:
        self._launch = calls["cuGraphLaunch"]
        self._handle = handle
        end = weakref.finalize(self, calls["cuGraphExecDestroy"], handle)  # one at work goes on to its end
        end.atexit = False  # the driver sees to it

    def launch(self, stream: int) -> bool:
        """Have it done in a stream; whether the driver agrees."""
        return not self._launch(self._handle, stream)


def chained(graph: torch.cuda.CUDAGraph) -> Chain | None:
    """A captured graph as a chain of kernels; None if it cannot be one.

    It must have been made with `keep_graph=True`, and has to stay: the memory that it works on is its own.
    """
    calls = _calls()
    if calls is None or not hasattr(graph, "raw_cuda_graph"):
        return None
    try:
        return _Building(calls).build(int(graph.raw_cuda_graph()))
    except (_NoChainError, RuntimeError):  # torch's, if it has not kept the graph
        return None


class _NoChainError(Exception):
    """Some graphs have branches, or do other things than run kernels, clear memory and copy it."""


class _Building:
    """Takes one graph apart, and makes another of it."""

    def __init__(self, calls: dict[str, Any]) -> None:
        self.calls = calls

    def build(self, graph: int) -> Chain:
        made = c_void_p()
        self._call("cuGraphCreate", byref(made), 0)
        try:
            last = None
            node = self._next("cuGraphGetRootNodes", graph)
            while node is not None:
                last = self._add(made, last, node)
                node = self._next("cuGraphNodeGetDependentNodes", node)
            handle = c_void_p()
            self._call("cuGraphInstantiateWithFlags", byref(handle), made, 0)
        finally:
            self.calls["cuGraphDestroy"](made)
        assert handle.value is not None
        return Chain(self.calls, handle.value)

    def _next(self, call: str, of: int) -> int | None:
        """The only node that follows."""
        nodes, n = (c_void_p * 2)(), c_size_t(2)
        self._call(call, of, nodes, byref(n))
        if n.value > 1:
            raise _NoChainError
        return nodes[0] if n.value else None

    def _add(self, graph: c_void_p, last: c_void_p | None, node: int) -> c_void_p:
        kind, params = c_int(), KernelNode()
        self._call("cuGraphNodeGetType", node, byref(kind))
        if kind.value == KERNEL:
            self._call("cuGraphKernelNodeGetParams_v2", node, byref(params))
        elif kind.value == FILL:
            params = self._filling(node)
        elif kind.value == COPY:
            params = self._copying(node)
        else:
            raise _NoChainError
        added = c_void_p()
        n_before = 0 if last is None else 1
        before = None if last is None else byref(last)
        self._call("cuGraphAddKernelNode_v2", byref(added), graph, before, n_before, byref(params))
        if kind.value == KERNEL:
            self._call("cuGraphKernelNodeCopyAttributes", added, node)
        return added

    def _filling(self, node: int) -> KernelNode:
        found = FillNode()
        self._call("cuGraphMemsetNodeGetParams", node, byref(found))
        of_one_byte = found.item_bytes == 1 or found.value == 0
        if found.height != 1 or not of_one_byte:
            raise _NoChainError
        return _launch_of(
            row_kernels.fill_bytes, found.width * found.item_bytes, found.target, found.value & 255
        )

    def _copying(self, node: int) -> KernelNode:
        found = CopyNode()
        self._call("cuGraphMemcpyNodeGetParams", node, byref(found))
        sides = found.source, found.target
        within = any(side.kind != ON_DEVICE or side.y or side.z or side.level for side in sides)
        if found.height != 1 or found.depth != 1 or within:
            raise _NoChainError
        return _launch_of(row_kernels.copy_bytes, found.width, *(side.device + side.x for side in sides))

    def _call(self, name: str, *arguments: Any) -> None:
        if self.calls[name](*arguments):
            raise _NoChainError


@functools.cache
def _calls() -> dict[str, Any] | None:
    """Of the driver; what a symbol of it takes never changes."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")  # a launch is not to let another thread take over
        calls = {name: getattr(library, name) for name in SIGNATURES}
    except (OSError, AttributeError):
        return None
    for name, arguments in SIGNATURES.items():
        calls[name].argtypes, calls[name].restype = arguments, c_int
    return calls


WIDE = 1 << 40  # so that all of them are taken for 64 bits


@functools.cache
def _compiled(function: Any, device: int) -> Any:
    compiled = function.warmup(WIDE, WIDE, WIDE, BLOCK=BLOCK, grid=(1,))
    compiled[(1, 1, 1)]  # loads it
    return compiled


def _launch_of(function: Any, n: int, *arguments: int) -> KernelNode:
    compiled = _compiled(function, torch.cuda.current_device())
    n_hidden = hidden_parameters(compiled, 3)
    if n_hidden is None:
        raise _NoChainError
    values = [c_uint64(value) for value in (n, *arguments, *[0] * n_hidden)]
    pointers = (c_void_p * len(values))(*map(ctypes.addressof, values))
    node = KernelNode()
    node.function = compiled.function
    node.grid[:] = (max(1, -(-n // BLOCK)), 1, 1)
    node.block[:] = (compiled.metadata.num_warps * 32, 1, 1)
    node.shared = compiled.metadata.shared
    node.parameters = ctypes.cast(pointers, POINTER(c_void_p))
    node.kept = values, pointers  # for as long as the node is described
    return node
