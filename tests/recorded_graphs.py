"""CUDA graphs on a CPU: a capture records operations and launches without effect, a replay runs them.

`flatbed.capture` can be tested so without a GPU, all its logic included. There are no streams: what runs at
the same time on a GPU runs in the order of its launches here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from flatbed.capture import CapturedStep
from flatbed.kernels._triton import coefficients
from flatbed.kernels._triton.launch import Kernel
from tests.optim.conftest import place

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
VIEW = torch.ops.aten._unsafe_view.default  # of the memory of its input, unlike what it says


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`.

    A replay first overwrites all memory that was allocated in the capture: on a GPU, kernels of the graph
    share it, so that its contents are lost from one replay to the next.
    """

    current: RecordedGraph | None = None
    """The one that records now."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []
        self._allocated: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation, and return its results, whose values replays compute."""
        if func in WAITS:
            raise RuntimeError(f"{func} waits for the GPU: not permitted when a stream is capturing")
        kwargs = kwargs or {}
        call = partial(func, *args, **kwargs)
        if func._schema.is_mutable:
            self._calls.append(call)
            is_own = all(address(one) in self._allocated for one in tensors(args[0]))
            # Other memory does not change before a replay.
            return call() if is_own else args[0] if func._schema.returns else None
        if func is VIEW or any(one.alias_info for one in func._schema.returns):
            return call()  # its memory is that of another result
        made = without_values(func, args, kwargs) if tensors((args, kwargs)) else call()
        self._allocated |= {address(one): one for one in tensors(made)}
        self._calls.append(partial(self._compute, call, made))
        return made

    @staticmethod
    def _compute(call: Callable[[], object], results: Any) -> None:
        for result, value in zip(tensors(results), tensors(call()), strict=True):
            result.copy_(value)

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        self._calls.append(partial(kernel, *args, **kwargs))

    @contextmanager
    def capture(self) -> Iterator[None]:
        RecordedGraph.current = self
        try:
            with self:
                yield
        finally:
            RecordedGraph.current = None

    def replay(self) -> None:
        with torch.no_grad():
            for tensor in self._allocated.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
            for call in self._calls:
                call()


def without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Results of an operation as memory alone: its inputs have no values yet."""
    with FakeTensorMode():
        fakes = func(*tree_map_only(Tensor, empty, args), **tree_map_only(Tensor, empty, kwargs))
    return tree_map_only(Tensor, empty, fakes)


def empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class NoStream:
    """Stands for streams and events."""

    device, device_index = torch.device("cpu"), 0

    def nothing(self, *_: Any) -> None: ...

    wait_stream = record = synchronize = nothing


class RecordedStep(CapturedStep):
    """A captured step of batches on a CPU."""

    def begin(self, example_batch: Any) -> None:
        super().begin(example_batch)
        self._inputs = [torch.empty(*kind[:1], dtype=kind[1]) for kind in self._kinds]


@pytest.fixture(params=["recorded", pytest.param("cuda", marks=pytest.mark.gpu)])
def graph_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of steps that are captured: a GPU, or a CPU that records graphs."""
    if request.param == "recorded":
        record_graphs(monkeypatch)
    yield from place("cuda" if request.param == "cuda" else "interpreter", monkeypatch)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of batches on a CPU be captured."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    run = executor.__call__

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        graph = RecordedGraph.current
        if graph is None:
            run(kernel, *args, **kwargs)
        else:
            graph.launch(partial(run, kernel), *args, **kwargs)

    loaded: set[Any] = set()

    def check_loaded(kernel: Kernel, args: Sequence[Any]) -> None:
        """A kernel is compiled and loaded at its first launch, which CUDA refuses in a capture."""
        dtypes = [one.dtype for one in args if isinstance(one, Tensor)]
        kind = (kernel.function, kernel.constants, *kernel.options.values(), *dtypes)
        assert RecordedGraph.current is None or kind in loaded, f"the first launch of {kind} is in a capture"
        loaded.add(kind)

    call, bind = Kernel.__call__, Kernel.bind

    def checked_call(self: Kernel, n_programs: int, device: torch.device, *args: Any, **options: Any) -> None:
        check_loaded(self, args)
        call(self, n_programs, device, *args, **options)

    def checked_bind(
        self: Kernel, n_programs: int, fixed: tuple[Any, ...], varying: tuple[Any, ...] = ()
    ) -> Any:
        check_loaded(self, (*fixed, *varying))
        return bind(self, n_programs, fixed, varying)

    monkeypatch.setattr(Kernel, "__call__", checked_call)
    monkeypatch.setattr(Kernel, "bind", checked_bind)
    capture, graphs = (importlib.import_module(f"flatbed.{name}") for name in ("capture", "cuda.graph"))
    monkeypatch.setattr(executor, "__call__", launch)
    monkeypatch.setattr(capture, "CapturedStep", RecordedStep)
    for module in (capture, graphs):
        monkeypatch.setattr(module, "stream_for", lambda *_: NoStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: NoStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "Event", NoStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph.capture())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def is_capturing(device: torch.device) -> bool:
        return RecordedGraph.current is not None

    begin_step = coefficients.Coefficients.begin_step

    def begin_with_spare_tables(self: Any, addresses: list[int]) -> None:
        """As on a GPU, where eager steps allocate what later captures need."""
        sizes = len(self.table), len(self.groups), self.device
        while not is_capturing(self.device) and len(self._spare) < coefficients.CAPTURES:
            self._spare.append((coefficients.ArgumentTables(*sizes), coefficients.ArgumentTables(*sizes)))
        begin_step(self, addresses)

    monkeypatch.setattr(coefficients.Coefficients, "begin_step", begin_with_spare_tables)
    for name, module in [*sys.modules.items()]:
        if name.startswith("flatbed.") and hasattr(module, "is_capturing"):
            monkeypatch.setattr(module, "is_capturing", is_capturing)
