"""Host memory for tables: exactly sized, zero at first, never touched by forked processes, freed once."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import operator
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from flatbed.cuda import driver as cuda_host
from flatbed.errors import FlatbedError
from flatbed.progress import progress

KINDS = ("managed", "registered", "pageable")
KIND_VARIABLE, LIMIT_VARIABLE = "FLATBED_HOST_MEMORY", "FLATBED_MANAGED_LIMIT"
HUGE_PAGE = 2 << 20
POPULATE = 1 << 30  # bytes of managed memory populated between two signs of progress


class HostMemory:
    """Bytes of host memory, made by `allocate` for one device to compute on.

    `kind` is "plain" for the CPU; for a GPU "managed" or "registered", which its kernels address, or
    "pageable", which they cannot.
    """

    def __init__(self, kind: str, nbytes: int, *, device: torch.device, owner: _Owner) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.device = device
        self._pid = os.getpid()
        self._free = owner.free
        self._tensor: Tensor | None = owner.tensor[:nbytes]

    @property
    def addressable(self) -> bool:
        """Whether kernels of `device` can read and write it."""
        return self.kind != "pageable"

    @property
    def tensor(self) -> Tensor:
        """All of it: a CPU tensor of uint8. Views keep the memory, until `close`."""
        self.check()
        assert self._tensor is not None
        return self._tensor

    def usable(self) -> bool:
        """Whether this process may touch it."""
        return self._free.alive and os.getpid() == self._pid

    def check(self) -> None:
        """Raise if this process must not touch it: closed, or made before a fork."""
        if os.getpid() != self._pid:
            raise FlatbedError(
                f"this table's memory belongs to process {self._pid}, not to its forked child "
                f"{os.getpid()}: look rows up in the process that made the table (a DataLoader's workers "
                "should hand out ids)"
            )
        if not self._free.alive:
            raise FlatbedError("this table's memory is closed: make the table again to use it")

    def close(self) -> None:
        """Free the memory now. No view of it may be used any more; closing twice is allowed."""
        self._free()
        self._tensor = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("host memory cannot be copied or pickled: save the table instead")

    def __repr__(self) -> str:
        state = "" if self.usable() else ", not usable"
        return f"HostMemory({self.kind!r}, {self.nbytes}, device={str(self.device)!r}{state})"


def allocate(nbytes: int, *, device: torch.device, kind: str | None = None) -> HostMemory:
    """Zeros on the host, for `device` to compute on.

    For a GPU: managed memory if it can, else registered, else pageable memory with a warning; `kind`, or
    the variable FLATBED_HOST_MEMORY, asks for one of them. FLATBED_MANAGED_LIMIT, "free" or a number of
    bytes, keeps managed memory within what the GPU has free, or within that number.
    """
    nbytes, kind, limit = operator.index(nbytes), _wanted_kind(kind), _wanted_limit()
    if nbytes < 0:
        raise ValueError(f"memory has 0 bytes or more, found nbytes={nbytes}")
    _refuse_too_much(nbytes)
    if device.type == "cpu":
        return HostMemory("plain", nbytes, device=device, owner=_mapped(nbytes))
    if device.type != "cuda":
        if kind != "pageable":
            _warn_once(f"flatbed addresses host memory from CUDA only, not from {device.type}")
        return HostMemory("pageable", nbytes, device=device, owner=_mapped(nbytes))
    return _for_cuda(nbytes, device, kind=kind, limit=limit)


def available_bytes() -> int:
    """Host memory that this process may still take: what the machine has left, or its cgroup if less."""
    return max(0, min([_machine_bytes(), *_cgroup_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


class _Owner:
    """A tensor over memory, and the call that frees it: at most once, never in a forked child."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], None]) -> None:
        # torch holds the buffer for as long as any view lives; the memory goes when the buffer does.
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        self.free = weakref.finalize(buffer, _unless_forked, os.getpid(), release)
        self.free.atexit = False
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)


def _unless_forked(pid: int, release: Callable[[], None]) -> None:
    if os.getpid() == pid:
        release()


# Mappings


