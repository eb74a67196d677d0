"""The kernels of one clipping, optimizer step and zero_grad, as torch's profiler sees them.

Every kernel, copy and fill is an interval since the call began, and `--png` draws them as bars. On a CPU the
intervals are those of torch's operators. The profiler slows the host down: gaps between kernels are longer
than without it, the kernels themselves are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import harness, trainers
from benchmarks.cases.step import WARM_UP, prepare
from benchmarks.harness import SEED, Options
from benchmarks.models import MODELS, Model
from benchmarks.rows import Row

CASES = ("resnet-like", "linear100", "vit-b16")
VARIANTS = (trainers.LOOP, trainers.FUSED, "flatbed ContiguousParams", "flat bound, one call", trainers.OPTIM)
MARK = "benchmarks.update"
Interval = tuple[float, float]
"""Begin and length, in µs since the call began."""


def run(options: Options) -> Iterator[Row]:
    """Trace the models that were asked for; without a name, ResNet-50."""
    for name in options.cases or CASES[:1]:
        yield from run_model(MODELS[name](options.device.type), options)


def run_model(model: Model, options: Options) -> Iterator[Row]:
    """Trace one update of every variant, the second one under a profiler."""
    generator = torch.Generator(options.device).manual_seed(SEED + 1)
    for name, setup in options.choose({name: trainers.VARIANTS[name] for name in VARIANTS}).items():
        batches = [model.make_batch(generator) for _ in range(WARM_UP)]
        made = prepare(setup, model, "adamw", batches)
        for batch in batches[:2]:
            made.trainer.backward(batch)
            intervals = trace(made.trainer, options.device)
        sizes = [param.numel() for param in made.trainer.model.parameters()]
        setting = {"model": model.name, "optimizer": "adamw", "parameters": len(sizes)}
        metrics: dict[str, Any] = {
            "kernels": len(intervals),
            "span_ms": max(begin + length for begin, length in intervals) / 1e3,
            "busy_ms": sum(length for _, length in intervals) / 1e3,
            "timeline": [[round(begin, 1), round(length, 2)] for begin, length in intervals],
        }
        ok = made.max_rel_error <= trainers.TOLERANCE
        yield options.row("trace update", name, setting, metrics, n_samples=1, ok=ok)
        del made
        harness.free_memory(options.device)


def trace(trainer: trainers.Trainer, device: torch.device) -> list[Interval]:
    """Record one update: what ran on the device; on a CPU, operators that no other operator called."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    harness.synchronize(device)
    with profile(activities=kinds, acc_events=True) as profiler:
        with record_function(MARK):
            trainer.update()
        harness.synchronize(device)
    events = profiler.events() or []
    call = next(e for e in events if e.name == MARK and e.device_type.name == "CPU")
    if on_gpu:
        chosen = [e for e in events if e.device_type.name == "CUDA" and e.name != MARK]
    else:
        chosen = [e for e in events if e.cpu_parent is not None and not _is_called_by_operator(e)]
    begin = call.time_range.start
    found = [(e.time_range.start - begin, e.time_range.end - e.time_range.start) for e in chosen]
    return sorted((start, length) for start, length in found if length > 0)


def _is_called_by_operator(event: Any) -> bool:
    parent = event.cpu_parent
    return parent.name.startswith("aten::") or not event.name.startswith("aten::")
