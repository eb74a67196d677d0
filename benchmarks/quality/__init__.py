"""Word vectors of two trainers, measured by the same judges: `benchmarks/word2vec_quality.py` runs it."""
