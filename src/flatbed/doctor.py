"""`flatbed doctor`: what this machine offers, what is missing, and what that means."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MIB = 1 << 20
GIB = 1 << 30
OLDEST_TORCH = (2, 7)


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
    import torch

    source = torch.ones(128 * MIB, dtype=torch.uint8)
    return _speed(source, torch.empty_like(source), crossings=2)


@probe("device copy")
def _device_copy() -> Answer:
    if not _have_gpu():
        return NEEDS_GPU
    import torch

    source = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda:0")
    return _speed(source, torch.empty_like(source), crossings=2)


@probe("pinned host → device")
def _pinned_to_device() -> Answer:
    return _across(to_device=True, pinned=True)


@probe("device → pinned host")
def _device_to_pinned() -> Answer:
    return _across(to_device=False, pinned=True)


@probe("pageable host → device")
def _pageable_to_device() -> Answer:
    return _across(to_device=True, pinned=False)


def _across(*, to_device: bool, pinned: bool) -> Answer:
    if not _have_gpu():
        return NEEDS_GPU
    import torch

    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=pinned).fill_(1)
    device = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda:0")
    return _speed(host, device) if to_device else _speed(device, host)


def _speed(source: Tensor, target: Tensor, *, crossings: int = 1) -> Answer:
    """The best of a few copies. Within one memory each byte crosses its bus twice: read and written."""
    import torch

    def wait() -> None:
        if source.is_cuda or target.is_cuda:
            torch.cuda.synchronize()

    target.zero_()  # touches its pages, and makes the comparison below mean something
    best = float("inf")
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - begin)
    ok = bool(torch.equal(target[:MIB].cpu(), source[:MIB].cpu()))
    value = f"{crossings * source.nbytes / best / 1e9:,.1f} GB/s{' read + write' if crossings == 2 else ''}"
    return Answer(ok, value, "" if ok else "The copy differs from its source: do not trust this machine.")


@probe("RAM")
def _memory() -> Answer:
    available = _available_bytes()
    ok = available >= GIB
    meaning = "" if ok else "Little is left: training may be killed. Close other programs."
    return Answer(ok, f"{available / GIB:.1f} GiB free", meaning)


def _available_bytes() -> int:
    from flatbed.rows.memory import available_bytes

    return available_bytes()


@probe("disk")
def _disk() -> Answer:
    usage = shutil.disk_usage(Path.cwd())
    ok = usage.free >= GIB
    meaning = "" if ok else "Little is left for checkpoints in this folder: free some, or work elsewhere."
    return Answer(ok, f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free here", meaning)


@probe("matplotlib")
def _matplotlib() -> Answer:
    try:
        return Answer(True, metadata.version("matplotlib"))
    except metadata.PackageNotFoundError:
        meaning = "Only plots are missing (flatbed bench step --png): pip install 'flatbed[plot]'."
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
    _matplotlib,
)
