import builtins
import json
import time
from importlib import metadata
from typing import Any

import pytest
import torch
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
    assert time.perf_counter() - begin < 20
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
    assert "flatbed[plot]" in finding.meaning


def test_little_memory_and_disk_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_bytes", lambda: doctor.GIB // 2)
    finding = doctor._memory()
    assert finding.ok is False
    assert finding.value == "0.5 GiB free"


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
