"""Embedding in the place of nn.Embedding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed.tables import whole_fields
from tests.tables.tables import STORAGES, dense_grad, storage_options

ROWS, DIM = 30, 5
EVERY = torch.arange(ROWS)


def made(storage: str = "host", folder: Path | None = None, **options: Any) -> flatbed.Embedding:
    return flatbed.Embedding(ROWS, DIM, **storage_options(storage, folder), **options)


def both(**options: Any) -> tuple[flatbed.Embedding, nn.Embedding]:
    """The same weights, ours and torch's."""
    theirs = nn.Embedding(ROWS, DIM, **options)
    return flatbed.Embedding.from_pretrained(theirs.weight.detach(), freeze=False, **options), theirs


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_forward_is_torchs(storage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    emb = made(storage, tmp_path, dtype=dtype)
    theirs = nn.Embedding.from_pretrained(emb.read_rows(EVERY))
    ids = torch.tensor([[0, 29, 7], [7, 7, 1]])
    found = emb(ids)
    assert found.dtype == dtype
    assert torch.equal(found, theirs(ids))
    assert found.requires_grad
    assert found.is_contiguous()


def test_output_may_be_changed_in_place() -> None:
    ours, theirs = both()
    for module in (ours, theirs):
        found = [module(torch.tensor(ids)).mul_(2).add_(1) for ids in (3, [[1, 2, 2]])]
        torch.stack([one.square().sum() for one in found]).sum().backward()
    assert torch.equal(dense_grad(ours.table), theirs.weight.grad)


def test_attributes_and_repr(tmp_path: Path) -> None:
    ours, theirs = both(padding_idx=-1)
    for name in ("num_embeddings", "embedding_dim", "padding_idx", "training"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.weight.shape == theirs.weight.shape
    assert (ours.table.num_embeddings, ours.table.embedding_dim) == (ROWS, DIM)
    assert ours.table.storage == "host"
    assert ours.table.nbytes == ROWS * 32
    assert ours.table.state_names == ()
    assert repr(ours) == "Embedding(30, 5, padding_idx=29, storage='host')"
    assert repr(made(dtype=torch.float16)) == "Embedding(30, 5, storage='host', dtype=torch.float16)"
    assert repr(ours.table) == "Table(30 × 5, torch.float32, host)"
    on_disk = made("disk", tmp_path)
    assert f"path='{tmp_path / 'table'}'" in repr(on_disk)
    assert str(tmp_path / "table") in repr(on_disk.table)


# ---- first weights


def test_first_weights(tmp_path: Path) -> None:
    """Equal for equal seeds in each storage; without a seed, torch's random numbers choose one."""
    rows = [made(storage, tmp_path, seed=3).read_rows(EVERY) for storage in STORAGES]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn += [made().read_rows(EVERY), flatbed.Embedding(2 * ROWS, DIM).read_rows(EVERY)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 4), {}, ValueError, "at least one row"),
        ((3.0, 4), {}, TypeError, "num_embeddings.*3.0"),
        ((3, "4"), {}, TypeError, "embedding_dim.*'4'"),
        ((3, 4), {"padding_idx": 3}, ValueError, "padding_idx.*3 rows; found 3"),
        ((3, 4), {"padding_idx": -4}, ValueError, "padding_idx"),
        ((3, 4), {"padding_idx": 1.5}, TypeError, "padding_idx.*1.5"),
        ((3, 4), {"path": "x"}, ValueError, "storage='host', path="),
        ((3, 4), {"dtype": torch.int64}, ValueError, "dtype.*found torch.int64"),
        ((3, 4), {"device": "meta"}, flatbed.FlatbedError, '"cpu" or "cuda".*"meta"'),
        ((3, 4), {"dtype": "float16"}, ValueError, "found 'float16'"),
        ((3, 4), {"init": "xavier"}, ValueError, r"init='xavier'.*low, high.$"),
        ((3, 4), {"init": ("normal", 0, 1e5), "dtype": torch.float16}, ValueError, "torch.float16 ends at"),
        ((3, 4), {"seed": "1"}, TypeError, "seed.*'1'"),
        ((3, 4), {"max_norm": True}, TypeError, "has no argument 'max_norm'.*optimizer's max_norm"),
        ((3, 4), {"_weight": True}, TypeError, "has no argument '_weight'.*from_pretrained"),
        ((3, 4), {"storge": True}, TypeError, "has no argument 'storge'.*help"),
        ((3, 4), {"replicate": "False"}, TypeError, r"replicate.*'False'"),
    ],
)
def test_wrong_values(arguments: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    for kind in (flatbed.Embedding, flatbed.EmbeddingBag):
        with pytest.raises(error, match=message):
            kind(*arguments, **options)


@pytest.mark.parametrize("storage", STORAGES)
def test_from_pretrained(storage: str, tmp_path: Path) -> None:
    weights, options = torch.randn(ROWS, DIM, dtype=torch.float64), storage_options(storage, tmp_path)
    emb = flatbed.Embedding.from_pretrained(weights, padding_idx=-1, **options)
    assert torch.equal(emb.read_rows(EVERY), weights)
    assert not emb([1]).requires_grad
    other = flatbed.Embedding.from_pretrained(weights + 1, init="zeros")
    weights.zero_()
    assert emb.read_rows([1]).any()
    if storage != "disk":
        for one in (emb, other):
            one.table.resize(ROWS + 2)
        assert emb.read_rows([ROWS, ROWS + 1]).unique().numel() == 2 * DIM  # drawn
        assert not other.read_rows([ROWS]).any()
        return
    saved = flatbed.load_table(options["path"], read_only=True)  # the file holds the weights from the start
    assert torch.equal(saved.read_rows(EVERY), emb.read_rows(EVERY))
    before = options["path"].read_bytes()
    with pytest.raises(flatbed.FlatbedError, match=r"exists, .* choose another"):
        flatbed.Embedding.from_pretrained(weights, **options)
    assert options["path"].read_bytes() == before


def test_from_pretrained_draws_no_random_numbers() -> None:
    """As in torch: layers that are built after it begin the same."""
    before = torch.get_rng_state()
    first, same = (flatbed.Embedding.from_pretrained(torch.ones(2, DIM)) for _ in range(2))
    other = flatbed.Embedding.from_pretrained(torch.zeros(2, DIM))
    assert torch.equal(torch.get_rng_state(), before)
    for emb in (first, same, other):
        emb.table.resize(3)
    assert torch.equal(first.read_rows([2]), same.read_rows([2]))
    assert not torch.equal(first.read_rows([2]), other.read_rows([2]))


def test_from_pretrained_takes_numpy_parameters_and_other_dtypes() -> None:
    values = np.random.default_rng(0).random((4, 3)).astype(np.float32)
    assert np.array_equal(flatbed.Embedding.from_pretrained(values).weight.numpy(), values)
    param = nn.Parameter(torch.randn(4, 3))
    low = flatbed.Embedding.from_pretrained(param, dtype=torch.bfloat16)
    assert torch.equal(low.weight, param.detach().bfloat16())


@pytest.mark.parametrize("storage", STORAGES)
def test_padding_row_begins_with_zeros_and_stays(storage: str, tmp_path: Path) -> None:
    emb = made(storage, tmp_path, padding_idx=-4)
    optimizer = flatbed.optim.SGD(emb, lr=0.1, weight_decay=0.1)
    assert not emb.read_rows([26]).any()
    emb.write_rows([26], torch.ones(1, DIM))
    emb([26, 26, 5]).sum().backward()
    optimizer.step()
    assert emb.table.grad_rows.tolist() == [5]
    assert torch.equal(emb.read_rows([26]), torch.ones(1, DIM))


# ---- state dicts


def with_head(emb: nn.Module) -> nn.Sequential:
    return nn.Sequential(emb, nn.Linear(DIM, 1))


@pytest.mark.parametrize("storage", STORAGES)
def test_state_dict_goes_to_torch_and_back(storage: str, tmp_path: Path) -> None:
    ours, theirs = with_head(made(storage, tmp_path)), with_head(nn.Embedding(ROWS, DIM))
    flatbed.optim.Adam(ours)  # records are wider then than the weights
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    weight = state["0.weight"]
    assert weight.is_contiguous()
    assert weight.untyped_storage().nbytes() == ROWS * DIM * 4
    assert theirs.load_state_dict(state) == theirs.load_state_dict(theirs.state_dict())
    assert torch.equal(theirs[0].weight, ours[0].read_rows(EVERY))
    fresh = with_head(nn.Embedding(ROWS, DIM))
    ours.load_state_dict(fresh.state_dict())
    ids = torch.tensor([1, 5, 29])
    assert torch.equal(ours(ids), fresh(ids))


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda weight: weight.copy_(torch.ones(ROWS, DIM)),
    "item": lambda weight: weight.__setitem__(slice(2, 4), 1.0),
    "rows": lambda weight: weight[2:4].zero_(),
    "data": lambda weight: weight.data.zero_(),
    "out": lambda weight: torch.add(weight, 1, out=weight),
    "init": nn.init.zeros_,
    "init by name": lambda weight: nn.init.constant_(weight, 3.0),
    "detached": lambda weight: weight.detach().fill_(3.0),
    "part of detached": lambda weight: weight.detach().view(-1)[4:].zero_(),
    "items of detached": lambda weight: weight.detach().__setitem__(2, 1.0),
    "foreach": lambda weight: torch._foreach_zero_([weight]),
    "foreach of detached": lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_writing_into_a_state_dict_raises(how: str) -> None:
    """In torch it changes the model; here it would change a copy."""
    model = with_head(made())
    for options in ({}, {"keep_vars": True}):
        with pytest.raises(flatbed.FlatbedError, match=r"copy.*emb\.weight.*write_rows"):
            IN_PLACE[how](model.state_dict(**options)["0.weight"])


def test_weights_in_a_state_dict_are_ordinary_otherwise(tmp_path: Path) -> None:
    emb, theirs = made(), nn.Embedding(ROWS, DIM)
    weight = emb.state_dict()["weight"]
    found = [weight + 1, weight.clone(), copy.deepcopy(weight), weight.T @ weight]
    assert [type(one) for one in found] == [Tensor] * len(found)
    found[2].mul_(2)
    torch.zeros(ROWS, DIM).copy_(weight)
    torch.save({"weight": weight}, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)["weight"]
    assert type(loaded) is Tensor
    theirs.load_state_dict(emb.state_dict(), assign=True)
    emb.load_state_dict({"weight": loaded.mul_(3)})
    assert torch.equal(emb.weight, 3 * weight)
    theirs = copy.deepcopy(theirs)
    theirs(torch.tensor([1])).sum().backward()
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    assert torch.equal(theirs.weight[1], weight[1] - 1)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_load_into_state_dicts(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    emb, other = made(), made()
    dcp.save({"model": emb.state_dict()}, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    assert torch.equal(other.weight, emb.weight)  # as with torch's state dicts
    other.load_state_dict(state["model"])
    assert torch.equal(other.weight, emb.weight)


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_copies_into_detached_entries_of_a_state_dict_take_effect(storage: str, tmp_path: Path) -> None:
    emb, values = made(storage, tmp_path), torch.rand(ROWS, DIM)
    before = emb.read_rows(EVERY)
    for part in (slice(3, 5), (slice(None), 1), slice(None)):
        emb.state_dict()["weight"].detach()[part].copy_(values[part])
        before[part] = values[part]
        assert torch.equal(emb.read_rows(EVERY), before)


@pytest.mark.parametrize(
    ("dropped", "added"),
    [
        (["0.weight"], {}),
        ([], {"0.bias": torch.zeros(1)}),
        (["0.weight"], {"0.bias": torch.zeros(1)}),
        ([], {"0.weight": torch.zeros(ROWS + 1, DIM)}),
    ],
    ids=["missing", "unexpected", "both", "size"],
)
def test_loading_what_does_not_fit_reads_as_torchs(dropped: list[str], added: dict[str, Tensor]) -> None:
    messages = []
    for emb in (made(), nn.Embedding(ROWS, DIM)):
        model, before = with_head(emb), emb.weight.detach().clone()
        state = {name: value for name, value in model.state_dict().items() if name not in dropped} | added
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        messages.append(str(caught.value))
        assert torch.equal(emb.weight, before)
        if "0.weight" not in added:
            messages[-1] += str(model.load_state_dict(state, strict=False))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("assign", [False, True])
def test_loading_copies_and_keeps_state_and_dtype(assign: bool) -> None:
    emb = made(dtype=torch.bfloat16)
    optimizer = flatbed.optim.Adam(emb)
    emb([1]).sum().backward()
    optimizer.step()
    state = emb.table.read_state("exp_avg", [1])
    weights = torch.full((ROWS, DIM), 1.5, dtype=torch.float64)
    emb.load_state_dict({"weight": weights}, assign=assign)
    weights.zero_()
    assert torch.equal(emb.weight, torch.full((ROWS, DIM), 1.5, dtype=torch.bfloat16))
    assert torch.equal(emb.table.read_state("exp_avg", [1]), state)


def test_table_too_large_for_memory_says_to_save_it(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb)
    emb([1]).sum().backward()
    optimizer.step()
    monkeypatch.setattr(whole_fields, "available_bytes", lambda: 100)
    for ask in (with_head(emb).state_dict, optimizer.state_dict):
        with pytest.raises(flatbed.FlatbedError, match=r"table\.save\(path\) or flatbed\.save_checkpoint"):
            ask()


# ---- modes, freezing


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("ahead", [False, True])
def test_table_first_used_in_inference_mode_can_be_trained(storage: str, ahead: bool, tmp_path: Path) -> None:
    emb = made(storage, tmp_path)
    optimizer = flatbed.optim.Adam(emb, lr=0.1) if ahead else None
    with torch.inference_mode():
        before = emb([1, 2]).clone()
    with torch.no_grad():
        assert not emb([1, 2]).requires_grad
    optimizer = optimizer or flatbed.optim.Adam(emb, lr=0.1)
    emb([1]).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        assert [torch.equal(*each) for each in zip(emb([1, 2]), before, strict=True)] == [False, True]
    emb.write_rows([2], torch.zeros(1, DIM))
    if storage != "disk":
        emb.weight.fill_(1.0)


FREEZE: dict[str, Callable[[flatbed.Embedding, bool], Any]] = {
    "module": lambda emb, value: emb.requires_grad_(value),
    "table": lambda emb, value: emb.table.requires_grad_(value),
    "weight": lambda emb, value: emb.weight.requires_grad_(value),
    "weight attribute": lambda emb, value: setattr(emb.weight, "requires_grad", value),
    "table attribute": lambda emb, value: setattr(emb.table, "requires_grad", value),
}


@pytest.mark.parametrize("way", FREEZE)
def test_freezing(way: str) -> None:
    emb, head = made(), nn.Linear(DIM, 1)
    optimizer = flatbed.optim.SGD([*head.parameters(), emb.table], lr=0.1)
    before = emb.weight.clone()
    for trains in (False, True):
        FREEZE[way](emb, trains)
        assert emb.table.requires_grad == emb.weight.requires_grad == emb([1]).requires_grad == trains
        head(emb([1])).sum().backward()
        optimizer.step()
        assert (emb.table.grad is not None) == trains
        assert torch.equal(emb.weight, before) != trains


# ---- modules


def test_initialisers_that_look_for_embeddings() -> None:
    """Also those of torch: `isinstance`, `reset_parameters`, the padding row."""
    model = nn.Sequential(made(padding_idx=3), flatbed.EmbeddingBag(ROWS, DIM))

    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            nn.init.constant_(module.weight, 2.0)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    model.apply(init)
    assert [module.weight[:, 0].sum() for module in model] == [2.0 * (ROWS - 1), 2.0 * ROWS]
    assert not model[0].read_rows([3]).any()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("used", [False, True])
def test_reset_parameters_draws_again(storage: str, used: bool, tmp_path: Path) -> None:
    emb = made(storage, tmp_path, padding_idx=3, init=("uniform", 5, 6))
    before = emb.read_rows(EVERY) if used else torch.zeros(ROWS, DIM)
    torch.manual_seed(3)
    emb.reset_parameters()
    torch.manual_seed(3)
    expected = flatbed.Embedding(ROWS, DIM, 3, init=("uniform", 5, 6)).read_rows(EVERY)
    assert torch.equal(emb.read_rows(EVERY), expected)
    assert not torch.equal(expected, before)
    emb.table.close(discard=True)


def test_table_shared_by_modules_counts_once() -> None:
    """Two towers and a nested bag over the same rows."""
    first = flatbed.Embedding(ROWS, DIM, padding_idx=2, init="zeros")
    second = flatbed.Embedding.from_table(first.table)
    bag = flatbed.EmbeddingBag.from_table(first.table, mode="sum")
    model = nn.ModuleList([nn.Sequential(first), nn.Sequential(nn.Sequential(second), bag), first])
    other = flatbed.Embedding(3, DIM)
    model.append(other)
    assert flatbed.tables(model) == list(model.parameters()) == [first.table, other.table]
    assert second.padding_idx == 2
    optimizer = flatbed.optim.SGD(model, lr=1.0)
    assert optimizer.param_groups[0]["param_names"] == ["0.0.weight", "3.weight"]
    (first([1, 2]).sum() + second([1, 3]).sum() + bag([[1, 1]]).sum()).backward()
    optimizer.step()
    assert first.weight[:, 0].tolist() == [0, -4, 0, -1] + [0] * (ROWS - 4)
    assert torch.equal(first.weight, second.weight)


def test_changes_of_dtype_leave_the_table_alone() -> None:
    model = nn.Sequential(made(), nn.Linear(DIM, 2))
    emb: Any = model[0]
    before = emb.weight.clone()
    for change in (model.double, model.half, model.bfloat16, lambda: model.to(torch.float64), model.float):
        change()
        assert emb.weight.dtype == emb([1]).dtype == torch.float32
    model.to(memory_format=torch.channels_last).cpu().to("cpu").type(torch.float32).share_memory()
    assert torch.equal(emb.weight, before)


def test_devices_that_cannot_compute_are_refused() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    before = emb.weight.clone()
    with pytest.raises(flatbed.FlatbedError, match=r'computes on "cpu" or "cuda".*"meta"'):
        nn.Sequential(emb).to("meta")
    with torch.device("meta"), pytest.raises(flatbed.FlatbedError, match='with device="cpu"'):
        flatbed.Embedding(ROWS, DIM)
    assert torch.equal(emb.weight, before)
    nn.Sequential(emb).to_empty(device="cpu")
    assert torch.equal(emb.weight, before)


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """Tensors made without a device have no memory, and fail when they are read."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("meta_by_default")
@pytest.mark.parametrize("cache_rows", [0, 4])
@pytest.mark.parametrize("storage", STORAGES)
def test_default_device_is_ignored(storage: str, cache_rows: int, tmp_path: Path) -> None:
    cached = {"cache_rows": cache_rows} if storage != "device" else {}
    emb = made(storage, tmp_path, device="cpu", padding_idx=1, **cached)
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    for options in ({"max_norm": 1.0}, {"per_row_steps": True}):
        emb.table.drop_state()
        optimizer = flatbed.optim.Adam(emb, **options)
        for _ in range(2):
            emb([1, 2, 2]).sum().backward()
            bag([[1, 3]]).sum().backward()
            emb.write_rows([2, 2], torch.ones(2, DIM, device="cpu"))
            assert float(nn.utils.clip_grad_norm_(emb.parameters(), 1.0)) > 0
            optimizer.step()
            optimizer.zero_grad()
        emb.table.resize(emb.num_embeddings + 5)
        optimizer.load_state_dict(optimizer.state_dict())
        emb.load_state_dict(emb.state_dict())
        emb.table.warm([1, 2], counts=[3, 1])
        emb.table.save(tmp_path / "saved.safetensors")
    weights = torch.ones(3, 2, device="cpu")
    assert flatbed.Embedding.from_pretrained(weights)([1]).device.type == "cpu"


@pytest.mark.usefixtures("meta_by_default")
def test_the_probe_of_an_optimizer_and_flat_parameters_ignore_the_default_device() -> None:
    emb, linear = flatbed.Embedding(ROWS, DIM, device="cpu"), nn.Linear(3, 3, device="cpu")
    flatbed.optim.from_torch(torch.optim.Adamax, emb.parameters())
    flat = flatbed.FlatParams(linear)
    linear(torch.ones(1, 3, device="cpu")).sum().backward()
    assert flat.grad_norm() > 0
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in flat.originals())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what comes after a graph break
@pytest.mark.parametrize(("backend", "cache_rows"), [("eager", 0), ("aot_eager", 2)])
def test_compiled_models(backend: str, cache_rows: int) -> None:
    torch._dynamo.reset()
    embeddings = both()
    embeddings[0].table.set_cache(cache_rows)
    models = [with_head(emb) for emb in embeddings]
    models[0][1].load_state_dict(models[1][1].state_dict())
    for model, optim in zip(models, (flatbed.optim, torch.optim), strict=True):
        optimizer, compiled = optim.SGD(model.parameters(), lr=0.1), torch.compile(model, backend=backend)
        for step in range(4):
            ids = torch.tensor([step, 2, 2])
            (compiled(ids) + compiled(ids + 3)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(value, models[1].state_dict()[name])


# ---- files


def test_existing_file_is_named_once_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only if it is a table."""
    made("disk", tmp_path, seed=3, padding_idx=2, init="uniform").table.checkpoint()
    assert capfd.readouterr().err == ""
    for options in ({}, {"seed": 3}, {"init": "uniform"}):
        made("disk", tmp_path, padding_idx=2, **options).table.close()
    said = capfd.readouterr().err
    assert said.count(f"{tmp_path / 'table'} exists") == 1
    assert "resume=True silences this" in said
    (tmp_path / "table").write_bytes(b"something else")
    with pytest.raises(flatbed.errors.DamagedFileError, match="table is no table of flatbed"):
        made("disk", tmp_path).table.checkpoint()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"init": "normal"},
        {"padding_idx": None},
        {"padding_idx": 3},
        {"dtype": torch.float64},
        {"embedding_dim": 6},
    ],
    ids=str,
)
def test_existing_file_must_be_what_was_asked_for(other: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM, "seed": 3, "init": "uniform"}
    options |= {"padding_idx": 2, **storage_options("disk", tmp_path)}
    first = flatbed.Embedding(**options)
    expected = first.read_rows(EVERY)
    first.table.close()
    with pytest.raises(flatbed.FlatbedError, match=r"table.*(asked for|load_table)"):
        flatbed.Embedding(**{**options, **other})
    again = flatbed.EmbeddingBag(resume=True, **options)
    assert torch.equal(again.read_rows(EVERY), expected)
    again.table.close()


