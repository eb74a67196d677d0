from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatbed import cost_model, doctor
from flatbed.doctor import GB, Finding, examine, plan

NAMES = ["environment", "GPU", "host memory", "bus", "disk"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of given sizes in GB; `gpu=None` for none."""

    def pretend(gpu: float | None, host: float, disk: float) -> None:
        free = int((gpu or 0) * GB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(doctor, "available_bytes", lambda: int(host * GB))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(disk * GB)))

    return pretend


def test_every_probe_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = examine()
    assert list(findings) == NAMES
    assert findings["environment"].ok
    assert findings["disk"].ok
    for finding in findings.values():
        assert finding.value
        assert finding.ok is not False or finding.meaning
    assert list(examine(GB)) == [*NAMES, "table"]

    def broken() -> int:
        raise RuntimeError("no luck\nsecond line")

    monkeypatch.setattr(doctor, "available_bytes", broken)
    findings = examine()
    assert findings["host memory"][:2] == (False, "RuntimeError: no luck")
    assert findings["environment"].ok


@pytest.mark.parametrize(("cuda", "remedy"), [("13.0", "CUDA_VISIBLE_DEVICES"), (None, "without CUDA")])
def test_without_a_gpu(cuda: str | None, remedy: str, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(None, 16, 100)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert doctor.gpu().ok is False
    assert remedy in doctor.gpu().meaning
    assert doctor.bus().ok is None
    assert doctor.host_memory() == Finding(True, "16.0 GB free")
    monkeypatch.setattr(doctor, "disk_reads", lambda: 250_000.0)
    assert doctor.disk().value.startswith("100.0 GB free in /")
    assert doctor.disk().value.endswith(", 250,000 random reads per second, 262 ms a batch")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((139, 200, 60), ["device", "device", "device"]),
        ((80, 200, 60), ["device", "device", "host"]),
        ((4, 16, 500), ["device", "host", "disk"]),
        ((1, 2, 50), ["host", "disk", None]),
        ((None, 128, 500), ["host", "host", "host"]),
        ((None, 109, 125), ["host", "host", "disk"]),  # room is left for the system and a journal
        ((None, 109, 124), ["host", "host", None]),
    ],
)
def test_the_fastest_storage_with_room_is_recommended(
    machine: Any, sizes: tuple[Any, ...], found: list[str | None]
) -> None:
    machine(*sizes)
    for size, storage in zip((1, 10, 100), found, strict=True):
        finding = doctor.fit(size * GB)
        assert finding.ok == (storage is not None)
        assert (f'fits: storage="{storage}"' if storage else "less state") in finding.meaning
        assert f"disk {size / sizes[2]:.0%} of {sizes[2]:.1f} GB free" in finding.value


# ---- tables on many GPUs


@pytest.mark.parametrize(
    ("n_rows", "n_ranks", "hit_rate", "wire_mb", "bus_mb", "ms", "bound"),
    [
        (20_000_000, 1, 0.1, 0, 181, 2.5, "the bus"),
        (20_000_000, 8, 0.1, 59, 179, 7.4, "host memory"),
        (20_000_000, 64, 0.99, 66, 2, 12.3, "headers"),
        (6_500_000_000, 512, 0.0, 67, 201, 74.0, "headers"),
        (1000, 1, 0.0, 0, 3, 1.0, "the host"),
    ],
)
def test_the_model_of_a_step(
    n_rows: int, n_ranks: int, hit_rate: float, wire_mb: float, bus_mb: float, ms: float, bound: str
) -> None:
    cost = cost_model.sharded_step(n_rows, 512, 1536, n_ranks=n_ranks, n_ids=65_536, hit_rate=hit_rate)
    assert cost.wire_bytes / 1e6 == pytest.approx(wire_mb, abs=0.7)
    assert cost.bus_bytes / 1e6 == pytest.approx(bus_mb, abs=0.7)
    assert 1e3 * cost.step_seconds == pytest.approx(ms, rel=0.05)
    assert cost.bound == bound
    assert cost.rank_bytes * n_ranks == pytest.approx(n_rows * 1536)


def test_a_plan_names_memory_traffic_time_and_what_is_assumed() -> None:
    found = plan(6_500_000_000, 128, "adam", ranks=512, ids=65_536)
    assert found["table"].value.endswith("1,536 bytes a row, 9,984.0 GB")
    assert found["host memory"].value == "19.5 GB per rank, 156.0 GB per host"
    assert found["traffic"].value == "67 MB between ranks, 201 MB over the bus"
    assert found["step"].value == "74.0 ms for 33,554,432 ids, bound by headers"
    assert "Not measured" in found["step"].meaning
    for part in ("assumed: 8 ranks per host; NVLink 200", "Measured: bus 80", "from a CPU: exchanges"):
        assert part in found["constants"].value
    found = plan(20_000_000, 128, "adam", ranks=8, ids=65_536, hit_rate=0.9)
    assert found["traffic"].value == "59 MB between ranks, 20 MB over the bus"
    assert "90% of the rows in caches" in found["traffic"].meaning
    for optimizer, nbytes in {"sgd": "512", "RowwiseAdagrad": "640", "AdamW": "1,536"}.items():
        assert f"{nbytes} bytes a row" in plan(1000, 128, optimizer, ranks=1, ids=10)["table"].value


@pytest.mark.gpu
def test_on_a_gpu_everything_is_tried() -> None:
    findings = examine(100 * GB)
    assert findings["GPU"].ok
    assert "GB/s back" in findings["bus"].value
    assert any(kind in findings["host memory"].value for kind in ("managed", "registered", "pageable"))
    assert findings["table"].value.startswith("100 GB: device")
