from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flatbed import FlatbedError
from flatbed.word2vec import Vectors

gensim = pytest.importorskip("gensim.models")


def some(n: int = 7, dim: int = 5, seed: int = 0) -> Vectors:
    matrix = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    return Vectors([f"wörd{i}" for i in range(n)], matrix, np.arange(n, 0, -1))


@pytest.mark.parametrize("binary", [False, True])
def test_files_hold_the_same_numbers(binary: bool, tmp_path: Path) -> None:
    vectors = some()
    vectors.matrix[0, :3] = [1e-30, -0.1, 123456.78]
    vectors.save(tmp_path / "v", binary=binary)
    again = Vectors.load(tmp_path / "v")
    assert again.words == vectors.words
    assert again.counts is None
    np.testing.assert_array_equal(again.matrix, vectors.matrix)


@pytest.mark.parametrize("binary", [False, True])
def test_gensim_reads_our_files_and_flatbed_reads_gensims(binary: bool, tmp_path: Path) -> None:
    vectors = some()
    vectors.save(tmp_path / "ours", binary=binary)
    theirs = gensim.KeyedVectors.load_word2vec_format(str(tmp_path / "ours"), binary=binary)
    assert list(theirs.index_to_key) == vectors.words
    np.testing.assert_array_equal(theirs.vectors, vectors.matrix)
    theirs.save_word2vec_format(str(tmp_path / "theirs"), binary=binary)
    again = Vectors.load(tmp_path / "theirs")
    assert again.words == vectors.words
    np.testing.assert_allclose(again.matrix, vectors.matrix, rtol=1e-5)
    wanted = theirs.most_similar("wörd2", topn=3)
    found = vectors.neighbors("wörd2", n=3)
    assert [word for word, _ in found] == [word for word, _ in wanted]
    np.testing.assert_allclose([c for _, c in found], [c for _, c in wanted], rtol=1e-5)


def test_binary_numbers_that_look_like_text(tmp_path: Path) -> None:
    """Bytes of floats can be spaces, digits and line ends."""
    matrix = np.frombuffer(b"1 2 3 4 5 6 7 8\n 1 2 3 4", "<f4").reshape(2, 3)
    Vectors(["a", "b"], matrix).save(tmp_path / "v", binary=True)
    np.testing.assert_array_equal(Vectors.load(tmp_path / "v").matrix, matrix)


def test_neighbours_of_few_words() -> None:
    vectors = Vectors(["a", "b", "zero"], np.array([[1.0, 0], [1, 1], [0, 0]]))
    assert [word for word, _ in vectors.neighbors("a")] == ["b", "zero"]
    assert "a" in vectors
    assert "q" not in vectors
    assert vectors["b"].tolist() == [1, 1]


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


@pytest.mark.parametrize("binary", [False, True])
def test_the_first_vector_of_a_repeated_word_counts(binary: bool, tmp_path: Path) -> None:
    some(4).save(tmp_path / "v", binary=binary)
    content = (tmp_path / "v").read_bytes().replace("wörd2".encode(), "wörd0".encode())
    (tmp_path / "v").write_bytes(content)
    theirs = gensim.KeyedVectors.load_word2vec_format(str(tmp_path / "v"), binary=binary)
    with pytest.warns(UserWarning, match=r"1 vectors of .* were left out"):
        found = Vectors.load(tmp_path / "v")
    assert found.words == ["wörd0", "wörd1", "wörd3"]
    np.testing.assert_array_equal(found.matrix, [theirs[word] for word in found.words])
    np.testing.assert_array_equal(found.matrix, some(4).matrix[[0, 1, 3]])


@pytest.mark.parametrize("binary", [False, True])
def test_words_that_are_not_utf_8_are_counted(binary: bool, tmp_path: Path) -> None:
    some(4).save(tmp_path / "v", binary=binary)
    (tmp_path / "v").write_bytes((tmp_path / "v").read_bytes().replace("wörd2".encode(), b"w\xf6rd2"))
    with pytest.warns(UserWarning, match=r"1 bytes are not UTF-8 in .*v and were replaced by U\+FFFD"):
        assert "w\ufffdrd2" in Vectors.load(tmp_path / "v")


def test_rows_of_nan_are_no_neighbours() -> None:
    vectors = Vectors(["a", "b", "bad", "c"], np.array([[1.0, 0], [1, 1], [np.nan, 1], [0, 1]]))
    assert [word for word, _ in vectors.neighbors("a")] == ["b", "c"]
    assert vectors.neighbors("bad") == []
