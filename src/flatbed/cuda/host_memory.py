"""Host memory for tables: exactly sized, zeroed, unusable in forked processes, freed once."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from flatbed.cuda import driver as cuda_driver
from flatbed.cuda.driver import Driver, DriverError
from flatbed.errors import FlatbedError
from flatbed.progress import progress

KINDS = ("managed", "registered", "pageable")
KIND_VARIABLE, LIMIT_VARIABLE = "FLATBED_HOST_MEMORY", "FLATBED_MANAGED_LIMIT"
HUGE_PAGE = 2 << 20
POPULATE = 1 << 30  # bytes of managed memory populated between two updates of the progress bar


class HostMemory:
    """Bytes of host memory for one computing device, made by `allocate`.

    `kind` is "plain" for the CPU. For a GPU it is "managed" or "registered", which kernels address, or
    "pageable", which they do not.
    """

    def __init__(self, kind: str, nbytes: int, *, device: torch.device, block: _Block) -> None:
        self.kind = kind
        self.nbytes = nbytes
        self.device = device
        self._process = os.getpid()
        self._free = block.free
        self._tensor: Tensor | None = block.tensor[:nbytes]

    @property
    def addressable(self) -> bool:
        """Whether kernels of `device` can read and write it."""
        return self.kind != "pageable"

    @property
    def tensor(self) -> Tensor:
        """All bytes as a CPU tensor of uint8. Views keep the memory until `close`."""
        self.check()
        assert self._tensor is not None
        return self._tensor

    def check(self) -> None:
        """Raise if the memory is closed, or if this process was forked since."""
        if os.getpid() != self._process:
            raise FlatbedError(
                f"this table's memory belongs to process {self._process}, not to its forked child "
                f"{os.getpid()}: look rows up in the process that made the table (a DataLoader's workers "
                "should hand out ids)"
            )
        if not self._free.alive:
            raise FlatbedError("this table's memory is closed: make the table again to use it")

    def close(self) -> None:
        """Free the memory now. Views of it must not be used any more; a second call does nothing."""
        self._free()
        self._tensor = None


def allocate(nbytes: int, *, device: torch.device, kind: str | None = None) -> HostMemory:
    """Allocate zeroed host memory for `device` to compute with.

    For a GPU: managed memory if possible, otherwise registered, otherwise pageable memory with a warning.
    `kind`, or the variable FLATBED_HOST_MEMORY, selects one of them. FLATBED_MANAGED_LIMIT, "free" or a
    number of bytes, keeps managed memory within the GPU's free memory, or within that number.
    """
    kind, limit = _requested_kind(kind), _requested_limit()
    if nbytes > available_bytes():  # the system would grant the memory, and kill the process for using it
        raise FlatbedError(_too_much(nbytes))
    if device.type == "cpu":
        return HostMemory("plain", nbytes, device=device, block=_mapped(nbytes))
    gpu = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", gpu)
    reasons: list[str] = []
    for attempt in KINDS if kind is None else (kind,):
        try:
            block = _block(attempt, nbytes, gpu, limit)
        except DriverError as error:
            reasons.append(f"{attempt}: {error}")
            continue
        if attempt == "pageable" and kind is None:
            _warn_once("; ".join(reasons))
        return HostMemory(attempt, nbytes, device=device, block=block)
    raise FlatbedError(
        f"no {kind} memory of {nbytes:,} bytes for {device} ({reasons[0]}): ask for another kind, or unset "
        f"{KIND_VARIABLE} and pass none to let flatbed choose"
    )


def available_bytes() -> int:
    """Host memory that this process may still use: what is left of the machine's, or of its cgroup's."""
    return max(0, min([_machine_bytes(), *_cgroup_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


class _Block:
    """A tensor over memory, and the call that frees it: at most once, and never in a forked child."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], object]) -> None:
        # torch holds the buffer as long as any view lives. The memory is freed with the buffer.
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        self.free = weakref.finalize(buffer, _unless_forked, os.getpid(), release)
        self.free.atexit = False
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)


def _unless_forked(process: int, release: Callable[[], object]) -> None:
    if os.getpid() == process:
        release()


# ---- mappings


def _mapped(nbytes: int) -> _Block:
    """Map untouched zeros."""
    address, size = _map(nbytes)
    return _Block(address, size, partial(_libc().munmap, address, size))


def _map(nbytes: int) -> tuple[int, int]:
    """Make an anonymous private mapping, aligned to huge pages if it has any. Returns address and size."""
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
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
    _advise(address, size, "MADV_HUGEPAGE")
    _advise(address, size, "MADV_DONTFORK")
    return address, size


def _advise(address: int, nbytes: int, advice: str) -> None:
    """Call madvise, where the system knows the advice."""
    if hasattr(mmap, advice):
        _libc().madvise(address, nbytes, getattr(mmap, advice))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    """Load libc: Python's mmap objects would unmap in forked children, too."""
    if os.name != "posix":
        raise FlatbedError('tables in host memory need Linux or macOS here: use storage="device"')
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


