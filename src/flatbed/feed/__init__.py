"""Batches on their way to the device, ahead of time."""

from flatbed.feed.prefetcher import Prefetcher

__all__ = ["Prefetcher"]
