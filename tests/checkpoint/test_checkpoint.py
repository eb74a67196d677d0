"""Checkpoints of trainings: they resume bitwise, and are complete whatever happens during a save."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import shutil
import sys
import weakref
from contextlib import _GeneratorContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import flatbed
from flatbed.checkpoint import folder as folders
from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.checkpoint.load_table import load_table
from flatbed.errors import FlatbedError
from flatbed.tables.embedding import Embedding, tables
from flatbed.tables.storage.disk import storage
from tests import programs
from tests.checkpoint.saved import Saved, current
from tests.programs import Program
from tests.tables.storage.disk import crash_model
from tests.tables.test_interruptions import SOURCE, answered, interrupted, is_signal_point
from tests.tables.training import Expected, Model, Operations, build, close, difference, snapshot, step

ROOT = Path(__file__).parents[2]
PAIRS = [("host", "disk"), ("device", "host"), ("disk", "disk")]


# ---- there and back


@pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])
@pytest.mark.parametrize("storages", PAIRS, ids="-".join)
def test_resumed_training_equals_uninterrupted_training(
    storages: tuple[str, str], copied: bool, tmp_path: Path
) -> None:
    expected = Expected(tmp_path / "expected", storages)
    model, optimizer = build(tmp_path, storages)
    for number in range(1, 7):
        step(model, optimizer, number)
        if number % 2 == 0:
            save_checkpoint(
                tmp_path / "saved", model, optimizer, extra={"step": number}, copy_disk_tables=copied
            )
    close(model)
    model, optimizer = build(tmp_path, storages)
    assert load_checkpoint(tmp_path / "saved", model, optimizer) == {"step": 6}
    assert difference(snapshot(model, optimizer), expected.at(6)) is None
    for _ in range(2):  # also back in the same process
        for number in range(7, 10):
            step(model, optimizer, number)
        assert difference(snapshot(model, optimizer), expected.at(9)) is None
        load_checkpoint(tmp_path / "saved", model, optimizer)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda m: flatbed.optim.SGD(m, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda m: flatbed.optim.Adagrad(m, lr=0.1, initial_accumulator_value=0.25),
    "NAdam": lambda m: flatbed.optim.NAdam(m, lr=torch.tensor(0.01)),
    "rows": lambda m: flatbed.optim.Adam(m, lr=0.1, per_row_steps=True),
    "clipped": lambda m: flatbed.optim.AdamW(m, lr=0.1, max_norm=0.5),
    "rounded": lambda m: flatbed.optim.Adam(m, lr=0.1, stochastic_rounding=True),
    "several": lambda m: [
        flatbed.optim.Adam([m.first.table], lr=0.1),
        torch.optim.SGD([m.one.weight], lr=0.1, momentum=0.9),
        flatbed.optim.Adam([{"params": [m.second.table], "lr": 0.2}, {"params": m.norm.parameters()}]),
    ],
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_kind_of_optimizer_resumes(make: Any, tmp_path: Path) -> None:
    first, second = (build(tmp_path / name)[0] for name in ("a", "b"))
    for model in (first, second):
        for table in tables(model):
            table.drop_state()
    optimizers = make(first)
    step(first, optimizers, 1)
    save_checkpoint(tmp_path / "saved", first, optimizers, copy_disk_tables=True)
    other = make(second)
    load_checkpoint(tmp_path / "saved", second, other)
    assert difference(snapshot(second, other), snapshot(first, optimizers)) is None
    for number in (2, 3):
        step(first, optimizers, number)
        step(second, other, number)
    assert difference(snapshot(second, other), snapshot(first, optimizers)) is None


TORCH_OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    torch.optim.Rprop,
    torch.optim.ASGD,
    lambda p: torch.optim.LBFGS(p, max_iter=3),
    torch.optim.Adafactor,
]


@pytest.mark.parametrize("make", TORCH_OPTIMIZERS)
def test_any_optimizer_of_torch(make: Any, tmp_path: Path) -> None:
    def training() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Conv2d(3, 4, 3)
        if not isinstance(make(model.parameters()), torch.optim.LBFGS):  # which takes no other strides
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, make(model.parameters())

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad = p.detach().sin()
        optimizer.step(lambda: 1.0)

    first, other = training(), training()
    go_on(*first)
    save_checkpoint(tmp_path / "saved", *first)
    load_checkpoint(tmp_path / "saved", *other)
    for _ in range(2):
        states = (
            tree_leaves((model.state_dict(), optimizer.state_dict())) for model, optimizer in (first, other)
        )
        for theirs, ours in zip(*states, strict=True):
            assert repr(ours) == repr(theirs)
            assert not isinstance(ours, torch.Tensor) or ours.stride() == theirs.stride()
        go_on(*first)
        go_on(*other)


def test_model_without_optimizer(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path / "a", ("host", "host"))
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "saved", model, optimizer, extra={"a": [1, None]})
    other = Model(tmp_path / "b", ("host", "host"))
    assert load_checkpoint(str(tmp_path / "saved"), other) == {"a": [1, None]}
    ids = torch.arange(10)
    assert torch.equal(other.eval()(ids), model.eval()(ids))
    for table in tables(other):  # which would take three times the memory
        assert (table.state_names, table.scalars()) == ((), {})
    its = flatbed.optim.Adam(other, lr=0.1)
    step(other, its, 2)
    state = snapshot(other, its)
    load_checkpoint(tmp_path / "saved", other)
    after = snapshot(other, its)
    assert torch.equal(other.first.weight, model.first.weight)
    assert torch.equal(after["table 0 exp_avg"], state["table 0 exp_avg"])


# ---- what is in the folder


def test_files_are_readable_without_flatbed(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    version = current(tmp_path / "saved")
    assert sorted(path.name for path in version.iterdir()) == [
        *(".flatbed", "checkpoint.json", "model.safetensors", "optimizer-0.safetensors", "optimizer.json"),
        "table-0.safetensors",
    ]
    dense = safetensors.torch.load_file(version / "model.safetensors")
    assert dense["norm.num_batches_tracked"].dtype == torch.int64
    assert "two.weight" not in dense  # one.weight, as save_model has it
    plain = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "norm": nn.BatchNorm1d(4)})
    plain["two"] = nn.Linear(4, 4, bias=False)
    plain["two"].weight = plain["one"].weight
    plain.register_parameter("frozen", nn.Parameter(torch.zeros(2)))
    assert safetensors.torch.load_model(plain, version / "model.safetensors") == (set(), [])
    assert torch.equal(plain["two"].weight, model.two.weight)
    assert torch.equal(load_table(version / "table-0.safetensors").weight, model.first.weight)


def test_old_versions_go_and_other_files_stay(tmp_path: Path) -> None:
    model = Model(tmp_path, ("host", "host"))
    folder = tmp_path / "deep" / "saved"
    save_checkpoint(folder, model)
    (folder / "notes.txt").write_text("mine")
    (folder / "v2").mkdir()
    for name in ("v0000006", "v0000007-0123abcd"):  # left by interrupted saves
        (folder / name).mkdir()
        (folder / name / ".flatbed").touch()
        (folder / name / "model.safetensors").write_bytes(b"half")
    (folder / ".old-v0000007").mkdir()  # left by an interrupted removal
    (folder / ".old-v0000007" / "x").touch()
    (folder / "v0000005").mkdir()  # the user's
    (folder / "v0000005" / "precious").touch()
    for _ in range(3):
        save_checkpoint(folder, model)
    left = [".lock", "CURRENT.json", "notes.txt", "v0000005", current(folder).name, "v2"]
    assert current(folder).name.startswith("v0000008-")
    assert sorted(p.name for p in folder.iterdir()) == left
    assert (folder / "v0000005" / "precious").exists()


class Extra(nn.Linear):
    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state(tmp_path: Path) -> None:
    given = {"a": (1, 2.5, float("inf")), 3: torch.arange(3), "$": None, "dtype": torch.bfloat16}
    save_checkpoint(tmp_path / "saved", Extra(given))
    other = Extra({})
    load_checkpoint(tmp_path / "saved", other)
    assert repr(other.extra) == repr(given)
    with pytest.raises(FlatbedError, match=r"_extra_state.a.*builtins\.object"):
        save_checkpoint(tmp_path / "saved", Extra({"a": object()}))
    load_checkpoint(tmp_path / "saved", other)


# ---- what does not fit: errors, and nothing has changed


def with_sgd(model: Model) -> Any:
    for table in tables(model):
        table.drop_state()
    return flatbed.optim.SGD(model, lr=0.1, momentum=0.9)


def with_another_size(model: Model) -> Any:
    model.second = Embedding(41, 4)
    return flatbed.optim.Adam(model)


OTHERS: dict[str, Any] = {
    "rows": (lambda m: setattr(m, "second", Embedding(41, 4)), "40 × 4.*41 × 4.*num_embeddings=40.*resize"),
    "rows with state": (with_another_size, "40 × 4.*41 × 4.*num_embeddings=40.*resize"),
    "state": (with_sgd, "exp_avg.*SGD keeps momentum_buffer"),
    "groups": (lambda m: torch.optim.Adam([{"params": [p]} for p in m.norm.parameters()]), "shapes"),
    "order": (lambda m: torch.optim.Adam([m.norm.weight, m.norm.bias, m.one.weight, m.frozen]), "shapes"),
}


@pytest.mark.parametrize(("make", "words"), OTHERS.values(), ids=OTHERS)
def test_another_model(make: Any, words: str, tmp_path: Path) -> None:
    run = Saved(tmp_path, ("host", "host"))
    run.optimizer = make(run.model)
    run.before = run.snapshot()
    run.assert_refuses(words)


def test_disk_table_with_a_later_checkpoint_raises(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    with pytest.warns(UserWarning, match=rf"1\.bed .*{run.folder}.*save_checkpoint again"):
        run.model.second.table.checkpoint()
    run.model.second.table.checkpoint()
    run.assert_refuses(rf"1\.bed.*when .*{run.version.name} was saved.*later checkpoint.*copy_disk_tables")
    save_checkpoint(tmp_path / "other", run.model, run.optimizer)
    load_checkpoint(tmp_path / "other", run.model, run.optimizer)
    run.assert_refuses("in another folder")


def test_growing_a_disk_table_names_the_folder_that_cannot_be_loaded_any_more(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    table = run.model.second.table
    table.resize(table.num_embeddings)
    with pytest.warns(UserWarning, match=rf"1\.bed .*{run.folder}.*resize\(\).*save_checkpoint again"):
        table.resize(table.num_embeddings + 1)
    save_checkpoint(run.folder, run.model, run.optimizer)
    run.load()


def test_a_folder_that_loses_its_disk_table_is_named_before_it_does(tmp_path: Path) -> None:
    last, best = tmp_path / "last", tmp_path / "best"
    run = Saved(tmp_path)
    save_checkpoint(last, run.model, run.optimizer, copy_disk_tables=True)  # the file stays that of `saved`
    run.assert_loads()
    lost = rf"1\.bed \(table second\.weight\) .*{run.folder}.* {last}: copy_disk_tables=True"
    with pytest.raises(UserWarning, match=lost):  # an error in tests: nothing was saved, and both load
        save_checkpoint(last, run.model, run.optimizer)
    run.assert_loads()
    with pytest.warns(UserWarning, match=lost) as caught:
        save_checkpoint(last, run.model, run.optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    save_checkpoint(last, run.model, run.optimizer)  # its own folder
    close(run.model)

    shutil.copytree(tmp_path, copied := tmp_path.with_name("copied"))
    run.model, run.optimizer = build(copied)  # knows from its file alone what is saved where
    for options in ({}, {"copy_disk_tables": True}):
        with pytest.raises(FlatbedError, match=r"rest of that checkpoint was not loaded.*load_checkpoint"):
            save_checkpoint(copied / "last", run.model, run.optimizer, **options)
    load_checkpoint(copied / "last", run.model, run.optimizer)
    save_checkpoint(copied / "last", run.model, run.optimizer)
    save_checkpoint(best, run.model, run.optimizer, copy_disk_tables=True)
    with pytest.warns(UserWarning, match=rf"{copied / 'last'}.* {best}/v.*another path") as caught:
        load_checkpoint(best, run.model, run.optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    save_checkpoint(best, run.model, run.optimizer)  # no folder has lost anything since
    load_checkpoint(best, run.model, run.optimizer)
    shutil.rmtree(best)
    save_checkpoint(last, run.model, run.optimizer)


def test_a_table_that_goes_on_alone_is_saved_elsewhere(tmp_path: Path) -> None:
    """Its file was opened, and the rest of its checkpoint was not loaded."""
    run = Saved(tmp_path)
    close(run.model)
    run.model, run.optimizer = build(tmp_path)
    run.step(2)
    with pytest.raises(
        FlatbedError, match=rf"1\.bed \(table second\.weight\) .* {run.folder}, .* not loaded"
    ):
        save_checkpoint(run.folder, run.model, run.optimizer)
    run.assert_loads()
    run.step(2)
    save_checkpoint(run.folder, run.model, run.optimizer)
    close(run.model)
    run.model, run.optimizer = build(tmp_path)
    run.step(2)
    with pytest.raises(
        UserWarning, match="cannot be loaded any more"
    ):  # an error in tests: nothing was saved
        save_checkpoint(tmp_path / "other", run.model, run.optimizer)
    with pytest.raises(FlatbedError, match="not loaded"):
        save_checkpoint(run.folder, run.model, run.optimizer)
    with pytest.warns(UserWarning, match="cannot be loaded any more"):
        save_checkpoint(tmp_path / "other", run.model, run.optimizer)
    save_checkpoint(tmp_path / "other", run.model, run.optimizer)
    close(run.model)


def test_a_renamed_folder_that_was_loaded_is_named_before_it_loses_its_table(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    close(run.model)
    renamed = run.folder.rename(tmp_path / "renamed")
    run.model, run.optimizer = build(tmp_path)
    load_checkpoint(renamed, run.model, run.optimizer)
    run.step(1)
    with pytest.raises(UserWarning, match=rf"{renamed}, .* {run.folder}: copy_disk_tables=True"):
        save_checkpoint(run.folder, run.model, run.optimizer)
    save_checkpoint(renamed, run.model, run.optimizer)  # the same folder
    close(run.model)


def test_a_load_drops_gradients(tmp_path: Path) -> None:
    """Those of a step that was interrupted would be added to the next ones."""
    run, temperature = Saved(tmp_path), nn.Parameter(torch.ones(1))  # of the loss, and not of the model
    parameters = [*(p for p in run.model.parameters() if p.requires_grad), temperature]
    run.optimizer = [run.optimizer, flatbed.optim.SGD([temperature])]
    with pytest.warns(UserWarning, match="not in the model"):
        save_checkpoint(run.folder, run.model, run.optimizer)
    (run.model(torch.arange(5)).square().sum() * temperature).backward()
    assert all(p.grad is not None for p in parameters)
    run.load()
    assert all(p.grad is None for p in parameters)
    close(run.model)


def test_parameters_outside_of_the_model_are_named(tmp_path: Path) -> None:
    """Their optimizer state is saved, and their values are not."""
    model, loss = nn.Linear(3, 3), nn.Linear(3, 2)
    parameters = [*model.parameters(), *loss.parameters()]
    words = r"Adam has parameters that are not in the model, of the shapes \[\[2, 3\], \[2\]\]"
    for make in (flatbed.optim.Adam, lambda p: torch.optim.Adam(flatbed.FlatParams(p).parameters())):
        optimizer = make(parameters)
        with pytest.warns(UserWarning, match=words) as caught:
            save_checkpoint(tmp_path, model, optimizer)
        assert [warning.filename for warning in caught] == [__file__]
        with pytest.raises(UserWarning, match=words):  # an error in tests: nothing was saved
            save_checkpoint(tmp_path, model, optimizer)
        assert sorted(os.listdir(tmp_path)) == [".lock", "CURRENT.json", current(tmp_path).name]
        save_checkpoint(tmp_path, nn.ModuleDict({"model": model, "loss": loss}), optimizer)
        others = make(model.parameters()), torch.optim.SGD(loss.parameters())
        save_checkpoint(tmp_path, nn.Sequential(model, loss), others)
        with pytest.warns(UserWarning, match=r"'1\.weight', '1\.bias' require gradients.*freeze") as caught:
            save_checkpoint(tmp_path, nn.Sequential(model, loss), others[0])
        assert [warning.filename for warning in caught] == [__file__]
        save_checkpoint(tmp_path, nn.Sequential(model, loss))  # without optimizers: on purpose
        loss.requires_grad_(False)
        save_checkpoint(tmp_path, nn.Sequential(model, loss), others[0])
        loss.requires_grad_(True)


def test_versions_whose_disk_table_would_be_lost_are_not_kept(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    with pytest.raises(ValueError, match=r"keep=2.*1\.bed.*second\.weight.*copy_disk_tables=True"):
        save_checkpoint(run.folder, run.model, run.optimizer, keep=2)
    run.assert_loads()
    for _ in range(2):
        save_checkpoint(run.folder, run.model, run.optimizer, keep=2, copy_disk_tables=True)
        run.step(2)
    first, _ = sorted(run.folder.glob("v*"))
    load_checkpoint(first, run.model, run.optimizer)
    assert difference(run.snapshot(), run.saved) is None


def test_disk_table_whose_file_is_missing_raises(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    close(run.model)
    (tmp_path / "1.bed").unlink()
    run.model, run.optimizer = build(tmp_path)
    with pytest.raises(
        FlatbedError, match=rf"1\.bed is missing.*{run.version.name} was saved.*a copy of the file"
    ):
        run.load()


def test_disk_table_whose_file_was_renamed_raises(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    (tmp_path / "1.bed").rename(tmp_path / "elsewhere")
    run.assert_refuses(r"1\.bed was removed or replaced.*put it back")
    (tmp_path / "elsewhere").rename(tmp_path / "1.bed")
    run.assert_loads()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_load_that_was_interrupted_while_a_table_was_closed(tmp_path: Path, replaced: bool) -> None:
    run = Saved(tmp_path)
    interrupted = crash_model.failing(storage.DiskStorage, "open", KeyboardInterrupt())
    with interrupted, pytest.raises(KeyboardInterrupt):
        run.load()
    with pytest.raises(FlatbedError, match="load_checkpoint failed or was interrupted"):
        run.step(3)
    if replaced:
        (tmp_path / "1.bed").rename(tmp_path / "moved")
        with Embedding(50, 6, storage="disk", path=tmp_path / "1.bed").table as other:
            other.read_rows([1])
        with pytest.raises(FlatbedError, match=r"1\.bed was replaced while it was closed"):
            run.load()
        (tmp_path / "moved").replace(tmp_path / "1.bed")
    run.assert_loads()


def test_disk_table_in_place_does_not_load_into_memory(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path / "a")
    save_checkpoint(tmp_path / "saved", model, optimizer)
    with pytest.raises(FlatbedError, match=r'second.*storage="disk"'):
        load_checkpoint(tmp_path / "saved", *build(tmp_path / "b", ("host", "host")))
    with pytest.raises(FlatbedError, match=r"b/1\.bed is missing.*in .*a/1\.bed when"):
        load_checkpoint(tmp_path / "saved", *build(tmp_path / "b"))
    other, its = build(tmp_path / "b")
    step(other, its, 1)
    with pytest.raises(FlatbedError, match=r"b/1\.bed .*another file"):
        load_checkpoint(tmp_path / "saved", other, its)
    save_checkpoint(tmp_path / "saved", model, optimizer, copy_disk_tables=True)
    for storages in PAIRS:
        other, its = build(tmp_path / "-".join(storages), storages)
        load_checkpoint(tmp_path / "saved", other, its)
        assert difference(snapshot(other, its), snapshot(model, optimizer)) is None


# ---- failures and ends


def saved_twice(folder: Path, operations: Any) -> tuple[Any, Any, bool]:
    """A training whose second save meets with something; whether that was an error."""
    model, optimizer = build(folder)
    step(model, optimizer, 1)
    save_checkpoint(folder / "saved", model, optimizer, extra={"step": 1})
    step(model, optimizer, 2)
    failed = False
    with operations:
        try:
            save_checkpoint(folder / "saved", model, optimizer, extra={"step": 2})
        except (FlatbedError, KeyboardInterrupt):
            failed = True
    return model, optimizer, failed


def goes_on(folder: Path, model: Any, optimizer: Any, *, save: bool) -> bool:
    """True if it has trained and saved; False if the state of the disk table's file is unknown."""
    try:
        step(model, optimizer, 3)
        if save:
            save_checkpoint(folder / "saved", model, optimizer, extra={"step": 3})
    except FlatbedError as error:
        if "1.bed cannot be changed" not in str(error):
            raise
        return False
    return save


