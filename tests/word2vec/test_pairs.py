from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatbed.word2vec import Corpus
from flatbed.word2vec.ngrams import make_bags
from flatbed.word2vec.sampling import BLOCK, SHARED, Batch, Batches, contexts, distinct

from .texts import random_corpus


def listed(batch: Batch, window: int) -> list[tuple[int, int]]:
    """The pairs of a batch, word by word."""
    pairs = []
    for block in range(len(batch.words)):
        for i in range(BLOCK):
            for column in range(batch.first[block, i], batch.last[block, i] + 1):
                if column != i + window:
                    word = batch.inputs[batch.words[block, i]]
                    pairs.append((int(word), int(batch.outputs[batch.others[block, column]])))
    return pairs


def plain_pairs(sentences: list[list[int]], reach: list[int]) -> list[tuple[int, int]]:
    """The same as everybody would write it."""
    pairs, place = [], 0
    for sentence in sentences:
        for i, word in enumerate(sentence):
            b = reach[place]
            place += 1
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
    batches = Batches(corpus, window=window, subsample=0, batch_words=10**6, seed=seed)
    order = batches.order(0)
    batch = batches.make(order, 0)
    begins = np.concatenate(([0], corpus.ends[:-1]))
    texts = [corpus.ids[begins[s] : corpus.ends[s]].tolist() for s in order.sentences]
    # What `make` draws, in its order.
    draws = np.random.default_rng([seed, 0, 1])
    draws.random(len(corpus), dtype=np.float32)
    reach = draws.integers(1, window + 1, len(corpus)).tolist()
    wanted = plain_pairs(texts, reach)
    assert listed(batch, window) == wanted
    assert batch.n_pairs == len(wanted)
    assert batch.n_words == len(corpus)


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 5), st.integers(0, 99))
def test_contexts(lengths: list[int], window: int, seed: int) -> None:
    sentences = np.repeat(np.arange(len(lengths)), lengths)
    reach = np.random.default_rng(seed).integers(1, window + 1, len(sentences))
    first, last = contexts(sentences, reach)
    for i in range(len(sentences)):
        seen = [j for j in range(len(sentences)) if sentences[j] == sentences[i] and abs(i - j) <= reach[i]]
        assert (first[i], last[i]) == (seen[0], seen[-1])


def test_windows_are_uniform() -> None:
    corpus = Corpus.from_sentences([["a"] * 1000] * 20)
    batches = Batches(corpus, window=5, subsample=0, batch_words=20_000)
    batch = batches.make(batches.order(0), 0)
    reach = (batch.last - batch.first)[:, 5:-5].ravel() / 2
    inner = reach[(reach == reach.astype(int)) & (reach > 0)]
    found = np.array([Counter(inner.tolist())[b] for b in range(1, 6)]) / len(inner)
    assert np.abs(found - 0.2).max() < 0.015


def test_frequent_words_are_thinned_out() -> None:
    corpus = random_corpus(50, 60_000)
    batches = Batches(corpus, window=2, subsample=1e-2, batch_words=100_000)
    batch = batches.make(batches.order(0), 0)
    real = np.zeros(batch.words.shape, bool)
    real.ravel()[: int((batch.last >= batch.first).sum())] = True
    words = batch.inputs[batch.words[real]]
    kept = np.bincount(words, minlength=len(corpus.words)) / corpus.counts
    f = corpus.counts / corpus.counts.sum()
    wanted = np.minimum(np.sqrt(1e-2 / f) + 1e-2 / f, 1)
    assert np.all(np.abs(kept - wanted) < 4.5 * np.sqrt(0.25 / corpus.counts))
    assert wanted[0] < 0.25


def test_every_word_of_the_text_is_in_one_batch_of_each_epoch() -> None:
    corpus = random_corpus(30, 5000)
    batches = Batches(corpus, window=3, subsample=0, batch_words=700)
    assert batches.per_epoch == 8
    made = list(batches.range(0, 16))
    for epoch in (made[:8], made[8:]):
        assert sum(batch.n_words for batch in epoch) == len(corpus)
        found: Counter[int] = Counter()
        for batch in epoch:
            real = (batch.last >= batch.first).ravel()
            found.update(batch.inputs[batch.words.ravel()[real]].tolist())
        assert [found[i] for i in range(len(corpus.words))] == corpus.counts.tolist()
    assert made[0].words.tolist() != made[8].words.tolist()


def test_steps_are_of_equal_length() -> None:
    """No remainder of a few words as a step of its own."""
    corpus = Corpus.from_sentences([["a"]] * 2001)
    for batch_words, wanted in ((1000, {667}), (500, {400, 401}), (3000, {2001}), (1, {1})):
        batches = Batches(corpus, window=2, subsample=0, batch_words=batch_words)
        assert {batch.n_words for batch in batches.range(0, batches.per_epoch)} == wanted


def test_a_batch_depends_on_its_number_alone() -> None:
    corpus = random_corpus(30, 3000)
    whole = list(Batches(corpus, window=3, subsample=1e-2, batch_words=400, seed=3).range(0, 16))
    parts = Batches(corpus, window=3, subsample=1e-2, batch_words=400, seed=3)
    for step in (11, 3, 15, 8):
        (again,) = parts.range(step, step + 1)
        for name in ("inputs", "outputs", "words", "others", "first", "last"):
            np.testing.assert_array_equal(getattr(whole[step], name), getattr(again, name))


def test_negatives_of_batches_follow_the_distribution() -> None:
    corpus = random_corpus(20, 8000)
    batches = Batches(corpus, window=3, subsample=0, batch_words=1000)
    drawn = np.zeros(len(corpus.words))
    for batch in batches.range(0, 16):
        drawn += np.bincount(batch.outputs[batch.others[:, -SHARED:]].ravel(), minlength=len(drawn))
    wanted = corpus.counts**0.75 / (corpus.counts**0.75).sum()
    assert np.abs(drawn / drawn.sum() - wanted).max() < 0.002


def test_sentences_longer_than_batches() -> None:
    corpus = Corpus.from_sentences([["a", "b"] * 50, ["c", "a"] * 20])
    batches = Batches(corpus, window=2, subsample=0, batch_words=10)
    made = list(batches.range(0, batches.per_epoch))
    assert sum(batch.n_words for batch in made) == 140
    assert any(batch.n_words == 0 and batch.n_pairs == 0 for batch in made)


def test_distinct() -> None:
    found, (a, b) = distinct(10, np.array([5, 2, 5]), np.array([9, 2]))
    assert found.tolist() == [2, 5, 9]
    assert a.tolist() == [1, 0, 1]
    assert b.tolist() == [2, 0]


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
    rows, offsets = bags.of(np.arange(len(words)))
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
    assert [r.tolist() for r in np.split(bags.of(some)[0], bags.of(some)[1][1:-1])] == [
        rows[offsets[i] : offsets[i + 1]].tolist() for i in some
    ]


@pytest.mark.parametrize("with_bags", [False, True])
def test_inputs_of_a_batch(with_bags: bool) -> None:
    corpus = random_corpus(30, 1000)
    bags = make_bags(corpus.words, 100, (3, 4)) if with_bags else None
    batches = Batches(corpus, window=3, subsample=0, batch_words=100, bags=bags)
    (batch,) = batches.range(0, 1)
    if bags is None:
        assert batch.offsets is None
        assert np.all(np.diff(batch.inputs) > 0)
    else:
        assert batch.offsets is not None
        words = batch.inputs[batch.offsets[:-1]]  # a word's own row comes first
        assert np.all(np.diff(words) > 0)
        assert words.max() < len(corpus.words) <= batch.inputs.max()
