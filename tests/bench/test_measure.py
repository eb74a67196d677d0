import torch

from flatbed.bench.measure import allocated_bytes, free_memory, percentiles, synchronize
from tests.bench.samples import CPU


def test_percentiles() -> None:
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == (1.0, 2.5, 4.0)


def test_a_cpu_is_never_waited_for() -> None:
    kept = torch.zeros(1000)
    synchronize(CPU)
    free_memory(CPU)
    assert allocated_bytes(CPU) == 0
    assert len(kept) == 1000
