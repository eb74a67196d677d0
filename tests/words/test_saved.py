from __future__ import annotations

from pathlib import Path

import pytest

from flatbed import FlatbedError
from flatbed.words import Settings, Trainer
from flatbed.words.saved import ABOUT, find, remove

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
def test_a_damaged_file(content: str, tmp_path: Path) -> None:
    (tmp_path / ABOUT).write_text(content)
    with pytest.raises(FlatbedError, match=r"words\.json is damaged"):
        find(tmp_path)


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
