"""Training steps of five models: clipping, optimizer step and zero_grad alone, and whole steps.

On small parameters with given gradients, every variant is compared with torch's for-loop in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import harness, trainers
from benchmarks.harness import SEED, Options, Plan, each, time_in_turns
from benchmarks.models import MODELS, Batch, Model
from benchmarks.rows import Row, percentiles
from benchmarks.trainers import CAPTURED, OPTIMIZERS, VARIANTS, Setup, Trainer

CASES = (*MODELS, "resnet-like:sgd")
MAX_NORM = 1.0
TURNS = 5
WARM_UP = 5  # flatbed.capture captures the fourth call
BLOCK_STEPS = 5
LARGE = (trainers.FUSED, trainers.OPTIM)
"""Variants of large models, which take 25 GB each."""


def run(options: Options) -> Iterator[Row]:
    """Measure the models that were asked for, under AdamW or, for `model:optimizer`, another optimizer."""
    for case in options.cases or CASES:
        name, _, optimizer = case.partition(":")
        if name not in MODELS or (optimizer or "adamw") not in OPTIMIZERS:
            known = f"{', '.join(MODELS)}, each with :{', :'.join(OPTIMIZERS)}"
            raise ValueError(f"unknown case {case!r}; there are {known}")
        yield from run_model(MODELS[name](options.device.type), optimizer or "adamw", options)


def run_model(model: Model, optimizer: str, options: Options) -> Iterator[Row]:
    """Measure one model. Variants of a large model run one after another, all others in turns."""
    known = {**VARIANTS, **(CAPTURED if options.on_gpu else {})}
    variants = options.choose({name: known[name] for name in LARGE} if model.is_large else known)
    for group in [{name: setup} for name, setup in variants.items()] if model.is_large else [variants]:
        yield from run_variants(group, model, optimizer, options)
        harness.free_memory(options.device)


def run_variants(variants: dict[str, Setup], model: Model, optimizer: str, options: Options) -> Iterator[Row]:
    """Time variants in turns: updates alone, then whole steps in blocks."""
    device, steps = options.device, options.steps or model.steps
    generator = torch.Generator(device).manual_seed(SEED + 1)

    def draw(n_batches: int) -> list[Batch]:
        return [model.make_batch(generator) for _ in range(n_batches)]

    made: dict[str, Trainer] = {}
    shared: dict[str, Any] = {"model": model.name, "optimizer": optimizer}
    errors, memory = {}, {}
    for name, setup in variants.items():
        try:
            errors[name] = trainers.max_rel_error(setup, optimizer, device)
            before = harness.allocated_bytes(device)
            built = build(model, device)
            sizes = [param.numel() for param in built.parameters()]
            made[name] = setup(built, model.loss, optimizer, MAX_NORM)
            batches = draw(WARM_UP)
            harness.reset_peak(device)
            for batch in batches:
                made[name].train(batch)
            memory[name] = harness.peak_bytes(device) - before
            shared |= {"parameters": len(sizes), "elements": sum(sizes)}
        except Exception as error:
            options.skip(name, error)
    turns, block = min(TURNS, steps), BLOCK_STEPS if options.on_gpu else 1
    eager = {name: trainer for name, trainer in made.items() if trainer.capture is None}
    parts = time_in_turns(
        {name: each(trainer.update) for name, trainer in eager.items()},
        draw,
        Plan(turns, synchronized=-(-steps // TURNS)),
        options,
        before=lambda name, batch: made[name].backward(batch),
    )
    whole = time_in_turns(
        {name: each(trainer.train) for name, trainer in made.items()},
        draw,
        Plan(turns, blocks=-(-steps // (TURNS * block)), block_steps=block),
        options,
    )
    for name, readings in whole.items():
        metrics = {
            "optimizer_ms": percentiles(parts[name].synchronized) if name in parts else None,
            "step_ms": percentiles(readings.back_to_back),
            "peak_memory_bytes": memory[name] if options.on_gpu else None,
            "max_rel_error": errors[name],
        }
        n, ok = len(readings.back_to_back), errors[name] <= trainers.TOLERANCE
        yield options.row("step train", name, shared, metrics, n_samples=n, ok=ok)


def build(model: Model, device: torch.device) -> nn.Module:
    """Build a model on the device, with the same weights at every call."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        return model.build()
