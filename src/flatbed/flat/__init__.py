"""Parameters in contiguous buffers, under any in-place optimizer of torch."""

from flatbed.flat.buffer import FlatParameter
from flatbed.flat.model_params import Source
from flatbed.flat.params import FlatParams, Snapshot
from flatbed.layout import Segment

__all__ = ["FlatParameter", "FlatParams", "Segment", "Snapshot", "Source"]
