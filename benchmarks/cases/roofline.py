"""A step of Adam that clips, against the time of its memory traffic.

No model runs: parameters have the shapes of a model and random gradients, which are kept. The roofline is the
least that a step must read and write, at the speed of a plain copy. GPU time is read with all kernels queued
and the GPU's cache flushed; wall time includes `zero_grad`. A few parameters are compared with fp64 after all
timed steps.
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
N_CHECKED = 8
N_ELEMENTS = 4096


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
            "max_rel_error": probe.error(),
        }
        for name, probe in probes.items()
    }


class Probe:
    """One variant on parameters and gradients of its own: times, memory and correctness."""

    def __init__(
        self, make: Callable[..., Made], precision: Precision, shapes: Sequence[Any], device: torch.device
    ) -> None:
        self.device = device
        self.params = make_params(shapes, precision.dtype, device)
        max_norm = sum(param.numel() for param in self.params) ** 0.5  # of gradients of root mean square 1
        self.reference = Fp64Reference(self.params, max_norm)
        fill_gradients(self.params, scale=SCALES[0], seed=SEED)
        self.reference.see_gradients()
        self.grads = [param.grad for param in self.params]
        before = allocated_bytes(device)
        self.made = make(self.params, precision, max_norm)
        self.n_steps = self.made.n_steps
        for _ in range(WARM_UP):
            self.step()
        synchronize(device)
        self.kept_bytes = allocated_bytes(device) - before - _state_bytes(self.made.optimizer)
        self.step_bytes = self._measure_step_memory()
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None

    def step(self, _: object = None) -> None:
        self.made.step()
        self.n_steps += 1

    def step_and_zero(self, _: object) -> None:
        self.step()
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
        self.step()
        synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before if before else 0

    def error(self) -> float:
        """Compare all steps so far, and three more with gradients of changing size, with fp64."""
        self.prepare()
        self.reference.step(self.n_steps)
        error = self.reference.error(self.made.optimizer)
        for number, scale in enumerate(SCALES, 1):
            fill_gradients(self.params, scale=scale, seed=SEED + number)
            self.reference.see_gradients()
            self.step()
            self.reference.step()
        errors = torch.tensor([error, self.reference.error(self.made.optimizer)])
        return float(errors.max())  # nan, if there is one


class Fp64Reference:
    """The last elements of a few parameters, trained by torch's for-loop in fp64 on the same gradients."""

    def __init__(self, params: Sequence[Tensor], max_norm: float) -> None:
        self.params, self.max_norm = params, max_norm
        last = len(params) - 1
        self.originals = [params[i] for i in sorted({round(i * last / 7) for i in range(N_CHECKED)})]
        self.copies = [nn.Parameter(_end(param).double()) for param in self.originals]
        self.first = [copy.detach().clone() for copy in self.copies]
        self.optimizer = torch.optim.Adam(self.copies, lr=1e-3, foreach=False)

    def see_gradients(self) -> None:
        """Take the current gradients, clipped by the norm of all of them."""
        norms = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in self.params if p.grad is not None
        ]
        factor = min(1.0, self.max_norm / (float(torch.stack(norms).norm()) + 1e-6))
        for copy, original in zip(self.copies, self.originals, strict=True):
            assert original.grad is not None
            copy.grad = _end(original.grad).double() * factor

    def step(self, n_steps: int = 1) -> None:
        """Take steps with the gradients seen last."""
        for _ in range(n_steps):
            self.optimizer.step()

    @torch.no_grad()
    def error(self, optimizer: torch.optim.Optimizer) -> float:
        """Compare the trained parameters, or their fp32 master weights, with fp64; then go on from them."""
        found = []
        for param in self.originals:
            master = optimizer.state[param].get("master_weight")
            if master is not None and not torch.equal(_end(master).to(param.dtype), _end(param)):
                return float("inf")  # the parameter is not its rounded master weight
            found.append(_end(param if master is None else master).double())
        error = max_rel_error(found, [copy.detach() for copy in self.copies], self.first)
        for copy, weight in zip(self.copies, found, strict=True):
            copy.copy_(weight)
        self.first = found
        return error


def _end(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[-N_ELEMENTS:]


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
