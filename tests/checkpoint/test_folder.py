"""Folders of checkpoints: several processes at once, late failures, damaged and hostile files, versions."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatbed
from flatbed.checkpoint import load as loading
from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.checkpoint import save as saves
from flatbed.checkpoint.load_table import check_path
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables.files import NotSynced
from flatbed.tables.storage.disk import DiskStorage
from flatbed.tables.storage.disk.format import RECORDS_AT
from flatbed.tables.storage.disk.journal import Journal
from tests import programs
from tests.checkpoint.saved import Saved, current
from tests.tables.storage.disk.crash_model import failing
from tests.tables.storage.disk.test_files import largest_file
from tests.tables.test_interruptions import answered
from tests.tables.training import build, close, difference, snapshot, step


def constant(value: float) -> nn.Module:
    """A model whose weights and rows are all of one value."""
    model = nn.Sequential(flatbed.Embedding(5, 2, init="zeros"), nn.Linear(2, 2, bias=False))
    set_to(model, value)
    return model


def set_to(model: Any, value: float) -> None:
    nn.init.constant_(model[1].weight, value)
    model[0].write_rows(torch.arange(5), torch.full((5, 2), value))


def values(model: Any) -> set[float]:
    return {*model[1].weight.flatten().tolist(), *model[0].read_rows(range(5)).flatten().tolist()}


# ---- several processes; locks of one file are apart also within a process


def test_two_runs_and_an_evaluator_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, constant(0.0), extra={"value": 0.0})
    errors: list[BaseException] = []

    def run(sign: int) -> None:
        try:
            model = constant(0.0)
            for number in range(1, 16):
                set_to(model, float(sign * number))
                save_checkpoint(tmp_path, model, extra={"value": float(sign * number)})
        except BaseException as error:
            errors.append(error)

    runs = [threading.Thread(target=run, args=(sign,)) for sign in (1, -1)]
    for thread in runs:
        thread.start()
    evaluator, n_loads = constant(0.5), 0
    while n_loads < 5 or any(thread.is_alive() for thread in runs):
        assert values(evaluator) == {0.5} if n_loads == 0 else len(values(evaluator)) == 1
        found = load_checkpoint(tmp_path, evaluator)
        assert values(evaluator) == {found["value"]}
        n_loads += 1
    for thread in runs:
        thread.join()
    assert errors == []
    assert load_checkpoint(tmp_path, evaluator)["value"] in (15.0, -15.0)
    save_checkpoint(tmp_path, evaluator)
    assert sorted(os.listdir(tmp_path)) == [".lock", "CURRENT.json", current(tmp_path).name]


def test_version_stays_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, constant(1.0))
    read, first = loading._model_part, current(tmp_path)

    def read_while_others_save(*args: Any) -> Any:
        for value in (2.0, 3.0):
            answered(partial(save_checkpoint, tmp_path, constant(value)))
        assert first.exists()
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_model_part", read_while_others_save)
        other = constant(0.0)
        load_checkpoint(tmp_path, other)
    assert values(other) == {1.0}
    save_checkpoint(tmp_path, constant(4.0))
    assert not first.exists()


def test_a_version_is_loaded_and_not_saved_to(tmp_path: Path) -> None:
    """A later load of it would not find what was saved in it, and a save to its folder would remove that."""
    model = constant(1.0)
    save_checkpoint(tmp_path / "run", model)
    version, renamed = current(tmp_path / "run"), tmp_path / "best"
    shutil.copytree(version, renamed)
    for folder in (version, renamed):
        before = sorted(folder.iterdir())
        with pytest.raises(FlatbedError, match=rf"{folder} is a version .*: save to another folder"):
            save_checkpoint(folder, model)
        assert sorted(folder.iterdir()) == before
        set_to(model, 2.0)
        load_checkpoint(folder, model)
        assert values(model) == {1.0}
        assert len(flatbed.load_table(folder).read_rows([1])) == 1
        assert "are as they were written" in check_path(folder)


def test_a_folder_beyond_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`link/../run` is beside the target of the link, where the file of a table finds it again."""
    job, copied = tmp_path / "job", tmp_path / "copied"
    (job / "target" / "inner").mkdir(parents=True)
    (job / "link").symlink_to(job / "target" / "inner")
    folder = job / "link" / ".." / "run"
    model, optimizer = build(job)
    save_checkpoint(folder, model, optimizer)
    step(model, optimizer, 1)
    with monkeypatch.context() as patch:  # as a kill would leave it
        patch.setattr(DiskStorage, "commit", lambda storage: None)
        save_checkpoint(folder, model, optimizer)
    expected = snapshot(model, optimizer)
    shutil.copytree(job, copied, symlinks=True)
    for place in (copied, job):
        close(model)
        model, optimizer = build(place)
        with pytest.raises(FlatbedError, match="rest of that checkpoint was not loaded"):
            save_checkpoint(place / "target" / "run", model, optimizer)
        load_checkpoint(place / "target" / "run", model, optimizer)
        assert difference(snapshot(model, optimizer), expected) is None
    close(model)


