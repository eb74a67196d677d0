from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatbed.word2vec import Settings
from flatbed.word2vec.model import Gradients, cbow, score_weights, skip_gram
from flatbed.word2vec.sampling import BLOCK, BatchSampler, TrainingBatch

from .texts import as_arrays, random_corpus

N_SHARED = 32
Model = Callable[[Tensor, Tensor, TrainingBatch, int], Gradients]


def some_batch(*, cbow: bool = False) -> TrainingBatch:
    corpus = random_corpus(12, 150)
    settings = Settings(window=3, subsample=0, batch_words=1000, cbow=cbow)
    return BatchSampler(corpus, settings).make(0)


def score(a: Tensor, b: Tensor) -> Tensor:
    return functional.hardtanh(a @ b, -6.0, 6.0)


def plain_loss(model: Model, inputs: Tensor, outputs: Tensor, batch: Any, negatives: int) -> Tensor:
    """The loss word by word, with the shared negatives that differ from the predicted word."""
    window = (batch.n_nearby - BLOCK) // 2
    loss = inputs.new_zeros(())

    def predict(word: int, x: Tensor, shared: np.ndarray) -> Tensor:
        others = torch.from_numpy(shared[shared != word]).long()
        far = functional.logsigmoid(-score(outputs[others], x)).sum() * negatives / N_SHARED
        return -functional.logsigmoid(score(outputs[word], x)) - far

    words = batch.inputs[batch.centers.flatten()]
    for block in range(len(batch.centers)):
        shared = batch.candidates[block, -N_SHARED:]
        for i in range(BLOCK):
            columns = range(batch.first_context[block, i], batch.last_context[block, i] + 1)
            columns = [column for column in columns if column != i + window]
            if model is skip_gram:
                x = inputs[batch.centers[block, i]]
                for column in columns:
                    loss = loss + predict(batch.candidates[block, column], x, shared)
            elif columns:
                at = [batch.inputs.tolist().index(words[block * BLOCK + c - window]) for c in columns]
                total = inputs[at].sum(0)
                mean = total + (total / len(at) - total).detach()  # each context gets the whole gradient
                loss = loss + predict(batch.candidates[block, i + window], mean, shared)
    return loss


@pytest.mark.parametrize("model", [skip_gram, cbow])
def test_loss_and_gradient_are_those_of_a_plain_loop(model: Model) -> None:
    batch = some_batch()
    shapes = (len(batch.inputs), 5), (len(batch.outputs), 5)
    given = [(2 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    assert 0.1 < ((given[0] @ given[1].T).abs() > 6).double().mean() < 0.9  # some beyond the bound
    found = model(*given, batch, 4)  # weights are fp32: exact, as 4 / 32 is a power of two
    wanted = plain_loss(model, *given, as_arrays(batch), 4)
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    wanted.backward()
    for grad, one in zip(found[1:], given, strict=True):
        torch.testing.assert_close(grad, one.grad, rtol=1e-9, atol=1e-9)


def test_every_pair_has_its_negatives() -> None:
    """Weights of a word: 1 per context, and `negatives` per context without those equal to it."""
    batch = some_batch()
    weights = score_weights(batch, 5)
    n_contexts = weights[:, :, :-N_SHARED].sum(2)
    assert int(n_contexts.sum()) == batch.n_pairs
    assert int((n_contexts > 0).sum()) == some_batch(cbow=True).n_pairs
    hits = 5 * n_contexts - weights[:, :, -N_SHARED:].sum(2)
    assert hits.min() > -1e-4
    assert 0 < hits.sum() < 0.5 * 5 * batch.n_pairs


@pytest.mark.gpu
@pytest.mark.parametrize("model", [skip_gram, cbow])
def test_gpu_and_cpu_agree(model: Model) -> None:
    batch = some_batch()
    random = np.random.default_rng(0)
    rows = [random.standard_normal((len(ids), 16), np.float32) for ids in (batch.inputs, batch.outputs)]
    found = []
    for device in ("cpu", "cuda"):
        given = [torch.from_numpy(r).to(device) for r in rows]
        moved = TrainingBatch(*(v.to(device) if isinstance(v, Tensor) else v for v in astuple(batch)))
        found.append([part.cpu() for part in model(*given, moved, 5)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
