import json
from pathlib import Path

import pytest
import torch

from flatbed.bench.step import Setting
from flatbed.bench.trace import STEPS, trace_path, write_traces
from tests.bench.samples import CPU, TINY


def check(setting: Setting, folder: Path) -> None:
    paths = write_traces(setting, folder / "out.json")
    names = ["torch-loop", "torch-fused", "flat", "optim"]
    assert [path.name for path in paths] == [f"out.{name}.json" for name in names]
    for path in paths:
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        for part in ("forward and backward", "clip", "optimizer", "zero_grad"):
            assert names.count(part) >= STEPS


def test_traces_name_the_parts_of_every_step(tmp_path: Path) -> None:
    check(Setting(TINY, "adamw", CPU, steps=1), tmp_path)


@pytest.mark.gpu
def test_traces_on_a_gpu(tmp_path: Path) -> None:
    check(Setting(TINY, "adamw", torch.device("cuda"), steps=1), tmp_path)
    assert '"kernel"' in (tmp_path / "out.flat.json").read_text()


def test_a_path_without_suffix_gets_one() -> None:
    assert trace_path(Path("a/b"), "flat following") == Path("a/b.flat.json")