def copied_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save a job twice, and copy it between the second decision and the copying of rows."""
    model, optimizer = build(folder / "job")
    save_checkpoint(folder / "job" / "run", model, optimizer)
    step(model, optimizer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "commit", lambda storage: None)
        save_checkpoint(folder / "job" / "run", model, optimizer, extra={"step": 1})
    expected = snapshot(model, optimizer)
    close(model)
    shutil.copytree(folder / "job", folder / "copy")
    return expected


@pytest.mark.parametrize("is_apart", [False, True], ids=["copied", "copied in another layout"])
def test_copied_job_goes_on_by_itself(
    is_apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied after a kill between the decision and the copying of rows, while the original goes on.

    In another layout, the table's journal names a folder that has gone on, and the table is refused.
    """
    expected, original = copied_job(tmp_path, monkeypatch), tmp_path / "job" / "run"
    folder = tmp_path / "elsewhere" if is_apart else tmp_path / "copy" / "run"
    shutil.move(tmp_path / "copy" / "run", folder)
    model, optimizer = build(tmp_path / "job")
    load_checkpoint(original, model, optimizer)
    step(model, optimizer, 2)
    save_checkpoint(original, model, optimizer, extra={"step": 2})
    later = snapshot(model, optimizer)
    close(model)
    if is_apart:
        with pytest.raises(FlatbedError, match=rf"{tmp_path}/copy/run/CURRENT.json, .* of another time"):
            build(tmp_path / "copy")
        shutil.move(folder, tmp_path / "copy" / "run")
        folder = tmp_path / "copy" / "run"
    model, optimizer = build(tmp_path / "copy")
    with pytest.raises(FlatbedError, match="is not as it was"):
        load_checkpoint(original, model, optimizer)
    assert load_checkpoint(folder, model, optimizer) == {"step": 1}
    assert difference(snapshot(model, optimizer), expected) is None
    assert not list((tmp_path / "copy").glob("*.journal*"))
    close(model)
    model, optimizer = build(tmp_path / "job")
    assert load_checkpoint(original, model, optimizer) == {"step": 2}
    assert difference(snapshot(model, optimizer), later) is None
    close(model)


def test_folder_without_write_access_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", constant(1.0))
    paths, other = (current(tmp_path / "run"), tmp_path / "run"), constant(0.0)
    for path in paths:
        path.chmod(0o555)
    try:
        load_checkpoint(tmp_path / "run", other)
    finally:
        for path in paths:
            path.chmod(0o755)
    assert values(other) == {1.0}


# ---- late failures


@pytest.mark.parametrize("used", [False, True], ids=["new files", "files in use"])
def test_load_without_space_changes_nothing(used: bool, tmp_path: Path) -> None:
    sizes = {"host": (50, None), "small": (50, "small.bed"), "large": (20_000, "large.bed")}

    def model(folder: Path) -> nn.ModuleDict:
        folder.mkdir()
        made: dict[str, nn.Module] = {"dense": nn.Linear(4, 4)}
        for name, (n_rows, file) in sizes.items():
            storage = {} if file is None else {"storage": "disk", "path": folder / file}
            made[name] = flatbed.Embedding(n_rows, 16, **storage)
        return nn.ModuleDict(made)

    def rows(of: nn.ModuleDict) -> list[torch.Tensor]:
        return [of[name].read_rows(range(50)) for name in sizes]

    saved, other = model(tmp_path / "a"), model(tmp_path / "b")
    save_checkpoint(tmp_path / "run", saved, copy_disk_tables=True)
    before = rows(other) if used else []
    weight, names = other["dense"].weight.detach().clone(), sorted(os.listdir(tmp_path / "b"))
    with largest_file(500_000), pytest.raises(FlatbedError, match=r"large.bed.*free some space"):
        load_checkpoint(tmp_path / "run", other)
    assert torch.equal(other["dense"].weight, weight)
    assert sorted(os.listdir(tmp_path / "b")) == names
    assert not used or all(map(torch.equal, rows(other), before))
    load_checkpoint(tmp_path / "run", other)
    assert all(map(torch.equal, rows(other), rows(saved)))


