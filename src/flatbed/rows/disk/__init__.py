"""Tables in files: larger than memory, and whole again after a crash."""

from flatbed.rows.disk.tier import DiskTier

__all__ = ["DiskTier"]