def failing(error: BaseException) -> Any:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), KeyboardInterrupt()], ids=repr)
def test_failure_of_every_file_operation(error: BaseException, tmp_path: Path) -> None:
    counted = Operations(synced=False)
    expected = Expected(tmp_path / "expected")
    gc.collect()
    close(saved_twice(tmp_path / "count", counted)[0])
    assert counted.count > 40
    went_on = failures = 0
    for number in range(1, counted.count + 1):
        folder = tmp_path / str(number)
        model, optimizer, failed = saved_twice(folder, Operations(number, failing(error), synced=False))
        failures += failed
        went_on += goes_on(folder, model, optimizer, save=number % 2 == 1)
        if isinstance(error, KeyboardInterrupt) and number % 2:
            assert went_on == (number + 1) // 2, "an interrupted save must not stop the training"
        close(model)
        model, optimizer = build(folder)
        found = load_checkpoint(folder / "saved", model, optimizer)["step"]
        assert difference(snapshot(model, optimizer), expected.at(found)) is None, (number, found)
        assert found >= (1 if failed else 2)
        close(model)
        if number % 2 and found == 3:
            assert len(list((folder / "saved").glob("v*"))) == 1
        shutil.rmtree(folder)
    assert failures > counted.count * 0.7
    assert went_on > counted.count * 0.3


