"""Hot records on the computing device, over a tier that has room for all."""

from flatbed.rows.cache.build import Cache, build, slots_for
from flatbed.rows.cache.device import DeviceCache
from flatbed.rows.cache.host import HostCache
from flatbed.rows.cache.stats import CacheStats
from flatbed.rows.cache.ticket import Ticket

__all__ = ["Cache", "CacheStats", "DeviceCache", "HostCache", "Ticket", "build", "slots_for"]
