"""Optimizers and tables: who owns a table, groups, and state dicts."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import Embedding, FlatbedError, optim
from flatbed.tables.storage.disk import DiskStorage
from tests.tables.models import DIM, EVERY, ROWS, Model, assert_same, pair
from tests.tables.tables import STORAGES, storage_options


def made(**options: Any) -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, DIM, **options)


def backward(emb: Any, ids: Any = (1, 2)) -> None:
    emb(torch.tensor(ids)).pow(2).sum().backward()


def train(model: nn.Module, optimizer: Any, n_steps: int = 3) -> None:
    """Train all rows, as torch's dense optimizers do."""
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(EVERY).pow(2).sum().backward()
        optimizer.step()


# ---- tables without an optimizer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_gradients_without_an_optimizer_raise_at_the_next_lookup(training: bool, deleted: bool) -> None:
    """Evaluation where gradients are enabled is none."""
    model = Model(made()).train(training)
    bag = flatbed.EmbeddingBag.from_table(model.emb.table).train(training)
    if deleted:
        optimizer = flatbed.optim.Adam(model)
        train(model, optimizer, 1)
        del optimizer
        gc.collect()
    model.eval()([1])
    model.train(training)([1]).sum().backward()
    for use in (lambda: model([1]), lambda: bag([[1]]), lambda: model.train()([1])):
        with pytest.raises(FlatbedError, match=r"no optimizer has it.*Adam\(model.*requires_grad_\(False\)"):
            use()
    with torch.no_grad():
        model([1])
    with torch.inference_mode():
        bag([[1]])
    if training:
        assert model.eval()([1]).requires_grad
    model.emb.requires_grad_(False)
    model([1]).sum().backward()


def test_optimizer_that_comes_later_uses_the_gradients() -> None:
    emb = made(init="zeros")
    emb([1]).sum().backward()
    optimizer = flatbed.optim.SGD(emb, lr=1.0)
    emb([2]).sum().backward()
    optimizer.step()
    assert emb.weight[:4, 0].tolist() == [0, -1, -1, 0]


def test_dropped_gradients_need_no_optimizer() -> None:
    """Training by hand."""
    emb = made(init="zeros")
    for _ in range(3):
        emb([1, 1]).sum().backward()
        rows, grad = emb.table.grad_rows, emb.table.grad
        emb.write_rows(rows, emb.read_rows(rows) - grad)
        emb.zero_grad()
    assert emb.weight[1].tolist() == [-6.0] * DIM


# ---- another optimizer


@pytest.mark.parametrize("amsgrad", [False, True])
def test_second_optimizer_takes_over_with_state_of_its_own(amsgrad: bool) -> None:
    """With more state than the one before, its records are others, too."""
    ours, theirs = pair()
    first = flatbed.optim.Adam(ours, lr=0.1)
    ours([1, 2]).sum().backward()
    first.step()
    first.zero_grad()
    theirs.load_state_dict(ours.state_dict())
    second = flatbed.optim.Adam(ours, lr=0.1, amsgrad=amsgrad)
    before = ours.state_dict()
    with pytest.raises(flatbed.FlatbedError, match=r"'emb\.weight' has been given to another optimizer"):
        first.step()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name])
    assert not ours.emb.table.read_state("exp_avg", EVERY).any()
    reference = torch.optim.Adam(theirs.parameters(), lr=0.1, amsgrad=amsgrad)
    for model, optimizer in ((ours, second), (theirs, reference)):
        model(EVERY).pow(2).sum().backward()
        optimizer.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("call", ["step", "state_dict", "load_state_dict", "refresh_masters"])
