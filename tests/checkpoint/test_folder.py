"""Folders of checkpoints: several processes at once, late failures, damaged and hostile files, versions."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatbed
from flatbed.checkpoint import load as loading
from flatbed.checkpoint import load_checkpoint, save_checkpoint
from flatbed.checkpoint.load_table import check_path
from flatbed.errors import DamagedFileError, FlatbedError
from flatbed.tables import saving
from flatbed.tables.storage.disk import DiskStorage
from tests import programs
from tests.programs import Program
from tests.tables.storage.disk.test_files import largest_file
from tests.tables.training import build, close, difference, snapshot, step


def current(folder: Path) -> Path:
    found: str = json.loads((folder / "CURRENT.json").read_text())["version"]
    return folder / found


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
    read, first = loading._model_values, current(tmp_path)

    def read_while_others_save(*args: Any) -> Any:
        for value in (2.0, 3.0):
            save_checkpoint(tmp_path, constant(value))
        assert first.exists()
        return read(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_model_values", read_while_others_save)
        other = constant(0.0)
        load_checkpoint(tmp_path, other)
    assert values(other) == {1.0}
    save_checkpoint(tmp_path, constant(4.0))
    assert not first.exists()


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


def test_copied_job_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied after a kill between the decision and the copying of rows, while the original goes on."""
    expected = copied_job(tmp_path, monkeypatch)
    model, optimizer = build(tmp_path / "job")
    load_checkpoint(tmp_path / "job" / "run", model, optimizer)
    step(model, optimizer, 2)
    save_checkpoint(tmp_path / "job" / "run", model, optimizer, extra={"step": 2})
    close(model)
    for name, number in (("copy", 1), ("job", 2)):
        model, optimizer = build(tmp_path / name)
        assert load_checkpoint(tmp_path / name / "run", model, optimizer) == {"step": number}
        assert (difference(snapshot(model, optimizer), expected) is None) == (name == "copy")
        close(model)


def test_copied_job_in_another_layout_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's journal names a folder that has gone on: the folder that is loaded decides instead."""
    expected = copied_job(tmp_path, monkeypatch)
    shutil.move(tmp_path / "copy" / "run", tmp_path / "elsewhere")
    model, optimizer = build(tmp_path / "job")
    load_checkpoint(tmp_path / "job" / "run", model, optimizer)
    step(model, optimizer, 2)
    save_checkpoint(tmp_path / "job" / "run", model, optimizer)
    close(model)
    with pytest.warns(UserWarning, match=r"kept as .*kept-1.*load_checkpoint"):
        model, optimizer = build(tmp_path / "copy")
    with pytest.raises(FlatbedError, match="is not as it was"):
        load_checkpoint(tmp_path / "job" / "run", model, optimizer)
    assert load_checkpoint(tmp_path / "elsewhere", model, optimizer) == {"step": 1}
    assert difference(snapshot(model, optimizer), expected) is None
    assert not list((tmp_path / "copy").glob("*.journal*"))
    close(model)


