"""Optimizers that update all parameters in one kernel, and embedding tables larger than the GPU."""

from flatbed import optim
from flatbed._version import __version__
from flatbed.capture import capture
from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.checkpoint.load_table import load_table
from flatbed.compat.contiguous_params import ContiguousParams
from flatbed.data import Prefetcher, RowReader
from flatbed.errors import FlatbedError
from flatbed.flat import FlatParams
from flatbed.tables.embedding import Embedding, EmbeddingBag, tables
from flatbed.tables.table import Table

__all__ = [
    "ContiguousParams",
    "Embedding",
    "EmbeddingBag",
    "FlatParams",
    "FlatbedError",
    "Prefetcher",
    "RowReader",
    "Table",
    "__version__",
    "capture",
    "load_checkpoint",
    "load_table",
    "optim",
    "save_checkpoint",
    "tables",
]
