from dataclasses import replace
from pathlib import Path

import pytest

from flatbed.bench import plot
from flatbed.bench.plot import write_plot
from tests.bench.samples import FLOOR_ROW, four_rows


def test_a_chart_is_drawn_for_every_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    one, two = four_rows(), [replace(row, model="linear100", ok=False) for row in four_rows()]
    write_plot(one, tmp_path / "one.png")
    write_plot(one + two, tmp_path / "two.png")
    small, large = (image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert large.shape[0] > 1.5 * small.shape[0]
    assert large.shape[1] == small.shape[1]
    assert small.std() > 0.05


def test_rows_of_the_floor_are_drawn_with_and_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import image

    unknown = {"gpu_p20_ms": None, "gpu_p50_ms": None, "gpu_p80_ms": None}
    fused = replace(FLOOR_ROW, way="torch fused", wall_p50_ms=25.0)
    write_plot([fused, FLOOR_ROW], tmp_path / "gpu.png")
    write_plot([replace(row, **unknown) for row in (fused, FLOOR_ROW)], tmp_path / "cpu.png")
    gpu, cpu = (image.imread(tmp_path / name) for name in ("gpu.png", "cpu.png"))
    assert gpu.shape == cpu.shape
    assert gpu.std() > 0.05
    assert abs(gpu - cpu).max() > 0.5  # one panel instead of two


def test_without_matplotlib_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install matplotlib"):
        write_plot(four_rows(), tmp_path / "rows.png")