class CallInterrupt:
    """Raises KeyboardInterrupt at one of flatbed's calls, where Python handles signals; counts them all."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if is_signal_point(frame, event):
            self.count += 1
            if self.count == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self) -> CallInterrupt:
        gc.disable()
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


# Control-C between opening a file and entering its `with` leaves the file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_c_at_any_call_of_a_save(tmp_path: Path) -> None:
    """Training goes on, and the folder holds one whole checkpoint."""
    counted, expected = CallInterrupt(), Expected(tmp_path / "expected")
    close(saved_twice(tmp_path / "count", counted)[0])
    draw = torch.Generator().manual_seed(0)
    for number in sorted(torch.randperm(counted.count, generator=draw)[:30].tolist()):
        folder = tmp_path / str(number)
        model, optimizer, _ = saved_twice(folder, CallInterrupt(number))
        assert goes_on(folder, model, optimizer, save=True), number
        close(model)
        model, optimizer = build(folder)
        assert load_checkpoint(folder / "saved", model, optimizer) == {"step": 3}
        assert difference(snapshot(model, optimizer), expected.at(3)) is None, number
        close(model)
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("copied", [False, True], ids=["in place", "copied"])
def test_control_c_at_any_call_of_a_load(copied: bool, tmp_path: Path) -> None:
    """Everything is as before or as saved; otherwise the next step and save say so until a load succeeds."""
    run = Saved(tmp_path, copy_disk_tables=copied)
    with CallInterrupt() as counted:
        run.load()
    outcomes = set[str]()
    late = counted.count * 9 // 10  # rows are replaced
    for number in (*range(1, late, 100), *range(late, counted.count - 10, 10), counted.count - 2):
        run.step(2)
        with CallInterrupt(number), suppress(KeyboardInterrupt):
            run.load()
        gc.collect()
        outcomes.add(run.state())
        if run.state() == "half loaded":
            for act in (
                partial(run.step, 3),
                partial(save_checkpoint, tmp_path / "x", run.model, run.optimizer),
            ):
                with pytest.raises(FlatbedError, match="load_checkpoint failed or was interrupted"):
                    act()
        run.assert_loads()
    assert outcomes == {"before", "half loaded", "saved"}
    close(run.model)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_load_changes_nothing_later(tmp_path: Path) -> None:
    """A notebook keeps the traceback of Control-C, and drops it at the next error."""
    run, n_left, kept, seen = Saved(tmp_path), 0, [], set[str]()

    def at_exit(frame: Any, *_: object) -> None:
        nonlocal n_left
        n_left -= frame.f_code is _GeneratorContextManager.__exit__.__code__
        if n_left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt

    for number in count(1):
        n_left = number
        sys.settrace(at_exit)
        try:
            run.load()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        if not kept:
            break
        seen.add(run.state())
        run.load()
        run.step(2)
        kept.clear()
        gc.collect()
        assert difference(run.snapshot(), run.before) is None, number
    assert seen >= {"before", "half loaded"}
    close(run.model)


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_a_save_after_an_interrupted_step(storage: str, tmp_path: Path) -> None:
    """It raises if only a part of the parameters made the step. A load, or a later step, ends that."""
    model = nn.ModuleList(
        [flatbed.Embedding(20, 4, seed=n, storage=storage, **files) for n, files in enumerate(
            [{"path": tmp_path / name} if storage == "disk" else {} for name in "ab"]
        )]
    ).append(nn.Linear(4, 1))  # fmt: skip
    optimizer = flatbed.optim.Adam(model, max_norm=1.0)
    first, second, last = model

    def train() -> None:
        ids = torch.arange(6)
        last(first(ids) * second(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> set[float]:
        counts = [table.table.scalars()["step"] for table in (first, second)]
        return {*counts, float(optimizer.state[last.weight]["step"])}

    class Scheduler:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise ZeroDivisionError

    train()
    n_torn = n_whole = 0
    for number in count(1, 9):
        save_checkpoint(tmp_path / "run", model, optimizer, scheduler=Scheduler())
        if not interrupted(train, number):
            break
        try:
            save_checkpoint(tmp_path / "run", model, optimizer, scheduler=Scheduler())
            n_whole += 1
            assert len(steps()) == 1
        except FlatbedError as error:
            assert "interrupted" in str(error)  # noqa: PT017
            n_torn += 1
            with pytest.raises(FlatbedError, match="ZeroDivisionError"):  # puts back what it had
                load_checkpoint(tmp_path / "run", model, optimizer, scheduler=Scheduler())
            with pytest.raises(FlatbedError, match="interrupted"):
                save_checkpoint(tmp_path / "run", model, optimizer)
        with pytest.warns(UserWarning, match="scheduler"):
            load_checkpoint(tmp_path / "run", model, optimizer)
        assert len(steps()) == 1
        train()
    assert n_torn > 1
    assert n_whole > 1


def test_a_save_after_interrupted_changes_of_averages(tmp_path: Path) -> None:
    """It raises if the model holds averages of some parameters. A load ends that."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = flatbed.optim.Adam(model, lr=0.1, ema_decay=0.5)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    save_checkpoint(tmp_path, model, optimizer)

    def evaluate() -> None:
        with optimizer.ema_weights():
            pass

    n_torn = 0
    for number in count(1, 4):
        if not interrupted(evaluate, number):
            break
        is_trained = all(map(torch.equal, model.parameters(), trained))
        try:
            save_checkpoint(tmp_path, model, optimizer)
            assert is_trained, number
        except FlatbedError as error:
            assert "interrupted" in str(error)  # noqa: PT017
            n_torn += not is_trained
        load_checkpoint(tmp_path, model, optimizer)
        assert all(map(torch.equal, model.parameters(), trained))
    assert n_torn > 1
    save_checkpoint(tmp_path, model, optimizer)


