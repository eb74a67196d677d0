"""Training steps of five models: clipping, optimizer step and zero_grad alone, and whole steps.

On small parameters with given gradients, every variant is compared with torch's for-loop in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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


class Prepared(NamedTuple):
    """A trainer that has taken its first steps, its GPU memory, and its distance from the reference."""

    trainer: Trainer
    peak_bytes: int
    max_rel_error: float


def prepare(setup: Setup, model: Model, optimizer: str, batches: Sequence[Batch]) -> Prepared:
    """Check a variant, build it, and take steps that compile or capture whatever is needed."""
    device = batches[0][0].device
    error = trainers.max_rel_error(setup, optimizer, device)
    before = harness.reset_peak(device)
    trainer = setup(build(model, device), model.loss, optimizer, MAX_NORM)
    for batch in batches:
        trainer.train(batch)
    return Prepared(trainer, harness.peak_bytes(device) - before, error)


def run_variants(variants: dict[str, Setup], model: Model, optimizer: str, options: Options) -> Iterator[Row]:
    """Time variants in turns: updates alone, then whole steps in blocks."""
    generator = torch.Generator(options.device).manual_seed(SEED + 1)

    def draw(n_batches: int) -> list[Batch]:
        return [model.make_batch(generator) for _ in range(n_batches)]

    made: dict[str, Prepared] = {}
    for name, setup in variants.items():
        try:
            made[name] = prepare(setup, model, optimizer, draw(WARM_UP))
        except Exception as error:
            options.skip(name, error)
    all_trainers = {name: prepared.trainer for name, prepared in made.items()}
    steps, block = options.steps or model.steps, BLOCK_STEPS if options.on_gpu else 1
    turns = min(TURNS, steps)
    updates = time_in_turns(
        {name: each(trainer.update) for name, trainer in all_trainers.items() if trainer.capture is None},
        draw,
        Plan(turns, synchronized=-(-steps // TURNS)),
        options,
        before=lambda name, batch: all_trainers[name].backward(batch),
    )
    whole = time_in_turns(
        {name: each(trainer.train) for name, trainer in all_trainers.items()},
        draw,
        Plan(turns, blocks=-(-steps // (TURNS * block)), block_steps=block),
        options,
    )
    for name, readings in whole.items():
        trainer, memory, distance = made[name]
        metrics = {
            "optimizer_ms": percentiles(updates[name].synchronized) if name in updates else None,
            "step_ms": percentiles(readings.back_to_back),
            "peak_memory_bytes": memory if options.on_gpu else None,
            "max_rel_error": distance,
        }
        sizes = [param.numel() for param in trainer.model.parameters()]
        setting: dict[str, Any] = {"model": model.name, "optimizer": optimizer}
        setting |= {"parameters": len(sizes), "elements": sum(sizes)}
        n, ok = len(readings.back_to_back), distance <= trainers.TOLERANCE
        yield options.row("step train", name, setting, metrics, n_samples=n, ok=ok)


def build(model: Model, device: torch.device) -> nn.Module:
    """Build a model on the device, with the same weights at every call."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        return model.build()
