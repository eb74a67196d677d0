"""The examples for Lightning, Accelerate and the Trainer of Hugging Face learn with two gloo processes."""

from __future__ import annotations

import re

import pytest

from tests.distributed.processes import run_example

EXAMPLES = {
    "lightning": ("lightning_fsdp.py", "--devices", "2"),
    "accelerate": ("accelerate_fsdp.py",),
    "trainer-class": ("trainer_fsdp.py",),
    "trainer-optimizer": ("trainer_fsdp.py", "--built"),
}
PACKAGES = {"lightning": "lightning", "accelerate": "accelerate", "trainer": "transformers"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = example.split("-", maxsplit=1)[0]
    pytest.importorskip(PACKAGES[framework])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = run_example(*EXAMPLES[example], "--steps", "16", n_processes=2)
    steps = [(float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+) norm ([\d.]+)", found)]
    assert len(steps) == 16
    losses = [loss for loss, _ in steps]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert all(norm > 0 for _, norm in steps)
    if framework != "lightning":  # its shards are DTensors
        assert found.count("gloo threads left: 0\n") == 2
