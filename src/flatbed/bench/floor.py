"""`flatbed bench floor`: how close a step of Adam that clips comes to the time its memory traffic takes.

No model is run: parameters of a model's shapes, random gradients, and nothing but steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flatbed.bench.capture import Captured
from flatbed.bench.check import SCALES, Deviation, worst
from flatbed.bench.measure import Progress, allocated_bytes, free_memory, percentiles, synchronize
from flatbed.bench.models import Case
from flatbed.bench.rows import FOREACH, FUSED, LOOP, Machine, Record, this_machine
from flatbed.bench.shadow import Shadow
from flatbed.bench.ways import CAPTURED, OPTIM, OPTIMIZERS

SEED = 20
ROUNDS = 5
WARM_UP_STEPS = 5
N_COPIES = 20
COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
FLUSH_BYTES = 256 << 20  # several times the cache of any GPU
CYCLES_PER_SECOND = 2e9  # at most, of a GPU's multiprocessors
OPTIMIZER = "adam"


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a training run; state is fp32."""

    name: str
    dtype: torch.dtype
    """Of parameters and gradients."""
    master_weights: bool

    @property
    def bytes_per_element(self) -> int:
        """The least that a step has to read and write for one element of a parameter."""
        grad = 2 * self.dtype.itemsize  # read for the norm, and again for the update
        param = self.dtype.itemsize + 2 * 4 if self.master_weights else 2 * self.dtype.itemsize
        state = 2 * 2 * 4  # two moments, read and written
        return grad + param + state


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32, master_weights=False),
        Precision("bf16-master", torch.bfloat16, master_weights=True),
    )
}


@dataclass(frozen=True, slots=True)
class FloorRow(Record):
    """The step in one way. What can only be told of a GPU is None on a CPU."""

    model: str
    optimizer: str
    precision: str
    way: str
    n_params: int
    n_elements: int
    n_samples: int
    """Readings per clock."""
    bytes_per_element: int
    copy_gb_per_s: float
    """What a large copy reads and writes, in 10⁹ bytes a second."""
    floor_ms: float
    """Elements × bytes per element, at the speed of that copy."""
    gpu_p20_ms: float | None
    """GPU time: from the step's first kernel to its last, all issued before the first begins."""
    gpu_p50_ms: float | None
    gpu_p80_ms: float | None
    wall_p20_ms: float
    """With `zero_grad`, which a captured step does without: from an idle device until it is idle again."""
    wall_p50_ms: float
    wall_p80_ms: float
    host_p20_ms: float | None
    """Until the step, without `zero_grad`, returns."""
    host_p50_ms: float | None
    host_p80_ms: float | None
    ratio_to_floor: float
    """p50 of the GPU time, on a CPU of the wall time, over the floor."""
    ratio_to_fused: float | None
    """The same over that of torch's fused optimizer: below 1 is faster."""
    step_memory_bytes: int | None
    """What a step allocates beyond what is there before it, at most."""
    overhead_bytes: int | None
    """What is there after the first steps beside parameters, gradients and the tensors of state."""
    max_rel_error: float
    """‖w − w_fp64‖ / ‖w_fp64 − w_start‖ for the worst of a few parameters' ends: of all timed steps, and of
    three more with gradients of changing size."""
    max_abs_error: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and how long."""

    case: Case
    precision: Precision
    device: torch.device
    steps: int
    """Timed steps per way and clock."""

    @property
    def n_stages(self) -> int:
        """How often `run` reports progress."""
        return 1 + len(floor_ways(self))


Step = Callable[[], object]
Setup = Callable[[Sequence[Tensor], Precision, float], tuple[torch.optim.Optimizer, Step]]


def floor_ways(setting: Setting) -> dict[str, Setup]:
    """The ways that can be taken there, by name. Torch's own optimizer knows no master weights."""
    ways: dict[str, Setup] = {}
    if not setting.precision.master_weights:
        if not setting.case.one_at_a_time:  # the largest would take too long
            ways[LOOP] = partial(_torch, foreach=False)
            ways[FOREACH] = partial(_torch, foreach=True)
        ways[FUSED] = partial(_torch, fused=True)
    ways[OPTIM] = _optim
    if setting.device.type == "cuda":
        ways[CAPTURED] = _captured
    return ways


def _torch(
    params: Sequence[Tensor], precision: Precision, max_norm: float, **implementation: bool
) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = OPTIMIZERS[OPTIMIZER].make_torch(params, **implementation)
    foreach = implementation.get("foreach", True)

    def step() -> None:
        nn.utils.clip_grad_norm_(params, max_norm, foreach=foreach)
        optimizer.step()

    return optimizer, step