@pytest.mark.parametrize("taken", ["Adam", "AdamW", None])
def test_a_former_optimizer_changes_nothing(taken: str | None, call: str) -> None:
    """Nor does it show the state of the next one as its own."""
    emb = made()
    former = flatbed.optim.SGD(emb, lr=0.1) if taken == "Adam" else flatbed.optim.Adam(emb, lr=0.1)
    saved = former.state_dict()
    if taken is None:
        emb.table.drop_state()
    else:
        owner = getattr(flatbed.optim, taken)(emb, lr=0.1)
        backward(emb)
        owner.step()
    before = emb.table.scalars(), emb.weight.clone()
    with pytest.raises(
        flatbed.FlatbedError, match="has been given to another optimizer since, or drop_state"
    ):
        getattr(former, call)(*([saved] if call == "load_state_dict" else []))
    assert emb.table.scalars() == before[0]
    assert torch.equal(emb.weight, before[1])


def test_another_kind_of_optimizer_takes_over() -> None:
    emb = made()
    before = emb.weight.clone()
    for make in (flatbed.optim.Adam, flatbed.optim.SGD, flatbed.optim.Adagrad, flatbed.optim.Adam):
        optimizer = make(emb, lr=0.0)
        backward(emb)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(emb.weight, before)
    assert emb.table.state_names == ("exp_avg", "exp_avg_sq")


def test_a_table_that_comes_back_does_not_continue_state_that_is_gone() -> None:
    """torch keeps the moments for the first optimizer; a record has room for those of one."""
    emb, layer = made(), nn.Linear(2, 2)
    first = optim.Adam([{"params": layer.parameters()}, {"params": [emb.table]}], lr=0.1)
    for _ in range(2):
        backward(emb)
        first.step()
        first.zero_grad()
    group = first.param_groups.pop()
    first.add_param_group(group)  # no other one has had it
    assert emb.table.read_state("exp_avg", [1]).all()
    assert float(first.state[emb.table]["step"]) == 2
    group = first.param_groups.pop()
    optim.SGD(emb)
    with pytest.raises(FlatbedError, match=r"lost the state of this Adam.*del optimizer\.state\[table\]"):
        first.add_param_group(group)
    assert len(first.param_groups) == 1
    del first.state[emb.table]
    first.add_param_group(group)
    assert float(first.state[emb.table]["step"]) == 0
    before = emb.read_rows([1])
    backward(emb)
    first.step()
    assert torch.allclose((emb.read_rows([1]) - before).abs(), torch.tensor(0.1))


TORCHS = [
    (name, more)
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    for more in ({}, {"fused": True})
    if set(more) <= set(inspect.signature(kind).parameters)
]


@pytest.mark.parametrize(("name", "more"), TORCHS, ids=str)
def test_torchs_own_optimizers_say_what_to_use_instead(name: str, more: dict[str, bool]) -> None:
    emb = made()
    before = emb.weight.clone()

    def train() -> None:
        optimizer = getattr(torch.optim, name)([emb.table], lr=0.1, **more)
        backward(emb)
        optimizer.step(lambda: torch.zeros(())) if name == "LBFGS" else optimizer.step()

    if name == "SparseAdam":  # it looks at the layout of gradients first
        with pytest.raises(RuntimeError, match="dense gradients"):
            train()
    else:
        with pytest.raises(flatbed.FlatbedError, match=r"was called on a table.*flatbed\.optim"):
            train()
    assert torch.equal(emb.weight, before)


@pytest.mark.parametrize("wrong", ["option", "state", "dtype"])
def test_failed_optimizer_changes_nothing(wrong: str) -> None:
    """Neither of two tables leaves its optimizer if one cannot come along."""
    first, second = made(), made(dtype=torch.bfloat16 if wrong == "dtype" else torch.float32)
    owner = flatbed.optim.Adam([first.table, second.table])
    backward(first)
    backward(second)
    owner.step()
    state = first.table.read_state("exp_avg", EVERY)
    last = {"params": [second.table], **({"lr": -1.0} if wrong == "option" else {})}
    if wrong == "state":  # as if it had come from a file
        second.table._store.state_owned = False
    for groups in ([{"params": [first.table]}, last], [{**last, "params": [first.table, second.table]}]):
        with pytest.raises((ValueError, flatbed.FlatbedError)):
            flatbed.optim.SGD(groups, lr=0.1, momentum=0.9, master_weights=wrong == "dtype")
        gc.collect()
        assert first.table._owner is second.table._owner is owner
        assert torch.equal(first.table.read_state("exp_avg", EVERY), state)
    backward(first)
    owner.step()


