from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatbed.word2vec import Corpus, python_corpus, read_corpus
from flatbed.word2vec import corpus as corpus_module
from flatbed.word2vec.corpus import LONGEST_SENTENCE
from flatbed.word2vec.stdlib_corpus import source_files


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


def test_long_sentences_are_cut() -> None:
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


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one two\r\nthr\u00e4e\n\n  four\tfive".encode() + b" s\xffix")
    (tmp_path / "b.txt").write_text("seven")
    seen: list[tuple[int, int]] = []
    corpus = read_corpus([tmp_path / "a.txt", tmp_path / "b.txt"], progress=lambda *p: seen.append(p))
    assert text(corpus) == [["one", "two"], ["thräe"], ["four", "five", "six"], ["seven"]]
    assert seen[-1][0] == seen[-1][1] > 30


def test_blocks_of_a_file_do_not_cut_words_or_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    lines = [" ".join(f"wörd{i}" for i in random.integers(0, 99, n)) for n in random.integers(1, 9, 400)]
    (tmp_path / "t.txt").write_text("\n".join(lines), encoding="utf-8")
    for size in (7, 64, 1 << 20):
        monkeypatch.setattr("flatbed.word2vec.corpus.READ_BYTES", size)
        assert text(read_corpus([tmp_path / "t.txt"])) == [line.split() for line in lines]


def test_a_text_without_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatbed.word2vec.corpus.READ_BYTES", 100)
    (tmp_path / "t.txt").write_text("ab cd " * 2000)
    corpus = read_corpus([tmp_path / "t.txt"])
    assert corpus.counts.tolist() == [2000, 2000]
    assert np.diff(corpus.ends, prepend=0).tolist() == [1000] * 4


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: read_corpus([p / "no.txt"]), r"no\.txt does not exist: give text files"),
        (lambda p: read_corpus([p]), "is a folder: give text files"),
        (lambda p: read_corpus([p / "empty.txt"]), r"no words in .*empty\.txt"),
        (lambda p: Corpus.from_sentences("text"), "lists of words; found one string"),
        (lambda p: Corpus.from_sentences(["some text"]), "found the string 'some text'"),
        (lambda p: Corpus.from_sentences([["a"]], max_words=0), "max_words must be 1 at least; found 0"),
        (lambda p: python_corpus(folder=p), "no Python source"),
    ],
)
def test_mistakes(make, match: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "empty.txt").write_text(" \n\n ")
    with pytest.raises((OSError, TypeError, ValueError), match=match):
        make(tmp_path)


def test_python_source(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a.py",
        "test/t.py",
        "pkg/tests/t.py",
        "site-packages/s.py",
        "pkg/c.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def f(x):\n    x.append(1)\n\nclass A:\n    pass\n")
    (tmp_path / "a.py").write_bytes(b"name_\xff = 'caf\xc3\xa9'  # 3 words2\n")
    assert [p.relative_to(tmp_path).as_posix() for p in source_files(tmp_path)] == [
        "a.py",
        "b.py",
        "pkg/c.py",
    ]
    corpus = python_corpus(folder=tmp_path)
    assert text(corpus) == [["name_", "café", "words2"]] + 2 * [
        ["def", "f", "x", "x", "append"],
        ["class", "A", "pass"],
    ]


def test_the_library_of_this_python() -> None:
    seen: list[tuple[int, int]] = []
    corpus = python_corpus(max_words=100_000, progress=lambda *p: seen.append(p))
    assert len(corpus) == 100_000
    counts = Counter(dict(zip(corpus.words, corpus.counts.tolist(), strict=True)))
    assert {"self", "if", "def", "return"} <= {word for word, _ in counts.most_common(30)}
    assert seen[0][1] > 200


@pytest.mark.parametrize(("block", "marked"), [(1 << 20, 1), (1, 2), (2, 2)])
def test_a_byte_order_mark_is_no_word(
    block: int, marked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "READ_BYTES", block)
    texts = [tmp_path / "a", tmp_path / "b"]
    for number, text in enumerate(texts):
        text.write_text("to be\nto do\n", encoding="utf-8-sig" if number < marked else "utf-8")
    seen: list[tuple[int, int]] = []
    corpus = read_corpus(texts, progress=lambda done, n: seen.append((done, n)))
    assert corpus.words == ["to", "be", "do"]
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(
    ("sentences", "match"),
    [
        ([[1, "a"]], "words are strings; found 1 among them"),
        ([["a", None]], "words are strings; found None among them"),
        ([["a", ["b"]]], r"words are strings; found \['b'\] among them"),
        ([5], "a sentence is a list of words; found 5"),
        ([(word for word in "ab")], "a sentence is a list of words; found generator"),
        (5, "sentences are lists of words; found 5"),
    ],
)
def test_what_is_no_sentence(sentences: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        Corpus.from_sentences(sentences)
