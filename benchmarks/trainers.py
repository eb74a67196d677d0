"""Models under torch's optimizers, over flat parameters and under `flatbed.optim`, and a check of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import flatbed
import flatbed.optim
from benchmarks.harness import SEED
from benchmarks.models import Batch, Loss

TOLERANCE = 1e-3
"""Relative to the distance that the reference moved. Correct variants differ by rounding, less than 1e-4."""
SCALES = (4.0, 0.5, 1.5, 4.0, 0.5, 1.5)
"""Root mean square of the checked gradients. Adam ignores their scale but not its change, and with steps
above and below the limit a clip that does nothing shows."""
CHECKED_SHAPES = ((64, 96), (1000,), (7, 3, 5, 2), ())
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, flatbed.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, flatbed.optim.Adam, {"lr": 1e-3}),
    "sgd": (torch.optim.SGD, flatbed.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}


@dataclass(slots=True)
class Trainer:
    """A model under one variant. `capture` makes a CUDA graph of the whole training step."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    """Clips and updates."""
    zero_grad: Callable[[], object]
    capture: Callable[..., Callable[[Batch], object]] | None = None
    _graph: Callable[[Batch], object] | None = field(default=None, init=False)

    def backward(self, batch: Batch) -> Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self, _: object = None) -> None:
        self.step()
        self.zero_grad()

    def train(self, batch: Batch) -> object:
        """Take a whole training step."""
        if self.capture is None:
            return self._train(batch)
        if self._graph is None:
            self._graph = self.capture(self._train, batch)
        return self._graph(batch)

    def _train(self, batch: Batch) -> Tensor:
        loss = self.backward(batch)
        self.update()
        return loss


class TorchGraph:
    """A step in a CUDA graph, as a user of torch alone writes it: warm up, capture, copy, replay."""

    def __init__(self, step: Callable[[Batch], object], example: Batch) -> None:
        self._step = step
        self._inputs = [tensor.clone() for tensor in example]
        self._n_calls = 0
        self._graph = torch.cuda.CUDAGraph()

    def __call__(self, batch: Batch) -> None:
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(batch), non_blocking=True)
        self._n_calls += 1
        if self._n_calls <= 3:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(self._inputs)
            torch.cuda.current_stream().wait_stream(side)
            return
        if self._n_calls == 4:
            with torch.cuda.graph(self._graph):
                self._step(self._inputs)
        self._graph.replay()


# ---- variants

Setup = Callable[[nn.Module, Loss, str, float], Trainer]
"""Makes a trainer of a model, its loss, an optimizer and a norm to clip to."""


def with_torch(
    model: nn.Module, loss: Loss, name: str, max_norm: float, *, capture: Any = None, **implementation: bool
) -> Trainer:
    """Use torch's optimizer and clipping, both in the given implementation."""
    make, _, options = OPTIMIZERS[name]
    params = list(model.parameters())
    capturable = {"capturable": True} if capture is not None and name != "sgd" else {}
    optimizer = make(params, **options, **implementation, **capturable)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, max_norm, foreach=implementation.get("foreach", True))
        optimizer.step()

    return Trainer(model, loss, optimizer, step, optimizer.zero_grad, capture)


def with_flat_params(
    model: nn.Module, loss: Loss, name: str, max_norm: float, *, grads: Any = "bound", one_call: bool = False
) -> Trainer:
    """Use torch's fused optimizer over `FlatParams`; `one_call` clips, steps and zeroes at once."""
    make, _, options = OPTIMIZERS[name]
    flat = flatbed.FlatParams(list(model.parameters()), grads=grads)
    optimizer = make(flat.parameters(), **options, fused=True)

    def step() -> None:
        flat.clip_grad_norm_(max_norm)
        optimizer.step()

    if one_call:
        at_once = partial(flat.step, optimizer, max_norm=max_norm)
        return Trainer(model, loss, optimizer, at_once, lambda: None)
    return Trainer(model, loss, optimizer, step, optimizer.zero_grad)


def with_contiguous_params(model: nn.Module, loss: Loss, name: str, max_norm: float) -> Trainer:
    """Use torch's fused optimizer over `ContiguousParams`, as users of contiguous_params do."""
    make, _, options = OPTIMIZERS[name]
    params: Any = flatbed.ContiguousParams(model.parameters())
    optimizer = make(params.contiguous(), **options, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(params.contiguous(), max_norm)
        optimizer.step()

    return Trainer(model, loss, optimizer, step, partial(optimizer.zero_grad, set_to_none=False))


def with_flatbed(
    model: nn.Module, loss: Loss, name: str, max_norm: float, *, capture: Any = None, **more: Any
) -> Trainer:
    """Use flatbed.optim, which clips within its step."""
    _, make, options = OPTIMIZERS[name]
    optimizer = make(list(model.parameters()), **options, max_norm=max_norm, **more)
    return Trainer(model, loss, optimizer, optimizer.step, optimizer.zero_grad, capture)


LOOP, FOREACH, FUSED = "torch for-loop", "torch foreach", "torch fused"
OPTIM = "flatbed.optim"
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
    f"{FUSED}, captured": partial(with_torch, fused=True, capture=TorchGraph),
    f"{OPTIM}, captured": partial(with_flatbed, capture=flatbed.capture),
}


# ---- given gradients


def make_params(
    shapes: Iterable[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.ParameterList:
    """Make a model of parameters of these shapes."""
    generator = torch.Generator(device).manual_seed(SEED)
    values = (torch.empty(tuple(shape), dtype=dtype, device=device) for shape in shapes)
    return nn.ParameterList(nn.Parameter(value.normal_(std=0.02, generator=generator)) for value in values)


def draw_gradients(params: Iterable[Tensor], *, scale: float, seed: int) -> list[Tensor]:
    """Draw gradients of the given root mean square."""
    listed = [param.detach() for param in params]
    generator = torch.Generator(listed[0].device).manual_seed(seed)
    return [torch.empty_like(param).normal_(std=scale, generator=generator) for param in listed]


def given_loss(model: nn.Module, gradients: Batch) -> Tensor:
    """Compute a loss whose gradients are those given."""
    products = [(p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True)]
    return torch.stack(products).sum()


def norm_to_clip(params: Iterable[Tensor]) -> float:
    """Return the norm of gradients of root mean square 1."""
    return float(sum(param.numel() for param in params) ** 0.5)


def max_rel_error(setup: Setup, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Train small parameters on given gradients, beside torch's for-loop in fp64.

    Gradients are given because a model's own differ from run to run on a GPU (atomic additions). Returns the
    worst parameter's distance from the reference, relative to how far that one moved.
    """
    model = make_params(CHECKED_SHAPES, device, dtype)
    copies = nn.ParameterList(param.detach().double() for param in model)
    first = [copy.detach().clone() for copy in copies]
    max_norm = norm_to_clip(model)
    trainer = setup(model, given_loss, name, max_norm)
    reference = with_torch(copies, given_loss, name, max_norm, foreach=False)
    for number, scale in enumerate(SCALES):
        gradients = draw_gradients(model, scale=scale, seed=SEED + number)
        reference.train([gradient.double() for gradient in gradients])
        trainer.train(gradients)
    errors = []
    for param, copy, start in zip(model, copies, first, strict=True):
        weight = trainer.optimizer.state.get(param, {}).get("master_weight", param.detach())
        if not torch.equal(weight.to(dtype), param):
            return float("inf")  # a parameter is not its rounded master weight
        errors.append((weight - copy.detach()).norm() / (copy.detach() - start).norm())
    return float(torch.stack(errors).max())
