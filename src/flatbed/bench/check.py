"""Whether a way computes what torch's plain loop computes: the same weights after the same gradients.

The gradients are given, not computed. A model's own differ from run to run on a GPU (atomic additions),
and Adam's first steps have the size of the learning rate whatever the gradient's size: where a gradient
is nothing but rounding, as that of an attention's key bias, two correct runs walk apart. Given gradients
reach the parameters through autograd, so that what a way does on accumulation takes part in the check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatbed.bench.models import count_parameters
from flatbed.bench.ways import Trainer

# Correct ways differ by the rounding of w += update: at most 1e-7·|w| of steps of 1e-3, thus below 1e-4.
TOLERANCE = 1e-3
# Root mean square of each step's gradients. Adam is blind to their scale but not to a change of it: with
# one step far over the limit, one below and one just over, a clip that does nothing shows.
SCALES = (4.0, 0.5, 1.5)


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a way's weights lie from the reference; relative to the way the reference has gone."""

    max_rel_error: float
    max_abs_error: float

    @property
    def ok(self) -> bool:
        return self.max_rel_error <= TOLERANCE  # False for nan


def take_given_steps(trainer: Trainer, *, seed: int) -> list[Tensor]:
    """Train on given gradients, the same for the same seed; returns the weights, on the CPU."""
    params = list(trainer.model.parameters())
    _, n_elements = count_parameters(trainer.model)
    device = params[0].device
    generator = torch.Generator(device).manual_seed(seed)
    for scale in SCALES:
        for param in params:
            gradient = torch.randn(param.shape, generator=generator, device=device, dtype=param.dtype)
            torch.autograd.backward(param, gradient.mul_(scale))
        trainer.update(max_norm=math.sqrt(n_elements))  # root mean square 1, whatever the model's size
    return weights_of(trainer.model)


def weights_of(model: nn.Module) -> list[Tensor]:
    """A copy of the parameters on the CPU, out of the way of the memory being measured."""
    return [param.detach().to("cpu", copy=True) for param in model.parameters()]


def compare(weights: list[Tensor], reference: list[Tensor], start: list[Tensor]) -> Deviation:
    """The worst parameter's deviation: a fault in one small bias must not drown in a billion others."""
    return worst(_deviation(*each) for each in zip(weights, reference, start, strict=True))


def _deviation(ours: Tensor, theirs: Tensor, first: Tensor) -> Deviation:
    difference = ours - theirs
    gone = float(torch.linalg.vector_norm(theirs - first, dtype=torch.float64))
    error = float(torch.linalg.vector_norm(difference, dtype=torch.float64))
    relative = error / gone if gone > 0 else math.inf if error > 0 else 0.0
    return Deviation(relative, float(difference.abs().max()))


def worst(deviations: Iterable[Deviation]) -> Deviation:
    """The largest errors of several comparisons."""
    worst_rel = worst_abs = 0.0
    for deviation in deviations:
        worst_rel = _larger(worst_rel, deviation.max_rel_error)
        worst_abs = _larger(worst_abs, deviation.max_abs_error)
    return Deviation(worst_rel, worst_abs)


def _larger(a: float, b: float) -> float:
    """The larger one; nan wins, which `max` would lose."""
    return b if math.isnan(b) or b > a else a
