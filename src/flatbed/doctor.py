"""`flatbed doctor`: what this machine offers, what is missing, and what that means."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flatbed.bench.copies import Speed
    from flatbed.bench.disk_reads import Reads
    from flatbed.tables.sizing import Example, Rates

MIB = 1 << 20
GIB = 1 << 30
GB = 10**9
OLDEST_TORCH = (2, 7)
BATCH = 65_536  # rows, in what is said of tables


class Answer(NamedTuple):
    """What a probe found; `ok` is None where it does not apply to this machine."""

    ok: bool | None
    value: str
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A probe's answer under the probe's name."""

    name: str
    ok: bool | None
    value: str
    meaning: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


NEEDS_GPU = Answer(None, "needs a GPU")

Probe = Callable[[], Finding]


def probe(name: str) -> Callable[[Callable[[], Answer]], Probe]:
    """Name a probe, and make what it raises a finding: no probe keeps the others from running."""

    def named(ask: Callable[[], Answer]) -> Probe:
        @wraps(ask)
        def run() -> Finding:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of broken drivers; findings say it better
                    return Finding(name, *ask())
            except Exception as error:
                return Finding(name, False, *_describe(error))

        return run

    return named


def _describe(error: Exception) -> tuple[str, str]:
    first_line = (str(error).splitlines() or [""])[0]
    meaning = "Could not be tried, and may not work in training either. The other findings still hold."
    return f"{type(error).__name__}: {first_line}", meaning


def examine(probes: Iterable[Probe] | None = None) -> list[Finding]:
    """Run every probe, in their order."""
    return [run() for run in (PROBES if probes is None else probes)]


def torch_is_usable() -> bool:
    """Whether torch can be imported and computes: without it nothing else works."""
    try:
        import torch

        return float(torch.ones(2).sum()) == 2.0
    except Exception:  # a broken install raises anything, OSError above all
        return False