def test_a_save_after_a_load_that_was_interrupted_twice(tmp_path: Path) -> None:
    """Control-C ends the load, and once more what puts the former state back."""
    n_left = 0

    class Interrupts(nn.Linear):
        def get_extra_state(self) -> Any: ...

        def set_extra_state(self, _: Any) -> None:
            nonlocal n_left
            n_left -= 1
            if n_left >= 0:
                raise KeyboardInterrupt

    model, other = Interrupts(3, 3), Interrupts(3, 3)
    save_checkpoint(tmp_path, model, flatbed.optim.Adam(model))
    optimizer = flatbed.optim.Adam(other)
    for n_left in (1, 2):
        before = other.weight.detach().clone()
        with pytest.raises(KeyboardInterrupt):
            load_checkpoint(tmp_path, other, optimizer)
        if n_left < 0:
            assert torch.equal(other.weight, before)
            save_checkpoint(tmp_path / "before", other, optimizer)
    with pytest.raises(FlatbedError, match="a load, was interrupted"):
        save_checkpoint(tmp_path / "before", other, optimizer)
    load_checkpoint(tmp_path, other, optimizer)
    save_checkpoint(tmp_path, other, optimizer)


def test_a_save_of_a_table_alone_after_an_interrupted_step(tmp_path: Path) -> None:
    emb = flatbed.Embedding(5, 2)
    optimizer = flatbed.optim.Adam(emb)
    for number in count(1):
        emb([1]).sum().backward()
        assert interrupted(optimizer.step, number)
        optimizer.zero_grad()
        if optimizer._has_partial_step:
            break
    with pytest.raises(FlatbedError, match=r"of Adam.* was interrupted"):
        save_checkpoint(tmp_path, emb)