def model_on_disk(folder: Path) -> nn.Sequential:
    return nn.Sequential(flatbed.Embedding(50, 4, storage="disk", path=folder / "rows.bed"))


def one_step(model: nn.Module, optimizer: flatbed.optim.Optimizer) -> None:
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("other", [flatbed.optim.SGD, partial(flatbed.optim.Adam, amsgrad=True)])
def test_file_is_not_rewritten_for_another_optimizer(other: Any, tmp_path: Path) -> None:
    """In a living process as in a new one: what was saved would be gone."""
    model = model_on_disk(tmp_path)
    other(model, lr=0.1)  # an optimizer that was never used does not matter
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    one_step(model, optimizer)
    flatbed.save_checkpoint(tmp_path / "saved", model, optimizer)
    expected = model[0].read_rows(range(50)).clone()
    with pytest.raises(FlatbedError, match=r"holds optimizer state of its own .*drop_state"):
        other(model, lr=0.1)
    one_step(model, optimizer)  # the first one still trains
    again = flatbed.optim.Adam(model, lr=0.1)  # the same kind of state, from zero
    one_step(model, again)
    model[0].table.close(discard=True)
    model = model_on_disk(tmp_path)
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    flatbed.load_checkpoint(tmp_path / "saved", model, optimizer)
    assert torch.equal(model[0].read_rows(range(50)), expected)
    model[0].table.drop_state()
    one_step(model, other(model, lr=0.1))
    model[0].table.close(discard=True)


# ---- groups


def test_add_param_group_in_mid_training() -> None:
    models = pair()
    for model, kind in zip(models, (flatbed.optim.SGD, torch.optim.SGD), strict=True):
        optimizer = kind(model.head.parameters(), lr=0.1)
        model.emb.requires_grad_(False)
        train(model, optimizer, 1)
        model.emb.requires_grad_(True)
        optimizer.add_param_group({"params": model.emb.parameters(), "lr": 0.3, "momentum": 0.5})
        train(model, optimizer)
    assert_same(*models)


def test_state_that_a_wrapper_adds_is_not_dropped_in_silence() -> None:
    """Lookahead, for example, would begin again at every step."""
    emb = flatbed.Embedding(10, 2)
    optimizer = flatbed.optim.Adam(emb, lr=0.1)
    for _ in range(2):
        emb([1, 2]).sum().backward()
        optimizer.step()
    before = emb.weight.clone()
    optimizer.state[emb.table]["slow"] = torch.ones(2)
    with pytest.raises(flatbed.FlatbedError, match=r"\['slow'\] in the state of Table.*would be lost"):
        optimizer.step()
    assert torch.equal(emb.weight, before)
    del optimizer.state[emb.table]["slow"]
    optimizer.step()
    assert not torch.equal(emb.weight, before)


