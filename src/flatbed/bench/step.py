"""`flatbed bench step`: the optimizer's part and the whole step, in every way, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatbed.bench.check import Deviation, compare, take_given_steps, weights_of
from flatbed.bench.measure import Progress, allocated_bytes, free_memory, percentiles, synchronize
from flatbed.bench.models import Batch, Case, count_parameters
from flatbed.bench.rows import FUSED, Machine, Part, Row, this_machine
from flatbed.bench.ways import OPTIMIZERS, WAYS, Trainer, Way

SEED = 20
ROUNDS = 5
WARM_UP_STEPS = 3
# To read the clock is to wait for the GPU; a whole step is read over several, so that they may overlap.
STEPS_PER_READING = {"cuda": 5, "cpu": 1}
PARTS: tuple[Part, ...] = ("optimizer", "step")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured, and how long."""

    case: Case
    optimizer: str
    device: torch.device
    steps: int
    ways: Sequence[Way] = WAYS
    """The first one is what the others are checked against."""

    @property
    def rounds(self) -> int:
        return min(ROUNDS, self.steps)

    @property
    def n_stages(self) -> int:
        """How often `run` reports progress."""
        return 1 + len(self.ways) * (1 + self.rounds)


@dataclass(frozen=True, slots=True)
class Start:
    """What all ways share: the first weights, and those after the check's steps in the first way."""

    state: dict[str, Tensor]
    weights: list[Tensor]
    reference: list[Tensor]
    n_params: int
    n_elements: int


@dataclass(frozen=True, slots=True)
class Result:
    """What was found about one way."""

    way: Way
    deviation: Deviation
    peak_memory_bytes: int | None
    readings_ms: dict[Part, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})


def run(setting: Setting, *, progress: Progress = lambda stage: None) -> list[Row]:
    """Measure every way: two rows each, one per part of the step."""
    machine = this_machine(setting.device.type)
    progress("reference")
    start = _make_start(setting)
    # Large models train one after another, the rest in turns, so that a busy machine is so for all alike.
    crews = [[way] for way in setting.ways] if setting.case.one_at_a_time else [setting.ways]
    results: list[Result] = []
    for crew in crews:
        free_memory(setting.device)
        results += _run_crew(crew, setting, start, progress=progress)
    free_memory(setting.device)
    return _rows(results, setting, start, machine=machine)


def build_trainer(way: Way, setting: Setting, state: dict[str, Tensor] | None = None) -> Trainer:
    """The case's model on the device, with the given first weights, set up in one way."""
    model = _build_model(setting)
    if state is not None:
        model.load_state_dict(state)
    return way.setup(model, OPTIMIZERS[setting.optimizer])


def make_batches(setting: Setting, *, seed: int, count: int) -> list[Batch]:
    """Fresh batches: the same seed gives every way the same ones."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    return [setting.case.make_batch(generator) for _ in range(count)]


def _build_model(setting: Setting) -> nn.Module:
    forked = [setting.device] if setting.device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), setting.device:
        torch.manual_seed(SEED)
        return setting.case.build()


def _make_start(setting: Setting) -> Start:
    model = _build_model(setting)
    state = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    weights = weights_of(model)
    trainer = setting.ways[0].setup(model, OPTIMIZERS[setting.optimizer])
    reference = take_given_steps(trainer, seed=SEED)
    # Libraries take their workspaces on first use; the first way measured should not pay for them.
    trainer.backward(setting.case, *make_batches(setting, seed=SEED, count=1))
    return Start(state, weights, reference, *count_parameters(model))


def _run_crew(ways: Sequence[Way], setting: Setting, start: Start, *, progress: Progress) -> list[Result]:
    """Measure ways whose models lie in memory together."""
    trainers: list[Trainer] = []
    results: list[Result] = []
    for way in ways:
        progress(f"{way.name}: check")
        before = allocated_bytes(setting.device)
        trainer = build_trainer(way, setting, start.state)
        deviation = compare(take_given_steps(trainer, seed=SEED), start.reference, start.weights)
        peak = _warm_up(trainer, setting)
        trainers.append(trainer)
        results.append(Result(way, deviation, None if peak is None else peak - before))
    for turn in range(setting.rounds):
        share = setting.steps * (turn + 1) // setting.rounds - setting.steps * turn // setting.rounds
        for trainer, result in zip(trainers, results, strict=True):
            progress(f"{result.way.name}: round {turn + 1} of {setting.rounds}")
            # One batch more than is timed: the first step of a turn finds the last way's data in the caches.
            first, *batches = make_batches(setting, seed=SEED + 1 + turn, count=share + 1)
            trainer.backward(setting.case, first)
            trainer.update()
            for part, read in READ.items():
                result.readings_ms[part] += read(trainer, setting, batches)
    return results


def _warm_up(trainer: Trainer, setting: Setting) -> int | None:
    """A few steps, untimed, in which all that is compiled or captured is so; returns the peak of memory."""
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(setting.device)
    for batch in make_batches(setting, seed=SEED, count=WARM_UP_STEPS):
        trainer.backward(setting.case, batch)
        trainer.update()
    return torch.cuda.max_memory_allocated(setting.device) if setting.device.type == "cuda" else None


def _read_optimizer(trainer: Trainer, setting: Setting, batches: Sequence[Batch]) -> list[float]:
    """Clip, step and zero_grad alone: nothing else is under way on the device."""
    readings = []
    for batch in batches:
        trainer.backward(setting.case, batch)
        synchronize(setting.device)
        begin = time.perf_counter()
        trainer.update()
        synchronize(setting.device)
        readings.append(1e3 * (time.perf_counter() - begin))
    return readings


def _read_step(trainer: Trainer, setting: Setting, batches: Sequence[Batch]) -> list[float]:
    """Whole steps; on a GPU several per reading, without waiting in between."""
    per_reading = min(STEPS_PER_READING[setting.device.type], len(batches))
    readings = []
    for at in range(0, len(batches) - per_reading + 1, per_reading):
        synchronize(setting.device)
        begin = time.perf_counter()
        for batch in batches[at : at + per_reading]:
            trainer.backward(setting.case, batch)
            trainer.update()
        synchronize(setting.device)
        readings.append(1e3 * (time.perf_counter() - begin) / per_reading)
    return readings


READ: dict[Part, Callable[[Trainer, Setting, Sequence[Batch]], list[float]]] = {
    "optimizer": _read_optimizer,
    "step": _read_step,
}


def _rows(results: Sequence[Result], setting: Setting, start: Start, *, machine: Machine) -> list[Row]:
    fused_ms = {
        part: statistics.median(result.readings_ms[part])
        for result in results
        for part in PARTS
        if result.way.name == FUSED
    }
    rows = []
    for result in results:
        for part in PARTS:
            p20, p50, p80 = percentiles(result.readings_ms[part])
            rows.append(
                Row(
                    benchmark="step",
                    model=setting.case.name,
                    optimizer=setting.optimizer,
                    way=result.way.name,
                    part=part,
                    n_params=start.n_params,
                    n_elements=start.n_elements,
                    n_samples=len(result.readings_ms[part]),
                    p20_ms=p20,
                    p50_ms=p50,
                    p80_ms=p80,
                    ratio_to_fused=p50 / fused_ms[part] if part in fused_ms else None,
                    max_rel_error=result.deviation.max_rel_error,
                    max_abs_error=result.deviation.max_abs_error,
                    ok=result.deviation.ok,
                    peak_memory_bytes=result.peak_memory_bytes,
                    machine=machine,
                )
            )
    return rows
