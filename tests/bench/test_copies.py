from __future__ import annotations

import pytest
import torch

from flatbed.bench import copies
from flatbed.bench.copies import WAYS, copied


def test_copies_in_host_memory_are_right() -> None:
    speed = copied("host")
    assert speed.ok
    assert speed.rate > 1e8


def test_a_copy_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(copies.MIB, dtype=torch.uint8)

    class Forgetful(torch.Tensor):
        def copy_(self, *_: object) -> Forgetful:  # type: ignore[override]
            return self

    wrong = torch.empty_like(ones).as_subclass(Forgetful)
    monkeypatch.setattr(copies, "_memory", lambda way: (ones, wrong))
    assert not copied("host").ok


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_of_a_gpu(way: str) -> None:
    assert copied(way).ok
