"""State in torch's format: checkpoints travel in both directions, and nothing is rounded on the way."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import flatbed
from tests.cases import build
from tests.optim.devices import assert_equal, assert_models_equal, is_exact
from tests.optim.optimizers import CASES, Case
from tests.optim.test_dropin import adam_pair, give_grads, steps, train_both
from tests.optim.test_precision import low

TORCH = [getattr(optim, name, None) for name in flatbed.optim.__all__]
IN_TORCH = [case for case in CASES if case.torch_kind in TORCH]


def theirs(case: Case, params: Any) -> Any:
    """Torch's optimizer, told to round as ours does."""
    return case.theirs(params, **case.same_rounding())


def ours(case: Case, params: Any) -> Any:
    """Ours, told the same: it does not care, but the choice travels in checkpoints."""
    return case.ours(params, **case.same_rounding())


@pytest.mark.parametrize("case", IN_TORCH, ids=lambda case: case.name)
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_a_checkpoint_changes_sides_in_mid_training(case: Case, direction: str) -> None:
    """Two runs from one checkpoint, on both sides: the same weights as a run that never changed."""
    straight, changing = build("mixed"), build("mixed")
    reference = theirs(case, straight.parameters())
    steps(straight, reference, range(3))
    makers = [partial(theirs, case), partial(ours, case)]
    first, second = makers if direction == "from torch" else reversed(makers)
    before = first(changing.parameters())
    steps(changing, before, range(3))
    saved = copy.deepcopy(before.state_dict())
    after = second(changing.parameters())
    after.load_state_dict(saved)
    steps(straight, reference, range(3, 6))
    steps(changing, after, range(3, 6))
    assert_models_equal(changing, straight, "cpu")


@pytest.mark.parametrize("case", IN_TORCH, ids=lambda case: case.name)
def test_state_before_the_first_step_is_torchs(case: Case) -> None:
    left, right = (make(build("mixed").parameters()).state_dict() for make in (case.ours, case.theirs))
    assert left["state"].keys() == right["state"].keys()


@pytest.mark.parametrize("why", ["a table", "a skipped step"])
def test_momentum_before_the_first_step_is_resumed(where: str, why: str) -> None:
    """The first gradient is not dampened, and a table or a skipped step makes state before it."""
    models = [build("tied", where) for _ in range(2)]
    options: Any = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "skip_nonfinite": True}
    tables = [[flatbed.Embedding(3, 2).table] if why == "a table" else [] for _ in models]
    straight, resumed = (
        flatbed.optim.SGD([*model.parameters(), *table], **options)
        for model, table in zip(models, tables, strict=True)
    )
    if why == "a skipped step":
        give_grads(models[0], seed=0)
        next(models[0].parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        straight.step()
    saved = copy.deepcopy(straight.state_dict())
    assert saved["state"]
    resumed.load_state_dict(saved)
    for model, optimizer in zip(models, (straight, resumed), strict=True):
        steps(model, optimizer, range(1, 3))
    assert_models_equal(models[1], models[0], where)


def carry_over(way: str, models: list[nn.Module], optimizers: list[Any], folder: Path) -> None:
    """Load the first model and its optimizer into the second ones."""
    from torch.distributed.checkpoint import state_dict as dcp

    models[1].load_state_dict(models[0].state_dict())
    if way == "memory":
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    elif way == "file":
        torch.save(optimizers[0].state_dict(), folder / "run.pt")
        optimizers[1].load_state_dict(torch.load(folder / "run.pt", weights_only=True))
    else:  # which keeps groups and state alone
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=way == "flat distributed checkpoint")
        saved = copy.deepcopy(dcp.get_optimizer_state_dict(models[0], optimizers[0], options=options))
        dcp.set_optimizer_state_dict(models[1], optimizers[1], saved, options=options)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("file", {}),
        ("memory", {"master_weights": True}),
        ("memory", {"ema_decay": 0.9}),
        ("memory", {"stochastic_rounding": True}),
        ("file", {"state_dtype": torch.bfloat16}),
        ("distributed checkpoint", {"state_dtype": torch.bfloat16}),
        ("flat distributed checkpoint", {"state_dtype": torch.bfloat16}),
    ],
)
def test_training_is_resumed_to_the_same_bits(
    where: str, way: str, options: dict[str, Any], tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if "stochastic_rounding" in options else low(where)
    models = [build("mixed", where).to(dtype) for _ in range(2)]
    optimizers = [flatbed.optim.Adam(model.named_parameters(), lr=0.01, **options) for model in models]
    steps(models[0], optimizers[0], range(3))
    carry_over(way, models, optimizers, tmp_path)
    train_both(models[0], models[1], optimizers[0], optimizers[1], range(3, 6))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizers[0].state[p].items():
            assert torch.equal(value, optimizers[1].state[q][key]), key


def pickled(value: Any, file: io.BytesIO) -> None:
    file.write(pickle.dumps(value))


@pytest.mark.parametrize("write", [torch.save, pickled])
@pytest.mark.parametrize("what", ["state dict", "optimizer"])
def test_saving_is_not_larger_than_the_state(where: str, what: str, write: Any) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]).to(where)
    optimizer = flatbed.optim.Adam(model.parameters())
    steps(model, optimizer, range(1))
    file = io.BytesIO()
    write(optimizer.state_dict() if what == "state dict" else optimizer, file)
    n_copies = 2 if what == "state dict" else 4  # parameters and their gradients, too
    assert file.tell() < 1.1 * n_copies * sum(p.nbytes for p in model.parameters()) + 60_000


