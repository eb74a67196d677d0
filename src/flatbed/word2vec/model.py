"""Skip-gram with negative sampling: scores of blocks, their loss, and its gradient by hand."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from flatbed.word2vec.sampling import BLOCK, SHARED


class Places(Protocol):
    """What stands against what: the arrays of a `Batch` as tensors on the computing device."""

    @property
    def words(self) -> Tensor: ...
    @property
    def others(self) -> Tensor: ...
    @property
    def first(self) -> Tensor: ...
    @property
    def last(self) -> Tensor: ...


def weights_of(places: Places, negatives: int) -> Tensor:
    """How much each score of a block counts, (B, BLOCK, others).

    A context counts 1. A pair's negatives are `negatives` words, each word of them as often as it is among
    those that the block shares; but not the context itself, as word2vec has it.
    """
    n_seen = places.others.shape[1] - SHARED
    column = torch.arange(n_seen, dtype=torch.int32, device=places.others.device)
    itself = torch.arange(BLOCK, dtype=torch.int32, device=places.others.device) + (n_seen - BLOCK) // 2
    is_context = (column >= places.first.unsqueeze(2)) & (column <= places.last.unsqueeze(2))
    is_context &= column != itself.unsqueeze(1)
    contexts = is_context.float()
    seen, shared = places.others[:, :n_seen], places.others[:, n_seen:]
    same = (seen.unsqueeze(2) == shared.unsqueeze(1)).float()
    drawn = torch.baddbmm(contexts.sum(2, keepdim=True), contexts, same, alpha=-1)
    return torch.cat((contexts, drawn.mul_(negatives / SHARED)), 2)


class BlockLoss(torch.autograd.Function):
    """The sum over pairs of -log σ(context) - Σ log σ(-negative).

    Autograd would keep every intermediate result and go over them once more; the gradient is at hand.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, outputs: Tensor, places: Places, weights: Tensor) -> Tensor:
        n_blocks, n_others = places.others.shape
        n_seen = n_others - SHARED
        words, others = places.words.flatten(), places.others.flatten()
        x = inputs.index_select(0, words).view(n_blocks, BLOCK, -1)
        y = outputs.index_select(0, others).view(n_blocks, n_others, -1)
        scores = torch.bmm(x, y.transpose(1, 2))
        scores[:, :, :n_seen].neg_()  # log σ(s) for contexts, log σ(-s) for negatives
        loss = torch.dot(torch.nn.functional.softplus(scores).flatten(), weights.flatten())
        slope = scores.sigmoid_().mul_(weights)
        slope[:, :, :n_seen].neg_()
        grad_x = torch.bmm(slope, y).view(-1, inputs.shape[1])
        grad_y = torch.bmm(slope.transpose(1, 2), x).view(-1, inputs.shape[1])
        grad_inputs = torch.zeros_like(inputs).index_add_(0, words, grad_x)
        grad_outputs = torch.zeros_like(outputs).index_add_(0, others, grad_y)
        ctx.save_for_backward(grad_inputs, grad_outputs)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = ctx.saved_tensors
        return inputs * grad, outputs * grad, None, None


def block_loss(inputs: Tensor, outputs: Tensor, places: Places, negatives: int) -> Tensor:
    """The loss of a batch, summed over its pairs.

    - `inputs`, `outputs`: the rows of the batch's distinct words, (inputs, dim) and (outputs, dim).
    """
    weights = weights_of(places, negatives).to(inputs.dtype)
    loss: Tensor = BlockLoss.apply(inputs, outputs, places, weights)  # type: ignore[no-untyped-call]
    return loss
