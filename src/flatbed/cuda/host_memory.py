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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flatbed.cuda import driver as cuda_driver
from flatbed.cuda.driver import DriverError
from flatbed.cuda.streams import capture_lock, captured_steps
from flatbed.errors import FlatbedError
from flatbed.progress import progress

KINDS = ("managed", "registered", "pageable")
KIND_VARIABLE, LIMIT_VARIABLE = "FLATBED_HOST_MEMORY", "FLATBED_MANAGED_LIMIT"
HUGE_PAGE = 2 << 20
Finalizer: TypeAlias = "weakref.finalize[..., Any]"
POPULATE = 1 << 30  # bytes of managed memory populated between two updates of the progress bar


class HostMemory:
    """Bytes of host memory for one computing device, made by `allocate`.

    `kind` is "plain" for the CPU. For a GPU it is "managed" or "registered", which kernels address, or
    "pageable", which they do not. The memory is freed with its last view.
    """

    def __init__(self, kind: str, memory: Tensor) -> None:
        self.kind = kind
        self._process = os.getpid()
        self._tensor: Tensor | None = memory

    @property
    def addressable(self) -> bool:
        """True if kernels of the device can read and write it."""
        return self.kind != "pageable"

    @property
    def tensor(self) -> Tensor:
        """All bytes as a CPU tensor of uint8."""
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
        if self._tensor is None:
            raise FlatbedError("this table's memory is closed: make the table again to use it")

    def close(self) -> None:
        """Drop the memory; a second call does nothing."""
        self._tensor = None


def allocate(nbytes: int, *, device: torch.device) -> HostMemory:
    """Allocate zeroed host memory for `device` to compute with.

    For a GPU: managed memory if possible, otherwise registered, otherwise pageable memory with a warning.
    The variable FLATBED_HOST_MEMORY selects one of them. FLATBED_MANAGED_LIMIT, "free" or a
    number of bytes, keeps managed memory within the GPU's free memory, or within that number.
    """
    kind, limit = os.environ.get(KIND_VARIABLE) or None, os.environ.get(LIMIT_VARIABLE) or None
    if kind not in (None, *KINDS):
        raise ValueError(f"{KIND_VARIABLE}={kind!r} is not known; expected one of {', '.join(KINDS)}")
    if limit not in (None, "free") and not (limit.isascii() and limit.isdecimal()):
        raise ValueError(f'{LIMIT_VARIABLE}={limit!r} is not known; expected "free" or a number of bytes')
    if nbytes > available_bytes():  # the system would grant the memory, and kill the process for using it
        raise FlatbedError(_too_much(nbytes))
    if device.type == "cpu":
        return HostMemory("plain", _zeros(nbytes)[:nbytes])
    gpu = torch.cuda.current_device() if device.index is None else device.index
    reasons: list[str] = []
    for attempt in KINDS if kind is None else (kind,):
        try:
            if attempt == "managed":
                memory = _managed(nbytes, gpu, limit)
            else:
                memory = _registered(nbytes, gpu) if attempt == "registered" else _zeros(nbytes)
        except DriverError as error:
            reasons.append(f"{attempt}: {error}")
            continue
        if attempt == "pageable" and kind is None:
            _warn_once("; ".join(reasons))
        return HostMemory(attempt, memory[:nbytes])
    raise FlatbedError(
        f"no {kind} memory of {nbytes:,} bytes for cuda:{gpu} ({reasons[0]}): unset {KIND_VARIABLE} to let "
        "flatbed choose"
    )


