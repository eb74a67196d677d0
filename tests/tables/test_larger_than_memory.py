"""A table on disk larger than the memory that its process may have."""

from __future__ import annotations

from pathlib import Path

from tests import programs

PROGRAM = """
import resource, sys
import torch, flatbed

used = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) * 1024
allowed = 192 << 20
resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, used + allowed))
try:
    torch.zeros(allowed * 3 // 2, dtype=torch.uint8)
except RuntimeError:
    print("limited")

emb = flatbed.Embedding(500_000, 64, storage="disk", path=sys.argv[1], init=("normal", 0.0, 0.1))
optimizer = flatbed.optim.Adam(emb, lr=0.01)
generator = torch.Generator().manual_seed(0)
losses = []
for _ in range(12):
    ids = torch.randint(500_000, (4096,), generator=generator)
    for _ in range(2):
        loss = (emb(ids) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
emb.table.checkpoint()
print(emb.table.nbytes > 1.9 * allowed, all(b < a for a, b in zip(losses[::2], losses[1::2])))
"""


def test_disk_table_larger_than_the_memory_allowed_trains(tmp_path: Path) -> None:
    done = programs.run(PROGRAM, tmp_path / "large.bed")
    assert done.stdout.split("\n")[:2] == ["limited", "True True"]
    assert (tmp_path / "large.bed").stat().st_size > 350 << 20
