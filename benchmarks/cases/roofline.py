"""A step of Adam that clips, against the time of its memory traffic.

No model runs: parameters have the shapes of a model and random gradients, which are kept. The roofline is the
least that a step must read and write, at the speed of a plain copy. GPU time is read with all kernels queued
and the GPU's cache flushed; wall time includes `zero_grad`. On a few small parameters, every variant is
compared with torch's for-loop in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness, trainers
from benchmarks.harness import SEED, Clock, Options, Plan, Readings, each, time_in_turns
from benchmarks.models import MODELS, Loss, Model
from benchmarks.rows import Row, percentiles, value_of
from benchmarks.trainers import FUSED, OPTIM, Setup, TorchGraph, Trainer, make_params

TURNS = 5
WARM_UP = 5  # the fourth call is captured
FLUSH_BYTES = 256 << 20  # several times the cache of any GPU
CASES = ("gpt-like", "gpt-like:bf16-master", "resnet-like", "linear100")
SHIFTED = f"{OPTIM}, gradients 4 bytes off"  # no gradient begins at a multiple of 16 bytes


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


PRECISIONS = {"fp32": Precision(torch.float32, False), "bf16-master": Precision(torch.bfloat16, True)}


def with_captured_step(model: nn.Module, loss: Loss, name: str, max_norm: float, **more: Any) -> Trainer:
    """Use flatbed.optim with the step alone as a CUDA graph, which reads gradients where they are."""
    return _captured(trainers.with_flatbed(model, loss, name, max_norm, **more))


def with_captured_torch(model: nn.Module, loss: Loss, name: str, max_norm: float) -> Trainer:
    """Use torch's fused optimizer and `clip_grad_norm_`, both in one CUDA graph."""
    return _captured(trainers.with_torch(model, loss, name, max_norm, fused=True, capture=TorchGraph))


def _captured(trainer: Trainer) -> Trainer:
    """Capture the step alone. Gradients keep their addresses, which the graph has recorded."""
    graph, zero_grad = TorchGraph(lambda _: trainer.step(), ()), trainer.optimizer.zero_grad
    step, zero = partial(graph, ()), partial(zero_grad, set_to_none=False)
    return Trainer(trainer.model, trainer.loss, trainer.optimizer, step, zero)


def variants_of(model: Model, precision: Precision, *, on_gpu: bool) -> dict[str, Setup]:
    """List the variants of a case. Torch has no master weights, and its loop is too slow for large models."""
    names = (FUSED,) if model.is_large else (trainers.LOOP, trainers.FOREACH, FUSED)
    found = {} if precision.master_weights else {name: trainers.VARIANTS[name] for name in names}
    found[OPTIM] = partial(trainers.with_flatbed, master_weights=precision.master_weights)
    if not precision.master_weights:
        found[SHIFTED] = found[OPTIM]
    if on_gpu and not precision.master_weights:
        found[f"{FUSED}, captured"] = with_captured_torch
    if on_gpu:
        found[f"{OPTIM}, captured"] = partial(with_captured_step, master_weights=precision.master_weights)
    return found


def run(options: Options) -> Iterator[Row]:
    """Measure the cases that were asked for: `model` or `model:precision`."""
    device = options.device
    source = torch.rand((1 << 30) if options.on_gpu else (1 << 20), device=device)
    speed = 2 * harness.copy_gb_per_s(torch.empty_like(source), source)  # reads and writes
    del source
    for case in options.cases or CASES:
        name, _, precision = case.partition(":")
        if name not in MODELS or (precision or "fp32") not in PRECISIONS:
            raise ValueError(f"unknown case {case!r}; there are {', '.join(MODELS)}, each with :bf16-master")
        yield from run_model(MODELS[name](device.type), precision or "fp32", speed, options)


