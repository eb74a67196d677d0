"""Training steps of five models: clipping, optimizer step and zero_grad alone, and whole steps.

Every variant first takes three steps on given gradients, and its weights are compared with those of torch's
for-loop. Gradients are given because a model's own differ from run to run on a GPU (atomic additions).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from benchmarks.harness import (
    SEED,
    Options,
    TorchGraph,
    allocated_bytes,
    call_in_turns,
    free_memory,
    synchronize,
)
from benchmarks.models import MODELS, Batch, Model, count_parameters
from benchmarks.rows import Row, percentiles

CASES = tuple(MODELS)
MAX_NORM = 1.0
TURNS = 5
WARM_UP = 5  # flatbed.capture captures the fourth call
BLOCK_STEPS = 5
TOLERANCE = 1e-3
"""Relative to the distance that the reference moved. Correct variants differ by rounding, less than 1e-4."""
SCALES = (4.0, 0.5, 1.5)
"""Root mean square of the checked gradients. Adam ignores their scale but not its change, and with steps
above and below the limit a clip that does nothing shows."""
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, flatbed.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, flatbed.optim.Adam, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, flatbed.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}
LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
OPTIM = "flatbed.optim"


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model under one variant."""

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor]
    update: Callable[[float], object]
    """Clips to a norm, steps and zeroes gradients."""
    train_step: Callable[[Batch], object] | None = None
    """A whole step in one call, if the variant has one."""

    def backward(self, batch: Batch) -> None:
        self.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]

    def clip_and_step(self, _: Batch) -> None:
        self.update(MAX_NORM)

    def step(self, batch: Batch) -> None:
        if self.train_step is not None:
            self.train_step(batch)
            return
        self.backward(batch)
        self.update(MAX_NORM)

    def steps(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.step(batch)


Setup = Callable[[nn.Module, Model, str], Trainer]


def with_torch(
    model: nn.Module, case: Model, optimizer: str, *, captured: bool = False, **implementation: bool
) -> Trainer:
    """Use torch's optimizer and clipping, both in the given implementation."""
    make, _, options = OPTIMIZERS[optimizer]
    params = list(model.parameters())
    capturable = {"capturable": True} if captured and optimizer != "sgd" else {}
    stepper = make(params, **options, **implementation, **capturable)

    def update(max_norm: float) -> None:
        nn.utils.clip_grad_norm_(params, max_norm, foreach=implementation.get("foreach", True))
        stepper.step()
        stepper.zero_grad(set_to_none=True)

    trainer = Trainer(model, case.loss, update)
    return with_graph(trainer, TorchGraph) if captured else trainer


def with_flat_params(
    model: nn.Module, case: Model, optimizer: str, *, grads: Any = "bound", one_call: bool = False
) -> Trainer:
    """Use torch's fused optimizer over flat parameters."""
    make, _, options = OPTIMIZERS[optimizer]
    flat = flatbed.FlatParams(list(model.parameters()), grads=grads)
    stepper = make(flat.parameters(), **options, fused=True)

    def update(max_norm: float) -> None:
        flat.clip_grad_norm_(max_norm)
        stepper.step()
        stepper.zero_grad()

    def at_once(max_norm: float) -> None:
        flat.step(stepper, max_norm=max_norm)

    return Trainer(model, case.loss, at_once if one_call else update)


def with_contiguous_params(model: nn.Module, case: Model, optimizer: str) -> Trainer:
    """Use torch's fused optimizer over `ContiguousParams`, as users of contiguous_params do."""
    make, _, options = OPTIMIZERS[optimizer]
    params: Any = flatbed.ContiguousParams(model.parameters())
    stepper = make(params.contiguous(), **options, fused=True)

    def update(max_norm: float) -> None:
        nn.utils.clip_grad_norm_(params.contiguous(), max_norm)
        stepper.step()
        stepper.zero_grad(set_to_none=False)

    return Trainer(model, case.loss, update)


def with_flatbed(model: nn.Module, case: Model, optimizer: str, *, captured: bool = False) -> Trainer:
    """Use flatbed.optim, which clips within its step; `captured` puts the whole step into a CUDA graph."""
    _, make, options = OPTIMIZERS[optimizer]
    stepper = make(list(model.parameters()), **options, max_norm=MAX_NORM)

    def update(max_norm: float) -> None:
        stepper.max_norm = max_norm
        stepper.step()
        stepper.zero_grad(set_to_none=True)

    trainer = Trainer(model, case.loss, update)
    return with_graph(trainer, flatbed.capture) if captured else trainer


def with_graph(trainer: Trainer, capture: Callable[..., Callable[[Batch], object]]) -> Trainer:
    """Capture whole steps at the first one, which is after the check: the check clips to another norm."""
    graph: list[Callable[[Batch], object]] = []

    def train_step(batch: Batch) -> Tensor:
        loss = trainer.loss(trainer.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        trainer.update(MAX_NORM)
        return loss

    def replay(batch: Batch) -> object:
        if not graph:
            graph.append(capture(train_step, batch))
        return graph[0](batch)

    return replace(trainer, train_step=replay)


VARIANTS: dict[str, Setup] = {
    LOOP: partial(with_torch, foreach=False),
    FOREACH: partial(with_torch, foreach=True),
    FUSED: partial(with_torch, fused=True),
    "flat following": partial(with_flat_params, grads="follow"),
    "flat following, one call": partial(with_flat_params, grads="follow", one_call=True),
    "flat bound": with_flat_params,
    "flat bound, one call": partial(with_flat_params, one_call=True),
    "flatbed ContiguousParams": with_contiguous_params,
    OPTIM: with_flatbed,
}
CAPTURED: dict[str, Setup] = {
    f"{FUSED}, captured": partial(with_torch, fused=True, captured=True),
    f"{OPTIM}, captured": partial(with_flatbed, captured=True),
}
LARGE = (FUSED, OPTIM)
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
    reference = Reference(model, optimizer, options.device)
    groups = [{name: setup} for name, setup in variants.items()] if model.is_large else [variants]
    for group in groups:
        free_memory(options.device)
        yield from _run_group(group, model, optimizer, reference, options)
    free_memory(options.device)


class Reference:
    """First weights, and weights after the checked steps with torch's for-loop."""

    def __init__(self, model: Model, optimizer: str, device: torch.device) -> None:
        self.device = device
        built = self.build(model)
        self.n_params, self.n_elements = count_parameters(built)
        self.first = weights_of(built)
        self.last = take_given_steps(VARIANTS[LOOP](built, model, optimizer))

    def build(self, model: Model) -> nn.Module:
        """Build the model on the device, with the same weights at every call."""
        forked = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=forked), self.device:
            torch.manual_seed(SEED)
            return model.build()

    def error(self, trainer: Trainer) -> float:
        """Return the worst parameter's distance from the reference, relative to how far that one moved."""
        found = take_given_steps(trainer)
        return max_rel_error(found, self.last, self.first)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Copy the parameters."""
    return [param.detach().clone() for param in model.parameters()]


def take_given_steps(trainer: Trainer) -> list[Tensor]:
    """Train on given gradients, which reach the parameters through autograd; returns the weights."""
    params = list(trainer.model.parameters())
    device = params[0].device
    generator = torch.Generator(device).manual_seed(SEED)
    max_norm = math.sqrt(count_parameters(trainer.model)[1])  # root mean square 1 for any size
    for scale in SCALES:
        for param in params:
            gradient = torch.randn(param.shape, generator=generator, device=device, dtype=param.dtype)
            torch.autograd.backward(param, gradient.mul_(scale))
        trainer.update(max_norm)
    return weights_of(trainer.model)


def max_rel_error(found: Sequence[Tensor], expected: Sequence[Tensor], first: Sequence[Tensor]) -> float:
    """Return the largest relative distance of any parameter; nan if there is one."""
    errors = []
    for ours, theirs, start in zip(found, expected, first, strict=True):
        moved = torch.linalg.vector_norm(theirs - start, dtype=torch.float64)
        errors.append(torch.linalg.vector_norm(ours - theirs, dtype=torch.float64) / moved)
    return float(torch.stack(errors).max())


def _run_group(
    variants: dict[str, Setup], model: Model, optimizer: str, reference: Reference, options: Options
) -> Iterator[Row]:
    device, steps = options.device, options.steps or model.steps
    trainers: dict[str, Trainer] = {}
    errors, memory = {}, {}
    for name, setup in variants.items():
        try:
            before = allocated_bytes(device)
            trainer = setup(reference.build(model), model, optimizer)
            errors[name] = reference.error(trainer)
            memory[name] = _warm_up(trainer, draw_batches(model, device, WARM_UP), device) - before
            trainers[name] = trainer
        except Exception as error:
            options.skip(name, error)
    generator = torch.Generator(device).manual_seed(SEED + 1)
    block = BLOCK_STEPS if options.on_gpu else 1
    shape: dict[str, Any] = {"turns": min(TURNS, steps), "warm_up": 0}
    parts = call_in_turns(
        {name: trainer.clip_and_step for name, trainer in trainers.items() if trainer.train_step is None},
        lambda: model.make_batch(generator),
        options,
        per_turn=-(-steps // TURNS),
        before=lambda name, batch: trainers[name].backward(batch),
        **shape,
    )
    whole = call_in_turns(
        {name: trainer.steps for name, trainer in trainers.items()},
        lambda: [model.make_batch(generator) for _ in range(block)],
        options,
        per_turn=-(-steps // (TURNS * block)),
        **shape,
    )
    setting = {
        "model": model.name,
        "optimizer": optimizer,
        "parameters": reference.n_params,
        "elements": reference.n_elements,
    }
    for name in whole:
        times = [time / block for time in whole[name].times]
        metrics = {
            "optimizer_ms": percentiles(parts[name].times) if name in parts else None,
            "step_ms": percentiles(times),
            "peak_memory_bytes": memory[name] if options.on_gpu else None,
            "max_rel_error": errors[name],
        }
        ok = errors[name] <= TOLERANCE
        n = len(times)
        yield options.row("step", "train", name, setting=setting, metrics=metrics, n_samples=n, ok=ok)


def draw_batches(model: Model, device: torch.device, count: int) -> list[Batch]:
    """Draw batches, the same for every variant."""
    generator = torch.Generator(device).manual_seed(SEED)
    return [model.make_batch(generator) for _ in range(count)]


def _warm_up(trainer: Trainer, batches: Sequence[Batch], device: torch.device) -> int:
    """Take steps that compile or capture whatever is needed; returns the peak of GPU memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for batch in batches:
        trainer.step(batch)
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
