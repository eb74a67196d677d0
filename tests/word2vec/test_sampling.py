from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flatbed.word2vec import Corpus, Settings
from flatbed.word2vec.sampling import BLOCK, BatchSampler, NegativeSampler, make_bags

from .texts import as_arrays, random_corpus


def sampler(corpus: Corpus, **options: Any) -> BatchSampler:
    return BatchSampler(corpus, Settings(**{"window": 3, "subsample": 0, "batch_words": 10**6} | options))


def sampled(corpus: Corpus, begin: int = 0, end: int = 1, **options: Any) -> list[Any]:
    return [as_arrays(batch) for batch in map(sampler(corpus, **options).make, range(begin, end))]


def listed(batch: Any, window: int) -> list[tuple[int, int]]:
    """The pairs of a batch, word by word."""
    pairs = []
    for block in range(len(batch.centers)):
        for i in range(BLOCK):
            for column in range(batch.first_context[block, i], batch.last_context[block, i] + 1):
                if column != i + window:
                    word = batch.inputs[batch.centers[block, i]]
                    pairs.append((int(word), int(batch.outputs[batch.candidates[block, column]])))
    return pairs


def plain_pairs(sentences: list[list[int]], reach: list[int]) -> list[tuple[int, int]]:
    """The pairs of a plain loop over sentences."""
    pairs, windows = [], iter(reach)
    for sentence in sentences:
        for i, word in enumerate(sentence):
            b = next(windows)
            for j in range(max(i - b, 0), min(i + b + 1, len(sentence))):
                if j != i:
                    pairs.append((word, sentence[j]))
    return pairs


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    window=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_pairs_are_those_of_a_plain_loop(lengths: list[int], window: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    sentences = [random.integers(0, 9, n).tolist() for n in lengths]
    corpus = Corpus.from_sentences([[str(w) for w in s] for s in sentences])
    if not len(corpus):
        return
    (batch,) = sampled(corpus, window=window, seed=seed)
    begins = np.concatenate(([0], corpus.ends[:-1]))
    # The random numbers of `make`, in the same order.
    order = np.random.default_rng([seed, 0, 0]).permutation(len(begins))
    texts = [corpus.ids[begins[s] : corpus.ends[s]].tolist() for s in order]
    draws = np.random.default_rng([seed, 0, 1])
    draws.random(len(corpus), dtype=np.float32)
    reach = draws.integers(1, window + 1, len(corpus)).tolist()
    wanted = plain_pairs(texts, reach)
    assert listed(batch, window) == wanted
    assert batch.n_pairs == len(wanted)
    assert batch.n_words == len(corpus)


def words_of(batch: Any) -> np.ndarray:
    """The words of a batch, without padding."""
    is_word = batch.last_context >= batch.first_context
    return batch.inputs[batch.centers[is_word]]


def test_frequent_words_are_thinned_out() -> None:
    corpus = random_corpus(50, 60_000)
    (batch,) = sampled(corpus, window=2, subsample=1e-2)
    kept = np.bincount(words_of(batch), minlength=len(corpus.words)) / corpus.counts
    f = corpus.counts / corpus.counts.sum()
    wanted = np.minimum(np.sqrt(1e-2 / f) + 1e-2 / f, 1)
    assert np.all(np.abs(kept - wanted) < 4.5 * np.sqrt(0.25 / corpus.counts))
    assert wanted[0] < 0.25


def test_every_word_of_the_text_is_in_one_batch_of_each_epoch() -> None:
    corpus = random_corpus(30, 5000)
    made = sampled(corpus, 0, 16, batch_words=700)
    for epoch in (made[:8], made[8:]):
        assert sum(batch.n_words for batch in epoch) == len(corpus)
        found = Counter(np.concatenate([words_of(batch) for batch in epoch]).tolist())
        assert [found[i] for i in range(len(corpus.words))] == corpus.counts.tolist()
    assert made[0].centers.tolist() != made[8].centers.tolist()


def test_steps_have_equal_lengths() -> None:
    """The last step of an epoch is not a short remainder."""
    corpus = Corpus.from_sentences([["a"]] * 2001)
    for batch_words, wanted in ((1000, {667}), (500, {400, 401}), (3000, {2001}), (1, {1})):
        n_steps = sampler(corpus, batch_words=batch_words).steps_per_epoch
        assert {batch.n_words for batch in sampled(corpus, 0, n_steps, batch_words=batch_words)} == wanted


def test_a_batch_depends_on_its_number_alone() -> None:
    corpus = random_corpus(30, 3000)
    options: dict[str, Any] = {"subsample": 1e-2, "batch_words": 400, "seed": 3}
    whole = sampled(corpus, 0, 16, **options)
    for step in (11, 3, 15, 8):
        (again,) = sampled(corpus, step, step + 1, **options)
        for name in ("inputs", "outputs", "centers", "candidates", "first_context", "last_context"):
            np.testing.assert_array_equal(getattr(whole[step], name), getattr(again, name))


def test_negatives_of_batches_follow_the_distribution() -> None:
    """Those of all blocks together, and those of the first blocks alone."""
    corpus = random_corpus(20, 8000)
    batches = sampled(corpus, 0, 64, batch_words=1000)
    wanted = corpus.counts**0.75 / (corpus.counts**0.75).sum()
    for blocks, tolerance in ((slice(None), 0.002), (slice(1), 0.045)):
        drawn = [batch.outputs[batch.candidates[blocks, batch.n_nearby :]].ravel() for batch in batches]
        found = np.bincount(np.concatenate(drawn), minlength=len(wanted))
        assert np.abs(found / found.sum() - wanted).max() < tolerance


def test_the_greatest_draw_is_the_last_word() -> None:
    greatest: Any = SimpleNamespace(
        random=lambda n: np.full(n, np.nextafter(1.0, 0.0)), permutation=lambda words: words
    )
    assert NegativeSampler(np.array([3, 2, 1])).draw(7, greatest).max() == 2


def test_sentences_longer_than_batches() -> None:
    corpus = Corpus.from_sentences([["a", "b"] * 50, ["c", "a"] * 20])
    made = sampled(corpus, 0, 14, batch_words=10)
    assert sum(batch.n_words for batch in made) == 140
    assert any(batch.n_words == 0 and batch.n_pairs == 0 for batch in made)


@settings(max_examples=40)
@given(
    words=st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), min_size=1, max_size=9, unique=True
    ),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    buckets=st.integers(1, 50),
)
def test_ngrams_are_those_of_a_plain_loop(words: list[str], lengths: tuple[int, int], buckets: int) -> None:
    least, most = lengths[0], sum(lengths)
    bags = make_bags(words, buckets, (least, most))
    rows, offsets = bags.lookup(np.arange(len(words)))
    unknown = make_bags(words, buckets, (least, most), n_known=7)
    ngrams = [row - len(words) for row in rows if row >= len(words)]
    assert (unknown.lookup(np.arange(len(words)))[0] - 7).tolist() == ngrams
    for i, word in enumerate(words):
        framed, wanted = f"<{word}>", [i]
        for n in range(least, most + 1):
            for at in range(len(framed) - n + 1):
                value = 0xCBF29CE484222325
                for character in framed[at : at + n]:
                    value = ((value ^ ord(character)) * 0x100000001B3) % 2**64
                wanted.append(len(words) + value % buckets)
        assert rows[offsets[i] : offsets[i + 1]].tolist() == wanted
    some = np.arange(len(words))[::2]
    assert [r.tolist() for r in np.split(bags.lookup(some)[0], bags.lookup(some)[1][1:-1])] == [
        rows[offsets[i] : offsets[i + 1]].tolist() for i in some
    ]


def test_ngrams_are_not_longer_than_words() -> None:
    found, same = (make_bags(["ab", "c"], 10, lengths) for lengths in ((2, 4), (2, 10**18)))
    assert found.rows.tolist() == same.rows.tolist()


def test_inputs_of_a_batch_with_ngrams() -> None:
    corpus = random_corpus(30, 1000)
    (plain,) = sampled(corpus, batch_words=100)
    assert plain.offsets is None
    (batch,) = sampled(corpus, batch_words=100, buckets=100, ngrams=(3, 4))
    assert batch.offsets is not None
    own_rows = batch.inputs[batch.offsets[:-1]]
    np.testing.assert_array_equal(own_rows, plain.inputs)
    assert own_rows.max() < len(corpus.words) <= batch.inputs.max()
