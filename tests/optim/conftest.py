"""The three ways a step runs: torch operations on the CPU, the kernels interpreted, the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

PLACES = ["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device to put a model on."""
    yield from place(request.param, monkeypatch)


@pytest.fixture(params=PLACES[1:])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same for tests of the kernels alone."""
    yield from place(request.param, monkeypatch)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret kernels on a CPU, for tests that look into their host code."""
    for _ in place("interpreter", monkeypatch):
        yield


def place(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if name == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("one process cannot both compile and interpret; the GPU runs the same test")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield "cuda" if name == "cuda" else "cpu"