def test_a_step_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = flatbed.optim.Adam(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(FlatbedError, match="sparse"):
        optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer)


def test_a_save_inside_of_a_save_or_load_raises(tmp_path: Path) -> None:
    """As that of a signal handler would. The outer one fails, and later ones do not."""
    model, within = nn.Linear(3, 1), "save"

    class Saves(nn.Linear):
        def get_extra_state(self) -> Any:
            if within == "save":
                save_checkpoint(tmp_path / "inner", model)

        def set_extra_state(self, _: Any) -> None:
            if within == "load":
                save_checkpoint(tmp_path / "inner", model)

    for folder in ("run", "other"):
        with pytest.raises(FlatbedError, match="save_checkpoint was called inside of save_checkpoint"):
            save_checkpoint(tmp_path / folder, Saves(2, 2))
    within = ""
    saved, loaded = Saves(2, 2), Saves(2, 2)
    save_checkpoint(tmp_path / "run", saved)
    before = loaded.weight.detach().clone()
    within = "load"
    with pytest.raises(FlatbedError, match="save_checkpoint was called inside of load_checkpoint"):
        load_checkpoint(tmp_path / "run", loaded)
    assert torch.equal(loaded.weight, before)
    assert not (tmp_path / "inner").exists()
    within = ""
    load_checkpoint(tmp_path / "run", loaded)
    assert torch.equal(loaded.weight, saved.weight)
    save_checkpoint(tmp_path / "run", model)
    load_checkpoint(tmp_path / "run", model)


