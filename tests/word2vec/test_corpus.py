from __future__ import annotations

import bz2
import gzip
import lzma
import random
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
    assert repr(corpus) == "Corpus(7 words of text, 4 distinct: b, a, c, d)"
    many = Corpus.from_sentences([[f"{n:04}" for n in range(1200)]])
    assert repr(many) == "Corpus(1,200 words of text, 1,200 distinct: 0000, 0001, 0002, 0003, …)"
    for n in (1, 3, 4, 7, 99):
        found = text(Corpus.from_sentences(sentences, max_words=n))
        assert [word for words in found for word in words] == [*"bacbadb"][:n]


def test_rare_words_are_left_out_and_sentences_close_up() -> None:
    corpus = Corpus.from_sentences([["a", "x", "b"], ["y"], ["b", "a", "z"]]).frequent(2)
    assert corpus.words == ["a", "b"]
    assert corpus.counts.tolist() == [2, 2]
    assert text(corpus) == [["a", "b"], ["b", "a"]]


def test_long_sentences_are_split() -> None:
    corpus = Corpus.from_sentences([["a"] * (LONGEST_SENTENCE + 3)])
    assert corpus.ends.tolist() == [LONGEST_SENTENCE, LONGEST_SENTENCE + 3]


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


@pytest.mark.parametrize("space", ["", "\t", "\u3000", "  "])
def test_long_lines_are_read_in_parts(space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any white space ends a word. Of longer words than a block, each part is a word."""
    monkeypatch.setattr("flatbed.word2vec.corpus.READ_CHARS", 8)
    (tmp_path / "t.txt").write_text(space.join(["abcdefgh"] * 100), encoding="utf-8")
    found = [word for words in text(read_corpus(tmp_path / "t.txt")) for word in words]
    assert "".join(found) == "abcdefgh" * 100
    assert {len(word) for word in found} == {8 if space else 16}


def test_encodings(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("café caf café\n", encoding="latin-1")
    assert read_corpus(file, encoding="latin-1").words == ["café", "caf"]
    with pytest.warns(UserWarning, match=r"^1 different words have U\+FFFD .* not utf-8; give its encoding"):
        assert read_corpus(file).words == ["caf\ufffd", "caf"]
    with pytest.raises(ValueError, match=r"unknown encoding: latin1000: .* such as latin-1"):
        read_corpus(file, encoding="latin1000")
    with pytest.raises(ValueError, match=r"'rot13' is not a text encoding"):
        read_corpus(file, encoding="rot13")
    file.write_text("café caf", encoding="utf-16")
    assert read_corpus(file, encoding="utf-16").words == ["caf", "café"]
    content = random.Random(0).randbytes(1000)
    compressed = [compress(content) for compress in (gzip.compress, bz2.compress, lzma.compress)]
    for found in (file.read_bytes(), bytes(100), *compressed):
        file.write_bytes(found)
        with pytest.raises(ValueError, match=r"t\.txt is no text .* NUL.* compressed, .* utf-16"):
            read_corpus(file)


def test_python_source(tmp_path: Path) -> None:
    names = ["b.py", "a.py", "test/t.py", "pkg/tests/t.py", "site-packages/s.py", "pkg/c.py", "notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def f(x):\n    x.append(1)\n\nclass A:\n    pass\n")
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbfname_\xff = 'caf\xc3\xa9'  # 3 words2\n")
    found = [path.relative_to(tmp_path).as_posix() for path in source_files(tmp_path)]
    assert found == ["a.py", "b.py", "pkg/c.py"]
    function, empty_class = ["def", "f", "x", "x", "append"], ["class", "A", "pass"]
    wanted = [["name_\ufffd", "café", "words2"], function, empty_class, function, empty_class]
    with pytest.warns(UserWarning, match=r"^1 different words have U\+FFFD .* UTF-8"):
        assert text(python_corpus(folder=tmp_path)) == wanted
    seen: list[tuple[int, int]] = []
    corpus = python_corpus(max_words=100_000, progress=lambda *p: seen.append(p))
    assert len(corpus) == 100_000
    assert {"self", "if", "def", "return"} <= set(corpus.words[:30])
    assert seen[0][1] > 200