def run_model(model: Model, precision: str, speed: float, options: Options) -> Iterator[Row]:
    """Measure one model. Variants of a large model run one after another, all others in turns."""
    chosen, steps = PRECISIONS[precision], options.steps or 40
    with torch.device("meta"):
        shapes = [param.shape for param in model.build().parameters()]
    variants = options.choose(variants_of(model, chosen, on_gpu=options.on_gpu))
    n_elements = sum(shape.numel() for shape in shapes)
    setting: dict[str, Any] = {"model": model.name, "optimizer": "adam", "precision": precision}
    setting |= {"parameters": len(shapes), "elements": n_elements}
    roofline_ms = n_elements * chosen.bytes_per_element / (1e6 * speed)
    for group in [[name] for name in variants] if model.is_large else [[*variants]]:
        harness.free_memory(options.device)
        probes = {
            name: Probe(variants[name], shapes, chosen.dtype, options.device, shifts=name == SHIFTED)
            for name in group
        }
        for name, metrics in read_clocks(probes, steps, options).items():
            metrics |= {
                "max_rel_error": trainers.max_rel_error(variants[name], "adam", options.device, chosen.dtype),
                "roofline_ms": roofline_ms,
                "roofline_ratio": value_of(metrics["gpu_ms"] or metrics["wall_ms"]) / roofline_ms,
                "copy_gb_per_s": speed,
                "bytes_per_element": chosen.bytes_per_element,
            }
            ok = metrics["max_rel_error"] <= trainers.TOLERANCE
            yield options.row("roofline step", name, setting, metrics, n_samples=steps, ok=ok)
        del probes
    harness.free_memory(options.device)


def read_clocks(probes: dict[str, Probe], steps: int, options: Options) -> dict[str, dict[str, Any]]:
    """Read all clocks of all variants in turns."""
    plan = Plan(min(TURNS, steps), warm_up=0, synchronized=-(-steps // TURNS))

    def read(clock: Clock, step: str) -> dict[str, Readings]:
        return time_in_turns(
            {name: each(getattr(probe, step)) for name, probe in probes.items()},
            lambda n: [None] * n,
            plan,
            options,
            clock=clock,
            before=lambda name, _: probes[name].prepare(),
        )

    wall, host = read(harness.wall_ms, "step_and_zero"), read(harness.host_ms, "step")
    slowest = max(max(readings.synchronized) for readings in host.values())
    gpu = read(partial(harness.gpu_ms, host_ms=3 * slowest), "step") if options.on_gpu else {}
    return {
        name: {
            "gpu_ms": percentiles(gpu[name].synchronized) if gpu else None,
            "wall_ms": percentiles(wall[name].synchronized),
            "host_ms": percentiles(host[name].synchronized) if gpu else None,
            "step_memory_bytes": probe.step_bytes if gpu else None,
            "kept_memory_bytes": probe.kept_bytes if gpu else None,
        }
        for name, probe in probes.items()
    }


class Probe:
    """One variant on parameters and gradients of its own: times and memory."""

    def __init__(
        self,
        setup: Setup,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        shifts: bool,
    ) -> None:
        self.params = make_params(shapes, device, dtype)
        self.grads = trainers.draw_gradients(self.params, scale=trainers.SCALES[0], seed=SEED)
        if shifts:
            self.grads = [_shifted(grad) for grad in self.grads]
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None
        before = harness.allocated_bytes(device)
        self.trainer = setup(self.params, trainers.given_loss, "adam", trainers.norm_to_clip(self.params))
        for _ in range(WARM_UP):
            self.prepare()
            self.trainer.step()
        harness.synchronize(device)
        self.kept_bytes = harness.allocated_bytes(device) - before - _state_bytes(self.trainer.optimizer)
        before = harness.reset_peak(device)
        self.trainer.step()
        self.step_bytes = harness.peak_bytes(device) - before

    def step(self, _: object) -> None:
        self.trainer.step()

    def step_and_zero(self, _: object) -> None:
        self.trainer.step()
        self.trainer.optimizer.zero_grad()

    def prepare(self) -> None:
        """Restore the gradients, and flush the GPU's cache, as forward and backward would."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        if self.flush is not None:
            self.flush.sum()  # reads, so that nothing is left to be written back during the step


def _shifted(grad: Tensor) -> Tensor:
    """Copy a gradient to an address that is one element off the boundaries of the allocator."""
    return torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(grad.shape)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors if t.is_cuda)
