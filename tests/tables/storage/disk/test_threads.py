"""How many threads copy records."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from flatbed.tables.record import Field, Record
from flatbed.tables.storage.disk import DiskStorage, threads


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied here")
def test_many_threads_read_from_the_disk_and_few_from_the_page_cache(tmp_path: Path) -> None:
    record = Record((Field("weight", torch.float32, 256),))
    n_rows = 4 * threads.READ_PART // record.nbytes
    storage = DiskStorage.create(
        tmp_path / "t.bed", record, n_rows, fill=lambda start, stop, records: records.fill_(7)
    )
    storage.close()
    with open(tmp_path / "t.bed", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    storage = DiskStorage.open(tmp_path / "t.bed")
    rows, pool = torch.randperm(n_rows), storage._files.pool
    before = threads._disk_faults()
    cold = storage.gather(rows)
    if threads._disk_faults() == before:
        pytest.skip("this file system does not drop pages")
    assert pool.part_bytes == threads.READ_PART
    warm = storage.gather(rows)
    assert pool.part_bytes == threads.MEMORY_PART
    assert torch.equal(cold, warm)
    assert np.unique(warm.numpy()).tolist() == [7]
    storage.close()
