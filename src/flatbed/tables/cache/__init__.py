"""Records of hot rows on the computing device, over storage that holds all rows."""

from flatbed.tables.cache.build import Cache, build, location_of, slots_for, warm
from flatbed.tables.cache.stats import CacheStats

__all__ = ["Cache", "CacheStats", "build", "location_of", "slots_for", "warm"]
