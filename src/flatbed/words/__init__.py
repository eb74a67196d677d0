"""Word vectors: skip-gram with negative sampling over tables that live on the host.

>>> from flatbed.words import Corpus, Settings, Trainer
>>> corpus = Corpus.from_sentences([["a", "cat", "and", "a", "dog"], ["a", "dog", "and", "a", "cat"]] * 20)
>>> trainer = Trainer(corpus, Settings(dim=8, min_count=1, epochs=2, device="cpu"))
>>> trainer.run()
>>> trainer.vectors().matrix.shape
(4, 8)
"""

from flatbed.words.corpus import Corpus, read_corpus
from flatbed.words.python_source import python_corpus
from flatbed.words.settings import Settings
from flatbed.words.trainer import Progress, Trainer
from flatbed.words.vectors import Vectors

__all__ = ["Corpus", "Progress", "Settings", "Trainer", "Vectors", "python_corpus", "read_corpus"]
