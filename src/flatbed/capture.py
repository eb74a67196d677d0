"""Capture of a whole training step in a CUDA graph."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

from flatbed.captured_grads import GRAD, SharedGrad, params_of, sharing_grads
from flatbed.cuda.graph import capture_step
from flatbed.cuda.streams import relaxed_capture, stream_for
from flatbed.data.batches import as_tensor
from flatbed.distributed.dense_shards import local_of
from flatbed.errors import FlatbedError
from flatbed.tables.captured_lookups import (
    CapturedLookup,
    NotedLookup,
    allocate_lookups,
    capture_context,
    not_prefetched,
)
from flatbed.tables.config import device_of
from flatbed.tables.ids import NO_ERROR, DeferredIdChecks
from flatbed.tables.lookup import prepare_replay

WARM_UP = 3
"""Calls before the capture: kernels are compiled, and optimizers and tables allocate, in the first ones."""
CHANGED_NUMBERS = (
    "hyperparameters of an optimizer have changed: three calls run as they are, and the next one captures "
    "the training step again, unless they change at every call. Give a learning rate that a scheduler "
    "changes as a tensor on the GPU"
)
REPLACED_GRADS = (
    "gradients that the training step uses were dropped or replaced outside of it: three calls run as they "
    "are, and the next one captures it again. Call zero_grad(set_to_none=False) outside"
)


def capture(
    train_step: Callable[[Any], Any], example_batch: Any = None, *, device: Any = None
) -> Callable[[Any], Any]:
    """Return a function that runs `train_step` as one CUDA graph, with the same results.

    - `train_step`: a function of one batch that looks up, computes the loss, calls `backward()`, the
      optimizer's `step()` and `zero_grad()`, and returns tensors, for example the loss. Gradients that
      pass from code outside to a step, or back, must stay where they are, by
      ``zero_grad(set_to_none=False)``. It must not read values of GPU tensors (`.item()`, `print`), and it
      runs on one stream. Python code in it does not run in replays: call learning rate schedulers outside
      of it.
    - `example_batch`: a batch (nested dicts, lists and tuples of tensors or arrays) with the shapes and
      dtypes of all batches, by default the first one. Its values are not used.
    - `device`: the GPU of the training step, by default the device of the tensors in the example.

    Every call is one training step. The first three run as they are. The fourth captures the graph; it and
    later calls copy the batch into the graph's inputs and replay it. The tensors that a call returns are its
    own: later calls do not change them. A batch of another shape runs `train_step` itself, and warns once.
    Three calls run as they are, and the next one captures again, after a change that the graph cannot follow:
    other memory, a frozen parameter, a backward pass outside, a gradient that the graph uses and code outside
    drops, another hyperparameter. Each of the last two warns once. With a float that changes at every call
    (a scheduler), no call uses a graph: `lr=torch.tensor(1e-3, device="cuda")` may change. Ids out of range
    raise IndexError in the next call at the latest. The GPU reads a batch in pinned memory after the call has
    returned: do not write to it again. Rows of batches of a `Prefetcher` are prefetched for captured steps,
    too, if all lookups in tables with a cache are of ids of the batch as they are; otherwise a warning names
    a table. On a CPU there is no graph: every call checks the batch in the same way and runs `train_step`.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(1000, 8)
    >>> optimizer = flatbed.optim.Adam(emb.parameters(), lr=0.01)
    >>> def train_step(ids):
    ...     loss = emb(ids).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     return loss
    >>> batches = torch.randint(1000, (5, 64))
    >>> step = flatbed.capture(train_step)
    >>> losses = [step(batch) for batch in batches]
    """
    if not callable(train_step):
        raise TypeError(f"train_step must be a function of a batch; found {type(train_step).__name__}")
    step = CapturedStep(train_step, None if device is None else device_of(device))
    if example_batch is not None:
        step.begin(example_batch)
    return step


@dataclass(eq=False)
class StepGraph:
    """A captured training step, and what the host does before and after each replay."""

    graph: torch.cuda.CUDAGraph
    outputs: Any
    """In the memory of the graph, which every replay writes again."""
    lookups: list[CapturedLookup]
    """Lookups of prefetched rows."""
    checks: list[DeferredIdChecks]
    positions: Tensor
    """In pinned memory: for each check the first position out of range, which every replay writes."""
    replayed: deque[torch.cuda.Event]
    """After the last replay, and after the one before it."""
    grads: list[SharedGrad]
    """Gradients from outside of the step, which must stay where they are."""

    def __del__(self) -> None:
        """Wait for the last replay, since it may still write `positions`, whose memory is used again."""
        with suppress(RuntimeError), relaxed_capture():
            self.replayed[0].synchronize()


class CapturedStep:
    """A training step that replays a CUDA graph. `capture` makes it."""

    def __init__(self, train_step: Callable[[Any], Any], device: torch.device | None) -> None:
        self._train_step = train_step
        self._wanted_device, self._device = device, torch.device("cpu")
        self._names: list[str] = []
        """Of the leaves of the example."""
        self._structure: Any = None
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._inputs: list[Tensor] = []
        """Memory of the graph; none on a CPU, where there is no graph."""
        self._n_warm_ups = 0
        """Calls that ran as they are since the last change that a graph cannot follow, at most `WARM_UP`."""
        self._noted: list[NotedLookup] = []
        """Lookups of the last warm-up. If one is not of a prefetched leaf, the graph admits all rows."""
        self._optimizers: list[torch.optim.Optimizer] = []
        """Those whose steps ran in the last warm-up."""
        self._built_from: list[Any] = []
        """The `_fingerprint` at the start of the last call."""
        self._hyperparameters: list[Any] = []
        """At the start of the last call: a graph has them as constants."""
        self._graph: StepGraph | None = None
        self._warned: set[str] = set()

    def begin(self, example_batch: Any) -> None:
        """Take the structure, shapes and device of all batches from an example."""
        leaves, structure = tree_flatten(example_batch)
        self._names = _names(example_batch)
        tensors = [*map(_tensor, leaves, self._names)]
        if not tensors:
            raise ValueError(f"a batch has no tensor; found {type(example_batch).__name__}")
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if self._wanted_device is None and len(devices) > 1:
            raise ValueError(f"a batch is on several GPUs: {', '.join(sorted(map(str, devices)))}")
        self._device = device = self._wanted_device or next(iter(devices), torch.device("cpu"))
        held = tensors if device.type == "cuda" else []
        self._inputs = [torch.empty_like(tensor, device=device) for tensor in held]
        self._kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._n_warm_ups = 0
        self._structure = structure  # last: the example fits

    def __call__(self, batch: Any) -> Any:
        if self._structure is not None:
            return self._run(batch)
        self.begin(batch)
        try:
            return self._run(batch)
        except BaseException:
            self._structure = None  # the next batch may be a better example
            raise

    def _run(self, batch: Any) -> Any:
        leaves, structure = tree_flatten(batch)
        names = self._names if structure == self._structure else _names(batch)
        leaves = [*map(_tensor, leaves, names)]
        kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        is_known = structure == self._structure and self._kinds == kinds
        if not is_known:
            self._warn_once("batch", self._describe(kinds, structure))
        if not is_known or not self._inputs:
            return self._run_without_graph(leaves, structure)
        for static, leaf in zip(self._inputs, leaves, strict=True):
            static.copy_(leaf, non_blocking=True)
        self._follow_changes()
        if self._n_warm_ups < WARM_UP:
            return self._warm_up(leaves)
        if self._graph is None:
            self._graph = self._capture(leaves)
        if not prepare_replay(self._graph.lookups, leaves):
            self._graph, self._n_warm_ups = None, 0
            return self._warm_up(leaves)
        self._graph.graph.replay()
        result = tree_map_only(Tensor, Tensor.clone, self._graph.outputs)
        if self._graph.checks:
            self._check_ids(self._graph)
        return result

    def _follow_changes(self) -> None:
        """Drop the graph after a change that it cannot follow. The next calls are warm-ups then."""
        built_from, numbers = _fingerprint(self._noted, self._optimizers), _hyperparameters(self._optimizers)
        shared = [] if self._graph is None else self._graph.grads
        warning = ""
        if not all(one.is_kept() for one in shared):
            warning = REPLACED_GRADS
        elif numbers != self._hyperparameters:
            warning = CHANGED_NUMBERS
        if (warning or built_from != self._built_from) and self._n_warm_ups == WARM_UP:
            self._graph, self._n_warm_ups = None, 0  # first: Control-C may come after any line
            if warning:
                self._warn_once(warning, warning, stacklevel=5)
        self._built_from, self._hyperparameters = built_from, numbers

    def _warm_up(self, leaves: list[Tensor]) -> Any:
        """Run a step as it is."""
        result = self._run_in_side_stream(leaves)
        self._n_warm_ups += 1  # unless it has failed
        return result

    def _run_without_graph(self, leaves: list[Tensor], structure: Any) -> Any:
        to_gpu = self._device.type == "cuda"  # a step on the host reads the batch at once
        batch = tree_unflatten([leaf.to(self._device, non_blocking=to_gpu) for leaf in leaves], structure)
        with capture_context([], []) as context:
            result = self._train_step(batch)
        devices = {table._store.device for table, _ in context.noted}
        if not self._inputs and (gpu := next((one for one in devices if one.type == "cuda"), None)):
            self._warn_once(
                "device",
                "no batch is on a GPU, and the training step looks up tables there: it runs without a CUDA "
                f'graph. Call flatbed.capture with device="{gpu}"',
                stacklevel=5,
            )
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), result)

    def _check_ids(self, graph: StepGraph) -> None:
        """Raise for bad ids of the call before this one. This call runs on the GPU meanwhile."""
        graph.replayed.rotate()
        graph.replayed[0].record(torch.cuda.current_stream(self._device))
        graph.replayed[1].synchronize()
        for check, position in zip(graph.checks, graph.positions.tolist(), strict=True):
            if position != NO_ERROR:
                check.check_graphs()

    def _run_in_side_stream(self, leaves: list[Tensor]) -> Any:
        """Run a step as it is; not in the default stream, on which nothing can be captured."""
        current, side = torch.cuda.current_stream(self._device), stream_for(self._device, "captures")
        side.wait_stream(current)
        try:
            with (
                torch.cuda.stream(side),
                capture_context(self._inputs, leaves) as context,
                stepping_optimizers() as self._optimizers,
            ):
                result = self._train_step(tree_unflatten(self._inputs, self._structure))
        finally:  # after an error, too: a part of the step has been issued
            current.wait_stream(side)
        self._noted = context.noted
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), result)

    def _capture(self, leaves: list[Tensor]) -> StepGraph:
        graph = torch.cuda.CUDAGraph()
        others = not_prefetched(self._noted, leaves)
        if others and any(table._prefetched for table, _ in self._noted):
            self._warn_once(
                "rows",
                f"the training step looks up rows of {others[0]!r} otherwise than by a training lookup of a "
                "prefetched tensor of its batch as it is: the CUDA graph admits the rows of all tables, and "
                "no more are prefetched",
                stacklevel=5,
            )
            for table, _ in self._noted:
                if table._store.cache is not None:
                    table._store.cache.has_warned = True
        n_tables = len({id(table) for table, _ in self._noted})
        pinned = self._device.type == "cuda"  # which a capture cannot allocate
        positions = torch.full((n_tables,), NO_ERROR, dtype=torch.int64, device="cpu", pin_memory=pinned)
        lookups = [] if others else allocate_lookups(self._noted, leaves)
        try:
            with (
                sharing_grads(self._optimizers) as grads,
                capture_context(self._inputs, leaves, lookups) as context,
                stepping_optimizers() as optimizers,
            ):
                with capture_step(graph, self._device):
                    outputs = self._train_step(tree_unflatten(self._inputs, self._structure))
                    if len(context.checks) > n_tables:
                        raise FlatbedError("it looks up more tables than in the call before")
                    for i, check in enumerate(context.checks):
                        assert check.graph_error is not None
                        positions[i : i + 1].copy_(check.graph_error, non_blocking=True)
                if optimizers != self._optimizers:
                    raise FlatbedError("its optimizers do not take the same steps in each call")
        except (RuntimeError, FlatbedError) as error:
            raise FlatbedError(f"train_step cannot be captured in a CUDA graph: {error}") from error
        return StepGraph(
            graph,
            # Without the autograd graph, whose nodes would tie later captures to this stream.
            tree_map_only(Tensor, Tensor.detach, outputs),
            [lookup for lookup in lookups if lookup.batch is not None],
            context.checks,
            positions[: len(context.checks)],
            deque([torch.cuda.Event(), torch.cuda.Event()]),  # type: ignore[no-untyped-call,unused-ignore]
            grads,
        )

    def _describe(self, kinds: list[tuple[torch.Size, torch.dtype]], structure: Any) -> str:
        """Say how a batch differs from the example."""
        found, remedy = "a batch has other keys, another order or another nesting than the example", ""
        if structure == self._structure:
            both = zip(self._names, kinds, self._kinds, strict=True)
            name, new, old = next(one for one in both if one[1] != one[2])
            found = f"{name} is {new[1]} of shape {tuple(new[0])}"
            found += f", and that of the example batch is {old[1]} of shape {tuple(old[0])}"
            remedy = ". DataLoader(drop_last=True) leaves out a short last batch" if new[1] == old[1] else ""
        effect = ": it runs without the CUDA graph, with the same result" if self._inputs else ""
        return f"{found}{effect}{remedy}"

    def _warn_once(self, about: str, message: str, *, stacklevel: int = 4) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, stacklevel=stacklevel)


@contextmanager
def stepping_optimizers() -> Iterator[list[torch.optim.Optimizer]]:
    """Yield a list of the optimizers whose `step` is called in the body."""
    found: list[torch.optim.Optimizer] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: found.append(optimizer))
    try:
        yield found
    finally:
        hook.remove()


class _Same:
    """Equal to another one of the same object."""

    def __init__(self, value: object) -> None:
        self._value = value  # kept, so that no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # type: ignore[assignment]


def _fingerprint(noted: list[NotedLookup], optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return what a graph cannot follow: memory that is replaced, parameters that are frozen or added, and
    gradients from outside of the step.

    An optimizer that loads a state dict has another `state` then.
    """
    found: list[Any] = []
    for table, _ in noted:
        store, cache = table._store, table._store.cache
        found += [store.version, store.device, table._needs_grad, not table._grads.parts]
        found.append(None if cache is None else weakref.ref(cache))
    for optimizer in optimizers:
        found += [_Same(optimizer.state), len(optimizer.state)]
    with torch._C.DisableTorchFunctionSubclass():
        for p in params_of(optimizers):
            found += [p.requires_grad, local_of(p).data_ptr(), GRAD.__get__(p) is None]
    return found


def _names(batch: Any) -> list[str]:
    """Return names of the leaves, as Python would index them."""
    return [f"batch{keystr(path)}" for path, _ in tree_flatten_with_path(batch)[0]]


def _tensor(leaf: Any, name: str) -> Tensor:
    found = as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
    if isinstance(found, Tensor):
        return found
    what = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
    remedy = "pass a batch without it" if name != "batch" else "nested dicts, lists and tuples can hold them"
    raise TypeError(
        f"a captured step takes batches of tensors and arrays of numbers; found {what} in {name}: {remedy}"
    )


def _hyperparameters(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return what a graph holds as constants: numbers, but not tensors on a GPU, which it reads."""
    found: list[Any] = []
    for optimizer in optimizers:
        found.append(getattr(optimizer, "max_norm", None))
        for group in optimizer.param_groups:
            for name, value in group.items():
                if isinstance(value, Tensor):
                    found.append(_Same(value) if value.is_cuda else value.item())
                elif name not in ("params", "param_names"):
                    found.append(value)
    return found
