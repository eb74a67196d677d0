from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatbed import cost_model, doctor
from flatbed.doctor import GB, Finding, examine, plan, storage_for

NAMES = ["environment", "GPU", "host memory", "bus", "disk", "table"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of given sizes in GB; `gpu=None` for none."""

    def pretend(gpu: float | None, host: float, disk: float, *, reads: float | None = 250_000.0) -> None:
        free = int((gpu or 0) * GB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(doctor, "available_bytes", lambda: int(host * GB))
        usage = SimpleNamespace(free=int(disk * GB))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
        monkeypatch.setattr(doctor, "bus_speed", lambda: (55e9, 50e9))
        monkeypatch.setattr(doctor, "disk_reads", lambda: reads)

    return pretend


def test_every_probe_answers_and_every_failure_says_what_it_means() -> None:
    findings = examine(GB)
    assert list(findings) == NAMES
    for finding in findings.values():
        assert finding.value
        assert finding.ok is not False or finding.meaning
    assert findings["environment"].ok
    assert findings["disk"].ok
    assert findings["table"].value.startswith("1 GB: ")


def test_a_probe_that_raises_becomes_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("no luck\nsecond line")

    monkeypatch.setattr(doctor, "available_bytes", broken)
    findings = examine(GB)
    assert findings["host memory"].ok is False
    assert findings["host memory"].value == "RuntimeError: no luck"
    assert findings["environment"].ok


@pytest.mark.parametrize(("cuda", "remedy"), [("13.0", "CUDA_VISIBLE_DEVICES"), (None, "without CUDA")])
def test_without_a_gpu_the_remedy_depends_on_the_build(
    cuda: str | None, remedy: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(None, 16, 100)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    finding = doctor.gpu()
    assert finding.ok is False
    assert remedy in finding.meaning
    assert doctor.bus().ok is None
    assert doctor.host_memory() == Finding(True, "16.0 GB free")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((139, 200, 60), ["device", "device", "device"]),
        ((80, 200, 60), ["device", "device", "host"]),
        ((4, 16, 500), ["device", "host", "disk"]),
        ((1, 2, 50), ["host", "disk", None]),
        ((None, 128, 500), ["host", "host", "host"]),
        ((None, 0.5, 0.5), [None, None, None]),
    ],
)
def test_the_fastest_storage_with_room_is_recommended(
    machine: Any, sizes: tuple[Any, ...], found: list[str | None]
) -> None:
    machine(*sizes)
    for size, storage in zip((1, 10, 100), found, strict=True):
        finding = doctor.fit(size * GB, measure=False)
        assert finding.ok == (storage is not None)
        assert (f'fits: storage="{storage}"' if storage else "less state") in finding.meaning


def test_room_is_left_for_what_training_needs_besides() -> None:
    assert storage_for(80, {"device": 100, "host": 1000, "disk": 1000}) == "device"
    assert storage_for(81, {"device": 100, "host": 1000, "disk": 1000}) == "host"
    assert storage_for(100, {"host": 109, "disk": 125}) == "disk"
    assert storage_for(100, {"host": 109, "disk": 124}) is None


def test_what_a_table_costs(machine: Any) -> None:
    machine(80, 200, 400)
    # 100.7 MB at 55 and 50 GB/s; 65,536 reads at 250,000 a second.
    assert doctor.fit(100 * GB, measure=True).value == (
        "100 GB: device 125% of 80.0 GB free; host 50% of 200.0 GB free, 3.8 ms a batch; "
        "disk 25% of 400.0 GB free, 262.1 ms a batch"
    )
    machine(None, 24, 61, reads=None)
    found = doctor.fit(100 * GB, measure=True)
    assert found.value == "100 GB: host 417% of 24.0 GB free; disk 164% of 61.0 GB free"


def test_reads_past_the_page_cache_are_measured_or_refused() -> None:
    rate = doctor.disk_reads()
    assert rate is None or rate > 0


# ---- tables on many GPUs


@pytest.mark.parametrize(
    ("n_rows", "n_ranks", "hit_rate", "wire_mb", "bus_mb", "ms", "bound"),
    [
        (20_000_000, 1, 0.1, 0, 181, 2.5, "the bus"),
        (20_000_000, 8, 0.1, 59, 179, 8.0, "host memory"),
        (20_000_000, 64, 0.99, 66, 2, 12.9, "headers"),
        (6_500_000_000, 512, 0.0, 67, 201, 74.7, "headers"),
        (1000, 1, 0.0, 0, 3, 1.3, "the host"),
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
    assert found["table"].value.endswith("1,536 bytes a row, 9,984 GB")
    assert found["host memory"].value == "19.5 GB per rank, 156.0 GB per host"
    assert found["traffic"].value == "67 MB between ranks, 201 MB over the bus"
    assert found["step"].value == "74.7 ms for 33,554,432 ids, bound by headers"
    assert "Not measured" in found["step"].meaning
    assert "assumed: 8 ranks per host; NVLink 200, network 40" in found["constants"].value
    assert "Measured: bus 80" in found["constants"].value
    assert "Scaled from a CPU: exchanges" in found["constants"].value
    found = plan(20_000_000, 128, "adam", ranks=8, ids=65_536, hit_rate=0.9)
    assert found["traffic"].value == "59 MB between ranks, 20 MB over the bus"
    assert "90% of the rows in caches" in found["traffic"].meaning


@pytest.mark.parametrize(("optimizer", "nbytes"), [("sgd", 512), ("RowwiseAdagrad", 640), ("AdamW", 1536)])
def test_a_row_has_the_state_of_its_optimizer(optimizer: str, nbytes: int) -> None:
    assert f"{nbytes:,} bytes a row" in plan(1000, 128, optimizer, ranks=1, ids=10)["table"].value


@pytest.mark.gpu
def test_on_a_gpu_everything_is_tried() -> None:
    findings = examine()
    assert findings["GPU"].ok
    assert "GB/s back" in findings["bus"].value
    assert any(kind in findings["host memory"].value for kind in ("managed", "registered", "pageable"))
    assert findings["table"].value.startswith("100 GB: device")