@pytest.mark.parametrize("is_tried_again", [False, True])
def test_tables_open_after_a_first_save_that_failed(is_tried_again: bool, tmp_path: Path) -> None:
    """Its version says that it was not completed. Another save, which is killed, has removed the version."""
    place, killed = tmp_path / "job", tmp_path / "killed"
    model, optimizer = build(place)
    before = model.second.read_rows(range(40))
    step(model, optimizer, 1)
    steps = [(saves, "_write_current"), *[(saves.Version, "write")] * is_tried_again]
    for owner, name in steps:
        with failing(owner, name, FlatbedError("no space left")), pytest.raises(FlatbedError, match="space"):
            save_checkpoint(place / "run", model, optimizer)
    shutil.copytree(place, killed)
    other, _ = build(killed)
    assert torch.equal(other.second.read_rows(range(40)), before)
    close(other)
    save_checkpoint(place / "run", model, optimizer)
    assert sorted(os.listdir(place / "run")) == [".lock", "CURRENT.json", current(place / "run").name]
    close(model)


@pytest.mark.parametrize("way", ["with copies", "after the folder was removed"])
def test_another_save_after_a_first_save_that_failed(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The table settles before the version goes, on which it depends, also if the save does not need it."""
    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    error = FlatbedError("no space left")
    with failing(saves, "_write_current", error), pytest.raises(FlatbedError, match="space"):
        save_checkpoint(tmp_path / "run", model, optimizer)
    shutil.copytree(tmp_path, copied := tmp_path.with_name(f"{tmp_path.name} copied"))
    if way == "with copies":
        save_checkpoint(tmp_path / "run", model, optimizer, copy_disk_tables=True)
    else:
        shutil.rmtree(tmp_path / "run")
        save_checkpoint(tmp_path / "run", model, optimizer)
    expected = model.second.read_rows(range(40))
    for table in flatbed.tables(model):
        table.close(discard=way != "with copies")
    model, optimizer = build(tmp_path)
    load_checkpoint(tmp_path / "run", model, optimizer)
    assert torch.equal(model.second.read_rows(range(40)), expected)
    close(model)
    capfd.readouterr()
    close(build(copied)[0])  # its rows of that save are lost
    assert "changed after its last checkpoint and are dropped" in capfd.readouterr().err


def test_a_first_save_whose_journal_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save raises before it removes the version that says how the first one ended."""
    model, optimizer = build(tmp_path)
    before = model.second.read_rows(range(40))
    step(model, optimizer, 1)
    seal = Journal.seal

    def fail(journal: Journal, *args: Any, **options: Any) -> None:
        seal(journal, *args, **options)
        raise NotSynced("syncing failed")

    monkeypatch.setattr(Journal, "seal", fail)
    with pytest.raises(FlatbedError, match="syncing failed"):
        save_checkpoint(tmp_path / "run", model, optimizer)
    monkeypatch.undo()
    versions = {path.name for path in (tmp_path / "run").glob("v*")}
    with pytest.raises(FlatbedError, match="cannot be changed"):
        save_checkpoint(tmp_path / "run", model, optimizer)
    assert versions <= {path.name for path in (tmp_path / "run").glob("v*")}
    shutil.copytree(tmp_path, copied := tmp_path.with_name(f"{tmp_path.name} copied"))
    other, _ = build(copied)
    assert torch.equal(other.second.read_rows(range(40)), before)
    close(other)
    model.second.table.close(discard=True)


AT_EXIT = """
import atexit, sys, torch, flatbed
from torch import nn
from flatbed.tables.storage.disk import journal

journal.MEMORY_PART = 64
table = flatbed.Embedding(100, 4, storage="disk", path=sys.argv[1] + "/t.bed", init="zeros")
table.write_rows(torch.arange(100), torch.ones(100, 4))
model = nn.Linear(512, 512)  # 1 MB
atexit.register(flatbed.save_checkpoint, sys.argv[1] + "/run", model)
atexit.register(table.table.close)
"""


def test_functions_at_exit_can_save(tmp_path: Path) -> None:
    """Pools take no more work by then."""
    ended = programs.run(AT_EXIT, tmp_path, finalize=True)
    assert "Error" not in ended.stderr
    assert (flatbed.load_table(tmp_path / "t.bed", read_only=True).read_rows(range(100)) == 1).all()
    load_checkpoint(tmp_path / "run", nn.Linear(512, 512))


# ---- damage


def flipped(file: Path, at: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    run, draw = Saved(tmp_path, ("host", "host"), rng=True, extra={"epoch": 3}), random.Random(0)
    files = [path for path in run.version.iterdir() if path.name != ".flatbed"]
    assert len(files) == 7
    for file in files:
        good = file.read_bytes()
        flips = [partial(flipped, at=draw.randrange(len(good)), bit=draw.randrange(8)) for _ in range(15)]
        for damage in (*flips, Path.unlink, partial(os.truncate, length=len(good) - 1)):
            damage(file)
            with pytest.raises(DamagedFileError, match=file.name):
                run.load()
            file.write_bytes(good)
    assert difference(run.snapshot(), run.before) is None
    with pytest.warns(UserWarning, match="random generators, which is not loaded: pass rng=True"):
        assert run.load() == {"epoch": 3}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-4096] + bytes(b ^ (0x80 * (i in (7, 71))) for i, b in enumerate(data[-4096:])),
        lambda data: data[:-4096] + data[-4088:-4080] + data[-4096:-4088] + data[-4080:],
        lambda data: data[:-8192] + data[-4096:] + data[-8192:-4096],
        lambda data: data + bytes(8),
    ],
    ids=["two signs of equal sum", "swapped words", "swapped pages", "longer"],
)
def test_damage_of_several_words_is_found(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    model = nn.Linear(64, 64, bias=False)  # four pages
    save_checkpoint(tmp_path, model)
    file = current(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    for read in (partial(load_checkpoint, model=model), check_path):
        with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
            read(tmp_path)


@pytest.mark.parametrize("is_pipe", [True, False])
@pytest.mark.parametrize("name", ["CURRENT.json", "checkpoint.json", "optimizer.json", "model.safetensors"])
def test_pipes_and_devices_are_refused(name: str, is_pipe: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(tmp_path, model, optimizer)
    path = tmp_path / name if name == "CURRENT.json" else current(tmp_path) / name
    path.unlink()
    if is_pipe:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(FlatbedError, match=name):
        load_checkpoint(tmp_path, model, optimizer)


def sealed(manifest: dict[str, Any]) -> str:
    """A manifest with a right checksum."""
    manifest.pop("checksum", None)
    return json.dumps({**manifest, "checksum": zlib.crc32(json.dumps(manifest).encode())})


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change a manifest as an attacker would."""
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(sealed(manifest))


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "table-0.safetensors/../x", "", 3, ["x"]])
def test_manifest_names_files_of_its_folder_alone(name: Any, tmp_path: Path) -> None:
    model = constant(1.0)
    save_checkpoint(tmp_path, model)
    manifest = current(tmp_path) / "checkpoint.json"
    rewrite(manifest, lambda found: found["tables"].update({"0.weight": name}))
    with pytest.raises(DamagedFileError, match="no file of a checkpoint"):
        load_checkpoint(tmp_path, model)
    rewrite(manifest, lambda found: found.update(tables={}, files={str(name): {}}))
    with pytest.raises(DamagedFileError, match="no file of a checkpoint"):
        load_checkpoint(tmp_path, model)


HOSTILE = [
    *(None, True, -1, 2**70, 1e308, float("nan"), "", "x" * 300, [], [[]], {}, {"": None}),
    *({"$tensor": "0.weight"}, {"$tensor": []}, {"$tuple": 3}, {"$dict": [[[], 1]]}, {"$float": "x"}),
    *({"$dtype": "load"}, {"$dtype": 5}, {"$counter": "ab"}, {"$tensor": "0.weight", "stride": [2**60, 1]}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers of JSON data, each with one of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


@pytest.mark.filterwarnings("ignore:.*holds the state of")
def test_hostile_json_gives_one_kind_of_error(tmp_path: Path) -> None:
    """Under right checksums: nothing but FlatbedError, or a model that has loaded."""
    torch.manual_seed(0)
    draw, folder = random.Random(0), tmp_path / "run"
    model = nn.Sequential(flatbed.Embedding(5, 2), nn.Linear(2, 2))
    optimizers = [flatbed.optim.Adam(model), torch.optim.SGD(model[1].parameters(), momentum=0.9)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizers[1], [3, 5])
    model(torch.tensor([1])).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    save_checkpoint(folder, model, optimizers, scheduler=schedule, rng=True)
    files = {
        name: current(folder) / name for name in ("checkpoint.json", "optimizer.json", "../CURRENT.json")
    }
    good = {name: file.read_text() for name, file in files.items()}
    n_errors = 0
    for _ in range(300):
        name = draw.choice([*files])
        found = json.loads(good[name])
        for _ in range(draw.randint(1, 3)):
            container, key = draw.choice([*places(found)])
            if draw.random() < 0.2:
                del container[key]
            else:
                container[key] = copy.deepcopy(draw.choice(HOSTILE))
        files[name].write_text(json.dumps(found))
        manifest = found if name == "checkpoint.json" else json.loads(good["checkpoint.json"])
        if name == "optimizer.json":
            manifest["files"][name] = zlib.crc32(files[name].read_bytes())
        files["checkpoint.json"].write_text(sealed(manifest))
        try:
            load_checkpoint(folder, model, optimizers, scheduler=schedule, rng=True)
        except FlatbedError:
            n_errors += 1
        finally:
            for other, text in good.items():
                files[other].write_text(text)
    assert n_errors > 150


def test_check_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flatbed.cli import app

    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "copied", model, optimizer, copy_disk_tables=True)
    save_checkpoint(tmp_path / "run", model, optimizer)
    model.first.table.save(tmp_path / "t.safetensors")
    close(model)
    assert "1.bed" not in check_path(tmp_path / "copied")
    assert check_path(tmp_path / "run").endswith(check_path(tmp_path / "1.bed"))
    expected = {
        "run": "all 4 files",
        "1.bed": "rows are as they were written",
        "t.safetensors": "only header",
    }
    files = [tmp_path / name for name in expected]
    for path in files:
        done = CliRunner().invoke(app, ["check", str(path)])
        assert done.exit_code == 0, done.output
        assert expected[path.name] in done.output
    flipped(current(tmp_path / "run") / "table-0.safetensors", -100, 3)
    for path in files[1:]:
        os.truncate(path, path.stat().st_size - 1)
    for path in (*files, tmp_path / "nothing"):
        assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 1


# ---- versions


def test_keep_leaves_the_last_versions(tmp_path: Path) -> None:
    def versions() -> list[Path]:
        return sorted(path for path in tmp_path.iterdir() if path.name.startswith("v"))

    for number in range(5):
        save_checkpoint(tmp_path, constant(float(number)), extra={"number": number}, keep=3)
    assert len(versions()) == 3
    model = constant(9.0)
    for number, version in enumerate(versions(), start=2):
        assert load_checkpoint(version, model) == {"number": number}
        assert values(model) == {number}
    (tmp_path / "CURRENT.json").chmod(0o600)
    save_checkpoint(tmp_path, constant(5.0), keep=2)
    assert (tmp_path / "CURRENT.json").stat().st_mode & 0o777 == 0o600
    assert len(versions()) == 2
    save_checkpoint(tmp_path, constant(6.0))
    assert versions() == [current(tmp_path)]
    shutil.rmtree(current(tmp_path))
    with pytest.raises(FlatbedError, match=r"checkpoint\.json is missing"):
        load_checkpoint(tmp_path, model)
    for wrong in (0, -1, 1.0, True, None):
        with pytest.raises(ValueError, match="keep must be at least 1"):
            save_checkpoint(tmp_path, model, keep=wrong)  # type: ignore[arg-type]


def test_a_folder_without_a_checkpoint_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    model = constant(1.0)
    optimizer = flatbed.optim.Adam(model)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="holds no checkpoint") as caught:
            load_checkpoint(folder, model)
        assert isinstance(caught.value, FlatbedError)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, rng=True)
    for file in (*current(tmp_path).iterdir(), current(tmp_path)):
        if file.name == ".flatbed":
            continue
        file.rename(hidden := tmp_path / "hidden")
        with pytest.raises(FlatbedError) as caught:
            load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, rng=True)
        assert not isinstance(caught.value, FileNotFoundError), file
        hidden.rename(file)
    load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, rng=True)


def test_a_file_in_place_of_a_folder_does_not_begin_a_run(tmp_path: Path) -> None:
    """A program that catches FileNotFoundError would train up to its first save, which fails."""
    (tmp_path / "model.pt").touch()
    with pytest.raises(FlatbedError, match=r"is a file.*folder") as caught:
        load_checkpoint(tmp_path / "model.pt", constant(1.0))
    assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("name", ["", "~/run", "s3://bucket/run"])
def test_names_of_no_local_folder_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder, a folder called ~ or s3: would be filled."""
    monkeypatch.chdir(tmp_path)
    model = constant(1.0)
    for call in (save_checkpoint, load_checkpoint):
        for folder in (name, *([Path(name)] if name else [])):
            with pytest.raises(ValueError, match=r"folder.*expanduser"):
                call(folder, model)
    assert not any(tmp_path.iterdir())
    save_checkpoint("~copy.of", model)  # no shell expands this
    load_checkpoint(Path("~copy.of"), model)


def test_rows_of_another_folder_do_not_begin_a_run(tmp_path: Path) -> None:
    """After a mistyped name, a program that catches FileNotFoundError would train them on."""
    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    with pytest.raises(FileNotFoundError):  # nothing was saved
        load_checkpoint(tmp_path / "run", model, optimizer)
    save_checkpoint(tmp_path / "run", model, optimizer)
    close(model)
    model, optimizer = build(tmp_path)
    with pytest.raises(FlatbedError, match=r"1\.bed .* has the rows of one, in .*run: load") as caught:
        load_checkpoint(tmp_path / "rum", model, optimizer)
    assert not isinstance(caught.value, FileNotFoundError)
    for table in flatbed.tables(model):
        if table.storage == "disk":
            with pytest.warns(UserWarning, match="cannot be loaded any more"):
                table.checkpoint()
    with pytest.raises(FileNotFoundError):  # the rows are a run's own
        load_checkpoint(tmp_path / "rum", model, optimizer)
    close(model)


def test_checking_a_folder_checks_its_tables_on_disk(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "run", model, optimizer)
    assert "rows are as they were written" in check_path(tmp_path / "run")
    with pytest.warns(UserWarning, match="run"):
        save_checkpoint(tmp_path / "second", model, optimizer)
    close(model)
    with pytest.raises(FlatbedError, match="is not as it was when"):
        check_path(tmp_path / "run")
    assert "rows are as they were written" in check_path(tmp_path / "second")
    table = tmp_path / "1.bed"
    flipped(table, RECORDS_AT + 5, 3)
    with pytest.raises(DamagedFileError):
        check_path(tmp_path / "second")
    table.rename(tmp_path / "moved")
    with pytest.raises(FlatbedError, match="missing: put the file back"):
        check_path(tmp_path / "second")


def test_checking_a_copy_of_a_folder_checks_the_copies_of_its_tables(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path / "own")
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "own" / "run", model, optimizer)
    for name in ("good", "damaged"):
        shutil.copytree(tmp_path / "own", tmp_path / name)
    flipped(tmp_path / "damaged" / "1.bed", RECORDS_AT + 5, 3)
    step(model, optimizer, 2)
    with pytest.warns(UserWarning, match="run"):
        save_checkpoint(tmp_path / "own" / "second", model, optimizer)
    close(model)
    assert f"{tmp_path}/good/1.bed" in check_path(tmp_path / "good" / "run")
    with pytest.raises(DamagedFileError, match=r"damaged/1\.bed"):
        check_path(tmp_path / "damaged" / "run")
    with pytest.raises(FlatbedError, match="is not as it was when"):
        check_path(tmp_path / "own" / "run")
    shutil.copytree(tmp_path / "own" / "second", tmp_path / "good" / "alone")  # beside another table
    assert f"{tmp_path}/own/1.bed" in check_path(tmp_path / "good" / "alone")


def test_a_journal_of_later_steps_is_no_checkpoint(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path)
    for name in ("run", "second"):
        step(model, optimizer, 1)
        with pytest.warns(UserWarning, match="run") if name == "second" else nullcontext():
            save_checkpoint(tmp_path / name, model, optimizer)
    step(model, optimizer, 2)
    assert (tmp_path / "1.bed.journal").exists()
    with pytest.raises(FlatbedError, match="is not as it was when"):
        check_path(tmp_path / "run")
    assert "rows are as they were written" in check_path(tmp_path / "second")
    close(model)