def test_state_of_wrappers_is_kept(where: str) -> None:
    """Lookahead and schedule-free wrappers put tensors of their own into the state."""
    models = [build("mixed", where) for _ in range(2)]
    optimizers = [flatbed.optim.Adam(model.parameters(), lr=0.01) for model in models]
    steps(models[0], optimizers[0], range(1))
    for p in models[0].parameters():
        optimizers[0].state[p]["slow"] = p.detach().clone()
        optimizers[0].state[p]["counts"] = {"k": 3}
    steps(models[0], optimizers[0], range(1, 2))
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, range(2, 4))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)
        mine, theirs = optimizers[1].state[q], optimizers[0].state[p]
        assert torch.equal(mine["slow"], theirs["slow"])
        assert mine["slow"].data_ptr() != theirs["slow"].data_ptr() or not q.numel()
        assert mine["counts"] == {"k": 3}


def test_tables_go_through_distributed_checkpoints() -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    models = [nn.Sequential(flatbed.Embedding(20, 4, seed=0), nn.Linear(4, 1)) for _ in range(2)]
    optimizers = [flatbed.optim.Adam(model, lr=0.01) for model in models]
    ids = torch.tensor([1, 2, 2])
    models[0](ids).sum().backward()
    optimizers[0].step()
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(models[0], optimizers[0]))
    assert saved["state"].keys() == {"0.weight", "1.weight", "1.bias"}
    dcp.set_optimizer_state_dict(models[1], optimizers[1], saved)
    for key, state in optimizers[0].state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizers[1].state_dict()["state"][key][name])


@pytest.mark.parametrize(
    ("saved", "loaded", "options"),
    [
        (
            torch.float32,
            torch.float32,
            {},
        ),  # torch's own loading would round moments to a bf16 parameter's dtype
        (torch.float32, torch.float32, {"master_weights": True}),
        (None, torch.bfloat16, {"state_dtype": torch.bfloat16}),  # which has the last word
    ],
)
def test_loading_keeps_the_dtype_of_moments(
    where: str, saved: Any, loaded: torch.dtype, options: Any
) -> None:
    model = build("mixed", where).to(low(where))
    optimizer = flatbed.optim.Adam(
        model.parameters(), state_dtype=saved, master_weights="master_weights" in options
    )
    steps(model, optimizer, range(2))
    again = flatbed.optim.Adam(model.parameters(), **options)
    again.load_state_dict(optimizer.state_dict())  # copied: both optimizers train on
    for p in model.parameters():
        assert again.state[p]["exp_avg"].dtype == loaded
        for key, value in optimizer.state[p].items():
            assert torch.equal(again.state[p][key], value.to(again.state[p][key].dtype))
            assert again.state[p][key].data_ptr() != value.data_ptr() or not value.numel()


def test_loading_a_lower_precision_does_not_lower_the_state(where: str) -> None:
    model, wide = build("mixed", where).bfloat16(), build("mixed", where)
    theirs, ours = optim.Adam(model.parameters()), flatbed.optim.Adam(wide.parameters())
    steps(model, theirs, range(1))
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[next(wide.parameters())]["exp_avg"].dtype == torch.float32


