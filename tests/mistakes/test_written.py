"""Mistakes with tables, batches and word vectors, as they are written, and what their errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import flatbed
from flatbed import Embedding, EmbeddingBag, FlatbedError, word2vec
from flatbed.word2vec import Corpus, Settings, Trainer

Row = tuple[str, type[Exception], str]

EMBEDDING: list[Row] = [
    ("Kind(torch.ones(10, 4), 4)", TypeError, r"\(10, 4\).*from_pretrained"),
    ("Kind(10, 4, storage='gpu')", ValueError, r"host.*'gpu'"),
    ("Kind(10, 4, storage='disk')", ValueError, r"path="),
    ("Kind(10, 4, storage='disk', path=folder / 'missing' / 'items.bed')", FlatbedError, r"missing: make it"),
    ("Kind(10, 4, device='gpu')", ValueError, r"\"cuda\".*'gpu'"),
    ("Kind(10, 4, cache_rows=0.1)", TypeError, r"cache_rows.*0\.1"),
    ("Kind.from_pretrained(torch.ones(3))", ValueError, r"\(3,\)"),
    ("Kind.from_pretrained('x.npy')", TypeError, r"found the path x\.npy: load its weights first"),
    ("Kind(10, 4, storage='disk', path=folder / 'x', resume=True)", FlatbedError, r"missing: check the path"),
    ("Kind.from_table(torch.ones(3, 2))", TypeError, r"found Tensor.*from_pretrained"),
    ("Kind(10, 4)(torch.tensor([[3, 10]]))", IndexError, r"10.*\(0, 1\)"),
    ("Kind(10, 4)(torch.tensor([[1.0]]))", TypeError, r"torch.float32"),
    ("Kind(10, 4)([[1], [1, 2]])", ValueError, r"equal length: pad them.*inhomogeneous"),
    ("Kind(10, 4, *[None, 2.0][Kind is EmbeddingBag:])", TypeError, r"Embedding.*found 2\.0 after.*by name"),
    ("Kind.from_pretrained(torch.ones(2, 2), True, None, 2.0)", TypeError, r"Embedding.*after.*by name"),
    ("Kind(10, 4).read_rows([10])", IndexError, r"id 10"),
    ("Kind(10, 4).topk(torch.ones(1, 5), 2)", ValueError, r"\(1, 5\)"),
    ("Kind(10, 4).write_rows([1, 2], torch.ones(1, 4))", ValueError, r"\(2, 4\); found \(1, 4\)"),
    ("Kind(10, 4).weight = nn.Parameter(torch.ones(10, 4))", AttributeError, r"from_pretrained"),
    ("Kind(10, 4).num_embeddings = 20", AttributeError, r"num_emb"),
]
BAG: list[Row] = [
    ("EmbeddingBag(10, 4, mode='avg')", ValueError, r"'avg'"),
    ("EmbeddingBag(10, 4, 5)", TypeError, r"Bag takes num_embeddings and embedding_dim .*found 5 .*by name"),
    ("EmbeddingBag.from_pretrained(torch.ones(10, 4), True, 5)", TypeError, r"found 5 after.*by name"),
    ("EmbeddingBag(10, 4)(torch.tensor([1, 2]))", ValueError, r"\(2,\) without offsets.*unsqueeze\(0\)"),
    ("EmbeddingBag(10, 4)(torch.tensor([[[1, 2]]]))", ValueError, r"\(1, 1, 2\)"),
]
TABLE: list[Row] = [
    ("flatbed.Table(10, 4)", TypeError, r"Table"),
    ("table.grad = torch.ones(3)", FlatbedError, r"found \(3,\)"),
    ("table.grad = 0", TypeError, r"found 0"),
    ("table.read_rows(slice(0, 3))", TypeError, r"found slice"),
    ("table.topk([[1, 2, 3, 4]], 2)", TypeError, r"int64.*\.float"),
    ("table.topk(torch.ones(4), 11)", ValueError, r"1 and 10.*found 11"),
    ("table.read_state('exp_avg', [1])", KeyError, r"exp_avg.*none"),
    ("table.write_rows(torch.ones(1, 4), [1])", TypeError, r"float32"),
    ("table.write_rows([1, 10], torch.ones(2, 4))", IndexError, r"id 10 at position 1.*10 rows"),
    ("table.write_rows([1], torch.ones(1, 4).long())", TypeError, r"int64.*float"),
    ("table.write_rows([1], None)", RuntimeError, r"NoneType"),
    ("table.warm([3, 10])", IndexError, r"id 10"),
    ("table.warm([1, 2], [5])", ValueError, r"1 for 2"),
    ("table.set_cache(0.1)", TypeError, r"cache_rows.*0\.1"),
    ("table.set_cache(5, policy='fifo')", ValueError, r"lru.*'fifo'"),
    ("table.resize(5)", ValueError, r"grow; found 5"),
    ("table.resize((20, 4))", TypeError, r"integer; found \(20, 4\)"),
    ("table.checkpoint()", FlatbedError, r"\"host\".*save"),
    ("table.save(folder / 'missing' / 'items.safetensors')", FlatbedError, r"missing.*make it"),
    ("table.export(folder / 'missing' / 'items.npy')", FlatbedError, r"missing.*make it"),
    ("table.load('none')", FlatbedError, r"check the path"),
    ("table.load(smaller(folder))", FlatbedError, r"5 × 4.*10 × 4"),
    ("closed(folder).read_rows([1])", FlatbedError, r"is closed.*load"),
    ("closed(folder).topk(torch.ones(4), 1)", FlatbedError, r"closed.*load"),
    ("closed(folder).checkpoint()", FlatbedError, r"closed.*load"),
    ("flatbed.load_table(folder / 'none')", FlatbedError, r"check the"),
    (
        "np.save(folder / 'a.npy', np.ones(4)); flatbed.load_table(folder / 'a.npy')",
        FlatbedError,
        "another kind",
    ),
    ("torch.save([], folder / 'a.pt'); flatbed.load_table(folder / 'a.pt')", FlatbedError, "another kind"),
    (
        "save_file({'weight': torch.ones(2, 2), 'bias': torch.ones(2)}, folder / 'a.safetensors'); "
        "flatbed.load_table(folder / 'a.safetensors')",
        FlatbedError,
        r"nothing else; found .*'bias'.*: save the weights alone",
    ),
    (
        "flatbed.save_checkpoint(folder, nn.Linear(1, 1), 2 * [torch.optim.SGD([torch.ones(1)])])",
        ValueError,
        "twice",
    ),
    ("flatbed.save_checkpoint(folder, nn.Linear(1, 1), {'state': {}})", TypeError, "found dict"),
    ("flatbed.load_table(folder)", FlatbedError, r"is a folder without a checkpoint: give a file"),
    ("closed(folder); flatbed.load_table(folder / 'items.bed', device='gpu')", ValueError, "cuda.*'gpu'"),
    ("closed(folder); flatbed.load_table(folder / 'items.bed', storage='host')", ValueError, "'host'.*save"),
    ("flatbed.load_table(smaller(folder), storage='disk')", ValueError, r"storage='disk', to=None"),
    ("flatbed.tables([nn.Sequential()])", TypeError, r"found list.*nn.ModuleList"),
    ("on_disk(folder).weight", FlatbedError, r"read_rows.*write_rows"),
    ("flatbed.capture(print, {})", ValueError, r"found dict"),
    ("flatbed.capture(print, {'n': 3})", TypeError, r"found int in batch\['n'\]"),
]
DATA: list[Row] = [
    ("RowReader(torch.ones(3, 2))", TypeError, r"found Tensor.*tensor.numpy\(\)"),
    ("RowReader(folder / 'missing.npy')", FileNotFoundError, "missing.npy"),
    (
        "np.savez(folder / 'a.npz', np.ones(3)); RowReader(folder / 'a.npz')",
        ValueError,
        r"npz is not .*numpy\.save",
    ),
    ("RowReader(np.ones((3, 2)), device='gpu')", ValueError, "device.*gpu"),
    ("RowReader(np.ones((3, 2)), device='cpu')[[0, 3]]", IndexError, "id 3 at position 1.*3 rows"),
    ("RowReader(np.ones((3, 2)), device='cpu')[np.ones(3) > 0]", TypeError, "integers; found.*bool"),
    ("reader = RowReader(np.ones((3, 2)), device='cpu'); reader.close(); reader([0])", FlatbedError, "make"),
    ("Prefetcher(torch.ones(8, 4))", TypeError, r"found one Tensor: give \[batch\]"),
    ("Prefetcher({'x': torch.ones(8)})", TypeError, r"found one dict: give \[batch\]"),
    ("Prefetcher([], [emb])", TypeError, "a key of the batch.*found list"),
    ("Prefetcher([], {nn.Embedding(3, 2): 'x'})", TypeError, r"found torch\.nn\..*Embedding"),
    ("Prefetcher([], {nn.Sequential(emb): 'x'})", TypeError, r"torch\.nn\..*Sequential: give"),
    ("Prefetcher([], {emb: None})", TypeError, "key of the batch.*found NoneType"),
    ("Prefetcher([], depth=1.5)", TypeError, "integer"),
    ("Prefetcher([], depth=-1)", ValueError, "0 or more; found -1"),
    ("Prefetcher([], device='meta')", FlatbedError, "meta"),
    ("Prefetcher([], device='gpu')", ValueError, "device.*gpu"),
    ("Prefetcher([], device='cuda')", ValueError, 'no CUDA GPU.*device="cpu"'),
    ("Prefetcher(iter(()), pin=True)", TypeError, "found tuple_iterator: give a list"),
    ("len(Prefetcher(iter([]), device='cpu'))", TypeError, "iterator"),
    ("list(Prefetcher([{'x': [1, 10]}], {emb: 'x'}))", IndexError, r"Table\(10 × 4.*id 10 at position 1"),
    ("list(Prefetcher([{'ids': [1]}], {emb: 'x'}))", KeyError, r"10 × 4.*'x'.*keys .'ids'.: give a key"),
    ("list(Prefetcher([[[1], 3]], {emb: 'x'}))", AttributeError, r"10 × 4.*'x'.*batch of type list"),
    ("list(Prefetcher([{'x': torch.ones(1)}], {emb: 'x'}))", TypeError, "10 × 4.*integers.*torch.float32"),
]
WORDS: list[Row] = [
    ("Corpus.from_sentences('to be')", TypeError, r"split\(\)"),
    ("Corpus.from_sentences(['to be'])", TypeError, "'to be'"),
    ("Corpus.from_sentences([[1]])", TypeError, r"1: use str"),
    ("read_corpus([folder])", IsADirectoryError, "Is a directory"),
    ("python_corpus(folder=folder)", FileNotFoundError, "give text files"),
    ("Settings(dim=0)", ValueError, r"dim must be at least 1, and less than 2\*\*63; found 0"),
    ("Settings(batch_words=0)", ValueError, "batch_words must be at least 1"),
    ("Settings(seed=-1)", ValueError, "seed must be at least 0"),
    (
        "Settings(subsample=float('nan'))",
        ValueError,
        r"subsample must be at least 0, and less than 2\*\*63; found nan",
    ),
    ("Settings(lr=float('nan'))", ValueError, r"lr must be at least 0, and less than 2\*\*63; found nan"),
    ("Settings(storage='cloud')", ValueError, "storage must be one of host, device, disk; found 'cloud'"),
    ("Settings(storage='disk')", ValueError, r"--path.*path=None"),
    ("Settings(path='x')", ValueError, "disk and a path"),
    ("Settings(ngrams=(4, 3))", ValueError, "least and the greatest length"),
    ("Settings(optimizer='adm')", ValueError, "one of adadelta, .*adamax, .*asgd.*, lion.*; found 'adm'"),
    ("Settings(optimizer='LBFGS')", ValueError, "found 'LBFGS'"),
    ("trainer(min_count=99)", ValueError, "^0 words .* lower min_count .--min-count"),
    ("trainer().save(None)", TypeError, "folder must be .*; found None"),
    ("trainer().resume(folder)", FlatbedError, "no checkpoint: check"),
    ("trainer().vectors(['z'])", FlatbedError, r"'z' is not in the text: train n-grams \(buckets=\)"),
    ("Vectors(['up'], np.ones((2, 2)))", ValueError, r"found \(2, 2\)"),
    ("Vectors(['up', 'up'], np.ones((2, 2)))", ValueError, "'up' more than"),
    ("Vectors(['up', 'down'], np.ones((2, 2)))['dwn']", FlatbedError, r"'dwn' .*did you mean down\?"),
    ("Vectors(['New York'], np.ones((1, 2))).save(folder / 'v')", FlatbedError, "'New York' has white space"),
]
ROWS = [
    *((row, kind) for row in EMBEDDING for kind in (Embedding, EmbeddingBag)),
    *((row, Embedding) for row in (*BAG, *TABLE, *DATA, *WORDS)),
]


def on_disk(folder: Path) -> Embedding:
    return Embedding(10, 4, storage="disk", path=folder / "items.bed")


def closed(folder: Path) -> flatbed.Table:
    table = on_disk(folder).table
    table.read_rows([1])
    table.close()
    return table


def smaller(folder: Path) -> Path:
    """A file of five rows."""
    Embedding(5, 4).table.save(folder / "five.safetensors")
    return folder / "five.safetensors"


def trainer(**options: Any) -> Trainer:
    settings = Settings(dim=4, epochs=1, subsample=0, device="cpu", **options)
    return Trainer(Corpus.from_sentences([["a", "b", "a", "c"]] * 9), settings)


@pytest.mark.parametrize(
    ("row", "kind"), ROWS, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_mistake(row: Row, kind: type[Embedding], tmp_path: Path) -> None:
    """A table that is used in the wrong way is as it was."""
    code, error, message = row
    emb = Embedding(10, 4, cache_rows=4)
    before = repr(emb.table), emb.read_rows(range(10))
    names = {**vars(flatbed), **vars(word2vec), "nn": nn, "np": np, "torch": torch, "flatbed": flatbed}
    names |= {"Kind": kind, "folder": tmp_path, "closed": closed, "on_disk": on_disk}
    names |= {"smaller": smaller, "trainer": trainer, "save_file": save_file}
    no_gpu = patch.object(torch.cuda, "is_available", return_value=False)
    with no_gpu, pytest.raises(error, match=message) as caught:
        exec(code, {**names, "emb": emb, "table": emb.table})
    assert "object at 0x" not in str(caught.value), "an address tells nobody what was found"
    assert repr(emb.table) == before[0]
    assert torch.equal(emb.read_rows(range(10)), before[1])
