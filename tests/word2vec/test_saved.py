from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from flatbed import FlatbedError, checkpoint, save_checkpoint
from flatbed.word2vec import Settings, Trainer
from flatbed.word2vec.checkpoint_dir import find, remove

from .texts import kinds_corpus


def saved(folder: Path) -> Trainer:
    trainer = Trainer(kinds_corpus(200), Settings(dim=8, epochs=2, device="cpu"))
    trainer.run(lambda p: trainer.stop() if p.step >= 3 else None)
    trainer.save(folder)
    return trainer


def test_what_a_folder_holds(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "none") is None
    trainer = saved(tmp_path)
    found = find(tmp_path)
    assert found is not None
    assert (found.step, found.n_steps, found.done) == (3, trainer.n_steps, False)
    assert str(found).startswith(f"a training at step 3 of {trainer.n_steps} (dim 8, window 5, epochs 2, ")
    trainer.run()
    trainer.save(tmp_path)
    found = find(tmp_path)
    assert found is not None
    assert found.done
    assert str(found).startswith(f"a finished training of {trainer.n_steps} steps (dim 8, ")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"settings": {}}'])
@pytest.mark.parametrize("name", ["CURRENT.json", "v0000001/checkpoint.json"])
def test_a_damaged_file(name: str, content: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(FlatbedError, match=rf"{name} is missing or damaged \(.*\): restore it from a copy"):
        find(tmp_path)
    assert not remove(tmp_path)
    assert (tmp_path / name).exists()


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(1, 1), extra={"step": 3})
    with pytest.raises(FlatbedError, match="holds a checkpoint of something else"):
        find(tmp_path)
    assert not remove(tmp_path)
    assert (tmp_path / "CURRENT.json").exists()


def test_it_is_of_the_same_moment_as_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is cut short anywhere before it counts leaves what was there before."""
    trainer = saved(tmp_path)
    trainer.run(lambda p: trainer.stop() if p.step >= 5 else None)
    write = checkpoint.write_text

    def cut(path: Path, text: str) -> None:
        if path.name == "CURRENT.json":
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr(checkpoint, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        trainer.save(tmp_path)
    found = find(tmp_path)
    assert found is not None
    assert found.step == 3


def test_only_our_files_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not remove(folder)
    saved(folder)
    assert remove(folder)
    assert not folder.exists()
    saved(folder)
    (folder / "v0000042").mkdir()
    (folder / "v0000042" / "mine").touch()
    (folder / "notes").touch()
    assert remove(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["notes", "v0000042"]
    assert (folder / "v0000042" / "mine").exists()
    assert not remove(folder)