@pytest.mark.parametrize("options", [{}, {"per_row_steps": True}], ids=str)
def test_groups_built_again(options: Any) -> None:
    first, second = made(), made()
    optimizer = flatbed.optim.Adam(first.parameters(), lr=0.1, **options)
    for emb in (first, first, second):
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": emb.parameters()})
        before = emb.weight.detach().clone()
        emb(torch.arange(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(emb.weight.detach()[:3], before[:3] - 0.1)


def test_ways_to_name_a_table() -> None:
    model = Model(made())
    table = model.emb.table
    by_module = flatbed.optim.Adam(model)
    assert by_module.param_groups[0]["param_names"] == ["emb.weight", "head.weight", "head.bias"]
    assert flatbed.optim.Adam([table]).param_groups[0]["params"] == [table]
    assert flatbed.optim.Adam([("items", table)]).param_groups[0]["param_names"] == ["items"]
    assert flatbed.optim.Adam({"params": table} for _ in range(1)).param_groups[0]["params"] == [table]
    with pytest.raises(TypeError, match=r"iterable of Tensors or dicts, but got flatbed\.Table"):
        flatbed.optim.Adam(table)


def test_full_disk_stops_a_step_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList([made(), made(**storage_options("disk", tmp_path)), nn.Linear(DIM, 1)])
    optimizer = optim.Adam(model, lr=0.1)
    model[2](model[0](EVERY) + model[1](EVERY)).sum().backward()

    def weights() -> list[Tensor]:
        return [*(table.read_rows(EVERY) for table in flatbed.tables(model)), model[2].weight.clone()]

    def full(self: DiskStorage, ids: Tensor) -> None:
        raise FlatbedError("no space left")

    before = weights()
    with monkeypatch.context() as patch:
        patch.setattr(DiskStorage, "make_room", full)
        with pytest.raises(FlatbedError, match="no space left"):
            optimizer.step()
    assert all(torch.equal(*each) for each in zip(before, weights(), strict=True))
    assert [table.scalars() for table in flatbed.tables(model)] == [{"step": 0.0}] * 2
    optimizer.step()
    assert not any(torch.equal(*each) for each in zip(before, weights(), strict=True))
    assert [table.scalars() for table in flatbed.tables(model)] == [{"step": 1.0}] * 2


# ---- state dicts


class UserAdamax(torch.optim.Adamax):
    """A class that flatbed has no rule for."""


TORCH_OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.ASGD, {}),
    (UserAdamax, {}),
]


@pytest.mark.parametrize(
    ("kind", "options", "by"),
    [
        (kind, options, by)
        for kind, options in TORCH_OPTIMIZERS
        for by in ("from_torch", "rule")
        if by == "from_torch" or hasattr(optim, kind.__name__)
    ],
)
def test_training_continues_from_state_dicts_of_torch_and_back(
    kind: Any, options: dict[str, Any], by: str
) -> None:
    theirs, ours, again = nn.Embedding(6, 4), Embedding(6, 4), nn.Embedding(6, 4)
    build = getattr(optim, kind.__name__) if by == "rule" else partial(optim.from_torch, kind)
    reference, from_ours = (kind(each.parameters(), lr=0.1, **options) for each in (theirs, again))
    optimizer = build(ours, lr=1.0, **options)

    def steps(n: int, *pairs: tuple[nn.Module, Any]) -> None:
        """Take the same steps, and compare the weights."""
        for factor in [torch.randn(6, 4) for _ in range(n)]:
            for module, its in pairs:
                (module(torch.arange(6)) * factor).sum().backward()
                its.step()
                its.zero_grad()
        for module, _ in pairs:
            torch.testing.assert_close(module.weight.detach(), theirs.weight.detach(), rtol=1e-6, atol=1e-6)

    steps(3, (theirs, reference))
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    steps(2, (theirs, reference), (ours, optimizer))
    assert reference.state_dict()["state"][0].keys() <= optimizer.state_dict()["state"][0].keys()
    again.load_state_dict(ours.state_dict())
    from_ours.load_state_dict(optimizer.state_dict())
    steps(2, (theirs, reference), (again, from_ours))


@pytest.mark.parametrize(
    ("storage", "options"),
    [("host", {}), ("device", {"per_row_steps": True}), ("disk", {"amsgrad": True})],
    ids=str,
)
def test_state_dict_resumes_bitwise(storage: str, options: Any, tmp_path: Path) -> None:
    models = [Model(made(**storage_options(storage, tmp_path, name))) for name in ("first", "second")]
    optimizers = [flatbed.optim.Adam(model, lr=0.1, **options) for model in models]

    def steps(model: Model, optimizer: Any) -> None:
        for ids in ([1, 2], [2, 3, 3], [9]):
            optimizer.zero_grad()
            model(ids).pow(2).sum().backward()
            optimizer.step()

    steps(models[0], optimizers[0])
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer)
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])
    for name in models[0].emb.table.state_names:
        assert torch.equal(*(model.emb.table.read_state(name, EVERY) for model in models))


