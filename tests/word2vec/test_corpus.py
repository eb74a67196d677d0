from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flatbed.word2vec import Corpus, python_corpus, read_corpus
from flatbed.word2vec.corpus import LONGEST_SENTENCE, source_files


def text(corpus: Corpus) -> list[list[str]]:
    begins = np.concatenate(([0], corpus.ends[:-1]))
    return [[corpus.words[i] for i in corpus.ids[a:b]] for a, b in zip(begins, corpus.ends, strict=True)]


def test_words_are_counted_and_sorted() -> None:
    sentences = [["b", "a", "c"], ["b", "a"], [], ["d", "b"]]
    corpus = Corpus.from_sentences(sentences)
    assert corpus.words == ["b", "a", "c", "d"]
    assert corpus.counts.tolist() == [3, 2, 1, 1]
    assert text(corpus) == [s for s in sentences if s]
    assert len(corpus) == 7


def test_rare_words_are_left_out_and_sentences_close_up() -> None:
    corpus = Corpus.from_sentences([["a", "x", "b"], ["y"], ["b", "a", "z"]]).frequent(2)
    assert corpus.words == ["a", "b"]
    assert corpus.counts.tolist() == [2, 2]
    assert text(corpus) == [["a", "b"], ["b", "a"]]


def test_long_sentences_are_split() -> None:
    corpus = Corpus.from_sentences([["a"] * (LONGEST_SENTENCE + 3)])
    assert corpus.ends.tolist() == [LONGEST_SENTENCE, LONGEST_SENTENCE + 3]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 99])
def test_max_words(n: int) -> None:
    sentences = [["a", "b"], ["c", "d", "e"]]
    found = [word for sentence in text(Corpus.from_sentences(sentences, max_words=n)) for word in sentence]
    assert found == ["a", "b", "c", "d", "e"][:n]


def test_fingerprints() -> None:
    base = Corpus.from_sentences([["a", "b"], ["c"]])
    assert base.fingerprint() == Corpus.from_sentences([["a", "b"], ["c"]]).fingerprint()
    others = ([["a", "b", "c"]], [["a", "c"], ["b"]], [["a", "x"], ["c"]])
    assert len({base.fingerprint(), *(Corpus.from_sentences(o).fingerprint() for o in others)}) == 4


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_blocks_of_a_file_cut_neither_words_nor_lines(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line longer than a block is cut into sentences, between words."""
    monkeypatch.setattr("flatbed.word2vec.corpus.READ_CHARS", block)
    random = np.random.default_rng(0)
    lines = [" ".join(f"wörd{i}" for i in random.integers(0, 99, n)) for n in random.integers(1, 9, 100)]
    (tmp_path / "marked.txt").write_text("\n".join(lines), encoding="utf-8-sig")
    (tmp_path / "other.txt").write_bytes(b"one\ttwo\r\n\n  three")
    seen: list[tuple[int, int]] = []
    found = text(read_corpus(sorted(tmp_path.iterdir()), progress=lambda *p: seen.append(p)))
    wanted = [*(line.split() for line in lines), ["one", "two"], ["three"]]
    assert [word for words in found for word in words] == [word for words in wanted for word in words]
    assert (found == wanted) == (block > 7)
    assert seen[-1][0] == seen[-1][1] == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_encodings(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("café caf café\n", encoding="latin-1")
    assert read_corpus(tmp_path / "t.txt", encoding="latin-1").words == ["café", "caf"]
    with pytest.warns(UserWarning, match=r"2 bytes are not utf-8 .* give the encoding"):
        assert read_corpus(tmp_path / "t.txt").words == ["caf\ufffd", "caf"]
    (tmp_path / "16.txt").write_text("café caf", encoding="utf-16")
    assert read_corpus(tmp_path / "16.txt", encoding="utf-16").words == ["caf", "café"]
    with pytest.raises(ValueError, match="NUL characters: give its encoding, utf-16"):
        read_corpus(tmp_path / "16.txt")
    (tmp_path / "fffd.txt").write_text("a \ufffd\n", encoding="utf-8")  # a character as any other
    assert read_corpus(tmp_path / "fffd.txt").words == ["a", "\ufffd"]
    with pytest.raises(ValueError, match=r"unknown encoding: latin1000: .* such as latin-1"):
        read_corpus(tmp_path / "t.txt", encoding="latin1000")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_are_named_as_such(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "t.txt").write_bytes(compress(b"to be or not"))
    with pytest.raises(ValueError, match=r"t\.txt is compressed: unpack it first"):
        read_corpus(tmp_path / "t.txt")


def test_python_source(tmp_path: Path) -> None:
    names = ["b.py", "a.py", "test/t.py", "pkg/tests/t.py", "site-packages/s.py", "pkg/c.py", "notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def f(x):\n    x.append(1)\n\nclass A:\n    pass\n")
    (tmp_path / "a.py").write_bytes(b"name_\xff = 'caf\xc3\xa9'  # 3 words2\n")
    found = [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)]
    assert found == ["a.py", "b.py", "pkg/c.py"]
    function, empty_class = ["def", "f", "x", "x", "append"], ["class", "A", "pass"]
    wanted = [["name_\ufffd", "café", "words2"], function, empty_class, function, empty_class]
    with pytest.warns(UserWarning, match=r"^1 bytes are not in the encoding of their files .* # coding:"):
        assert text(python_corpus(folder=tmp_path)) == wanted


def test_python_source_has_the_encoding_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# coding: latin-1\ncafé = caf\n".encode("latin-1"))
    (tmp_path / "b.py").write_text("\ufeffcafé\n", encoding="utf-8")
    (tmp_path / "c.py").write_text("# coding: unknown-9\nété\n", encoding="utf-8")
    assert {"café": 2, "caf": 1, "été": 1}.items() <= count(python_corpus(folder=tmp_path)).items()


def count(corpus: Corpus) -> dict[str, int]:
    return dict(zip(corpus.words, corpus.counts.tolist(), strict=True))


def test_the_library_of_this_python() -> None:
    seen: list[tuple[int, int]] = []
    corpus = python_corpus(max_words=100_000, progress=lambda *p: seen.append(p))
    assert len(corpus) == 100_000
    assert {"self", "if", "def", "return"} <= set(corpus.words[:30])
    assert seen[0][1] > 200