def _mapped(nbytes: int) -> _Owner:
    """Untouched zeros in huge pages, where the system has them."""
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    address = _map(size, nbytes)
    _advise(address, size, "MADV_HUGEPAGE")
    _advise(address, size, "MADV_DONTFORK")
    return _Owner(address, size, partial(_libc().munmap, address, size))


def _map(size: int, nbytes: int) -> int:
    """An anonymous private mapping, aligned to huge pages if it has any."""
    spare = HUGE_PAGE if size >= HUGE_PAGE else 0
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _libc().mmap(None, size + spare, access, flags, -1, 0)
    if start is None or start == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise FlatbedError(f"the system gave no memory ({reason}): {_too_much(nbytes)}")
    address: int = start + (-start % HUGE_PAGE if spare else 0)
    if address > start:
        _libc().munmap(start, address - start)
    if address + size < start + size + spare:
        _libc().munmap(address + size, start + spare - address)
    return address


def _advise(address: int, nbytes: int, advice: str) -> None:
    """Say what the memory is for; a system that does not know the word goes without."""
    if hasattr(mmap, advice):
        _libc().madvise(address, nbytes, getattr(mmap, advice))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """Called directly: Python's mmap objects would unmap in forked children, too."""
    if os.name != "posix":
        raise FlatbedError('tables in host memory need Linux or macOS here: use storage="device"')
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


# Memory that a GPU addresses

_placed: dict[int, tuple[int, int, weakref.finalize[..., ctypes.Array[ctypes.c_uint8]]]] = {}
_postponed: list[Callable[[], object]] = []  # memory to be freed when no graph is captured
"""By address: GPU, bytes of managed memory, the call that frees it. Dicts need no lock in finalizers."""
_warned = False


def _for_cuda(nbytes: int, device: torch.device, *, kind: str | None, limit: str | None) -> HostMemory:
    driver = cuda_host.driver()
    gpu = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", gpu)
    reasons: list[str] = []
    for attempt in KINDS if kind is None else (kind,):
        if attempt == "pageable":
            if kind is None:
                _warn_once("; ".join(reasons))
            return HostMemory(attempt, nbytes, device=device, owner=_mapped(nbytes))
        try:
            if driver is None:
                raise cuda_host.DriverError("NVIDIA's libcuda.so.1 was not found")
            if attempt == "managed":
                owner = _managed(nbytes, gpu, driver=driver, limit=limit)
            else:
                owner = _registered(nbytes, gpu, driver=driver)
            return HostMemory(attempt, nbytes, device=device, owner=owner)
        except cuda_host.DriverError as error:
            reasons.append(f"{attempt}: {error}")
    raise FlatbedError(
        f"no {kind} memory of {nbytes:,} bytes for {device} ({reasons[0]}): ask for another kind, or unset "
        f"{KIND_VARIABLE} and pass none to let flatbed choose"
    )


