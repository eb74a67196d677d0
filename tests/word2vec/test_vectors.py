from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flatbed import FlatbedError
from flatbed.word2vec import Vectors

gensim = pytest.importorskip("gensim.models")
both = pytest.mark.parametrize("binary", [False, True])


def some(n: int = 7, dim: int = 5) -> Vectors:
    matrix = np.random.default_rng(0).standard_normal((n, dim)).astype(np.float32)
    matrix[0, :3] = [1e-30, -0.1, 123456.78]
    return Vectors([f"wörd{i}" for i in range(n)], matrix, np.arange(n, 0, -1))


@both
def test_gensim_reads_our_files_and_flatbed_reads_both(binary: bool, tmp_path: Path) -> None:
    vectors = some()
    vectors.save(tmp_path / "ours", binary=binary)
    theirs = gensim.KeyedVectors.load_word2vec_format(str(tmp_path / "ours"), binary=binary)
    again = Vectors.load(tmp_path / "ours")
    assert list(theirs.index_to_key) == vectors.words == again.words
    assert again.counts is None
    np.testing.assert_array_equal(theirs.vectors, vectors.matrix)
    np.testing.assert_array_equal(again.matrix, vectors.matrix)
    theirs.save_word2vec_format(str(tmp_path / "theirs"), binary=binary)
    again = Vectors.load(tmp_path / "theirs")
    assert again.words == vectors.words
    np.testing.assert_allclose(again.matrix, vectors.matrix, rtol=1e-5)
    wanted, found = theirs.most_similar("wörd2", topn=3), vectors.neighbors("wörd2", n=3)
    assert [word for word, _ in found] == [word for word, _ in wanted]
    np.testing.assert_allclose([c for _, c in found], [c for _, c in wanted], rtol=1e-5)


def test_binary_numbers_that_look_like_text(tmp_path: Path) -> None:
    """Bytes of floats can be spaces, digits and line ends."""
    matrix = np.frombuffer(b"1 2 3 4 5 6 7 8\n 1 2 3 4", "<f4").reshape(2, 3)
    Vectors(["a", "b"], matrix).save(tmp_path / "v", binary=True)
    np.testing.assert_array_equal(Vectors.load(tmp_path / "v").matrix, matrix)


def test_neighbours_of_few_words() -> None:
    """Rows of NaN are no neighbours, and have none."""
    rows = np.array([[1.0, 0], [1, 1], [0, 0], [np.nan, 1]])
    vectors = Vectors(["a", "b", "zero", "bad"], rows)
    assert [word for word, _ in vectors.neighbors("a")] == ["b", "zero"]
    assert vectors.neighbors("bad") == []
    assert "a" in vectors
    assert "q" not in vectors
    assert vectors["b"].tolist() == [1, 1]
    assert repr(vectors) == "Vectors(4 words, dim 2: a, b, zero, bad)"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "does not begin with a line of two numbers"),
        (b"hello world\n", "does not begin with a line of two numbers"),
        (b"2 2\na 1 2\n", "2 words of 2 numbers: it has 1 words"),
        (b"2 2\na 1 2\nb 1\n", "'b' has 1"),
        (b"2 2\na 1 2\nb x y\n", "could not convert"),
        (b"1 9\na \x00\x01\x02", "it ends early"),
    ],
)
def test_damaged_files(content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(content)
    with pytest.raises(FlatbedError, match=match):
        Vectors.load(tmp_path / "v")


@both
@pytest.mark.parametrize(
    ("word", "kept", "warning"),
    [
        ("wörd0".encode(), [0, 1, 3], "1 vectors of .* were left out"),
        (b"w\xf6rd2", [0, 1, 2, 3], r"1 different words have U\+FFFD .* as UTF-8"),
    ],
    ids=["repeated", "not UTF-8"],
)
def test_words_of_a_file_that_are_warned_of(
    binary: bool, word: bytes, kept: list[int], warning: str, tmp_path: Path
) -> None:
    """The first vector of a repeated word counts, as in gensim."""
    some(4).save(tmp_path / "v", binary=binary)
    (tmp_path / "v").write_bytes((tmp_path / "v").read_bytes().replace("wörd2".encode(), word))
    with pytest.warns(UserWarning, match=warning):
        found = Vectors.load(tmp_path / "v")
    known = ["wörd0", "wörd1", word.decode("utf-8", "replace"), "wörd3"]
    assert found.words == [known[row] for row in kept]
    np.testing.assert_array_equal(found.matrix, some(4).matrix[kept])