def test_failed_save_leaves_the_versions_of_others(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, constant(1.0))
    first = current(tmp_path)
    with pytest.raises(FlatbedError, match="run the model once"):
        save_checkpoint(tmp_path, nn.LazyLinear(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "CURRENT.json", first.name]


def test_folder_without_write_access_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", constant(1.0))
    for path in (current(tmp_path / "run"), tmp_path / "run"):
        path.chmod(0o555)
    try:
        other = constant(0.0)
        load_checkpoint(tmp_path / "run", other)
    finally:
        for path in (tmp_path / "run", current(tmp_path / "run")):
            path.chmod(0o755)
    assert values(other) == {1.0}


# ---- late failures


@pytest.mark.parametrize("used", [False, True], ids=["new files", "files in use"])
def test_load_without_space_changes_nothing(used: bool, tmp_path: Path) -> None:
    def model(folder: Path) -> nn.ModuleDict:
        folder.mkdir()
        return nn.ModuleDict(
            {
                "dense": nn.Linear(4, 4),
                "host": flatbed.Embedding(50, 4),
                "small": flatbed.Embedding(50, 4, storage="disk", path=folder / "small.bed"),
                "large": flatbed.Embedding(20_000, 16, storage="disk", path=folder / "large.bed"),
            }
        )

    saved, other = model(tmp_path / "a"), model(tmp_path / "b")
    save_checkpoint(tmp_path / "run", saved, copy_disk_tables=True)
    if used:
        for name in ("host", "small", "large"):
            other[name](torch.tensor([1]))
    before = {name: table.read_rows(range(50)) for name, table in other.items() if name != "dense" and used}
    weight, names = other["dense"].weight.detach().clone(), sorted(os.listdir(tmp_path / "b"))
    with largest_file(500_000), pytest.raises(FlatbedError, match=r"large.bed.*free some space"):
        load_checkpoint(tmp_path / "run", other)
    assert torch.equal(other["dense"].weight, weight)
    assert sorted(os.listdir(tmp_path / "b")) == names
    assert all(torch.equal(other[name].read_rows(range(50)), rows) for name, rows in before.items())
    load_checkpoint(tmp_path / "run", other)
    for name in ("host", "small", "large"):
        assert torch.equal(other[name].read_rows(range(50)), saved[name].read_rows(range(50)))


def test_table_that_fails_late_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(tmp_path, ("host", "host"))
    save_checkpoint(tmp_path / "run", model, optimizer)
    step(model, optimizer, 1)
    before, begin, calls = snapshot(model, optimizer), saving.begin_read, []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise FlatbedError("the second table")
        return begin(*args, **options)

    monkeypatch.setattr(saving, "begin_read", fail)
    with pytest.raises(FlatbedError, match="second"):
        load_checkpoint(tmp_path / "run", model, optimizer)
    assert difference(snapshot(model, optimizer), before) is None


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
    model, optimizer = build(tmp_path, ("host", "host"))
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "run", model, optimizer, rng=True, extra={"epoch": 3})
    step(model, optimizer, 2)
    before, draw = snapshot(model, optimizer), random.Random(0)
    files = [path for path in current(tmp_path / "run").iterdir() if path.name != ".flatbed"]
    assert len(files) == 7
    for file in files:
        good = file.read_bytes()
        for _ in range(15):
            flipped(file, draw.randrange(len(good)), draw.randrange(8))
            with pytest.raises(DamagedFileError, match=file.name):
                load_checkpoint(tmp_path / "run", model, optimizer)
            file.write_bytes(good)
    assert difference(snapshot(model, optimizer), before) is None
    assert load_checkpoint(tmp_path / "run", model, optimizer) == {"epoch": 3}


def two_signs(data: bytearray) -> None:
    """Flip the last bits of two words of 64 bits, whose sum stays."""
    data[-4096 + 7] ^= 0x80
    data[-4096 + 71] ^= 0x80


def swapped_words(data: bytearray) -> None:
    data[-4096:-4080] = data[-4088:-4080] + data[-4096:-4088]


def swapped_pages(data: bytearray) -> None:
    data[-8192:] = data[-4096:] + data[-8192:-4096]


def longer(data: bytearray) -> None:
    data.extend(bytes(8))


def shorter(data: bytearray) -> None:
    del data[-8:]


