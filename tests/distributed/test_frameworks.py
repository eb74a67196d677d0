"""The examples for Lightning, Accelerate and the Trainer of Hugging Face learn with two gloo processes."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.scripts.ranks import run_on_ranks

EXAMPLES = {
    "lightning": ("lightning_fsdp.py", "--devices", "2"),
    "accelerate": ("accelerate_fsdp.py",),
    "trainer-class": ("trainer_fsdp.py",),
    "trainer-optimizer": ("trainer_fsdp.py", "--built"),
}
IMPORTS = {
    "lightning": ["lightning"],
    "accelerate": ["accelerate"],
    "trainer": ["transformers", "transformers.trainer"],
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_two_processes(example: str) -> None:
    framework = example.split("-", maxsplit=1)[0]
    if find_spec(IMPORTS[framework][0]) is None:
        pytest.skip(f"needs {framework}")
    options = (*EXAMPLES[example], "--steps", "16")
    found = run_on_ranks(*options, imports=IMPORTS[framework])
    steps = [(float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+) norm ([\d.]+)", found)]
    assert len(steps) == 16
    losses = [loss for loss, _ in steps]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert all(norm > 0 for _, norm in steps)
    if framework != "lightning":  # its shards are DTensors
        assert found.count("gloo threads left: 0\n") == 2
