"""A step of Adam that clips, against the time of its memory traffic.

No model runs: parameters have the shapes of a model and random gradients, which are kept. The roofline is the
least that a step must read and write, at the speed of a plain copy. GPU time is read with all kernels queued
and the GPU's cache flushed; wall time includes `zero_grad`. On a few small parameters, every variant is
compared with torch's for-loop in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import flatbed.optim
from benchmarks.cases.step import FOREACH, FUSED, LOOP, OPTIM, SCALES, TOLERANCE, max_rel_error
from benchmarks.harness import (
    SEED,
    Options,
    TorchGraph,
    allocated_bytes,
    call_in_turns,
    copy_gb_per_s,
    free_memory,
    gpu_ms,
    host_ms,
    synchronize,
)
from benchmarks.models import MODELS, Model
from benchmarks.rows import Row, percentiles, value_of

TURNS = 5
WARM_UP = 5
FLUSH_BYTES = 256 << 20  # several times the cache of any GPU
CHECKED_SHAPES = [torch.Size(shape) for shape in ((64, 96), (1000,), (7, 3, 5, 2), ())]


class Precision(NamedTuple):
    """Dtypes of a training run; optimizer state is fp32."""

    dtype: torch.dtype
    master_weights: bool

    @property
    def bytes_per_element(self) -> int:
        """Least traffic per element: gradient read twice (norm, update), parameter, two moments."""
        size = self.dtype.itemsize
        param = size + 2 * 4 if self.master_weights else 2 * size
        return 2 * size + param + 2 * 2 * 4


PRECISIONS = {
    "fp32": Precision(torch.float32, False),
    "bf16-master": Precision(torch.bfloat16, True),
}
CASES = ("gpt-like", "gpt-like:bf16-master", "resnet-like", "linear100")
Step = Callable[[], object]


class Made(NamedTuple):
    """An optimizer, and how to step and zero its gradients; a captured step keeps its gradients."""

    optimizer: torch.optim.Optimizer
    step: Step
    zero_grad: Step
    n_steps: int = 0
    """Steps that were taken already."""


def with_torch(params: list[Tensor], precision: Precision, max_norm: float, **implementation: bool) -> Made:
    """Use torch's Adam and clipping, both in the given implementation."""
    optimizer = torch.optim.Adam(params, lr=1e-3, **implementation)  # type: ignore[arg-type]

    def step() -> None:
        nn.utils.clip_grad_norm_(params, max_norm, foreach=implementation.get("foreach", True))
        optimizer.step()

    return Made(optimizer, step, optimizer.zero_grad)


def with_flatbed(
    params: list[Tensor], precision: Precision, max_norm: float, *, captured: bool = False
) -> Made:
    """Use flatbed.optim.Adam; `captured` replays the step alone as a CUDA graph."""
    optimizer = flatbed.optim.Adam(
        params, lr=1e-3, max_norm=max_norm, master_weights=precision.master_weights
    )
    if not captured:
        return Made(optimizer, optimizer.step, optimizer.zero_grad)
    graph = TorchGraph(lambda _: optimizer.step(), ())
    return Made(optimizer, lambda: graph(()), lambda: None, graph.WARM_UP)


