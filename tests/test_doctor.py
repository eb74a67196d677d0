import builtins
import json
import time
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flatbed.bench.copies import Speed
from flatbed.bench.disk_reads import Reads
from typer.testing import CliRunner

from flatbed import doctor
from flatbed.cli import app
from flatbed.doctor import Answer, Finding, examine, probe

NAMES = {
    "python",
    "torch",
    "GPU",
    "NVIDIA driver",
    "Triton",
    "pinned memory",
    "managed memory",
    "host copy",
    "device copy",
    "pinned host → device",
    "device → pinned host",
    "pageable host → device",
    "RAM",
    "disk",
    "disk reads",
    "tables",
    "100 GB table",
    "matplotlib",
}


def find(name: str) -> Finding:
    return next(finding for finding in examine() if finding.name == name)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_probe_answers_quickly_and_every_failure_says_what_it_means() -> None:
    begin = time.perf_counter()
    findings = examine()
    assert time.perf_counter() - begin < 20  # 5 s, if nobody else is at work
    assert {finding.name for finding in findings} == NAMES
    for finding in findings:
        assert finding.value
        assert finding.ok is not False or finding.meaning
    assert find("torch").ok
    assert find("host copy").value.endswith("GB/s read + write")


def test_a_probe_that_raises_does_not_break_the_others() -> None:
    @probe("broken")
    def broken() -> Answer:
        raise RuntimeError("no luck\nsecond line")

    @probe("fine")
    def fine() -> Answer:
        return Answer(True, "yes")

    first, second = examine([broken, fine])
    assert first.name == "broken"
    assert first.ok is False
    assert first.value == "RuntimeError: no luck"
    assert "other findings still hold" in first.meaning
    assert second == Finding("fine", True, "yes", "")


@pytest.mark.usefixtures("no_gpu")
def test_without_gpu_the_rest_is_not_called_broken() -> None:
    gpu = find("GPU")
    assert gpu.ok is False
    assert gpu.meaning.startswith("Everything runs on the CPU with the same results.")
    for name in ("pinned memory", "managed memory", "device copy", "pinned host → device"):
        assert find(name).ok is None


@pytest.mark.usefixtures("no_gpu")
def test_a_cuda_build_without_gpu_gets_another_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA_VISIBLE_DEVICES" in find("GPU").meaning
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in find("GPU").meaning


def test_failing_memory_probes_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", fail)
    finding = doctor._pinned_memory()
    assert finding.ok is False
    assert "ulimit" in finding.meaning


def test_managed_memory_without_bindings_or_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    importing = builtins.__import__

    def without_cuda(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(name)
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_cuda)
    finding = doctor._managed_memory()
    assert finding.ok is False
    assert "pip install cuda-bindings" in finding.meaning


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    finding = doctor._matplotlib()
    assert finding.ok is False
    assert "pip install matplotlib" in finding.meaning


def test_little_memory_and_disk_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_bytes", lambda: doctor.GIB // 2)
    finding = doctor._memory()
    assert finding.ok is False
    assert finding.value == "0.5 GiB free"