@probe("python")
def _python_version() -> Answer:
    return Answer(True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


@probe("torch")
def _torch_version() -> Answer:
    if not torch_is_usable():
        meaning = "Nothing works without torch. Install it as https://pytorch.org says for your machine."
        return Answer(False, "cannot be imported, or does not compute", meaning)
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    value = f"{torch.__version__}, built with {cuda}; {torch.get_num_threads()} threads"
    oldest = ".".join(map(str, OLDEST_TORCH))
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return Answer(False, value, f"Older than {oldest}, the oldest that flatbed supports: please upgrade.")
    return Answer(True, value)


@probe("GPU")
def _gpu() -> Answer:
    import torch

    if not torch.cuda.is_available():
        remedy = "torch is built for CUDA but sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES."
        if torch.version.cuda is None:
            remedy = (
                "This torch is built without CUDA: to use a GPU, install a build from https://pytorch.org."
            )
        return Answer(False, "no CUDA GPU", f"Everything runs on the CPU with the same results. {remedy}")
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    count = torch.cuda.device_count()
    value = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    value += f", {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Answer(True, value if count == 1 else f"{count} GPUs, the first: {value}")


@probe("NVIDIA driver")
def _driver() -> Answer:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if not _have_gpu():
            return NEEDS_GPU
        meaning = "The GPU works, so a driver is there; install nvidia-smi to see which."
        return Answer(False, "nvidia-smi not found", meaning)
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        meaning = "The driver does not answer: reload or reinstall it. Until then everything runs on the CPU."
        return Answer(False, (done.stdout or done.stderr).strip(), meaning)
    return Answer(True, done.stdout.split()[0])


@probe("Triton")
def _triton() -> Answer:
    try:
        return Answer(True, metadata.version("triton"))
    except metadata.PackageNotFoundError:
        if not _have_gpu():
            return Answer(None, "not installed", "Only used on GPUs.")
        meaning = (
            "Kernels written in Triton cannot run; torch's own give the same results: pip install triton."
        )
        return Answer(False, "not installed", meaning)


@probe("pinned memory")
def _pinned_memory() -> Answer:
    if not _have_gpu():
        return NEEDS_GPU
    import torch

    try:
        pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        meaning = "Copies to the GPU wait for the CPU. Raise the limit on locked memory (ulimit -l)."
        return Answer(False, str(error).splitlines()[0], meaning)
    if not pinned.is_pinned():
        return Answer(False, "memory asked for as pinned is not", "Copies to the GPU wait for the CPU.")
    return Answer(True, "works", "Copies to the GPU can run beside other work.")


@probe("managed memory")
def _managed_memory() -> Answer:
    if not _have_gpu():
        return NEEDS_GPU
    slower = "The GPU reads host memory in place through pinned pages instead, at about a third of the speed."
    try:
        from cuda.bindings import runtime
    except ImportError:
        return Answer(False, "cuda.bindings not installed", f"{slower} pip install cuda-bindings.")
    attribute = runtime.cudaDeviceAttr.cudaDevAttrConcurrentManagedAccess
    if not _cuda(runtime.cudaDeviceGetAttribute(attribute, 0)):
        return Answer(False, "concurrentManagedAccess is 0", f"{slower} Nothing to do: the system lacks it.")
    if not _managed_round_trip(runtime, 64 * MIB):
        return Answer(False, "the GPU read other bytes than were written", f"{slower} Update the driver.")
    return Answer(True, "works", "The GPU reads host memory in place, without moving it.")


def _managed_round_trip(runtime: Any, nbytes: int) -> bool:
    """Write managed memory that stays on the host, and read it from the GPU."""
    import torch

    host, device = runtime.cudaMemLocation(), runtime.cudaMemLocation()
    host.type = runtime.cudaMemLocationType.cudaMemLocationTypeHost
    device.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    advice = runtime.cudaMemoryAdvise
    # CUDA 13 gave the plain name the signature that CUDA 12 calls _v2.
    advise = getattr(runtime, "cudaMemAdvise_v2", runtime.cudaMemAdvise)
    target = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
    pointer = _cuda(runtime.cudaMallocManaged(nbytes, runtime.cudaMemAttachGlobal))
    try:
        _cuda(advise(pointer, nbytes, advice.cudaMemAdviseSetPreferredLocation, host))
        _cuda(advise(pointer, nbytes, advice.cudaMemAdviseSetAccessedBy, device))
        ctypes.memset(int(pointer), 7, nbytes)
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        _cuda(runtime.cudaMemcpy(target.data_ptr(), pointer, nbytes, kind))
        return bool((target == 7).all())
    finally:
        _cuda(runtime.cudaFree(pointer))


def _cuda(answer: tuple[Any, ...]) -> Any:
    """The value of a cuda.bindings call, which returns (error, value) or (error,)."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA says {getattr(error, 'name', error)}")
    return values[0] if values else None


@probe("host copy")
def _host_copy() -> Answer:
    return _answer(_measured("host"), within=True)


@probe("device copy")
def _device_copy() -> Answer:
    return _answer(_measured("device"), within=True)


@probe("pinned host → device")
def _pinned_to_device() -> Answer:
    return _answer(_measured("pinned to device"))


@probe("device → pinned host")
def _device_to_pinned() -> Answer:
    return _answer(_measured("device to pinned"))


@probe("pageable host → device")
def _pageable_to_device() -> Answer:
    return _answer(_measured("pageable to device"))


def _answer(speed: Speed | None, *, within: bool = False) -> Answer:
    if speed is None:
        return NEEDS_GPU
    meaning = "" if speed.ok else "The copy differs from its source: do not trust this machine."
    return Answer(speed.ok, f"{speed.rate / GB:,.1f} GB/s{' read + write' if within else ''}", meaning)


@cache  # several findings are about the same copies
def _copied(way: str) -> Speed:
    from flatbed.bench.copies import copied

    return copied(way)


def _measured(way: str) -> Speed | None:
    """How fast copies of one kind are; None if they need a GPU and there is none."""
    return _copied(way) if way == "host" or _have_gpu() else None


@probe("RAM")
def _memory() -> Answer:
    available = _available_bytes()
    ok = available >= GIB
    meaning = "" if ok else "Little is left: training may be killed. Close other programs."
    return Answer(ok, f"{available / GIB:.1f} GiB free", meaning)


def _available_bytes() -> int:
    from flatbed.cuda.host_memory import available_bytes

    return available_bytes()


@probe("disk")
def _disk() -> Answer:
    usage = shutil.disk_usage(Path.cwd())
    ok = usage.free >= GIB
    meaning = "" if ok else "Little is left for checkpoints in this folder: free some, or work elsewhere."
    return Answer(ok, f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free here", meaning)


@probe("disk reads")
def _disk_reads() -> Answer:
    reads = _read_at_random()
    if reads.rate is None:
        return Answer(None, "not measured", reads.why)
    value = f"{reads.rate:,.0f} records of {_example().record.nbytes:,} bytes a second, at random"
    return Answer(True, value, "What the system keeps of a file in memory is read much faster.")


@cache
def _read_at_random() -> Reads:
    from flatbed.bench.disk_reads import read_at_random

    return read_at_random(Path.cwd(), _example().record.nbytes)


@probe("tables")
def _tables() -> Answer:
    from flatbed.tables.sizing import storage_for

    free = _free_bytes()
    found = {size: storage_for(size * GB, free) for size in (1, 10, 100)}
    value = ", ".join(f"{size} GB: {storage or 'nowhere'}" for size, storage in found.items())
    meaning = "storage= for a table of that size, optimizer state included."
    if found[1] is None:
        return Answer(False, value, f"{meaning} There is little memory and disk here: free some.")
    return Answer(True, value, meaning)


@probe("100 GB table")
def _large_table() -> Answer:
    from flatbed.tables.sizing import ROOM, Example, storage_for

    example, free = _example(), _free_bytes()
    parts = [
        f"{storage} {example.nbytes / max(1, free[storage]):.0%}{'' if fits else ' (too large)'}"
        for storage in ROOM
        if storage in free
        for fits in [storage_for(example.nbytes, {storage: free[storage]}) is not None]
    ]
    value = f"takes of what is free: {', '.join(parts)}"
    meaning = f"{example.n_rows / 1e6:.0f} million rows × {example.dim} with Adam. {_batch_times(list(free))}"
    if storage_for(example.nbytes, free) is not None:
        return Answer(True, value, meaning)
    less = Example(0, n_states=0, n_numbers=1).record.nbytes * example.n_rows / GB
    remedy = f"Take less state (RowwiseAdagrad: {less:.0f} GB), bf16 weights, fewer rows, or a larger disk."
    return Answer(False, value, f"It fits nowhere here. {remedy} {meaning}")


def _batch_times(storages: list[str]) -> str:
    """What a batch of the 100 GB table takes, from what was measured."""
    from flatbed.tables.sizing import batch_seconds

    record, rates = _example().record, _rates()
    times = []
    for storage in storages:
        seconds = batch_seconds(storage, BATCH, record.nbytes, rates)
        way = "to read" if storage == "disk" else "there and back"
        times.append(f"{storage} not measured" if seconds is None else f"{storage} {_ms(seconds)} {way}")
    moved = f"{BATCH:,} of its rows ({BATCH * record.nbytes / 1e6:.0f} MB) travel in at least"
    return f"{moved}: {', '.join(times)}; the step itself comes on top, a millisecond or two on a GPU."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _example() -> Example:
    from flatbed.tables.sizing import Example

    return Example(100 * GB)


def _free_bytes() -> dict[str, int]:
    """What each storage has left. Without a GPU, that of the device is the host's."""
    import torch

    free = {"host": _available_bytes(), "disk": shutil.disk_usage(Path.cwd()).free}
    if not _have_gpu():
        return free
    kept = torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)  # by torch, after the copies above
    return {"device": torch.cuda.mem_get_info(0)[0] + kept, **free}


def _rates() -> Rates:
    from flatbed.tables.sizing import Rates

    def rate(way: str) -> float | None:
        speed = _measured(way)
        return None if speed is None else speed.rate

    return Rates(
        host=rate("host"),
        device=rate("device"),
        to_device=rate("pinned to device"),
        from_device=rate("device to pinned"),
        disk_records=_read_at_random().rate,
    )


@probe("matplotlib")
def _matplotlib() -> Answer:
    try:
        return Answer(True, metadata.version("matplotlib"))
    except metadata.PackageNotFoundError:
        meaning = "Only plots are missing (flatbed bench step --png): pip install matplotlib."
        return Answer(False, "not installed", meaning)


def _have_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


PROBES: tuple[Probe, ...] = (
    _python_version,
    _torch_version,
    _gpu,
    _driver,
    _triton,
    _pinned_memory,
    _managed_memory,
    _host_copy,
    _device_copy,
    _pinned_to_device,
    _device_to_pinned,
    _pageable_to_device,
    _memory,
    _disk,
    _disk_reads,
    _tables,
    _large_table,
    _matplotlib,
)
