"""State of schedulers, scalers and random generators in checkpoints, and what `extra` may hold."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import flatbed
from flatbed.checkpoint import load, load_checkpoint, save_checkpoint
from flatbed.checkpoint.state import bit_sum
from flatbed.errors import FlatbedError
from tests.tables.training import build, close, difference, snapshot, step

SCHEDULERS: dict[str, Any] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 6], gamma=0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.MultiStepLR(o, [3, 5])], [2]
    ),
    "several": lambda o: [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [3])],
}


def steps(optimizer: Any, scheduler: Any, n: int) -> list[float]:
    found = []
    for _ in range(n):
        optimizer.step()
        for one in scheduler if isinstance(scheduler, list) else [scheduler]:
            one.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def training() -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model, flatbed.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_resume(make: Any, tmp_path: Path) -> None:
    model, optimizer = training()
    scheduler = make(optimizer)
    steps(optimizer, scheduler, 3)
    save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    expected = steps(optimizer, scheduler, 6)
    model, optimizer = training()
    scheduler = make(optimizer)
    load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert steps(optimizer, scheduler, 6) == expected


def test_scheduler_without_its_state_raises(tmp_path: Path) -> None:
    model, optimizer = training()
    scheduler = lr_scheduler.MultiStepLR(optimizer, [2])
    scaler = torch.amp.GradScaler("cpu")
    save_checkpoint(tmp_path / "none", model, optimizer)
    save_checkpoint(tmp_path / "one", model, optimizer, scheduler=scheduler)
    for folder, given, words in (
        ("none", {"scheduler": scheduler}, "0 schedulers; found 1"),
        ("none", {"scaler": scaler}, "0 scalers; found 1"),
        ("none", {"rng": True}, "0 ranks; found 1"),
        ("one", {"scheduler": [scheduler, scheduler]}, "1 schedulers; found 2"),
        ("one", {"scheduler": lr_scheduler.StepLR(optimizer, 2)}, "MultiStepLR; found StepLR"),
    ):
        with pytest.raises(FlatbedError, match=words):
            load_checkpoint(tmp_path / folder, model, optimizer, **given)
    for wrong in (optimizer, model, {"last_epoch": 3}, lr_scheduler.StepLR):
        with pytest.raises(TypeError, match=r"scheduler .*objects with state_dict.*found"):
            save_checkpoint(tmp_path / "one", model, optimizer, scheduler=[wrong])


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist()  # noqa: NPY002


def test_random_generators_and_scalers_resume(tmp_path: Path) -> None:
    random.gauss(0, 1)  # keeps a second number
    np.random.randn()  # noqa: NPY002
    scaler, other = torch.amp.GradScaler("cpu", init_scale=128.0), torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 2})
    save_checkpoint(tmp_path, nn.Linear(2, 2), rng=True, scaler=scaler)
    expected = draws()
    assert draws() != expected
    load_checkpoint(tmp_path, nn.Linear(2, 2), scaler=other)
    assert draws() != expected
    assert other.state_dict() == scaler.state_dict()
    load_checkpoint(tmp_path, nn.Linear(2, 2), rng=True)
    assert draws() == expected


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({3: None}, r"extra\[3\].*string keys"),
        ({"a": {"b": {1: 2}}}, r"extra\['a'\]"),
        ({"a": [1, (2,)]}, r"extra\['a'\].*lists"),
        ({"milestones": Counter([1, 2])}, r"extra\['milestones'\].*scheduler="),
        ({"a": torch.ones(2)}, r"Tensor.*\.item\(\).*\.tolist\(\)"),
        ({"a": [float("nan")]}, r"extra\['a'\].*None"),
    ],
)
def test_extra_refuses_what_json_would_change(extra: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=words):
        save_checkpoint(tmp_path / "run", nn.Linear(2, 2), extra=extra)
    assert not (tmp_path / "run").exists()
    kept = {"a": [1, 2.5, None, True, "é"], "b": {"c": {}, "d": []}, "inf": float("inf"), "big": 2**80}
    save_checkpoint(tmp_path, nn.Linear(2, 2), extra=kept)
    assert load_checkpoint(tmp_path, nn.Linear(2, 2)) == kept


def test_state_that_is_left_out_warns(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    schedule, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 3), torch.amp.GradScaler("cpu")
    save_checkpoint(tmp_path, model, optimizer, scheduler=schedule, scaler=scaler)
    load_checkpoint(tmp_path, model, optimizer, scheduler=schedule, scaler=scaler)
    load_checkpoint(tmp_path, model)  # the weights alone
    with pytest.warns(UserWarning, match="scheduler and a scaler.*pass scheduler= and scaler=") as caught:
        load_checkpoint(tmp_path, model, optimizer)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="a scaler.*pass scaler="):
        load_checkpoint(tmp_path, model, optimizer, scheduler=schedule)


def test_the_optimizer_of_a_table_that_is_left_out_warns(tmp_path: Path) -> None:
    emb = flatbed.Embedding(4, 2)
    save_checkpoint(tmp_path, emb)
    save_checkpoint(tmp_path, emb, optimizer := flatbed.optim.Adam(emb))
    with pytest.warns(UserWarning, match=r"Adam.*weight.*not saved.*optimizer") as caught:
        save_checkpoint(tmp_path, emb)
    assert caught[0].filename == __file__
    del optimizer


def test_parameter_with_a_reserved_name_is_saved(tmp_path: Path) -> None:
    first, second = nn.Module(), nn.Module()
    for model in (first, second):
        model.register_parameter("__metadata__", nn.Parameter(torch.rand(3)))
    save_checkpoint(tmp_path, first)
    load_checkpoint(tmp_path, second)
    assert torch.equal(next(second.parameters()), next(first.parameters()))


def test_names_of_wrappers_are_told_from_another_model(tmp_path: Path) -> None:
    model = nn.Sequential(flatbed.Embedding(3, 2), nn.Linear(2, 1))
    partly = nn.Sequential(model[0], nn.ModuleDict({"_orig_mod": model[1]}))  # the names of torch.compile
    wrappers = (nn.ModuleDict({"module": model}), nn.ModuleDict({"_orig_mod": model}), partly)
    for number, wrapper in enumerate(wrappers):
        flatbed.save_checkpoint(tmp_path / f"{number}", wrapper)
        with pytest.raises(FlatbedError, match=r"lacks.*the model itself, not the wrapper.*compile"):
            flatbed.load_checkpoint(tmp_path / f"{number}", model)


def test_the_class_of_the_optimizer_is_compared(tmp_path: Path) -> None:
    emb = flatbed.Embedding(10, 4)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    emb([1, 2]).sum().backward()
    optimizer.step()
    flatbed.save_checkpoint(tmp_path, emb, optimizer)
    other = flatbed.Embedding(10, 4)
    with pytest.warns(UserWarning, match="state of Adam, and AdamW goes on"):
        flatbed.load_checkpoint(tmp_path, other, flatbed.optim.AdamW(other, lr=0.1))
    assert torch.equal(other.read_rows(range(10)), emb.read_rows(range(10)))


def test_the_options_of_the_optimizer_are_compared(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    options: dict[str, Any] = {"max_norm": 0.1, "state_dtype": torch.bfloat16}
    save_checkpoint(tmp_path, model, flatbed.optim.Adam(model, **options))
    load_checkpoint(tmp_path, model, flatbed.optim.Adam(model, **options))
    load_checkpoint(tmp_path, model)
    for other in (flatbed.optim.Adam(model, skip_nonfinite=True), torch.optim.Adam(model.parameters())):
        saved = r"Adam\(max_norm=0\.1, .*torch\.bfloat16\), and Adam\(max_norm=None, .*state_dtype=None\)"
        with pytest.warns(UserWarning, match=saved) as caught:
            load_checkpoint(tmp_path, model, other)
        (warning,) = caught
        assert warning.filename == __file__
        assert ("skip_nonfinite" in str(warning.message)) == isinstance(other, flatbed.optim.Adam)
    save_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()))
    load_checkpoint(tmp_path, model, flatbed.optim.Adam(model, **options))


@pytest.mark.parametrize(("saved", "given"), [("Adam", "NAdam"), ("Adagrad", "Adam")])
@pytest.mark.parametrize("passed", [True, False])
def test_state_of_a_file_that_the_optimizer_does_not_keep_raises(
    saved: str, given: str, passed: bool, tmp_path: Path
) -> None:
    """The rows stay in the file, and its state was dropped since: loading would continue without it."""
    emb = flatbed.Embedding(10, 4, storage="disk", path=tmp_path / "t.bed")
    optimizer: Any = getattr(flatbed.optim, saved)(emb, lr=0.1)
    emb([1, 2]).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "run", emb, optimizer)
    emb.table.drop_state()
    optimizer = getattr(flatbed.optim, given)(emb, lr=0.1)
    with pytest.raises(FlatbedError, match=f"t.bed holds the optimizer state .*and {given} keeps"):
        load_checkpoint(tmp_path / "run", emb, optimizer if passed else None)
    emb.table.drop_state()
    optimizer = getattr(flatbed.optim, saved)(emb, lr=0.1)
    load_checkpoint(tmp_path / "run", emb, optimizer)
    assert float(emb.table.read_state(emb.table.state_names[0], [1]).abs().sum()) > 0
    emb.table.close(discard=True)


class RefusingSchedule(lr_scheduler.StepLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        raise KeyError("refused")


class RefusingModule(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise ValueError("refused")


class RefusingOptimizer(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("refused")


@pytest.mark.parametrize("what", ["scheduler", "model", "optimizer", "table"])
@pytest.mark.parametrize("stepped", [True, False])
def test_error_of_one_part_leaves_all_as_they_were(
    what: str, stepped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path) -> tuple[Any, Any, list[Any]]:
        model: Any = build(folder, ("disk", "disk"))[0]
        model.one_more = (RefusingModule if what == "model" else nn.Linear)(2, 2)
        model.last = nn.Linear(2, 2)
        optimizer = flatbed.optim.Adam(model, lr=0.1)
        second = (RefusingOptimizer if what == "optimizer" else torch.optim.SGD)(model.last.parameters())
        kinds = [lr_scheduler.StepLR, RefusingSchedule if what == "scheduler" else lr_scheduler.StepLR]
        return model, [optimizer, second], [kind(optimizer, 1) for kind in kinds]

    model, optimizers, schedulers = made(tmp_path)
    step(model, optimizers, 1)
    save_checkpoint(tmp_path / "saved", model, optimizers, scheduler=schedulers)
    if stepped:
        step(model, optimizers, 2)
        schedulers[0].step()
    else:
        close(model)
        model, optimizers, schedulers = made(tmp_path)
        nn.init.zeros_(model.last.weight)
    if what == "table":
        monkeypatch.setattr(load, "_revert", lambda *_: {}["refused"])

    def now() -> Any:
        return [one.state_dict() for one in schedulers], [one.param_groups[0]["lr"] for one in optimizers]

    before, rates = snapshot(model, optimizers), now()
    with pytest.raises(FlatbedError, match=f"{what} .*refused"):
        load_checkpoint(tmp_path / "saved", model, optimizers, scheduler=schedulers)
    assert difference(snapshot(model, optimizers), before) is None
    assert now() == rates
    step(model, optimizers, 3)
    close(model)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool],
    ids=str,
)
def test_bit_sums_are_of_values_and_see_each_bit(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (1,), (7,), (8, 3), (4, 3, 5, 5)):
        values = torch.randint(0, 2, (5, *shape)).to(dtype)[1 + len(shape) % 2]  # not at an address of words
        found = bit_sum(values)
        assert bit_sum(values.clone()) == found
        if len(shape) == 4:
            assert bit_sum(values.to(memory_format=torch.channels_last)) == found
        raw = values.clone().reshape(-1).view(torch.uint8)
        for position in range(0, len(raw), 5):
            for bit in (1, 128):
                raw[position] ^= bit
                assert bit_sum(raw) != found
                raw[position] ^= bit
        assert bit_sum(raw) == found
    large = torch.full((1 << 12,), -1, dtype=torch.int64)
    assert bit_sum(large) == -(1 << 12)
