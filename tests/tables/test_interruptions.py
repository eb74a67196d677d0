"""Ctrl-C anywhere in a training step: each row is as before the step or as after it, and stays so."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import flatbed
from flatbed.kernels._triton import decision_graphs
from flatbed.tables.cache import write_behind
from tests.data.fakes import wait_until
from tests.tables.tables import everything

SOURCE = str(Path(flatbed.__file__).parent)
ROWS, DIM = 24, 3
BATCHES = [[1, 2, 3, 4], [5, 1, 23, 6], [7, 2, 8, 8, 1, 9]]
APART = 4  # calls between two interruptions
IN_FINALIZERS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""For interruptions in finalizers, which Python ignores."""


def is_signal_point(frame: Any, event: str, within: str | tuple[str, ...] = SOURCE) -> bool:
    """Python handles signals at the begin of a function, and after a function of C.

    Tests check locks in Python: left out.
    """
    file = frame.f_code.co_filename
    skipped = file.endswith("streams.py") or frame.f_code.co_name == "<genexpr>"
    return event in ("call", "c_return") and file.startswith(within) and not skipped


def interrupted(
    act: Callable[[], Any],
    number: int,
    within: str | tuple[str, ...] = SOURCE,
    errors: list[BaseException] | None = None,
) -> bool:
    """Interrupt at a call, where Python handles signals; returns False if there are fewer calls.

    `errors` keeps the error, and so the frames of its traceback.
    """
    n_seen = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal n_seen
        if is_signal_point(frame, event, within):
            n_seen += 1
            if n_seen == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    gc.disable()  # an error in the finalizer of another table would reach no one
    sys.setprofile(profile)
    try:
        act()
    except KeyboardInterrupt as error:
        if errors is not None:
            errors.append(error)
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return n_seen >= number


def made(storage: str, folder: Path, cache_rows: int = 6) -> tuple[Any, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / "table" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, seed=1, storage=storage, path=path, cache_rows=cache_rows)
    return emb, flatbed.optim.Adam(emb, lr=0.1)


def step(emb: Any, optimizer: Any, ids: list[int]) -> None:
    emb(torch.tensor(ids)).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def records(emb: Any) -> Tensor:
    """Weights and state of all rows, side by side."""
    weight, state = everything(emb)
    return torch.cat([weight, *state.values()], 1)


def answered(ask: Callable[[], Any]) -> Any:
    """Ask in another thread: no lock may be left behind."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(timeout=200)


def before_or_after(found: Tensor, before: Tensor, after: Tensor) -> str:
    """The state of a table: that before a change, that after it, or one between them."""
    states = {"before": before, "after": after}
    return next((name for name, rows in states.items() if torch.equal(found, rows)), "between")


def check_rows(emb: Any, before: Tensor, after: Tensor) -> Tensor:
    """Each row is one of two, and the same however it is asked for. Returns the rows."""
    found = answered(partial(records, emb))
    as_before, as_after = (found == before).all(1), (found == after).all(1)
    assert (as_before | as_after).all(), (~(as_before | as_after)).nonzero().flatten().tolist()
    for ids in ([10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20, 21, 22]):  # evicts all others
        emb(torch.tensor(ids))
        assert torch.equal(records(emb), found)
    return found


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_rows_of_an_interrupted_step(storage: str, tmp_path: Path) -> None:
    twin, its = made(storage, tmp_path / "whole")
    for ids in BATCHES:
        step(twin, its, ids)
    after = records(twin)
    twin.table.close(discard=True)
    number, seen = 1, set[str]()
    while True:
        emb, optimizer = made(storage, tmp_path / str(number))
        for ids in BATCHES[:2]:
            step(emb, optimizer, ids)
        before = records(emb)
        emb(torch.tensor(BATCHES[2]))  # some rows of the step are cached, and unchanged
        if not interrupted(partial(step, emb, optimizer, BATCHES[2]), number):
            break
        found, saved = check_rows(emb, before, after), tmp_path / f"{number}.safetensors"
        seen.add(before_or_after(found, before, after))
        if storage == "disk":
            emb.table.checkpoint()
            emb.table.close(discard=True)
            saved = tmp_path / str(number) / "table"
        else:
            emb.table.save(saved)
        again = flatbed.Embedding.from_table(flatbed.load_table(saved))
        assert torch.equal(records(again), found)
        again.table.close(discard=True)
        number += APART
    emb.table.close(discard=True)
    assert seen >= {"before", "after"}


@pytest.mark.parametrize("cache_rows", [0, 6])
def test_interrupted_step_leaves_no_lock(
    cache_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the user's debugger or notebook holds the traceback."""
    monkeypatch.setattr(write_behind, "MANY", 1)  # threads read and write
    emb, optimizer = made("disk", tmp_path / "whole", cache_rows)
    step(emb, optimizer, BATCHES[0])
    before = records(emb)
    step(emb, optimizer, BATCHES[1])
    after = records(emb)
    emb.table.close(discard=True)
    number, seen, errors = 1, set[str](), list[BaseException]()
    within = SOURCE, contextlib.__file__, threading.__file__
    while True:
        emb, optimizer = made("disk", tmp_path / str(number), cache_rows)
        step(emb, optimizer, BATCHES[0])
        if not interrupted(partial(step, emb, optimizer, BATCHES[1]), number, within, errors):
            break
        seen.add(before_or_after(answered(partial(records, emb)), before, after))
        answered(emb.table.checkpoint)
        emb.table.close(discard=True)
        number += 1
    emb.table.close(discard=True)
    assert seen >= {"before", "after"}


