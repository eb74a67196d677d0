"""An English text and judged pairs of words, from gensim's own test data: nothing is downloaded."""

from __future__ import annotations

import bz2
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

WIKIPEDIA = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
PLAIN = ("lee_background.cor", "lee.cor", "pang_lee_polarity.cor")
JUDGED = {"WordSim-353": "wordsim353.tsv", "SimLex-999": "simlex999.txt"}
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
SHORTEST = 5  # words: shorter lines are headings and remains of markup
HELD_OUT = 20  # one sentence of so many is kept from the trainers

Pair = tuple[str, str, float]
"""Two words, and how alike people found them."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What the trainers are given, and what is kept for judging them."""

    training: list[list[str]]
    held_out: list[list[str]]
    words: list[str]
    """Those of the training text that occur `min_count` times, the most frequent first."""
    counts: npt.NDArray[np.int64]

    @property
    def n_words(self) -> int:
        """Words of training text, rare ones too."""
        return sum(map(len, self.training))


def data_folder() -> Path:
    """Where gensim keeps its test data."""
    import gensim

    folder = Path(gensim.__file__).parent / "test" / "test_data"
    if not (folder / WIKIPEDIA).exists():
        raise FileNotFoundError(
            f"gensim {gensim.__version__} has no {WIKIPEDIA} under {folder}; install gensim from its wheel"
        )
    return folder


def wikipedia(path: Path) -> Iterator[str]:
    """The paragraphs of the articles, without their markup."""
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    with bz2.open(path) as file:
        for _, article, _ in extract_pages(file, ("0",)):
            if not article.lstrip().upper().startswith("#REDIRECT"):
                yield from filter_wiki(article).splitlines()


@lru_cache(maxsize=1)
def sentences() -> list[list[str]]:
    """The whole text: a paragraph of Wikipedia, a news article or a review's sentence is one sentence.

    They are shuffled once. gensim takes a text in its order, and what it finds of one article then depends on
    the articles that come after it: a trainer that shuffles would be held against that accident.
    """
    folder = data_folder()
    lines = list(wikipedia(folder / WIKIPEDIA))
    for name in PLAIN:
        lines += (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
    split = (WORD.findall(line.lower().removeprefix("__label__")) for line in lines)
    found = [words for words in split if len(words) >= SHORTEST]
    return [found[place] for place in np.random.default_rng(0).permutation(len(found))]


def read_text(*, min_count: int, max_sentences: int | None = None) -> Text:
    """The text in its two parts, of which the trainers see the larger one."""
    return divide(sentences()[:max_sentences], min_count=min_count)


def divide(all_of_them: Sequence[list[str]], *, min_count: int) -> Text:
    """Sentences in two parts, every twentieth is held out; and the words that are frequent enough."""
    training = [words for place, words in enumerate(all_of_them) if place % HELD_OUT]
    counted = Counter(word for words in training for word in words)
    kept = [(word, count) for word, count in counted.most_common() if count >= min_count]
    return Text(
        training=training,
        held_out=list(all_of_them[::HELD_OUT]),
        words=[word for word, _ in kept],
        counts=np.array([count for _, count in kept], dtype=np.int64),
    )


def judged_pairs(name: str, words: Sequence[str]) -> list[Pair]:
    """The pairs of a collection that these words cover; a word with itself tells nothing and is left out."""
    known = set(words)
    pairs = []
    for line in (data_folder() / JUDGED[name]).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            first, second, likeness = line.lower().split("\t")[:3]
            if first != second and first in known and second in known:
                pairs.append((first, second, float(likeness)))
    return pairs