def _optim(
    params: Sequence[Tensor], precision: Precision, max_norm: float
) -> tuple[torch.optim.Optimizer, Step]:
    optimizer = OPTIMIZERS[OPTIMIZER].make_flatbed(
        params, max_norm=max_norm, master_weights=precision.master_weights
    )
    return optimizer, optimizer.step


def _captured(
    params: Sequence[Tensor], precision: Precision, max_norm: float
) -> tuple[torch.optim.Optimizer, Step]:
    optimizer, step = _optim(params, precision, max_norm)
    return optimizer, Captured(step)


@dataclass(frozen=True, slots=True)
class Result:
    """What was found about one way; times in ms."""

    way: str
    gpu: list[float]
    wall: list[float]
    host: list[float]
    step_memory_bytes: int
    overhead_bytes: int
    deviation: Deviation

    @property
    def p50(self) -> float:
        return statistics.median(self.gpu or self.wall)


def run(setting: Setting, *, progress: Progress = lambda stage: None) -> list[FloorRow]:
    """Measure every way: a row each."""
    machine = this_machine(setting.device.type)
    with torch.device("meta"):
        shapes = [param.shape for param in setting.case.build().parameters()]
    progress("copy speed")
    speed = copy_speed(setting.device)
    # Large models one after another, the rest in turns, so that a busy machine is so for all alike.
    ways = list(floor_ways(setting).items())
    crews = [[way] for way in ways] if setting.case.one_at_a_time else [ways]
    results: list[Result] = []
    for crew in crews:
        free_memory(setting.device)
        trials = []
        for name, setup in crew:
            progress(name)
            trials.append(OptimizerProbe(name, setup, setting, shapes))
        for turn in range(ROUNDS):
            share = setting.steps * (turn + 1) // ROUNDS - setting.steps * turn // ROUNDS
            for trial in trials:
                trial.read(share)
        results += [trial.finish() for trial in trials]
        del trials
    free_memory(setting.device)
    return _rows(results, setting, shapes, speed=speed, machine=machine)


