"""A result is a row: what was measured, how large the case was, on which machine, at which commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from flatbed._version import __version__
from flatbed.bench.host import allowed_cores

Part = Literal["optimizer", "step"]
FUSED, FOREACH, LOOP = "torch fused", "torch foreach", "torch loop"
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with which versions a row was measured. Any benchmark's row can carry one."""

    device: str
    cpu: str
    cores: int
    threads: int
    python: str
    torch: str
    flatbed: str
    commit: str | None
    timestamp: str


@dataclass(frozen=True, slots=True)
class Record:
    """What the rows of all benchmarks have in common."""

    benchmark: str
    machine: Machine

    def to_dict(self) -> dict[str, Any]:
        """The row as one flat JSON object, the machine's fields beside the row's."""
        record = asdict(self)
        machine = record.pop("machine")
        return {**record, **machine}


@dataclass(frozen=True, slots=True)
class Row(Record):
    """One part of the step, trained in one way; times are wall time per step, over `n_samples` readings."""

    model: str
    optimizer: str
    way: str
    part: Part
    n_params: int
    n_elements: int
    n_samples: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    ratio_to_fused: float | None
    """This p50 over the p50 of torch's fused optimizer: below 1 is faster."""
    max_rel_error: float
    """‖w − w_loop‖ / ‖w_loop − w_start‖ after the check's steps, for the worst parameter."""
    max_abs_error: float
    ok: bool
    """Whether `max_rel_error` is within the tolerance: where it is not, the times mean nothing."""
    peak_memory_bytes: int | None


RecordT = TypeVar("RecordT", bound=Record)


def this_machine(device: str) -> Machine:
    """The machine as it is now; `device` is "cpu" or "cuda"."""
    import torch

    return Machine(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        cpu=_cpu_name(),
        cores=len(allowed_cores()) or os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        flatbed=__version__,
        commit=git_commit(),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


@lru_cache(maxsize=1)
def git_commit(package: Path = PACKAGE) -> str | None:
    """The commit that flatbed's sources are at, "-dirty" with local changes; None outside its checkout.

    A copy of the sources without their history is told its commit by `FLATBED_COMMIT`.
    """
    if told := os.environ.get("FLATBED_COMMIT"):
        return told
    top = _git(package, "rev-parse", "--show-toplevel")
    # An environment inside somebody else's checkout must not report that checkout's commit.
    own = top is not None and (Path(top) / "src" / "flatbed").resolve() == package
    commit = _git(package, "rev-parse", "--verify", "--quiet", "HEAD") if own else None
    if not commit:
        return None
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes else commit


def write_rows(rows: Iterable[Record], path: Path) -> None:
    """Write rows as a JSON list. A reader sees the old file or the new one, never half of one."""
    text = json.dumps([row.to_dict() for row in rows], indent=1) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp's file is for its owner alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@overload
def read_rows(path: Path) -> list[Row]: ...


@overload
def read_rows(path: Path, *kinds: type[RecordT]) -> list[RecordT]: ...


def read_rows(path: Path, *kinds: type[Any]) -> list[Any]:
    """Read rows that `write_rows` wrote, of these kinds; ValueError where the file holds something else."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} is not a list of rows")
    try:
        return [_from_dict(record, kinds or (Row,)) for record in records]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _from_dict(record: dict[str, Any], kinds: Sequence[type[RecordT]]) -> RecordT:
    """The inverse of `to_dict`: a row of the kind that has these fields."""
    machine_names = {field.name for field in fields(Machine)}
    differing: set[str] = set()
    for kind in reversed(kinds):  # so that the complaint is about the first
        own_names = {field.name for field in fields(kind)} - {"machine"}
        differing = set(record) ^ (machine_names | own_names)
        if not differing:
            machine = Machine(**{name: record[name] for name in machine_names})
            return kind(**{name: record[name] for name in own_names}, machine=machine)
    raise ValueError(f"not a row of this benchmark: missing or unknown fields {sorted(differing)}")


@dataclass(frozen=True, slots=True)
class Line:
    """Both parts of one way, side by side, as the tables and the plot show them."""

    optimizer: Row
    step: Row


def group(rows: Sequence[Row]) -> list[list[Line]]:
    """Rows by case (model, optimizer, device), in each the lines by way, all in order of appearance.

    A later row replaces an earlier one of the same case, way and part. A part alone is left out.
    """
    cases: dict[tuple[str, ...], dict[str, dict[str, Row]]] = {}
    for row in rows:
        key = (row.model, row.optimizer, row.machine.device)
        cases.setdefault(key, {}).setdefault(row.way, {})[row.part] = row
    paired = [
        [Line(parts["optimizer"], parts["step"]) for parts in ways.values() if len(parts) == 2]
        for ways in cases.values()
    ]
    return [lines for lines in paired if lines]


def speedup(row: Row, others: Iterable[Row], *, over: str) -> float | None:
    """How many times faster this row is than the way `over` in the same part of the same case."""
    for other in others:
        if other.way == over and other.part == row.part and other.p50_ms > 0:
            return other.p50_ms / row.p50_ms
    return None


def to_markdown(rows: Sequence[Row]) -> str:
    """Stored rows as a markdown table per case, with the machine under it."""
    tables = []
    for lines in group(rows):
        first = lines[0].optimizer
        table = [
            f"**{describe_case(first)}**",
            "",
            f"| way | clip + {first.optimizer} + zero_grad | vs torch fused | whole step | vs torch fused |",
            "|---|---:|---:|---:|---:|",
        ]
        for line in lines:
            way = line.optimizer.way if line.optimizer.ok else f"{line.optimizer.way} (FAILED)"
            cells = [f"{cell.p50_ms:.3g} ms | {_times(cell, lines)}" for cell in (line.optimizer, line.step)]
            table.append(f"| {way} | {' | '.join(cells)} |")
        tables.append("\n".join([*table, "", f"<sub>{describe_machine(first.machine)}</sub>"]))
    return "\n\n".join(tables) + "\n"


def describe_case(row: Row) -> str:
    """One line for people: the model, its size and the optimizer."""
    return f"{row.model}, {row.optimizer}: {row.n_params:,} parameters, {row.n_elements:,} elements"


def describe_machine(machine: Machine) -> str:
    """One line for people: what it ran on."""
    commit = f", commit {machine.commit[:10]}" if machine.commit else ""
    dirty = "-dirty" if machine.commit and machine.commit.endswith("-dirty") else ""
    where = f"{machine.cpu}, {machine.threads} threads"
    if machine.device != "cpu":
        where = f"{machine.device}, {where}"
    return (
        f"{where}; torch {machine.torch}, flatbed {machine.flatbed}{commit}{dirty}; {machine.timestamp[:10]}"
    )


def _times(row: Row, lines: Sequence[Line]) -> str:
    faster = speedup(row, (cell for line in lines for cell in (line.optimizer, line.step)), over=FUSED)
    return "" if faster is None else f"{faster:.2f}×"


def _git(package: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