def available_bytes() -> int:
    """Host memory that this process may still use: what is left of the machine's, or of its cgroup's."""
    return max(0, min([_machine_bytes(), *_cgroup_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def _own(address: int, nbytes: int, release: Callable[[], object]) -> tuple[Tensor, Finalizer]:
    """Make a tensor over memory that is released with its last view: once, and not in a forked child."""
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)  # torch holds it as long as any view lives
    released = weakref.finalize(buffer, unless_forked, os.getpid(), release)
    released.atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8), released


def unless_forked(process: int, release: Callable[[], object]) -> None:
    """Free something that belongs to a process."""
    if os.getpid() == process:
        release()


def _zeros(nbytes: int) -> Tensor:
    """Allocate untouched zeros."""
    address, size, unmap = _map(nbytes)
    return _own(address, size, unmap)[0]


def _map(nbytes: int) -> tuple[int, int, Callable[[], object]]:
    """Map untouched zeros, aligned to huge pages, that forked children do not get.

    Returns address, size and the call that unmaps. Python's mmap objects would unmap in children, too.
    """
    libc = _libc()
    size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    spare = HUGE_PAGE if size >= HUGE_PAGE else 0
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, size + spare, access, flags, -1, 0)
    if start is None or start == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise FlatbedError(f"the system gave no memory ({reason}): {_too_much(nbytes)}")
    address: int = start + (-start % HUGE_PAGE if spare else 0)
    _advise(address, size, "MADV_HUGEPAGE")
    _advise(start, size + spare, "MADV_DONTFORK")
    return address, size, partial(libc.munmap, start, size + spare)


def _advise(address: int, nbytes: int, advice: str) -> None:
    """Call madvise, where the system knows the advice."""
    if hasattr(mmap, advice):
        _libc().madvise(address, nbytes, getattr(mmap, advice))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc


# ---- memory that a GPU addresses


@dataclass(frozen=True, slots=True)
class _Live:
    """Memory that kernels may address."""

    gpu: int
    managed_bytes: int
    release: Finalizer


_live: dict[int, _Live] = {}  # by address; finalizers change it, and a dict needs no lock for that
_postponed: list[Callable[[], object]] = []  # calls that free something, for when no graph is captured
_has_warned = False


def _managed(nbytes: int, gpu: int, limit: str | None) -> Tensor:
    """Allocate pages on the host that the GPU maps: the fastest for random rows."""
    driver = cuda_driver.driver()
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
    memory = _own_on_gpu(address, size, gpu, partial(driver.free_managed, gpu, address), managed_bytes=size)
    try:
        _advise(address, size, "MADV_DONTFORK")
        with progress("allocating host memory", size, "bytes") as advance:
            for start in range(0, size, POPULATE):
                part = min(POPULATE, size - start)
                driver.populate(gpu, address + start, part)
                memory[start : start + part].zero_()  # the driver does not promise zeros
                advance(part)
    except BaseException:
        _live[address].release()
        raise
    return memory


def _registered(nbytes: int, gpu: int) -> Tensor:
    """Allocate memory and pin it."""
    driver = cuda_driver.driver()
    if not driver.can_register(gpu):
        raise DriverError("this GPU sees registered memory under other addresses")
    address, size, unmap = _map(nbytes)
    try:
        driver.register(gpu, address, size)
    except BaseException:
        unmap()
        raise

    def release() -> None:
        driver.unregister(gpu, address)
        unmap()

    return _own_on_gpu(address, size, gpu, release)


def _own_on_gpu(
    address: int, size: int, gpu: int, release: Callable[[], object], *, managed_bytes: int = 0
) -> Tensor:
    """Own memory that must be freed before CUDA ends, and not while a CUDA graph is captured."""

    def postpone() -> None:
        _live.pop(address, None)
        free_after_captures(release)

    _free_postponed()
    _free_at_exit()
    memory, released = _own(address, size, postpone)
    _live[address] = _Live(gpu, managed_bytes, released)
    return memory


def free_after_captures(release: Callable[[], object]) -> None:
    """Free something of a GPU, at once unless a CUDA graph is being captured."""
    _postponed.append(release)
    _free_postponed()


def _free_postponed() -> None:
    """Free memory, unless a CUDA graph is being captured: freeing would invalidate it."""
    has_started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call,unused-ignore]
    # Captures of the user are seen in their own thread alone.
    is_captured = has_started and torch.cuda.is_current_stream_capturing()
    if capture_lock.locked() or captured_steps or is_captured:
        return
    while _postponed:
        _postponed.pop()()


@lru_cache(maxsize=1)
def _free_at_exit() -> None:
    """Register late, so that this handler runs before those of torch and weakref."""
    atexit.register(_free_all)


def _free_all() -> None:
    for live in list(_live.values()):
        live.release()


def _warn_once(reason: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        message = "rows are staged through the CPU, which is slower: the GPU cannot address host memory here"
        warnings.warn(f"{message} ({reason})", stacklevel=3)


# ---- available memory


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