def test_rows_after_an_interrupted_change_of_the_cache(tmp_path: Path) -> None:
    """Training goes on, and `close` saves all rows."""

    def change(emb: Any) -> None:
        emb.table.set_cache(8)
        emb(torch.tensor([1]))

    number, seen = 1, set[int]()
    while True:
        emb, optimizer = made("disk", tmp_path / str(number))
        step(emb, optimizer, BATCHES[0])
        if not interrupted(partial(change, emb), number):
            break
        seen.add(emb.table._store.config.cache_rows)
        emb.table.checkpoint()
        step(emb, optimizer, BATCHES[1])
        expected = records(emb)
        assert not emb.table._store.cache.retired, number
        emb.table.close()
        again = flatbed.Embedding.from_table(flatbed.load_table(tmp_path / str(number) / "table"))
        assert torch.equal(records(again), expected), number
        again.table.close(discard=True)
        number += 1
    emb.table.close(discard=True)
    assert seen == {6, 8}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_a_cache_is_emptied_as_a_whole(storage: str, tmp_path: Path) -> None:
    """Ctrl-C while its maps are emptied: the next use empties the rest."""
    number, seen = 1, set[tuple[int, int]]()
    while True:
        emb, optimizer = made(storage, tmp_path / str(number), cache_rows=4)
        twin, its = made("host", tmp_path, cache_rows=0)
        step(emb, optimizer, [1, 2, 3, 4])
        step(twin, its, [1, 2, 3, 4])
        was_interrupted = interrupted(emb.table._store.cache.drop, number, f"{SOURCE}/kernels")
        index = emb.table._store.cache.index
        seen.add((int((index.slot_of_row >= 0).sum()), int((index.row_of_slot >= 0).sum())))
        for ids in ([3, 5], [1, 6, 7], [3, 8], [9, 10, 11, 3], [1, 2, 12], [13, 14, 15, 16], [1, 3]):
            step(emb, optimizer, ids)
            step(twin, its, ids)
            cached = {row: slot for row, slot in enumerate(index.slot_of_row.tolist()) if slot >= 0}
            assert cached == {row: slot for slot, row in enumerate(index.row_of_slot.tolist()) if row >= 0}
            torch.testing.assert_close(records(emb), records(twin), rtol=1e-5, atol=1e-6, msg=str(number))
        emb.table.close(discard=True)
        if not was_interrupted:
            break
        number += 1
    assert seen >= {(4, 4), (0, 0)}
    assert len(seen) > 2, "no interruption between the two maps"


@IN_FINALIZERS
def test_steps_after_the_creation_of_the_journal_was_interrupted(tmp_path: Path) -> None:
    number, seen = 1, set[bool]()
    while True:
        emb, optimizer = made("disk", tmp_path / str(number))
        emb(torch.tensor(BATCHES[0])).sum().backward()
        if not interrupted(optimizer.step, number):
            break
        seen.add((tmp_path / str(number) / "table.journal").exists())
        optimizer.zero_grad()
        step(emb, optimizer, BATCHES[0])
        emb.table.checkpoint()
        emb.table.close(discard=True)
        number += 1
    emb.table.close(discard=True)
    assert seen == {False, True}


