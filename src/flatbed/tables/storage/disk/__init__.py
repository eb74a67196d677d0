"""Storage in files: for tables larger than memory, consistent after a crash."""

from flatbed.tables.storage.disk.read_only import ReadOnlyStorage
from flatbed.tables.storage.disk.storage import DiskStorage

__all__ = ["DiskStorage", "ReadOnlyStorage"]