# ---- memory that a GPU addresses


@dataclass(frozen=True, slots=True)
class _Live:
    """A block that kernels may address."""

    gpu: int
    managed_bytes: int
    free: weakref.finalize[..., ctypes.Array[ctypes.c_uint8]]


_live: dict[int, _Live] = {}  # by address; finalizers change it, and a dict needs no lock for that
_postponed: list[Callable[[], object]] = []  # calls that free memory, for when no graph is captured
_has_warned = False


def _block(kind: str, nbytes: int, gpu: int, limit: str | None) -> _Block:
    if kind == "pageable":
        return _mapped(nbytes)
    driver = cuda_driver.driver()
    if driver is None:
        raise DriverError("NVIDIA's libcuda.so.1 was not found")
    if kind == "managed":
        return _managed(nbytes, gpu, driver=driver, limit=limit)
    return _registered(nbytes, gpu, driver=driver)


def _managed(nbytes: int, gpu: int, *, driver: Driver, limit: str | None) -> _Block:
    """Allocate pages on the host that the GPU maps: the fastest for random rows."""
    if not driver.can_manage(gpu):
        raise DriverError("this GPU and the CPU cannot use managed memory at the same time")
    size = -(-max(nbytes, 1) // HUGE_PAGE) * HUGE_PAGE
    if limit is not None:
        most = driver.free_bytes(gpu) if limit == "free" else int(limit)
        taken = sum(live.managed_bytes for live in list(_live.values()) if live.gpu == gpu)
        if taken + size > most:
            raise DriverError(
                f"{LIMIT_VARIABLE}={limit} allows {most:,} bytes, {taken:,} are taken, {size:,} more needed"
            )
    address = driver.managed(gpu, size)
    block = _gpu_block(address, size, gpu, partial(driver.free_managed, gpu, address), managed_bytes=size)
    try:
        _advise(address, size, "MADV_DONTFORK")
        with progress("allocating host memory", size, "bytes") as advance:
            for start in range(0, size, POPULATE):
                part = min(POPULATE, size - start)
                driver.populate(gpu, address + start, part)
                block.tensor[start : start + part].zero_()  # the driver does not promise zeros
                advance(part)
    except BaseException:
        block.free()
        raise
    return block


def _registered(nbytes: int, gpu: int, *, driver: Driver) -> _Block:
    """Map memory and pin it."""
    if not driver.can_register(gpu):
        raise DriverError("this GPU sees registered memory under other addresses")
    address, size = _map(nbytes)
    try:
        driver.register(gpu, address, size)
    except BaseException:
        _libc().munmap(address, size)
        raise

    def release() -> None:
        driver.unregister(gpu, address)
        _libc().munmap(address, size)

    return _gpu_block(address, size, gpu, release)


def _gpu_block(
    address: int, size: int, gpu: int, release: Callable[[], object], *, managed_bytes: int = 0
) -> _Block:
    """Own memory that must be freed before CUDA ends, and not while a CUDA graph is captured."""

    def free() -> None:
        _live.pop(address, None)
        _postponed.append(release)
        _free_postponed()

    _free_postponed()
    block = _Block(address, size, free)
    _live[address] = _Live(gpu, managed_bytes, block.free)
    _free_at_exit()
    return block


def _free_postponed() -> None:
    """Free memory, unless a CUDA graph is being captured: freeing would invalidate it."""
    has_started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call,unused-ignore]
    if has_started and torch.cuda.is_current_stream_capturing():
        return
    while _postponed:
        _postponed.pop()()


@lru_cache(maxsize=1)
def _free_at_exit() -> None:
    """Register late, so that this handler runs before those of torch and weakref."""
    atexit.register(_free_all)


def _free_all() -> None:
    for live in list(_live.values()):
        live.free()


def _warn_once(reason: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        message = "rows are staged through the CPU, which is slower: the GPU cannot address host memory here"
        warnings.warn(f"{message} ({reason})", stacklevel=3)


# ---- environment


def _requested_kind(kind: str | None) -> str | None:
    source = "kind" if kind is not None else KIND_VARIABLE
    kind = kind if kind is not None else os.environ.get(KIND_VARIABLE) or None
    if kind is not None and kind not in KINDS:
        raise ValueError(f"{source}={kind!r} is not known; expected one of {', '.join(KINDS)}")
    return kind


def _requested_limit() -> str | None:
    limit = os.environ.get(LIMIT_VARIABLE) or None
    if limit is not None and limit != "free" and not (limit.isascii() and limit.isdecimal()):
        raise ValueError(f'{LIMIT_VARIABLE}={limit!r} is not known; expected "free" or a number of bytes')
    return limit


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
    """Yield what each cgroup of this process has left; cached files count as free."""
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
                limit, used = (int((folder / name).read_text()) for name in files)
                stat = _numbers(folder / "memory.stat")
                yield limit - used + stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]
            except (OSError, KeyError, ValueError):
                continue  # no such group within this container, or "max": no limit


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a word and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
