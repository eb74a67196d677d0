"""A safetensors file that several ranks write together, each one its own parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flatbed.distributed.channel import Channel
from flatbed.distributed.ranks import Lockstep, communicating, rank
from flatbed.errors import FlatbedError
from flatbed.tables.checksum import SharedChecksums
from flatbed.tables.tensor_file import (
    FileLayout,
    TensorEntry,
    Writer,
    draft_of,
    file_errors,
    replacing,
    write_at,
)


@contextmanager
def writing_together(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str],
    *,
    channel: Channel,
    lockstep: Lockstep,
) -> Iterator[tuple[Writer, Callable[[], None]]]:
    """Write a safetensors file on all ranks. Its name appears when it is complete and durable.

    Yields a writer, and a function that ranks call instead of `lockstep.meet`. Parts of a tensor that ranks
    write between two calls are in rank order. The first rank has the checksums.
    """
    ranks, layout = lockstep.ranks, FileLayout.of(entries, metadata)
    lockstep.meet()
    word = ranks.token()[:8]
    sums = SharedChecksums(("", *layout.starts), channel)
    with file_errors(path, layout.nbytes), ExitStack() as undo:
        if ranks.first:
            descriptor = undo.enter_context(replacing(path, layout.nbytes, word))
            # The whole length first: network file systems fill pages beyond the end with zeros.
            os.ftruncate(descriptor, layout.nbytes)
            header = memoryview(layout.header)
            sums.add("", 0, header)
            write_at(descriptor, 0, header)
        lockstep.meet()
        if not ranks.first:
            descriptor = _opened(draft_of(path, word))
            undo.callback(os.close, descriptor)
        lockstep.meet()  # from here on the first rank may fail, and remove the file

        def meet() -> None:
            lockstep.meet()
            with communicating(lockstep.doing):
                sums.share()

        with ThreadPoolExecutor(1) as pool:
            yield Writer(descriptor, layout.starts, pool, sums), meet
        os.fsync(descriptor)
        meet()


def _opened(draft: Path) -> int:
    """Open the file that the first rank has made."""
    try:
        # Without read access: network file systems then write those bytes alone, and no page around them.
        return os.open(draft, os.O_WRONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise FlatbedError(
            f"rank {rank()} does not find the file that the first rank has made in {draft.parent}: save to a "
            "folder that all ranks see"
        ) from error
