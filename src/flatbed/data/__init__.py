"""Batches and rows on the device ahead of time."""

from flatbed.data.prefetcher import Prefetcher
from flatbed.data.row_reader import RowReader

__all__ = ["Prefetcher", "RowReader"]
