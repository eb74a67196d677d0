import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEPTH", 10)
    monkeypatch.setattr(module, "STEPS", 5)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # global to all tests
    return module


def test_the_demo_ends_with_the_same_numbers(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    out = capsys.readouterr().out
    losses = [line.split("loss ")[1] for line in out.splitlines() if " loss " in line]
    assert out.count("largest difference between any two weights: 0.0\n") == 2
    assert len(losses) == 4
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    for part in ("forward", "backward", "clip", "optimizer", "zero_grad", "whole step"):
        assert part in out


def test_the_demo_fails_when_the_numbers_differ(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "largest_difference", lambda a, b: 1e-9)
    with pytest.raises(SystemExit, match="differ"):
        demo.main()


def test_the_network_learns(demo: ModuleType) -> None:
    run = demo.flat_run("flat", fused=True)
    for step in range(30):
        run.step(*demo.make_batch(step))
    assert run.losses[-1] < run.losses[0] / 2