@IN_FINALIZERS
@pytest.mark.usefixtures("interpreted")
def test_an_interrupted_loop_keeps_no_reservation(tmp_path: Path) -> None:
    """Prefetches of later loops have the whole cache."""
    batches = [torch.tensor([10, 11, 12, 13]), torch.tensor([14, 15, 16, 17]), torch.tensor([1, 2, 3, 4])]

    def loop(emb: Any, optimizer: Any) -> None:
        for ids in flatbed.Prefetcher(batches, {emb: lambda ids: ids}, depth=1):
            emb(ids).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            n_steps.append(1)

    number, seen, within, n_steps = 1, set[int](), (f"{SOURCE}/tables", f"{SOURCE}/data"), list[int]()
    while True:
        emb, optimizer = made("disk", tmp_path / str(number), cache_rows=8)
        step(emb, optimizer, [5])
        n_steps.clear()
        if not interrupted(partial(loop, emb, optimizer), number, within):
            break
        seen.add(len(n_steps))
        gc.collect()
        cache = emb.table._store.cache

        def n_live(cache: Any = cache) -> int:
            with cache.lock, cache._ordered():
                return len(cache._live)

        assert wait_until(lambda n_live=n_live: n_live() == 0), number  # type: ignore[misc]
        emb.table.close(discard=True)
        number += 29
    emb.table.close(discard=True)
    assert seen == {0, 1, 2, 3}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("storage", ["host", "disk"])
def test_interrupted_admission_by_kernels(storage: str, tmp_path: Path) -> None:
    """Rows are right; between the kernels that choose slots and move records, every use raises.

    For a table on disk, no use raises: the host takes back what the kernels chose.
    """
    emb, optimizer = made(storage, tmp_path / "whole")
    for ids in BATCHES:
        step(emb, optimizer, ids)
    after, number, n_raised, n_right = records(emb), 1, 0, 0
    emb.table.close(discard=True)
    files = ("kernels/_triton/cache.py", "tables/cache/host_copy.py", "kernels/cache.py")
    while True:
        emb, optimizer = made(storage, tmp_path / str(number))
        for ids in BATCHES[:2]:
            step(emb, optimizer, ids)
        before = records(emb)
        within = tuple(f"{SOURCE}/{file}" for file in files)
        if not interrupted(partial(step, emb, optimizer, BATCHES[2]), number, within):
            break
        try:
            check_rows(emb, before, after)
            n_right += 1
        except flatbed.FlatbedError as error:
            assert "last checkpoint" in str(error)  # noqa: PT017
            n_raised += 1
            with pytest.raises(flatbed.FlatbedError, match="last checkpoint"):
                emb.state_dict()
        if storage == "disk":
            emb.table.close(discard=True)
        number += 7
    assert n_right > 0
    assert (n_raised > 0) == (storage == "host")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("by_graphs", "n_lookups"), [(False, 1), (True, 2)])
def test_interrupted_prefetch_by_kernels(
    by_graphs: bool, n_lookups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are right, or every use raises from then on, another loop included."""
    if by_graphs:  # which call their functions again
        monkeypatch.setattr(decision_graphs, "N_EAGER", 0)
        monkeypatch.setattr(decision_graphs, "can_capture", lambda device: True)
        monkeypatch.setattr(decision_graphs, "Graph", lambda function, *_: mock.Mock(replay=function))
    batches = [torch.tensor([10, 11, 12, 13]), torch.tensor([14, 15, 16, 17])]

    def prefetch(emb: Any) -> None:
        with iter(flatbed.Prefetcher(batches, {emb: lambda ids: [*ids.chunk(n_lookups)]}, depth=1)) as loop:
            next(loop)

    files = ("kernels/_triton/cache.py", "kernels/_triton/decision_graphs.py", "tables/cache/gpu.py")
    kernels = tuple(f"{SOURCE}/{file}" for file in files)
    number, n_raised, n_right = 1, 0, 0
    while True:
        emb, optimizer = made("host", tmp_path, cache_rows=12)
        for ids in (*BATCHES, [18, 19], [1], [1], [1]):  # the last ones leave room for prefetches
            step(emb, optimizer, ids)
        before = records(emb)
        if not interrupted(partial(prefetch, emb), number, kernels):
            break
        try:
            assert torch.equal(records(emb), before)
            n_right += 1
            prefetch(emb)
            assert torch.equal(records(emb), before)
        except flatbed.FlatbedError as error:
            assert "last checkpoint" in str(error)  # noqa: PT017
            n_raised += 1
            for use in (partial(prefetch, emb), emb.state_dict, partial(step, emb, optimizer, [1])) * 2:
                with pytest.raises(flatbed.FlatbedError, match="last checkpoint"):
                    use()
        number += 13
    assert n_raised > 0
    assert n_right > 0
