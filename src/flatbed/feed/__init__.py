"""Batches on their way to the device, ahead of time."""

from flatbed.feed.feeder import Feeder
from flatbed.feed.prefetcher import Prefetcher
from flatbed.feed.row_reader import RowReader

__all__ = ["Feeder", "Prefetcher", "RowReader"]