def test_replacing_a_checkpoint_of_another_process_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 1)
    save_checkpoint(tmp_path, model)
    save_checkpoint(tmp_path, model)  # its own
    for prepare in (lambda: None, partial(load_checkpoint, tmp_path, model)):
        monkeypatch.setattr(folders, "known_tokens", set[str]())
        monkeypatch.setattr("flatbed.checkpoint.load.known_tokens", folders.known_tokens)
        prepare()
        is_known = bool(folders.known_tokens)
        with nullcontext() if is_known else pytest.warns(UserWarning, match="v0000002-.* neither loaded nor"):
            save_checkpoint(tmp_path, model)
    monkeypatch.setattr(folders, "known_tokens", set[str]())
    with pytest.warns(UserWarning, match="neither loaded nor"):  # later saves remove it
        save_checkpoint(tmp_path, model, keep=2)
    monkeypatch.setattr(folders, "known_tokens", set[str]())
    monkeypatch.setattr("flatbed.checkpoint.load.known_tokens", folders.known_tokens)
    load_checkpoint(sorted(tmp_path.glob("v*"))[0], model)  # back to an earlier version, on purpose
    save_checkpoint(tmp_path, model, keep=2)


def test_parameters_in_another_order(tmp_path: Path) -> None:
    """Of equal shapes: their moments would be mixed up."""
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abcdefgh"})

    def adam(names: str, flat: bool = False) -> Any:
        groups: Any = [{"params": list(model[name].parameters())} for name in names]
        if flat:
            return torch.optim.Adam(flatbed.FlatParams(groups).parameters())
        return flatbed.optim.Adam(groups)

    for flat in (False, True):
        save_checkpoint(tmp_path, model, adam("abcdefgh", flat))
        load_checkpoint(tmp_path, model, adam("abcdefgh", flat))
        words = r"state of 'f\.weight' for a parameter that is 'g\.weight' in Adam: build it .* same order"
        with pytest.raises(FlatbedError, match=words):
            load_checkpoint(tmp_path, model, adam("abcdegfh", flat))