def test_a_state_dict_that_does_not_fit_changes_nothing(where: str) -> None:
    model = build("mixed", where)
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.01)
    steps(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    for breakage, error in (
        (lambda s: s["param_groups"].append(s["param_groups"][0]), ValueError),
        (lambda s: s["param_groups"][0]["params"].pop(), ValueError),
        (lambda s: s["param_groups"][0].update(lr=-1.0), ValueError),
        (lambda s: s["state"][1].update(exp_avg=torch.zeros(3)), flatbed.FlatbedError),
        (lambda s: s["state"][1].update(exp_avg="nothing"), flatbed.FlatbedError),
        (lambda s: s["state"][1].update(exp_avg=s["state"][1]["exp_avg"].long()), flatbed.FlatbedError),
        (lambda s: s["state"][1].pop("exp_avg_sq"), flatbed.FlatbedError),
    ):
        broken = copy.deepcopy(before)
        breakage(broken)
        with pytest.raises(error):
            optimizer.load_state_dict(broken)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for key, state in before["state"].items():
            assert all(torch.equal(state[name], after["state"][key][name]) for name in state)
    steps(model, optimizer, range(2, 3))  # training continues


def test_groups_that_share_a_learning_rate_do_so_after_loading() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    rates = []
    for kind in (flatbed.optim.Adam, torch.optim.Adam):
        optimizer: Any = kind([{"params": [p]} for p in params], lr=torch.tensor(0.1))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"].fill_(0.2)
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    assert rates[0] == rates[1]


def test_hooks_of_state_dicts() -> None:
    model = build("mixed")
    optimizer = flatbed.optim.Adam(model.parameters())
    steps(model, optimizer, range(1))
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "saved", "load", "loaded"]


def test_checkpoints_of_older_torch_and_of_other_devices_and_strides(where: str) -> None:
    ours, theirs = build("conv", where), build("conv", "cpu")
    a, b = adam_pair(ours, theirs)
    steps(theirs, b, range(2))
    saved = copy.deepcopy(b.state_dict())
    saved["param_groups"][0].pop("decoupled_weight_decay", None)
    for state in saved["state"].values():
        state["step"] = float(state["step"])
        state["exp_avg"] = state["exp_avg"].contiguous()
    ours.load_state_dict(theirs.state_dict())
    a.load_state_dict(saved)
    steps(ours, a, range(2, 4))
    steps(theirs, b, range(2, 4))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_equal(p.detach().cpu(), q.detach(), where if is_exact(where) else "tolerant")


@pytest.mark.parametrize(
    ("source", "into"),
    [
        (optim.SGD, flatbed.optim.AdamW),
        (optim.AdamW, flatbed.optim.SGD),
        (optim.AdamW, flatbed.optim.Lion),
        (optim.Adam, flatbed.optim.NAdam),
        (optim.RMSprop, flatbed.optim.AdamW),
        (optim.Adam, flatbed.optim.RMSprop),
    ],
)
def test_checkpoints_of_other_optimizers_are_refused(source: Any, into: Any) -> None:
    model = build("mixed")
    theirs = source(model.parameters(), lr=0.1, **({"momentum": 0.9} if source is optim.SGD else {}))
    steps(model, theirs, range(1))
    optimizer = into(model.parameters(), lr=0.01)
    with pytest.raises(flatbed.FlatbedError, match=f"another optimizer than {into.__name__}"):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert not optimizer.state_dict()["state"]


def test_repr_shows_what_was_asked_for() -> None:
    model = build("mixed")
    text = repr(flatbed.optim.Adam(model.parameters(), max_norm=1.0, master_weights=True))
    assert "max_norm: 1.0" in text
    assert "master_weights: True" in text
    assert "All groups" not in repr(flatbed.optim.Adam(model.parameters()))


def test_state_may_be_on_a_gpu_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Tensor.__dlpack__` of newer versions of torch refuses tensors of such a GPU."""

    def refuse(*_: Any, **__: Any) -> None:
        raise BufferError("Can't export tensors on a different CUDA device index")

    monkeypatch.setattr(torch.Tensor, "__dlpack__", refuse)
    ours, theirs = build("mixed"), build("mixed")
    for model, optimizer in (
        (ours, flatbed.optim.Adam(ours.parameters())),
        (theirs, optim.Adam(theirs.parameters())),
    ):
        steps(model, optimizer, range(2))
    assert_models_equal(ours, theirs, "interpreter")  # to a few units in the last place
    flatbed.FlatParams(ours)