def copy_speed(device: torch.device) -> float:
    """Bytes that `b.copy_(a)` reads and writes in a second, for buffers far larger than any cache."""
    nbytes = COPY_BYTES[device.type]
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2.5 * nbytes:
        nbytes //= 2
    a = torch.rand(nbytes // 4, device=device)
    b = torch.empty_like(a)
    readings = [_read_one(lambda: b.copy_(a), device) for _ in range(WARM_UP_STEPS + N_COPIES)]
    return 2 * a.nbytes / (1e-3 * statistics.median(readings[WARM_UP_STEPS:]))


class OptimizerProbe:
    """One way, on parameters and gradients of its own: times, memory and correctness."""

    def __init__(self, name: str, setup: Setup, setting: Setting, shapes: Sequence[torch.Size]) -> None:
        self._name, self._setting = name, setting
        self._params = _make_params(setting, shapes)
        max_norm = sum(param.numel() for param in self._params) ** 0.5  # of gradients of root mean square 1
        self._shadow = Shadow(self._params, OPTIMIZERS[OPTIMIZER], max_norm=max_norm)
        _fill_gradients(self._params, scale=SCALES[0], seed=SEED)
        self._shadow.see_gradients()
        device = setting.device
        before = allocated_bytes(device)
        self._optimizer, self._step = setup(self._params, setting.precision, max_norm)
        for _ in range(WARM_UP_STEPS):
            self._step()
        synchronize(device)
        self._overhead = allocated_bytes(device) - before - _state_bytes(self._optimizer)
        self._step_memory = _step_memory(self._step, device)
        self._caches = _Caches(device)
        self._wall: list[float] = []
        self._host: list[float] = []
        self._gpu: list[float] = []
        self._n_steps = WARM_UP_STEPS + 1

    def read(self, steps: int) -> None:
        """Take that many readings of each clock, after a step that is not read."""
        zero = (lambda: None) if isinstance(self._step, Captured) else self._optimizer.zero_grad
        self._step()
        wall, host = _read_wall(self._step, zero, self._params, self._caches, self._setting.device, steps)
        self._wall += wall
        self._host += host
        self._n_steps += 1 + steps
        if self._setting.device.type == "cuda":
            busy_ms = 3 * max(self._host)
            self._gpu += _read_gpu(self._step, self._caches, self._setting.device, steps, busy_ms=busy_ms)
            self._n_steps += steps

    def finish(self) -> Result:
        """Compare with fp64."""
        self._shadow.step(self._n_steps)
        timed = self._shadow.compare(self._optimizer)
        # Adam is blind to the scale of gradients but not to a change of it: some are clipped, some are not.
        for number, scale in enumerate(SCALES, 1):
            _fill_gradients(self._params, scale=scale, seed=SEED + number)
            self._shadow.see_gradients()
            self._step()
            self._shadow.step()
        deviation = worst([timed, self._shadow.compare(self._optimizer)])
        return Result(
            self._name, self._gpu, self._wall, self._host, self._step_memory, self._overhead, deviation
        )


def _make_params(setting: Setting, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Parameters of these shapes with memory for their gradients."""
    generator = torch.Generator(setting.device).manual_seed(SEED)
    kind = {"dtype": setting.precision.dtype, "device": setting.device}
    params: list[Tensor] = []
    for shape in shapes:
        param = nn.Parameter(torch.empty(shape, **kind).normal_(std=0.02, generator=generator))  # type: ignore[call-overload]
        param.grad = torch.zeros_like(param)
        params.append(param)
    return params


def _fill_gradients(params: Sequence[Tensor], *, scale: float, seed: int) -> None:
    """Put random numbers of that root mean square where the gradients are."""
    generator = torch.Generator(params[0].device).manual_seed(seed)
    for param in params:
        if param.grad is not None:
            param.grad.normal_(std=scale, generator=generator)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors if t.device.type == "cuda")


def _step_memory(step: Step, device: torch.device) -> int:
    if device.type != "cuda":
        step()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class _Caches:
    """Empties a GPU's cache, as forward and backward would: a small model's step must not be found in it."""

    def __init__(self, device: torch.device) -> None:
        self._filler = torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None

    def empty(self) -> None:
        if self._filler is not None:
            self._filler.sum()  # reading, so that nothing is left to be written back during the step


def _read_wall(
    step: Step, zero: Step, params: Sequence[Tensor], caches: _Caches, device: torch.device, steps: int
) -> tuple[list[float], list[float]]:
    """Wall times of step and zero_grad, and those until the step returned. Gradients are given, and kept."""
    wall, host = [], []
    grads = [param.grad for param in params]
    for _ in range(steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        caches.empty()
        synchronize(device)
        begin = time.perf_counter()
        step()
        issued = time.perf_counter()
        zero()
        synchronize(device)
        wall.append(1e3 * (time.perf_counter() - begin))
        host.append(1e3 * (issued - begin))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return wall, host


def _read_gpu(
    step: Step, caches: _Caches, device: torch.device, steps: int, *, busy_ms: float
) -> list[float]:
    """GPU times; the device is kept busy for `busy_ms`, so that it never waits for a kernel to be issued."""
    readings = []
    for _ in range(steps):
        caches.empty()
        torch.cuda._sleep(int(1e-3 * busy_ms * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        readings.append(_read_one(step, device))
    return readings


def _read_one(call: Step, device: torch.device) -> float:
    """Time of one call in ms, on the device's own clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _rows(
    results: Sequence[Result],
    setting: Setting,
    shapes: Sequence[torch.Size],
    *,
    speed: float,
    machine: Machine,
) -> list[FloorRow]:
    n_elements = sum(shape.numel() for shape in shapes)
    floor_ms = 1e3 * n_elements * setting.precision.bytes_per_element / speed
    fused_ms = next((result.p50 for result in results if result.way == FUSED), None)
    on_gpu = setting.device.type == "cuda"
    rows = []
    for result in results:
        gpu, host = (percentiles(x) if on_gpu else (None, None, None) for x in (result.gpu, result.host))
        wall = percentiles(result.wall)
        rows.append(
            FloorRow(
                benchmark="floor",
                model=setting.case.name,
                optimizer=OPTIMIZER,
                precision=setting.precision.name,
                way=result.way,
                n_params=len(shapes),
                n_elements=n_elements,
                n_samples=len(result.wall),
                bytes_per_element=setting.precision.bytes_per_element,
                copy_gb_per_s=speed / 1e9,
                floor_ms=floor_ms,
                gpu_p20_ms=gpu[0],
                gpu_p50_ms=gpu[1],
                gpu_p80_ms=gpu[2],
                wall_p20_ms=wall[0],
                wall_p50_ms=wall[1],
                wall_p80_ms=wall[2],
                host_p20_ms=host[0],
                host_p50_ms=host[1],
                host_p80_ms=host[2],
                ratio_to_floor=result.p50 / floor_ms,
                ratio_to_fused=None if fused_ms is None else result.p50 / fused_ms,
                step_memory_bytes=result.step_memory_bytes if on_gpu else None,
                overhead_bytes=result.overhead_bytes if on_gpu else None,
                max_rel_error=result.deviation.max_rel_error,
                max_abs_error=result.deviation.max_abs_error,
                ok=result.deviation.ok,
                machine=machine,
            )
        )
    return rows
