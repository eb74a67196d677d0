"""Tables in files: larger than memory, and whole again after a crash."""

from flatbed.tables.storage.disk.storage import DiskStorage

__all__ = ["DiskStorage"]
