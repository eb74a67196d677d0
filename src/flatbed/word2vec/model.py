"""The two tables, their optimizer, and the losses of skip-gram and CBOW with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatbed import Embedding, EmbeddingBag
from flatbed.word2vec.sampling import BLOCK, TrainingBatch
from flatbed.word2vec.settings import Settings, find_optimizer

SCORE_BOUND = 6.0
"""Scores beyond this give no gradient, as in gensim: vectors of repeated junk stay finite."""
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
    # `resume` here, since the trainer itself says which files it continues, or refuses them.
    files: list[dict[str, Any]] = [{"path": file, "resume": file.exists()} for file in table_files(settings)]
    files = files or [{}, {}]
    first = {**options, **files[0], "init": ("uniform", -1 / dim, 1 / dim)}  # as in gensim
    inputs: nn.Module
    if settings.buckets:
        n_rows = n_words + settings.buckets
        inputs = EmbeddingBag(n_rows, dim, mode="mean", include_last_offset=True, **first)
    else:
        inputs = Embedding(n_words, dim, **first)
    outputs = Embedding(n_words, dim, init="zeros", **files[1], **options)
    model = nn.ModuleDict({"inputs": inputs, "outputs": outputs})
    rate = {} if settings.learning_rate is None else {"lr": settings.learning_rate}
    return model, find_optimizer(settings.optimizer)(model, **rate, **settings.defaults.options)


class Gradients(NamedTuple):
    """Loss of a batch, and its gradient for each row of the batch."""

    loss: Tensor
    inputs: Tensor
    outputs: Tensor


@torch.no_grad()
def skip_gram(inputs: Tensor, outputs: Tensor, batch: TrainingBatch, negatives: int) -> Gradients:
    """Predict each context of a word from the word: -log σ(context) - Σ log σ(-negative), summed over pairs.

    Computes the gradient along with the loss; autograd would store every intermediate result.

    - `inputs`, `outputs`: vectors of the batch's unique words, (inputs, dim) and (outputs, dim).
    """
    weights = score_weights(batch, negatives).to(inputs.dtype)
    n_nearby = batch.n_nearby
    x, y = _rows(inputs, batch.centers), _rows(outputs, batch.candidates)
    scores = torch.bmm(x, y.transpose(1, 2))
    scores[:, :, :n_nearby].neg_()  # log σ(s) for contexts, log σ(-s) for negatives
    loss, slope = _bounded(scores, weights)
    slope[:, :, :n_nearby].neg_()
    grad_x, grad_y = torch.bmm(slope, y), torch.bmm(slope.transpose(1, 2), x)
    return Gradients(loss, _sums(inputs, batch.centers, grad_x), _sums(outputs, batch.candidates, grad_y))


@torch.no_grad()
def cbow(inputs: Tensor, outputs: Tensor, batch: TrainingBatch, negatives: int) -> Gradients:
    """Predict each word from the mean of its contexts; the arguments are those of `skip_gram`.

    As in word2vec, each context gets the whole gradient of the mean, not its share.
    """
    n_nearby, window = batch.n_nearby, (batch.n_nearby - BLOCK) // 2
    contexts = context_mask(batch).to(inputs.dtype)
    n_contexts = contexts.sum(2, keepdim=True)
    padded = torch.nn.functional.pad(batch.centers.flatten(), (window, window))
    nearby = padded.unfold(0, n_nearby, BLOCK)  # indices into the inputs
    centers, shared = batch.candidates[:, window : window + BLOCK], batch.candidates[:, n_nearby:]
    is_other = (centers.unsqueeze(2) != shared.unsqueeze(1)).to(inputs.dtype)
    has_context = (n_contexts > 0).to(inputs.dtype)

    rows, target, noise = _rows(inputs, nearby), _rows(outputs, centers), _rows(outputs, shared)
    hidden = torch.bmm(contexts, rows).div_(n_contexts.clamp(min=1))
    near, near_slope = _bounded(-(hidden * target).sum(2, keepdim=True), has_context)
    far, slope = _bounded(
        torch.bmm(hidden, noise.transpose(1, 2)), is_other * has_context * (negatives / shared.shape[1])
    )
    grad_hidden = torch.bmm(slope, noise) - near_slope * target
    grad_outputs = _sums(outputs, centers, -near_slope * hidden)
    grad_outputs += _sums(outputs, shared, torch.bmm(slope.transpose(1, 2), hidden))
    grad_rows = torch.bmm(contexts.transpose(1, 2), grad_hidden)
    return Gradients(near + far, _sums(inputs, nearby, grad_rows), grad_outputs)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten()).view(*index.shape, -1)


def _sums(table: Tensor, index: Tensor, grads: Tensor) -> Tensor:
    """Sum gradients of equal rows."""
    return torch.zeros_like(table).index_add_(0, index.flatten(), grads.view(-1, table.shape[1]))


def _bounded(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ weight · log(1 + exp(score)) with bounded scores, and its derivative, 0 at the bounds."""
    scores = scores.clamp_(-SCORE_BOUND, SCORE_BOUND)
    loss = torch.dot(torch.nn.functional.softplus(scores).flatten(), weights.flatten())
    slope = scores.sigmoid().mul_(weights)
    return loss, torch.ops.aten.hardtanh_backward(slope, scores, -SCORE_BOUND, SCORE_BOUND)


def context_mask(batch: TrainingBatch) -> Tensor:
    """Return which nearby words are contexts of each word, (B, BLOCK, nearby) of bool."""
    n_nearby, device = batch.n_nearby, batch.candidates.device
    column = torch.arange(n_nearby, dtype=torch.int32, device=device)
    center_column = torch.arange(BLOCK, dtype=torch.int32, device=device) + (n_nearby - BLOCK) // 2
    is_context = (column >= batch.first_context.unsqueeze(2)) & (column <= batch.last_context.unsqueeze(2))
    return is_context & (column != center_column.unsqueeze(1))


def score_weights(batch: TrainingBatch, negatives: int) -> Tensor:
    """Return the weight of each score in the loss of skip-gram, (B, BLOCK, candidates).

    A context has weight 1. A pair has `negatives` negatives in total, spread evenly over the shared ones.
    As in word2vec, a negative equal to the pair's context is left out.
    """
    contexts = context_mask(batch).float()
    nearby, shared = batch.candidates[:, : batch.n_nearby], batch.candidates[:, batch.n_nearby :]
    is_equal = (nearby.unsqueeze(2) == shared.unsqueeze(1)).float()
    n_contexts = torch.baddbmm(contexts.sum(2, keepdim=True), contexts, is_equal, alpha=-1)
    return torch.cat((contexts, n_contexts.mul_(negatives / shared.shape[1])), 2)