@pytest.mark.parametrize("damage", [two_signs, swapped_words, swapped_pages, longer, shorter])
def test_damage_of_several_words_is_found(damage: Callable[[bytearray], None], tmp_path: Path) -> None:
    model = nn.Linear(64, 64, bias=False)  # four pages
    save_checkpoint(tmp_path, model)
    file = current(tmp_path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        load_checkpoint(tmp_path, model)
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        check_path(tmp_path)


def test_checksums_that_are_numbers_are_compared(tmp_path: Path) -> None:
    """Files of earlier versions: CRC-32 of the sums of the words of each page, and of the rest."""
    model = nn.Linear(64, 70, bias=False)
    save_checkpoint(tmp_path, model)
    version = current(tmp_path)
    file, data = version / "model.safetensors", (version / "model.safetensors").read_bytes()
    head, tensor = data[: -64 * 70 * 4], data[-64 * 70 * 4 :]
    sums = np.frombuffer(tensor[: 4 * 4096], np.uint64).reshape(4, -1).sum(1).tobytes()
    old = {"": zlib.crc32(head), "weight": zlib.crc32(sums + tensor[4 * 4096 :])}
    rewrite(version / "checkpoint.json", lambda found: found["files"].update({file.name: old}))
    load_checkpoint(tmp_path, model)
    flipped(file, len(data) - 5000, 3)
    with pytest.raises(DamagedFileError, match="the checksum of 'weight' is wrong"):
        load_checkpoint(tmp_path, model)


def test_checkpoint_of_the_first_version_loads(tmp_path: Path) -> None:
    """Without checksums, without a token in the version's name, with tensors that lack the table's name."""
    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "run", model, optimizer, extra={"epoch": 3})
    before, version = snapshot(model, optimizer), current(tmp_path / "run")
    model.first.table.save(version / "table-0.safetensors")
    manifest = json.loads((version / "checkpoint.json").read_text())
    for key in ("files", "checksum", "schedulers", "scaler", "rng"):
        del manifest[key]
    (version / "checkpoint.json").write_text(json.dumps(manifest))
    version.rename(tmp_path / "run" / "v0000001")
    (tmp_path / "run" / "CURRENT.json").write_text(
        json.dumps({"token": manifest["token"], "version": "v0000001"})
    )
    step(model, optimizer, 2)
    assert load_checkpoint(tmp_path / "run", model, optimizer) == {"epoch": 3}
    assert difference(snapshot(model, optimizer), before) is None


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("replace", [pipe, endless])
@pytest.mark.parametrize("name", ["CURRENT.json", "checkpoint.json", "optimizer.json", "model.safetensors"])
def test_pipes_and_devices_are_refused(name: str, replace: Callable[[Path], None], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(tmp_path, model, optimizer)
    replace(tmp_path / name if name == "CURRENT.json" else current(tmp_path) / name)
    with pytest.raises(FlatbedError, match=name):
        load_checkpoint(tmp_path, model, optimizer)


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change a manifest as an attacker would, with a right checksum."""
    manifest = json.loads(path.read_text())
    manifest.pop("checksum")
    change(manifest)
    text = json.dumps(manifest)
    path.write_text(json.dumps({**manifest, "checksum": zlib.crc32(text.encode())}))


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
    files = {name: current(folder) / name for name in ("checkpoint.json", "optimizer.json")}
    good = {name: file.read_text() for name, file in files.items()}
    n_errors = 0
    for _ in range(600):
        name = draw.choice([*files])
        found = json.loads(good[name])
        for _ in range(draw.randint(1, 3)):
            container, key = draw.choice([*places(found)])
            if draw.random() < 0.2:
                del container[key]
            else:
                container[key] = draw.choice(HOSTILE)
        manifest = found if name == "checkpoint.json" else json.loads(good["checkpoint.json"])
        if name == "optimizer.json":
            files[name].write_text(json.dumps(found))
            manifest["files"][name] = zlib.crc32(files[name].read_bytes())
        manifest.pop("checksum", None)
        text = json.dumps(manifest)
        files["checkpoint.json"].write_text(json.dumps({**manifest, "checksum": zlib.crc32(text.encode())}))
        try:
            load_checkpoint(folder, model, optimizers, scheduler=schedule, rng=True)
        except FlatbedError:
            n_errors += 1
        finally:
            for other, text in good.items():
                files[other].write_text(text)
    assert n_errors > 300


def test_check_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flatbed.cli import app

    model, optimizer = build(tmp_path)
    step(model, optimizer, 1)
    save_checkpoint(tmp_path / "run", model, optimizer)
    model.first.table.save(tmp_path / "t.safetensors")
    close(model)
    files = [tmp_path / "run", tmp_path / "1.bed", tmp_path / "t.safetensors"]
    for path, found in zip(
        files, ("all 4 files", "rows are as they were written", "only header and size"), strict=True
    ):
        done = CliRunner().invoke(app, ["check", str(path)])
        assert done.exit_code == 0, done.output
        assert found in done.output
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
    save_checkpoint(tmp_path, constant(5.0), keep=2)
    assert len(versions()) == 2
    save_checkpoint(tmp_path, constant(6.0))
    assert versions() == [current(tmp_path)]
    for wrong in (0, -1, 1.0, True, None):
        with pytest.raises(ValueError, match="keep must be at least 1"):
            save_checkpoint(tmp_path, model, keep=wrong)  # type: ignore[arg-type]


def test_modes_of_replaced_files_are_kept(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, constant(1.0))
    (tmp_path / "CURRENT.json").chmod(0o600)
    save_checkpoint(tmp_path, constant(2.0))
    assert stat.S_IMODE((tmp_path / "CURRENT.json").stat().st_mode) == 0o600


ALONE = """
import sys, time, torch.distributed as dist, flatbed
from pathlib import Path
from torch import nn
from flatbed.distributed import ranks
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
ranks.PATIENCE = 0.5
while rank == 1 and not (folder / "gave up").exists():
    time.sleep(0.05)
try:
    flatbed.save_checkpoint(folder / "run", nn.Linear(2, 2))
except flatbed.FlatbedError as error:
    print("call it on every rank" in str(error))
(folder / "gave up").touch()
"""


def test_save_on_the_first_rank_alone_raises(tmp_path: Path) -> None:
    """So does a rank that calls it after the first one gave up."""
    said = programs.run_all(*(Program(ALONE, [str(tmp_path), rank]) for rank in "01"))
    assert [ended.stdout for ended in said] == ["True\n", "True\n"], said
    assert not (tmp_path / "run").exists()


def test_check_names_the_files_of_tables_on_disk(tmp_path: Path) -> None:
    model = nn.ModuleList([flatbed.Embedding(5, 4, storage="disk", path=tmp_path / "a.bed")])
    save_checkpoint(tmp_path / "run", model)
    assert check_path(tmp_path / "run").endswith(f"are in {tmp_path / 'a.bed'}: check them, too")
    save_checkpoint(tmp_path / "copied", model, copy_disk_tables=True)
    assert "a.bed" not in check_path(tmp_path / "copied")
    flatbed.tables(model)[0].close()