def tied(names: str) -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
    model["a"].weight = model["b"].weight
    return model


def as_checkpoint_wrapper(names: str) -> nn.ModuleDict:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.ModuleDict({name: checkpoint_wrapper(module) for name, module in tied(names).items()})


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, flatbed.optim.Adam])
def test_the_same_parameters_by_other_names(make: Any, named: bool, tmp_path: Path) -> None:
    """Wrappers that the state dict does not show, and another order of modules with one parameter."""

    def given(module: nn.Module, named: bool) -> Any:
        return make(module.named_parameters() if named else module.parameters())

    plain = tied("ab")
    for number, model in enumerate((plain, tied("ba"), as_checkpoint_wrapper("ab"))):
        for wrapped in (model, nn.Sequential(model)):  # the second as DDP and torch.compile name parameters
            save_checkpoint(tmp_path / str(number), model, given(wrapped, named))
            load_checkpoint(tmp_path / str(number), plain, given(plain, True))
            load_checkpoint(tmp_path / str(number), model, given(wrapped, False))


def test_flat_parameters_of_a_wrapper(tmp_path: Path) -> None:
    for number, wrap in enumerate((nn.Sequential, nn.Module.parameters, lambda model: model)):
        model, other = nn.Linear(3, 3), nn.Linear(3, 3)
        save_checkpoint(
            tmp_path / str(number), model, torch.optim.Adam(flatbed.FlatParams(wrap(model)).parameters())
        )
        optimizer = torch.optim.Adam(flatbed.FlatParams(other).parameters())
        load_checkpoint(tmp_path / str(number), other, optimizer)
        assert torch.equal(other.weight, model.weight)


def test_a_model_is_asked_once_for_its_state(tmp_path: Path) -> None:
    """It may gather shards (FSDP1), or do what torch refuses for parameters with gradients."""
    calls: list[object] = []

    class Counted(nn.Linear):
        def get_extra_state(self) -> Any:
            calls.append(self)

        def set_extra_state(self, state: Any) -> None: ...

    def copied(_: nn.Module, state: Any, *__: Any) -> None:
        state["weight"] = torch.from_numpy(state["weight"].numpy().copy())

    model = Counted(3, 3)
    model._register_state_dict_hook(copied)
    optimizers = [torch.optim.Adam([parameter]) for parameter in model.parameters()]
    save_checkpoint(tmp_path, model, optimizers)
    assert len(calls) == 1
    load_checkpoint(tmp_path, model, optimizers)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_save_leaves_no_lock(tmp_path: Path) -> None:
    """Also while the traceback of Control-C is kept, as a notebook does."""
    kept: list[BaseException] = []
    model, places, seen = nn.Linear(1, 1), (contextlib.__file__, SOURCE), set[bool]()
    for number in count(1, 3):
        save = partial(save_checkpoint, tmp_path / str(number), model)
        if not interrupted(save, number, places, kept):
            break
        seen.add((tmp_path / str(number) / "CURRENT.json").exists())
        answered(save)
        save()  # in this thread, too
        kept.clear()
    assert seen == {False, True}
    saved, seen = model.weight.detach().clone(), set()
    for number in count(1, 3):
        nn.init.zeros_(model.weight)
        if not interrupted(partial(load_checkpoint, tmp_path / "1", model), number, places, kept):
            break
        seen.add(torch.equal(model.weight, saved))
        model.load_state_dict({"weight": saved, "bias": model.bias})
        save_checkpoint(tmp_path / "1", model)
        kept.clear()
    assert seen == {False, True}


