"""Word vectors: skip-gram with negative sampling over flatbed tables.

>>> from flatbed.word2vec import Corpus, Settings, Trainer
>>> corpus = Corpus.from_sentences([["a", "cat", "and", "a", "dog"]] * 40)
>>> trainer = Trainer(corpus, Settings(dim=8, epochs=2, device="cpu"))
>>> trainer.run()
>>> trainer.vectors().matrix.shape
(4, 8)
"""

from flatbed.word2vec.corpus import Corpus, python_corpus, read_corpus
from flatbed.word2vec.settings import Settings
from flatbed.word2vec.trainer import Progress, Trainer
from flatbed.word2vec.vectors import Vectors

__all__ = ["Corpus", "Progress", "Settings", "Trainer", "Vectors", "python_corpus", "read_corpus"]
