"""The two tables, their optimizer, and the loss of negative sampling with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatbed import Embedding, EmbeddingBag, FlatbedError
from flatbed.word2vec.sampling import BLOCK, SHARED, TrainingBatch
from flatbed.word2vec.settings import Settings, find_optimizer

SCORE_BOUND = 6.0
"""Scores beyond this give no gradient, as in word2vec and gensim: vectors of repeated junk stay finite."""
MakeTables = Callable[[Settings, int], tuple[nn.ModuleDict, torch.optim.Optimizer]]
"""Makes the modules `inputs` and `outputs` and their optimizer from the settings and the number of words."""


def table_files(settings: Settings) -> list[Path]:
    """List the files of tables on disk: those of inputs and outputs."""
    return [] if settings.path is None else [Path(settings.path) / f"{n}.bed" for n in ("inputs", "outputs")]


def make_tables(settings: Settings, n_words: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """Make flatbed tables. With n-grams, `inputs` is an EmbeddingBag whose first rows are those of words."""
    dim, device = settings.dim, settings.torch_device
    options: dict[str, Any] = {"storage": settings.storage, "device": device, "seed": settings.seed}
    if settings.storage != "device":
        options["cache_rows"] = settings.cache_rows
    paths: list[Any] = [*table_files(settings)] or [None, None]
    first = {**options, "path": paths[0], "init": ("uniform", -1 / dim, 1 / dim)}  # as in gensim
    inputs: nn.Module
    if settings.buckets:
        n_rows = n_words + settings.buckets
        inputs = EmbeddingBag(n_rows, dim, mode="mean", include_last_offset=True, **first)
    else:
        inputs = Embedding(n_words, dim, **first)
    outputs = Embedding(n_words, dim, init="zeros", path=paths[1], **options)
    model = nn.ModuleDict({"inputs": inputs, "outputs": outputs})
    try:
        return model, find_optimizer(settings.optimizer)(model, **settings.optimizer_options)
    except (FlatbedError, TypeError) as error:
        raise ValueError(f"the optimizer {settings.optimizer!r} does not support tables: {error}") from error


def block_loss(inputs: Tensor, outputs: Tensor, batch: TrainingBatch, negatives: int) -> Tensor:
    """Return the loss of a batch, summed over its pairs: -log σ(context) - Σ log σ(-negative).

    Scores are bounded by ±`SCORE_BOUND`.

    - `inputs`, `outputs`: vectors of the batch's unique words, (inputs, dim) and (outputs, dim).
    """
    weights = score_weights(batch, negatives).to(inputs.dtype)
    loss: Tensor = _BlockLoss.apply(  # type: ignore[no-untyped-call]
        inputs, outputs, batch.centers, batch.candidates, weights
    )
    return loss


def score_weights(batch: TrainingBatch, negatives: int) -> Tensor:
    """Return the weight of each score in the loss, (B, BLOCK, candidates).

    A context has weight 1. A pair has `negatives` negatives in total, spread evenly over the shared ones.
    As in word2vec, a negative equal to the pair's context is left out.
    """
    candidates = batch.candidates
    n_nearby, device = candidates.shape[1] - SHARED, candidates.device
    column = torch.arange(n_nearby, dtype=torch.int32, device=device)
    center_column = torch.arange(BLOCK, dtype=torch.int32, device=device) + (n_nearby - BLOCK) // 2
    is_context = (column >= batch.first_context.unsqueeze(2)) & (column <= batch.last_context.unsqueeze(2))
    is_context &= column != center_column.unsqueeze(1)
    contexts = is_context.float()
    nearby, shared = candidates[:, :n_nearby], candidates[:, n_nearby:]
    is_equal = (nearby.unsqueeze(2) == shared.unsqueeze(1)).float()
    n_contexts = torch.baddbmm(contexts.sum(2, keepdim=True), contexts, is_equal, alpha=-1)
    return torch.cat((contexts, n_contexts.mul_(negatives / SHARED)), 2)


class _BlockLoss(torch.autograd.Function):
    """Computes the gradient along with the loss; autograd would store every intermediate result."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, outputs: Tensor, centers: Tensor, candidates: Tensor, weights: Tensor
    ) -> Tensor:
        n_blocks, n_candidates = candidates.shape
        n_nearby = n_candidates - SHARED
        centers, candidates = centers.flatten(), candidates.flatten()
        x = inputs.index_select(0, centers).view(n_blocks, BLOCK, -1)
        y = outputs.index_select(0, candidates).view(n_blocks, n_candidates, -1)
        scores = torch.bmm(x, y.transpose(1, 2)).clamp_(-SCORE_BOUND, SCORE_BOUND)
        scores[:, :, :n_nearby].neg_()  # log σ(s) for contexts, log σ(-s) for negatives
        loss = torch.dot(torch.nn.functional.softplus(scores).flatten(), weights.flatten())
        slope = scores.sigmoid().mul_(weights)
        slope = torch.ops.aten.hardtanh_backward(slope, scores, -SCORE_BOUND, SCORE_BOUND)  # 0 at the bounds
        slope[:, :, :n_nearby].neg_()
        grad_x = torch.bmm(slope, y).view(-1, inputs.shape[1])
        grad_y = torch.bmm(slope.transpose(1, 2), x).view(-1, inputs.shape[1])
        grad_inputs = torch.zeros_like(inputs).index_add_(0, centers, grad_x)
        grad_outputs = torch.zeros_like(outputs).index_add_(0, candidates, grad_y)
        ctx.save_for_backward(grad_inputs, grad_outputs)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_inputs, grad_outputs = ctx.saved_tensors
        return grad_inputs * grad, grad_outputs * grad, None, None, None
