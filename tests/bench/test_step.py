from functools import partial

import pytest
import torch
from torch import nn

from flatbed.bench import step as bench_step
from flatbed.bench.models import Case
from flatbed.bench.rows import FUSED, LOOP
from flatbed.bench.step import Setting, make_batches, run
from flatbed.bench.ways import CAPTURED, OPTIM, WAYS, Recipe, Trainer, Way, find_ways
from tests.bench.samples import CPU, TINY

ALONE = Case("alone", TINY.build, TINY.make_batch, TINY.loss, steps=3, one_at_a_time=True)


def off_by_one_percent(model: nn.Module, recipe: Recipe) -> Trainer:
    trainer = WAYS[0].setup(model, recipe)
    trainer.optimizer.param_groups[0]["lr"] *= 1.01
    return trainer


@pytest.mark.parametrize("case", [TINY, ALONE], ids=lambda case: case.name)
def test_every_way_gives_a_row_per_part(case: Case) -> None:
    stages: list[str] = []
    setting = Setting(case, "adamw", CPU, steps=7)
    rows = run(setting, progress=stages.append)
    assert [(row.way, row.part) for row in rows] == [
        (way.name, part) for way in WAYS for part in ("optimizer", "step")
    ]
    assert len(stages) == setting.n_stages
    for row in rows:
        assert row.benchmark == "step"
        assert (row.model, row.optimizer) == (case.name, "adamw")
        assert (row.n_params, row.n_elements, row.n_samples) == (4, 8 * 8 + 8 + 8 * 2 + 2, 7)
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert row.ok
        assert row.peak_memory_bytes is None
    fused = [row for row in rows if row.way == "torch fused"]
    assert [row.ratio_to_fused for row in fused] == [1.0, 1.0]
    assert rows[0].ratio_to_fused == pytest.approx(rows[0].p50_ms / fused[0].p50_ms)


def test_a_wrong_way_is_marked() -> None:
    ways = (WAYS[0], Way("wrong", off_by_one_percent))
    rows = run(Setting(TINY, "adam", CPU, steps=1, ways=ways))
    assert [row.ok for row in rows] == [True, True, False, False]
    assert rows[2].max_rel_error == pytest.approx(0.01, rel=0.05)
    assert rows[2].max_abs_error > 0
    assert rows[2].ratio_to_fused is None


def test_every_way_trains_on_the_same_fresh_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[torch.Tensor]] = {}
    trainers = []  # held, since another one may get the id of one that is gone

    def remember(trainer: Trainer, case: Case, batch: tuple[torch.Tensor, ...]) -> None:
        trainers.append(trainer)
        seen.setdefault(id(trainer), []).append(batch[0])
        case.loss(trainer.model, batch).backward()

    monkeypatch.setattr(bench_step.Trainer, "backward", remember)
    run(Setting(TINY, "sgd", CPU, steps=6, ways=WAYS[:3]))
    reference, *others = [batches for batches in seen.values() if len(batches) > 1]
    assert len(others) == 2
    for batches in others:
        assert len(batches) == len(reference)
        assert all(map(torch.equal, batches, reference))
    # In each turn both parts use the same batches; across turns they are new.
    assert len({tuple(batch.flatten().tolist()) for batch in reference}) >= 6


def test_batches_follow_their_seed() -> None:
    make = partial(make_batches, Setting(TINY, "sgd", CPU, steps=1), count=2)
    assert torch.equal(make(seed=1)[1][0], make(seed=1)[1][0])
    assert not torch.equal(make(seed=1)[1][0], make(seed=2)[1][0])
    assert not torch.equal(make(seed=1)[0][0], make(seed=1)[1][0])


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    bench_step.build_trainer(WAYS[0], Setting(TINY, "sgd", CPU, steps=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_torch_fused_there_is_nothing_to_compare_with() -> None:
    rows = run(Setting(TINY, "sgd", CPU, steps=1, ways=find_ways(CPU, [OPTIM])))
    assert [row.way for row in rows] == [LOOP, LOOP, OPTIM, OPTIM]
    assert all(row.ok and row.ratio_to_fused is None for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [TINY, ALONE], ids=lambda case: case.name)
def test_on_a_gpu_rows_tell_the_memory_a_way_needs(case: Case) -> None:
    device = torch.device("cuda")
    rows = run(Setting(case, "adamw", device, steps=12, ways=find_ways(device)))
    assert all(row.ok for row in rows)
    assert {FUSED, OPTIM, CAPTURED} <= {row.way for row in rows}
    assert all(row.peak_memory_bytes >= 3 * 4 * row.n_elements for row in rows)
    assert all(row.machine.device != "cpu" for row in rows)