def variants_of(model: Model, precision: Precision, *, on_gpu: bool) -> dict[str, Callable[..., Made]]:
    """List the variants of a case. Torch has no master weights, and its loop is too slow for large models."""
    found: dict[str, Callable[..., Made]] = {}
    if not precision.master_weights:
        if not model.is_large:
            found[LOOP] = partial(with_torch, foreach=False)
            found[FOREACH] = partial(with_torch, foreach=True)
        found[FUSED] = partial(with_torch, fused=True)
    found[OPTIM] = with_flatbed
    if on_gpu:
        found[f"{OPTIM}, captured"] = partial(with_flatbed, captured=True)
    return found


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for: `model` or `model:precision`."""
    device = options.device
    source = torch.rand((1 << 30) if options.on_gpu else (1 << 20), device=device)
    speed = 2 * copy_gb_per_s(torch.empty_like(source), source)  # reads and writes
    del source
    for case in options.cases or CASES:
        name, _, chosen = case.partition(":")
        if name not in MODELS or (chosen or "fp32") not in PRECISIONS:
            raise ValueError(f"unknown case {case!r}; there are {', '.join(MODELS)}, each with :bf16-master")
        yield from run_model(MODELS[name](device.type), chosen or "fp32", speed, options)


def run_model(model: Model, precision: str, speed: float, options: Options) -> Iterator[Row]:
    """Measure one model. Variants of a large model run one after another, all others in turns."""
    chosen, steps = PRECISIONS[precision], options.steps or 40
    with torch.device("meta"):
        shapes = [param.shape for param in model.build().parameters()]
    variants = options.choose(variants_of(model, chosen, on_gpu=options.on_gpu))
    groups = [{name: make} for name, make in variants.items()] if model.is_large else [variants]
    n_elements = sum(shape.numel() for shape in shapes)
    setting = {
        "model": model.name,
        "optimizer": "adam",
        "precision": precision,
        "parameters": len(shapes),
        "elements": n_elements,
    }
    roofline_ms = n_elements * chosen.bytes_per_element / (1e6 * speed)
    for group in groups:
        free_memory(options.device)
        probes = {name: Probe(make, chosen, shapes, options.device) for name, make in group.items()}
        for name, metrics in read(probes, steps, options).items():
            best = value_of(metrics["gpu_ms"] or metrics["wall_ms"])
            metrics |= {
                "max_rel_error": error_of(variants[name], chosen, options.device),
                "roofline_ms": roofline_ms,
                "roofline_ratio": best / roofline_ms,
                "copy_gb_per_s": speed,
                "bytes_per_element": chosen.bytes_per_element,
            }
            ok = metrics["max_rel_error"] <= TOLERANCE
            yield options.row(
                "roofline", "step", name, setting=setting, metrics=metrics, n_samples=steps, ok=ok
            )
        del probes
    free_memory(options.device)


def read(probes: dict[str, Probe], steps: int, options: Options) -> dict[str, dict[str, Any]]:
    """Read all clocks of all variants in turns."""
    common: dict[str, Any] = {
        "turns": min(TURNS, steps),
        "per_turn": -(-steps // TURNS),
        "warm_up": 0,
        "before": lambda name, _: probes[name].prepare(),
    }
    steppers = {name: probe.step for name, probe in probes.items()}
    whole = {name: probe.step_and_zero for name, probe in probes.items()}
    wall = call_in_turns(whole, lambda: None, options, **common)
    host = call_in_turns(steppers, lambda: None, options, clock=host_ms, **common)
    slowest = max(time for calls in host.values() for time in calls.times)
    clock = partial(gpu_ms, host_ms=3 * slowest)
    gpu = call_in_turns(steppers, lambda: None, options, clock=clock, **common) if options.on_gpu else {}
    return {
        name: {
            "gpu_ms": percentiles(gpu[name].times) if gpu else None,
            "wall_ms": percentiles(wall[name].times),
            "host_ms": percentiles(host[name].times) if gpu else None,
            "step_memory_bytes": probe.step_bytes if gpu else None,
            "kept_memory_bytes": probe.kept_bytes if gpu else None,
        }
        for name, probe in probes.items()
    }


class Probe:
    """One variant on parameters and gradients of its own: times and memory."""

    def __init__(
        self, make: Callable[..., Made], precision: Precision, shapes: Sequence[Any], device: torch.device
    ) -> None:
        self.device = device
        self.params = make_params(shapes, precision.dtype, device)
        fill_gradients(self.params, scale=SCALES[0], seed=SEED)
        self.grads = [param.grad for param in self.params]
        before = allocated_bytes(device)
        self.made = make(self.params, precision, max_norm_of(self.params))
        for _ in range(WARM_UP):
            self.made.step()
        synchronize(device)
        self.kept_bytes = allocated_bytes(device) - before - _state_bytes(self.made.optimizer)
        self.step_bytes = self._measure_step_memory()
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None

    def step(self, _: object) -> None:
        self.made.step()

    def step_and_zero(self, _: object) -> None:
        self.made.step()
        self.made.zero_grad()

    def prepare(self) -> None:
        """Restore the gradients, and flush the GPU's cache, as forward and backward would."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        if self.flush is not None:
            self.flush.sum()  # reads, so that nothing is left to be written back during the step

    def _measure_step_memory(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        before = allocated_bytes(self.device)
        self.made.step()
        synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before if before else 0


def error_of(make: Callable[..., Made], precision: Precision, device: torch.device) -> float:
    """Train small parameters on given gradients; return the distance from torch's for-loop in fp64."""
    params = make_params(CHECKED_SHAPES, precision.dtype, device)
    copies = [nn.Parameter(param.detach().double()) for param in params]
    first = [copy.detach().clone() for copy in copies]
    reference = torch.optim.Adam(copies, lr=1e-3, foreach=False)
    max_norm = max_norm_of(params)

    def step_reference(n_steps: int) -> None:
        for copy, param in zip(copies, params, strict=True):
            assert param.grad is not None
            copy.grad = param.grad.double()
        nn.utils.clip_grad_norm_(copies, max_norm, foreach=False)
        for _ in range(n_steps):
            reference.step()

    fill_gradients(params, scale=SCALES[0], seed=SEED)
    made = make(params, precision, max_norm)
    step_reference(made.n_steps)
    for number, scale in enumerate(SCALES, 1):
        fill_gradients(params, scale=scale, seed=SEED + number)
        step_reference(1)  # first, since torch's clipping changes the gradients of the variant
        made.step()
    found = [made.optimizer.state[param].get("master_weight", param.detach()) for param in params]
    if any(not torch.equal(w.to(p.dtype), p) for w, p in zip(found, params, strict=True)):
        return float("inf")  # a parameter is not its rounded master weight
    return max_rel_error([weight.double() for weight in found], [c.detach() for c in copies], first)


def max_norm_of(params: Sequence[Tensor]) -> float:
    """Return the norm of gradients of root mean square 1."""
    return float(sum(param.numel() for param in params) ** 0.5)


def make_params(shapes: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Make parameters of these shapes, with memory for their gradients."""
    generator = torch.Generator(device).manual_seed(SEED)
    params: list[Tensor] = []
    for shape in shapes:
        values = torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=generator)
        params.append(nn.Parameter(values))
        params[-1].grad = torch.zeros_like(values)
    return params


def fill_gradients(params: Sequence[Tensor], *, scale: float, seed: int) -> None:
    """Draw gradients of the given root mean square, in place."""
    generator = torch.Generator(params[0].device).manual_seed(seed)
    for param in params:
        assert param.grad is not None
        param.grad.normal_(std=scale, generator=generator)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors if t.is_cuda)