def test_a_failed_save_is_freed_without_a_collection(tmp_path: Path) -> None:
    """Files and memory of its frames are not kept by its own error."""
    model = nn.Linear(1, 1)
    freed = weakref.ref(model)
    gc.disable()
    try:
        with suppress(ValueError):
            save_checkpoint(tmp_path, model, keep=0)
        del model
        assert freed() is None
    finally:
        gc.enable()


def test_twenty_kills(tmp_path: Path) -> None:
    seen = json.loads(programs.run("tests.tables.training", "kill", tmp_path, 20, 0).stdout)
    assert seen["kills"] == 20
    assert seen["leftovers"] >= 2
    assert seen["saved"] >= 2


def test_two_ranks(tmp_path: Path) -> None:
    ranks = programs.run_all(
        *(Program("tests.tables.training", ["ranks", str(tmp_path), rank]) for rank in "01")
    )
    for rank, ended in enumerate(ranks):
        assert ended.returncode == 0, ended
        found = json.loads(ended.stdout)
        others = [f"saving a checkpoint failed on rank {failing}" for failing in (0, 1)]
        assert found["moved"]
        assert (found["back"], found["again"]) == (None, None)
        told = [failure.startswith(other) for failure, other in zip(found["failures"], others, strict=True)]
        assert told == [rank == 1, rank == 0]


def test_ranks_with_tables_of_their_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatbed.checkpoint import save

    monkeypatch.setattr(save, "world_size", lambda: 2)
    with pytest.raises(FlatbedError, match="replicate=False"):
        save_checkpoint(tmp_path / "saved", Embedding(4, 2, replicate=False))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Extra(torch.eye(2).to_sparse()), "sparse"),
        (nn.LazyLinear(2), "run the model once"),
        (Extra(torch.zeros(2, dtype=torch.complex128)), "complex128"),
    ],
    ids=["sparse", "lazy", "complex"],
)
def test_tensors_that_cannot_be_saved(model: nn.Module, words: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(2, 2))
    first = current(tmp_path)
    with pytest.raises(FlatbedError, match=words):
        save_checkpoint(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "CURRENT.json", first.name]


def test_closing_a_table_that_is_newer_than_its_folder_raises(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    with pytest.raises(FlatbedError, match="discard=True"):
        run.model.second.table.close()
    run.model.second.table.close(discard=True)
    run.model, run.optimizer = build(tmp_path)
    run.assert_loads()


def test_closing_a_table_completes_an_interrupted_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Saved(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "apply", lambda *_, **__: failing(KeyboardInterrupt())())
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(run.folder, run.model, run.optimizer)
    run.model.second.table.close()
    run.model, run.optimizer = build(tmp_path)
    run.load()
    assert difference(run.snapshot(), run.before) is None


# ---- one table of a folder


def test_load_table_reads_one_table_of_a_folder(tmp_path: Path) -> None:
    run = Saved(tmp_path, ("host", "device"), keep=2)
    save_checkpoint(run.folder, run.model, run.optimizer, keep=2)
    first, second = sorted(run.folder.glob("v*"))
    for number, name in enumerate(("first", "second")):
        for folder, state in ((first, run.saved), (second, run.before), (run.folder, run.before)):
            for given in (name, f"{name}.weight"):
                table = load_table(folder, name=given)
                assert torch.equal(table.read_rows(range(40)), state[f"table {number} weight"])
                assert table.state_names == ("exp_avg", "exp_avg_sq")
    with load_table(run.folder, name="second", storage="disk", to=tmp_path / "second.bed") as on_disk:
        assert torch.equal(on_disk.read_rows(range(40)), run.before["table 1 weight"])


def test_load_table_of_a_folder_needs_a_name_that_is_there(tmp_path: Path) -> None:
    run = Saved(tmp_path)
    own = re.escape(str(tmp_path / "1.bed"))
    for name, words in (
        *((wrong, "first, second.*name") for wrong in (None, "third")),
        ("second", rf"own file, {own}: flatbed.load_table\('{own}'\)"),
    ):
        with pytest.raises(FlatbedError, match=words):
            load_table(run.folder, name=name)
    file = run.version / "table-0.safetensors"
    with pytest.raises(ValueError, match="name is for folders"):
        load_table(file, name="first")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(flatbed.errors.DamagedFileError, match="table-0"):
        load_table(run.folder, name="first")
    alone = Embedding(5, 2)
    save_checkpoint(tmp_path / "alone", alone)
    assert torch.equal(load_table(tmp_path / "alone").read_rows(range(5)), alone.table.read_rows(range(5)))
