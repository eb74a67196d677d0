"""A case and rows small enough for every test."""

from dataclasses import replace

import torch
from torch import nn

from flatbed.bench.floor import FloorRow
from flatbed.bench.models import Case
from flatbed.bench.rows import FUSED, Machine, Row

CPU = torch.device("cpu")


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(5, 8, generator=generator, device=generator.device),)


TINY = Case(
    "tiny",
    build=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
    make_batch=make_batch,
    loss=lambda model, batch: model(batch[0]).square().mean(),
    steps=3,
)
MACHINE = Machine(
    device="Some GPU",
    cpu="Some CPU",
    cores=8,
    threads=4,
    python="3.11.7",
    torch="2.13.0",
    flatbed="0.1.0",
    commit="0123456789abcdef-dirty",
    timestamp="2026-11-15T08:00:00+00:00",
)
ROW = Row(
    benchmark="step",
    model="many-small",
    optimizer="adamw",
    way=FUSED,
    part="optimizer",
    n_params=2000,
    n_elements=128000,
    n_samples=30,
    p20_ms=1.5,
    p50_ms=2.0,
    p80_ms=2.5,
    ratio_to_fused=1.0,
    max_rel_error=1e-6,
    max_abs_error=1e-8,
    ok=True,
    peak_memory_bytes=123,
    machine=MACHINE,
)


FLOOR_ROW = FloorRow(
    benchmark="floor",
    model="gpt-like",
    optimizer="adam",
    precision="fp32",
    way="flatbed.optim",
    n_params=580,
    n_elements=1_250_000_000,
    n_samples=20,
    bytes_per_element=32,
    copy_gb_per_s=4000.0,
    floor_ms=10.0,
    gpu_p20_ms=11.9,
    gpu_p50_ms=12.0,
    gpu_p80_ms=12.1,
    wall_p20_ms=12.4,
    wall_p50_ms=12.5,
    wall_p80_ms=12.6,
    host_p20_ms=0.09,
    host_p50_ms=0.1,
    host_p80_ms=0.2,
    ratio_to_floor=1.2,
    ratio_to_fused=0.8,
    step_memory_bytes=0,
    overhead_bytes=1_500_000,
    max_rel_error=2e-6,
    max_abs_error=1e-9,
    ok=True,
    machine=MACHINE,
)


def four_rows() -> list[Row]:
    flat = replace(ROW, way="flat bound", p50_ms=0.5, ratio_to_fused=0.25)
    return [
        row for fast in (ROW, flat) for row in (fast, replace(fast, part="step", p50_ms=10 * fast.p50_ms))
    ]
