"""Random rows of a large array, read by ids on the host, in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flatbed.bench.feed_measure import SEED, FeedSetting
from flatbed.bench.feed_rows import BENCHMARK, NUMPY, READER, READER_COPY, TORCH, ReadRow
from flatbed.bench.measure import percentiles
from flatbed.bench.tables_measure import number_, wall_time
from flatbed.data import RowReader

Array: TypeAlias = np.ndarray[Any, Any]
Read: TypeAlias = Callable[[Array], Tensor]


def read(array_bytes: int, row_sizes: tuple[int, ...], n_ids: int, setting: FeedSetting) -> Iterator[ReadRow]:
    """All ways with rows of all sizes; ids are fresh in each call."""
    flat = np.empty(array_bytes // 4096 * 4096, np.uint8)
    number_(torch.from_numpy(flat))
    generator = np.random.default_rng(SEED)
    for row_bytes in row_sizes:
        array = flat.view(np.float32).reshape(-1, row_bytes // 4)
        for name in (NUMPY, TORCH, READER, READER_COPY):
            if name == READER_COPY and setting.device.type == "cpu":
                continue  # which copies nothing there
            with _way(name, array, setting.device) as (call, memory):
                readings = []
                for _ in range(setting.n_samples + 2):
                    ids = generator.integers(0, len(array), n_ids, np.int32)
                    readings.append(wall_time(lambda ids=ids: call(ids), setting.device))  # type: ignore[misc]
                found = call(ids).cpu().numpy()
            p20, p50, p80 = percentiles(readings[2:])
            speed = n_ids * row_bytes / (1e6 * p50)
            yield ReadRow(
                benchmark=BENCHMARK,
                case="rows",
                way=name,
                memory=memory,
                array_bytes=flat.nbytes,
                row_bytes=row_bytes,
                n_ids=n_ids,
                n_samples=setting.n_samples,
                p20_ms=p20,
                p50_ms=p50,
                p80_ms=p80,
                gb_per_s=speed,
                dma_gb_per_s=setting.dma_gb_per_s,
                share_of_dma=speed / setting.dma_gb_per_s,
                ok=np.array_equal(found.view(np.int32), array[ids].view(np.int32)),
                machine=setting.machine,
            )


@contextmanager
def _way(name: str, array: Array, device: torch.device) -> Iterator[tuple[Read, str]]:
    on_gpu = device.type == "cuda"
    if name == NUMPY:

        def taken(ids: Array) -> Tensor:
            rows = torch.from_numpy(np.take(array, ids, axis=0))
            return (rows.pin_memory() if on_gpu else rows).to(device, non_blocking=True)

        yield taken, ""
    elif name == TORCH:
        tensor = torch.from_numpy(array)
        yield lambda ids: tensor[torch.from_numpy(ids)].to(device), ""
    else:
        with RowReader(array, device=device, copy=True if name == READER_COPY else None) as reader:
            yield reader, repr(reader)
