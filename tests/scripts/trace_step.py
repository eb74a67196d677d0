"""List the functions of the package that one eager step of a cached table with a `Prefetcher` calls.

CONTRIBUTING.md has the result ("The path of a batch"). Run it by `python -m tests.scripts.trace_step`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

import flatbed

SOURCE = f"{Path(flatbed.__file__).parent}{os.sep}"
INSIDE = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")
calls: dict[tuple[str, str], None] = {}
is_tracing = False


def note(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if is_tracing and event == "call" and code.co_filename.startswith(SOURCE) and code.co_name not in INSIDE:
        caller = frame.f_back
        if caller is None or "triton" not in caller.f_code.co_filename.split(os.sep):  # a compiled function
            calls.setdefault((code.co_filename.removeprefix(SOURCE), code.co_qualname))


def main() -> None:
    global is_tracing
    emb = flatbed.Embedding(1000, 8, cache_rows=400)
    optimizer = flatbed.optim.Adam(emb.parameters(), lr=0.01)
    threading.setprofile(note)
    sys.setprofile(note)
    batches = torch.randint(1000, (12, 16), generator=torch.Generator().manual_seed(0))
    with iter(flatbed.Prefetcher([*batches], {emb: lambda batch: batch})) as prefetched:
        for number in range(6):
            is_tracing = number == 5
            emb(next(prefetched)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        is_tracing = False
    sys.setprofile(None)
    for path in sorted({path for path, _ in calls}):
        print(path, *(name for where, name in calls if where == path), sep="\n    ")
    print(f"{len(calls)} functions in {len({path for path, _ in calls})} files")


if __name__ == "__main__":
    main()