# ---- tables


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of given sizes, in GB; `gpu=None` for none."""

    def pretend(gpu: float | None, host: float, disk: float, *, reads: Reads | None = None) -> None:
        free = None if gpu is None else int(gpu * doctor.GB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(doctor, "_available_bytes", lambda: int(host * doctor.GB))
        monkeypatch.setattr(
            doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(disk * doctor.GB))
        )
        rates = {"host": 200e9, "device": 4e12, "pinned to device": 55e9, "device to pinned": 50e9}
        monkeypatch.setattr(doctor, "_copied", lambda way: Speed(rates[way], True))
        monkeypatch.setattr(doctor, "_read_at_random", lambda: reads or Reads(250_000.0))

    return pretend


@pytest.mark.parametrize(
    ("sizes", "value"),
    [
        ((139, 200, 60), "1 GB: device, 10 GB: device, 100 GB: device"),
        ((80, 200, 60), "1 GB: device, 10 GB: device, 100 GB: host"),
        ((4, 16, 500), "1 GB: device, 10 GB: host, 100 GB: disk"),
        ((1, 2, 50), "1 GB: host, 10 GB: disk, 100 GB: nowhere"),
        ((None, 128, 500), "1 GB: host, 10 GB: host, 100 GB: host"),
        ((None, 8, 110), "1 GB: host, 10 GB: disk, 100 GB: nowhere"),
    ],
)
def test_a_tier_is_recommended_by_size(machine: Any, sizes: tuple[Any, ...], value: str) -> None:
    machine(*sizes)
    finding = doctor._tables()
    assert finding.ok
    assert finding.value == value


def test_no_room_at_all_is_said(machine: Any) -> None:
    machine(None, 0.5, 0.5)
    finding = doctor._tables()
    assert finding.ok is False
    assert finding.value == "1 GB: nowhere, 10 GB: nowhere, 100 GB: nowhere"
    assert "free some" in finding.meaning


def test_what_a_large_table_costs(machine: Any) -> None:
    machine(80, 200, 400)
    finding = doctor._large_table()
    assert finding.ok
    assert finding.value == "takes of what is free: device 125% (too large), host 50%, disk 25%"
    assert finding.meaning.startswith("65 million rows × 128 with Adam. 65,536 of its rows (101 MB) travel")
    # 100.7 MB read and written at 4 TB/s; at 55 GB/s there and 50 GB/s back; 65,536 at 250,000 a second.
    for time_ in ("device 0.05 ms there and back", "host 3.8 ms there and back", "disk 262 ms to read"):
        assert time_ in finding.meaning
    assert "nowhere" not in finding.meaning


def test_a_large_table_that_fits_nowhere_is_refused_plainly(machine: Any) -> None:
    machine(None, 24, 61, reads=Reads(None, "No file could be written."))
    finding = doctor._large_table()
    assert finding.ok is False
    assert finding.value == "takes of what is free: host 417% (too large), disk 164% (too large)"
    assert finding.meaning.startswith("It fits nowhere here. Take less state (RowwiseAdagrad: 42 GB)")
    assert "host 2 ms there and back, disk not measured;" in finding.meaning


def test_a_disk_that_cannot_be_measured_says_why(machine: Any) -> None:
    machine(None, 24, 61, reads=Reads(None, "The system keeps files in memory here."))
    assert doctor._disk_reads() == Finding(
        "disk reads", None, "not measured", "The system keeps files in memory here."
    )
    machine(None, 24, 61)
    assert doctor._disk_reads().value == "250,000 records of 1,536 bytes a second, at random"


def test_copies_are_measured_once() -> None:
    doctor._copied.cache_clear()
    first = doctor._host_copy()
    assert doctor._rates().host == doctor._copied("host").rate
    assert doctor._host_copy() == first
    assert doctor._copied.cache_info().misses == 1 or torch.cuda.is_available()


def test_json_is_the_findings() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    records = json.loads(result.stdout)
    assert {record["name"] for record in records} == NAMES
    assert all(set(record) == {"name", "ok", "value", "meaning"} for record in records)


def test_the_table_shows_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    @probe("disk")
    def full() -> Answer:
        return Answer(False, "[none] left", "Free some.")

    monkeypatch.setattr(doctor, "PROBES", (full,))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "[none] left" in result.stdout
    assert "Free some." in result.stdout


def test_an_unusable_torch_is_the_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(torch, "ones", broken)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    finding = next(record for record in json.loads(result.stdout) if record["name"] == "torch")
    assert finding["ok"] is False
    assert "pytorch.org" in finding["meaning"]


@pytest.mark.gpu
def test_on_a_gpu_everything_is_tried() -> None:
    findings = {finding.name: finding for finding in examine()}
    assert findings["GPU"].ok
    assert findings["pinned memory"].ok
    assert findings["managed memory"].ok is not None
    for name in ("device copy", "pinned host → device", "device → pinned host", "pageable host → device"):
        assert findings[name].ok
        assert "GB/s" in findings[name].value
    assert findings["tables"].value.startswith("1 GB: device")
    assert findings["100 GB table"].value.startswith("takes of what is free: device")
    assert "host not measured" not in findings["100 GB table"].meaning
