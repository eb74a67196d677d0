"""Hot records on the computing device, over a tier that has room for all."""

from flatbed.tables.cache.build import Cache, build, slots_for
from flatbed.tables.cache.device import DeviceCache
from flatbed.tables.cache.host import HostCache
from flatbed.tables.cache.reservation import Reservation
from flatbed.tables.cache.stats import CacheStats

__all__ = ["Cache", "CacheStats", "DeviceCache", "HostCache", "Reservation", "build", "slots_for"]
