"""Batches on their way to the device, ahead of time."""

from flatbed.data.feeder import Feeder
from flatbed.data.prefetcher import Prefetcher
from flatbed.data.row_reader import RowReader

__all__ = ["Feeder", "Prefetcher", "RowReader"]