def test_resume_says_if_a_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(flatbed.FlatbedError, match=r"resume=True.*is missing"):
        made("disk", tmp_path, resume=True)
    made("disk", tmp_path, resume=False, seed=1).table.checkpoint()
    with pytest.raises(flatbed.FlatbedError, match=r"exists, and resume=False"):
        made("disk", tmp_path, resume=False, seed=1)
    with pytest.raises(ValueError, match="resume"):
        made(resume=True)


def test_given_weights_on_disk_can_be_resumed(tmp_path: Path) -> None:
    """The second start of a program goes on with the rows of the file, and not with the given ones."""
    given: Any = {"storage": "disk", "path": tmp_path / "rows.bed", "freeze": False}
    with flatbed.Embedding.from_pretrained(torch.zeros(5, 3), **given).table as table:
        table.write_rows([2], torch.ones(1, 3))
    with pytest.raises(flatbed.FlatbedError, match=r"exists, .* pass resume=True"):
        flatbed.Embedding.from_pretrained(torch.zeros(5, 3), **given)
    emb = flatbed.Embedding.from_pretrained(torch.full((5, 3), 7.0), **given, resume=True)
    assert emb.read_rows(range(5)).sum(1).tolist() == [0, 0, 3, 0, 0]
    emb.table.close()
    with pytest.raises(flatbed.FlatbedError, match=r"resume=True, and .* is missing"):
        flatbed.Embedding.from_pretrained(
            torch.zeros(5, 3), storage="disk", path=tmp_path / "other.bed", resume=True
        )


def test_functional_call_cannot_replace_a_table() -> None:
    emb = flatbed.Embedding(5, 3)
    for weight in (torch.zeros(5, 3), *emb.state_dict().values()):
        with pytest.raises(flatbed.FlatbedError, match="was replaced by a"):
            torch.func.functional_call(emb, {"weight": weight}, torch.tensor([1]))
    assert emb(torch.tensor([1])).shape == (1, 3)