def _managed(nbytes: int, gpu: int, *, driver: cuda_host.Driver, limit: str | None) -> _Owner:
    """Pages on the host that the GPU maps; the fastest for rows in random order."""
    if not driver.can_manage(gpu):
        raise cuda_host.DriverError("this GPU and the CPU cannot use managed memory at the same time")
    size = -(-max(nbytes, 1) // HUGE_PAGE) * HUGE_PAGE
    if limit is not None:
        most = driver.free_bytes(gpu) if limit == "free" else int(limit)
        taken = sum(managed for other, managed, _ in list(_placed.values()) if other == gpu)
        if taken + size > most:
            raise cuda_host.DriverError(
                f"{LIMIT_VARIABLE}={limit} allows {most:,} bytes, {taken:,} are taken, {size:,} more needed"
            )
    address = driver.managed(gpu, size)
    owner = _Owner(address, size, partial(_release_managed, driver, gpu, address))
    _place(address, gpu, managed=size, owner=owner)
    try:
        _advise(address, size, "MADV_DONTFORK")
        with progress("laying out host memory", size, "bytes") as advance:
            for start in range(0, size, POPULATE):
                part = min(POPULATE, size - start)
                driver.populate(gpu, address + start, part)
                owner.tensor[start : start + part].zero_()  # the driver promises no zeros
                advance(part)
    except BaseException:
        owner.free()
        raise
    return owner


def _registered(nbytes: int, gpu: int, *, driver: cuda_host.Driver) -> _Owner:
    """A mapping, pinned."""
    if not driver.can_register(gpu):
        raise cuda_host.DriverError("this GPU sees registered memory under other addresses")
    mapping = _mapped(nbytes)
    address, size = mapping.tensor.data_ptr(), mapping.tensor.numel()
    try:
        driver.register(gpu, address, size)
    except BaseException:
        mapping.free()
        raise
    mapping.free.detach()
    owner = _Owner(address, size, partial(_release_registered, driver, gpu, address, size))
    _place(address, gpu, managed=0, owner=owner)
    return owner


def _release_managed(driver: cuda_host.Driver, gpu: int, address: int) -> None:
    _placed.pop(address, None)
    _when_allowed(partial(driver.free_managed, gpu, address))


def _release_registered(driver: cuda_host.Driver, gpu: int, address: int, size: int) -> None:
    def release() -> None:
        driver.unregister(gpu, address)
        _libc().munmap(address, size)

    _placed.pop(address, None)
    _when_allowed(release)


def _when_allowed(free: Callable[[], object] | None = None) -> None:
    """Free memory now, or later if a CUDA graph is being captured, which that would spoil: garbage is
    collected at any time.
    """
    if free is not None:
        _postponed.append(free)
    started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call,unused-ignore]
    if started and torch.cuda.is_current_stream_capturing():
        return
    while _postponed:
        _postponed.pop()()


def _place(address: int, gpu: int, *, managed: int, owner: _Owner) -> None:
    _when_allowed()
    _placed[address] = (gpu, managed, owner.free)
    _free_at_exit()


@lru_cache(maxsize=1)
def _free_at_exit() -> None:
    """Exit handlers run last come, first served: this one before those of torch and of weakref."""
    atexit.register(_free_all)


def _free_all() -> None:
    """While CUDA is still there."""
    for _, _, free in list(_placed.values()):
        free()


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        message = "rows are staged through the CPU, which is slower: the GPU cannot address host memory here"
        warnings.warn(f"{message} ({reason})", stacklevel=4)


# What was asked for, and what there is


def _wanted_kind(kind: str | None) -> str | None:
    source = "kind" if kind is not None else KIND_VARIABLE
    kind = kind if kind is not None else os.environ.get(KIND_VARIABLE) or None
    if kind is not None and kind not in KINDS:
        raise ValueError(f"{source}={kind!r} is not known; expected one of {', '.join(KINDS)}")
    return kind


def _wanted_limit() -> str | None:
    limit = os.environ.get(LIMIT_VARIABLE) or None
    if limit is not None and limit != "free" and not (limit.isascii() and limit.isdecimal()):
        raise ValueError(f'{LIMIT_VARIABLE}={limit!r} is not known; expected "free" or a number of bytes')
    return limit


def _refuse_too_much(nbytes: int) -> None:
    """The system would promise the memory, and kill the process for using it."""
    if nbytes > available_bytes():
        raise FlatbedError(_too_much(nbytes))


def _too_much(nbytes: int) -> str:
    return (
        f"{nbytes:,} bytes of host memory were asked for, {available_bytes():,} are available; "
        'use fewer rows, a smaller dtype, or storage="disk"'
    )


def _machine_bytes() -> int:
    try:
        return _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError):
        names = getattr(os, "sysconf_names", {})
        return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE if "SC_PHYS_PAGES" in names else sys.maxsize


def _cgroup_bytes(membership: Path, root: Path) -> Iterator[int]:
    """What each cgroup around this process has left, files it caches counted as free."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, files, prefix = root, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            top, files, prefix = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != top and top not in folder.parents:
                break
            try:
                limit, used = ((folder / name).read_text().strip() for name in files)
                cached = _numbers(folder / "memory.stat")
                yield (
                    int(limit)
                    - int(used)
                    + sum(cached[f"{prefix}{age}_file"] for age in ("active", "inactive"))
                )
            except (OSError, KeyError, ValueError):
                continue  # no such group within this container, or "max": no limit


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a word and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
