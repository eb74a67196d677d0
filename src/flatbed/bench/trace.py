"""Chrome traces of a few steps, before and after: chrome://tracing and Perfetto show them."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from flatbed.bench.measure import Progress
from flatbed.bench.rows import FUSED, LOOP
from flatbed.bench.step import SEED, WARM_UP_STEPS, Setting, build_trainer, make_batches
from flatbed.bench.ways import MAX_NORM, OPTIM, Trainer, Way

# Ways that are traced, and what their files are called.
TRACED = {LOOP: "torch-loop", FUSED: "torch-fused", "flat following": "flat", OPTIM: "optim"}
STEPS = 3


def trace_path(path: Path, way: str) -> Path:
    """Where the trace of a way goes: out.json → out.torch-fused.json."""
    return path.with_name(f"{path.stem}.{TRACED[way]}{path.suffix or '.json'}")


def write_traces(setting: Setting, path: Path, *, progress: Progress = lambda stage: None) -> list[Path]:
    """Trace `STEPS` steps of those ways of the setting that are traced; returns the files."""
    paths = []
    for way in setting.ways:
        if way.name in TRACED:
            progress(f"{way.name}: trace")
            paths.append(trace_path(path, way.name))
            _trace(way, setting, paths[-1])
            gc.collect()
    return paths


def _trace(way: Way, setting: Setting, path: Path) -> None:
    trainer = build_trainer(way, setting)
    for batch in make_batches(setting, seed=SEED, count=WARM_UP_STEPS):
        trainer.backward(setting.case, batch)
        trainer.update()
    activities = [ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(setting.device)
    # Some versions of torch warn unless they are told to keep events.
    with profile(activities=activities, acc_events=True) as profiler:
        for number, batch in enumerate(make_batches(setting, seed=SEED, count=STEPS)):
            with record_function(f"step {number}"):
                _annotated_step(trainer, setting, batch)
        if setting.device.type == "cuda":
            torch.cuda.synchronize(setting.device)
    profiler.export_chrome_trace(str(path))


def _annotated_step(trainer: Trainer, setting: Setting, batch: tuple[torch.Tensor, ...]) -> None:
    with record_function("forward and backward"):
        trainer.backward(setting.case, batch)
    with record_function("clip"):
        trainer.clip(MAX_NORM)
    with record_function("optimizer"):
        trainer.optimizer.step()
    with record_function("zero_grad"):
        trainer.optimizer.zero_grad(set_to_none=True)
