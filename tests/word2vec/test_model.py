from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatbed.word2vec.model import block_loss, score_weights
from flatbed.word2vec.sampling import BLOCK, SHARED, BatchSampler, TrainingBatch

from .texts import BatchArrays, random_corpus


def some_batch() -> TrainingBatch:
    sampler = BatchSampler(random_corpus(12, 150), window=3, subsample=0, batch_words=1000)
    return sampler.make(0)


def plain_loss(inputs: Tensor, outputs: Tensor, batch: BatchArrays, negatives: int) -> Tensor:
    """The loss pair by pair: a context, and the shared negatives that differ from the context."""
    window = (batch.candidates.shape[1] - SHARED - BLOCK) // 2
    loss = inputs.new_zeros(())
    for block in range(len(batch.centers)):
        shared = batch.candidates[block, -SHARED:]
        for i in range(BLOCK):
            x = inputs[batch.centers[block, i]]
            for column in range(batch.first_context[block, i], batch.last_context[block, i] + 1):
                if column == i + window:
                    continue
                context = batch.candidates[block, column]
                others = torch.from_numpy(shared[shared != context]).long()
                near, far = (functional.hardtanh(outputs[at] @ x, -6.0, 6.0) for at in (context, others))
                loss = loss - functional.logsigmoid(near)
                loss = loss - functional.logsigmoid(-far).sum() * negatives / SHARED
    return loss


def test_loss_and_gradient_are_those_of_plain_pairs() -> None:
    batch = some_batch()
    shapes = (len(batch.inputs), 5), (len(batch.outputs), 5)
    ours = [(2 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    scores = (ours[0] @ ours[1].T).abs()
    assert 0.1 < (scores > 6).double().mean() < 0.9  # some beyond the bound
    plain = [one.detach().clone().requires_grad_() for one in ours]
    loss = block_loss(*ours, batch, 4)  # weights are fp32: exact, as 4 / 64 is a power of two
    wanted = plain_loss(*plain, BatchArrays.of(batch), 4)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    (3 * loss).backward()
    (3 * wanted).backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_every_pair_has_its_negatives() -> None:
    """Weights of a word: 1 per context, and `negatives` per context without those equal to it."""
    batch = some_batch()
    weights = score_weights(batch, 5)
    n_contexts = weights[:, :, :-SHARED].sum(2)
    assert int(n_contexts.sum()) == batch.n_pairs
    hits = 5 * n_contexts - weights[:, :, -SHARED:].sum(2)
    assert hits.min() > -1e-4
    assert 0 < hits.sum() < 0.5 * 5 * batch.n_pairs


@pytest.mark.gpu
def test_gpu_and_cpu_agree() -> None:
    batch = some_batch()
    random = np.random.default_rng(0)
    rows = [random.standard_normal((len(ids), 16), np.float32) for ids in (batch.inputs, batch.outputs)]
    found = []
    for device in ("cpu", "cuda"):
        given = [torch.from_numpy(r).to(device).requires_grad_() for r in rows]
        moved = TrainingBatch(*(v.to(device) if isinstance(v, Tensor) else v for v in astuple(batch)))
        loss = block_loss(*given, moved, 5)
        loss.backward()
        found.append([loss.detach().cpu(), *(one.grad.cpu() for one in given)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