WRONG_STATES: dict[str, Callable[[Any, Any], Any]] = {
    "shape": lambda state, groups: state.update(exp_avg=torch.zeros(ROWS + 1, DIM)),
    "transposed": lambda state, groups: state.update(exp_avg=torch.zeros(DIM, ROWS)),
    "missing": lambda state, groups: state.pop("exp_avg_sq"),
    "wrapper": lambda state, groups: state.update(slow=torch.zeros(ROWS, DIM)),
    "groups": lambda state, groups: groups[0]["params"].pop(),
    "option": lambda state, groups: groups[0].update(lr=-1.0),
}


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_state_dict_that_does_not_fit_changes_nothing(wrong: str) -> None:
    model, _ = pair()
    optimizer = flatbed.optim.Adam(model, lr=0.1)
    train(model, optimizer)
    before, state = optimizer.state_dict(), optimizer.state_dict()
    WRONG_STATES[wrong](state["state"][0], state["param_groups"])
    with pytest.raises((ValueError, flatbed.FlatbedError)):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, held in before["state"].items():
        for name, value in held.items():
            assert torch.equal(after["state"][key][name], value)
    train(model, optimizer, 1)


@pytest.mark.parametrize("storage", STORAGES)
def test_growing_before_a_pending_layout(storage: str, tmp_path: Path) -> None:
    emb = Embedding(20, 4, seed=0, **storage_options(storage, tmp_path))
    emb.read_rows([0])
    optim.Adam(emb)
    emb.table.resize(30)
    assert torch.equal(emb.read_rows(range(30)), Embedding(30, 4, seed=0).read_rows(range(30)))


def into_state_dict(kind: Any, model: Any, source: Any, folder: Path) -> None:
    kind(made()).load_state_dict(source.state_dict())


def into_owned_table(kind: Any, model: Any, source: Any, folder: Path) -> None:
    model[0].table.save(folder / "table.safetensors")
    emb = made()
    _kept = kind(emb)
    emb.table.load(folder / "table.safetensors")


def into_loaded_table(kind: Any, model: Any, source: Any, folder: Path) -> None:
    model[0].table.save(folder / "table.safetensors")
    kind(Embedding.from_table(flatbed.load_table(folder / "table.safetensors")))


def into_checkpoint(kind: Any, model: Any, source: Any, folder: Path) -> None:
    flatbed.save_checkpoint(folder / "saved", model, source)
    other = nn.Sequential(made())
    flatbed.load_checkpoint(folder / "saved", other, kind(other))


@pytest.mark.parametrize("load", [into_state_dict, into_owned_table, into_loaded_table, into_checkpoint])
def test_state_of_another_class_raises(load: Any, tmp_path: Path) -> None:
    """NAdam has the fields of Adam, and one number more."""
    model = nn.Sequential(made())
    source = optim.Adam(model, lr=0.1)
    train(model, source, 1)
    with pytest.raises(FlatbedError, match=r"mu_product|Adam"):
        load(optim.NAdam, model, source, tmp_path)
    load(optim.Adam, model, source, tmp_path)


def test_a_file_knows_the_class_of_its_state(tmp_path: Path) -> None:
    """Adam's state fits AdamW and RAdam, as in torch; a table on disk says so."""

    def trained(kind: Any) -> None:
        emb = flatbed.Embedding(10, 4, storage="disk", path=tmp_path / "t.bed", seed=1)
        optimizer = kind(emb.parameters(), lr=0.1)
        emb(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        emb.table.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained(flatbed.optim.Adam)
        trained(flatbed.optim.Adam)
    with pytest.warns(UserWarning, match=r"state of Adam, and RAdam goes on.*drop_state"):
        trained(flatbed.optim.RAdam)
    with pytest.warns(UserWarning, match=r"state of RAdam, and Adam goes on"):
        trained(flatbed.optim.Adam)
