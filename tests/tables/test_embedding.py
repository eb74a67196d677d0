"""Embedding in the place of nn.Embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed.tables import embedding

ROWS, DIM = 30, 5
STORAGES = ("host", "device", "disk")


def made(storage: str = "host", folder: Path | None = None, **options: Any) -> flatbed.Embedding:
    path = folder / "table" if storage == "disk" and folder is not None else None
    return flatbed.Embedding(ROWS, DIM, storage=storage, path=path, **options)


def both(**options: Any) -> tuple[flatbed.Embedding, nn.Embedding]:
    """The same weights, ours and torch's."""
    theirs = nn.Embedding(ROWS, DIM, **options)
    return flatbed.Embedding.from_pretrained(theirs.weight.detach(), freeze=False, **options), theirs


def dense_grad(table: flatbed.Table) -> Tensor:
    """A table's gradient in the form of nn.Embedding's."""
    dense = torch.zeros(table.num_embeddings, table.embedding_dim)
    return dense if table.grad is None else dense.index_copy(0, table.grad_rows, table.grad.clone())


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3), (2, 1, 3)])
def test_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    ours, theirs = both()
    ids = torch.randint(ROWS, shape)
    for module in (ours, theirs):
        found = module(ids)
        found.mul_(2).add_(1)
        found.square().sum().backward()
    assert torch.equal(dense_grad(ours.table), theirs.weight.grad)


# ---- what it is made of


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_forward_is_torchs(storage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    emb = made(storage, tmp_path, dtype=dtype)
    theirs = nn.Embedding.from_pretrained(emb.read_rows(range_of(ROWS)))
    ids = torch.tensor([[0, 29, 7], [7, 7, 1]])
    found = emb(ids)
    assert found.dtype == dtype
    assert torch.equal(found, theirs(ids))
    assert found.requires_grad
    assert found.is_contiguous()


def range_of(n: int) -> Tensor:
    return torch.arange(n)


def test_attributes_are_torchs() -> None:
    ours, theirs = both(padding_idx=3)
    for name in ("num_embeddings", "embedding_dim", "padding_idx", "training"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.weight.shape == theirs.weight.shape
    assert (ours.table.num_embeddings, ours.table.embedding_dim) == (ROWS, DIM)
    assert ours.table.storage == "host"
    assert ours.table.nbytes == ROWS * 32
    assert ours.table.state_names == ()


def test_repr() -> None:
    assert repr(made()) == "Embedding(30, 5, storage='host')"
    assert repr(made(padding_idx=-1)) == "Embedding(30, 5, padding_idx=29, storage='host')"
    assert repr(made(dtype=torch.float16)) == "Embedding(30, 5, storage='host', dtype=torch.float16)"
    assert repr(made().table) == "Table(30 × 5, torch.float32, host)"
    assert "(0): Embedding(30, 5, storage='device')" in repr(nn.Sequential(made("device")))


def test_repr_of_a_table_on_disk_names_its_file(tmp_path: Path) -> None:
    emb = made("disk", tmp_path)
    assert f"path='{tmp_path / 'table'}'" in repr(emb)
    assert str(tmp_path / "table") in repr(emb.table)


def test_default_dtype_is_used() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert made().table._storage.config.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_same_seed_gives_the_same_weights_everywhere(tmp_path: Path) -> None:
    rows = [made(storage, tmp_path, seed=3).read_rows(range_of(ROWS)) for storage in STORAGES]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], made(seed=4).read_rows(range_of(ROWS)))


# ---- what is refused


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
@pytest.mark.parametrize("kind", [flatbed.Embedding, flatbed.EmbeddingBag])
def test_arguments_of_torch_that_are_missing_raise(kind: Any, option: str) -> None:
    with pytest.raises(TypeError, match=option):
        kind(ROWS, DIM, **{option: True})


def test_tables_start_different_and_repeatably() -> None:
    def rows() -> list[Tensor]:
        torch.manual_seed(5)
        return [made().read_rows(range_of(ROWS)), flatbed.Embedding(2 * ROWS, DIM).read_rows(range_of(ROWS))]

    first, second = rows(), rows()
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0, 4), {}, ValueError, "at least one row"),
        ((4, 0), {}, ValueError, "at least one row"),
        ((-3, 4), {}, ValueError, "at least one row"),
        ((3.0, 4), {}, TypeError, "num_embeddings must be an integer; found 3.0"),
        ((3, "4"), {}, TypeError, "embedding_dim must be an integer; found '4'"),
        ((3, 4, 3), {}, ValueError, "padding_idx must be within the 3 rows; found 3"),
        ((3, 4, -4), {}, ValueError, "padding_idx must be within"),
        ((3, 4, 1.5), {}, TypeError, "padding_idx must be an integer; found 1.5"),
        ((3, 4), {"storage": "gpu"}, ValueError, "storage must be one of host, disk, device; found 'gpu'"),
        ((3, 4), {"storage": "disk"}, ValueError, "needs a path"),
        ((3, 4), {"path": "x"}, ValueError, "storage='host', path="),
        ((3, 4), {"dtype": torch.int64}, ValueError, "dtype must be one of .*found torch.int64"),
        ((3, 4), {"dtype": "float32"}, ValueError, "dtype must be one of"),
        ((3, 4), {"device": "meta"}, flatbed.FlatbedError, 'computes on "cpu" or "cuda".*"meta"'),
        ((3, 4), {"device": "somewhere"}, ValueError, "somewhere"),
        ((3, 4), {"init": "xavier"}, ValueError, "init='xavier' is not known; expected one of"),
        ((3, 4), {"init": ("normal", 0)}, ValueError, "is not known"),
        ((3, 4), {"init": float("nan")}, ValueError, "not a finite number"),
        ((3, 4), {"init": 1e6, "dtype": torch.float16}, ValueError, "torch.float16 ends at"),
        ((3, 4), {"seed": "1"}, TypeError, "seed must be an integer; found '1'"),
    ],
)
def test_wrong_values(arguments: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    for kind in (flatbed.Embedding, flatbed.EmbeddingBag):
        with pytest.raises(error, match=message):
            kind(*arguments, **options)


# ---- padding


@pytest.mark.parametrize("padding", [0, 7, -1, -30])
def test_padding(padding: int) -> None:
    ours, theirs = both(padding_idx=padding)
    assert ours.padding_idx == theirs.padding_idx
    ids = torch.tensor([[7, 0, 29], [1, 7, 2], [0, 29, 29]])
    with torch.no_grad():
        ours.weight[padding] = theirs.weight[padding] = 5.0
    assert torch.equal(ours(ids), theirs(ids))
    for emb in (ours, theirs):
        emb(ids).pow(2).sum().backward()
    assert torch.equal(dense_grad(ours.table), theirs.weight.grad)
    assert theirs.padding_idx not in ours.table.grad_rows.tolist()  # type: ignore[union-attr]


def test_padding_row_begins_with_zeros_and_stays(tmp_path: Path) -> None:
    for storage in STORAGES:
        emb = made(storage, tmp_path, padding_idx=4)
        optimizer = flatbed.optim.SGD(emb, lr=0.1, weight_decay=0.1)
        assert not emb.read_rows([4]).any()
        emb.write_rows([4], torch.ones(1, DIM))
        emb([4, 4, 5]).sum().backward()
        optimizer.step()
        assert torch.equal(emb.read_rows([4]), torch.ones(1, DIM))


def test_nothing_but_padding() -> None:
    emb = made(padding_idx=4)
    optimizer = flatbed.optim.Adam(emb)
    before = emb.weight.clone()
    emb([4, 4]).sum().backward()
    assert emb.table.grad.shape == (0, DIM)  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(emb.weight, before)


# ---- from_pretrained


@pytest.mark.parametrize("storage", STORAGES)
def test_from_pretrained(storage: str, tmp_path: Path) -> None:
    weights = torch.randn(ROWS, DIM, dtype=torch.float64)
    options: dict[str, Any] = {"path": tmp_path / "table"} if storage == "disk" else {}
    emb = flatbed.Embedding.from_pretrained(weights, storage=storage, padding_idx=-1, **options)
    assert torch.equal(emb.read_rows(range_of(ROWS)), weights)
    assert emb.padding_idx == ROWS - 1
    assert not emb.table.requires_grad
    assert not emb([1]).requires_grad
    weights.zero_()
    assert emb.read_rows([1]).any()


def test_from_pretrained_takes_numpy_parameters_and_other_dtypes() -> None:
    values = np.random.default_rng(0).random((4, 3)).astype(np.float32)
    assert np.array_equal(flatbed.Embedding.from_pretrained(values).weight.numpy(), values)  # type: ignore[arg-type]
    param = nn.Parameter(torch.randn(4, 3))
    assert torch.equal(flatbed.Embedding.from_pretrained(param).weight, param.detach())
    low = flatbed.Embedding.from_pretrained(param, dtype=torch.bfloat16)
    assert torch.equal(low.weight, param.detach().bfloat16())


def test_from_pretrained_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(num_embeddings, embedding_dim\); found \(3,\)"):
        flatbed.Embedding.from_pretrained(torch.zeros(3))
    with pytest.raises(ValueError, match="dtype must be one of"):
        flatbed.Embedding.from_pretrained(torch.zeros(3, 2, dtype=torch.int64))
    taken = tmp_path / "table"
    taken.write_bytes(b"mine")
    with pytest.raises(flatbed.FlatbedError, match="would overwrite"):
        flatbed.Embedding.from_pretrained(torch.zeros(3, 2), storage="disk", path=taken)
    assert taken.read_bytes() == b"mine"


# ---- state dicts


class Model(nn.Module):
    def __init__(self, emb: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"rows": emb})
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner["rows"](ids))
        return out


@pytest.mark.parametrize("storage", STORAGES)
def test_state_dict_goes_to_torch_and_back(storage: str, tmp_path: Path) -> None:
    ours, theirs = Model(made(storage, tmp_path)), Model(nn.Embedding(ROWS, DIM))
    flatbed.optim.Adam(ours)  # records are wider then than the weights
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    weight = state["inner.rows.weight"]
    assert type(weight) is Tensor
    assert weight.is_contiguous()
    assert weight.untyped_storage().nbytes() == ROWS * DIM * 4
    assert theirs.load_state_dict(state) == theirs.load_state_dict(theirs.state_dict())
    assert torch.equal(theirs.inner["rows"].weight, ours.inner["rows"].read_rows(range_of(ROWS)))  # type: ignore[operator,arg-type]
    fresh = Model(nn.Embedding(ROWS, DIM))
    ours.load_state_dict(fresh.state_dict())
    ids = torch.tensor([1, 5, 29])
    assert torch.equal(ours(ids), fresh(ids))


def test_state_dict_survives_torch_save(tmp_path: Path) -> None:
    emb = made()
    torch.save(emb.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["weight"], emb.weight)
    assert (tmp_path / "model.pt").stat().st_size < 4096


def test_state_dict_is_a_copy() -> None:
    emb = made()
    emb.state_dict()["weight"].zero_()
    assert emb.weight.any()


@pytest.mark.parametrize("change", ["missing", "unexpected", "size", "both"])
def test_loading_what_does_not_fit_reads_as_torchs(change: str) -> None:
    messages = []
    for emb in (made(), nn.Embedding(ROWS, DIM)):
        model = Model(emb)
        state = model.state_dict()
        if change in ("missing", "both"):
            del state["inner.rows.weight"]
        if change in ("unexpected", "both"):
            state["inner.rows.bias"] = torch.zeros(1)
        if change == "size":
            state["inner.rows.weight"] = torch.zeros(ROWS + 1, DIM)
        before = emb.weight.detach().clone()  # type: ignore[union-attr,operator]
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        messages.append(str(caught.value))
        assert torch.equal(emb.weight, before)  # type: ignore[arg-type]
        if change != "size":
            answer = model.load_state_dict(state, strict=False)
            messages[-1] += str((answer.missing_keys, answer.unexpected_keys))
    assert messages[0] == messages[1]


def test_assign_copies() -> None:
    emb, weights = made(), torch.randn(ROWS, DIM)
    emb.load_state_dict({"weight": weights}, assign=True)
    assert torch.equal(emb.weight, weights)
    weights.zero_()
    assert emb.weight.any()


def test_loading_keeps_state_and_dtype() -> None:
    emb = made(dtype=torch.bfloat16)
    optimizer = flatbed.optim.Adam(emb)
    emb([1]).sum().backward()
    optimizer.step()
    state = emb.table.read_state("exp_avg", [1])
    emb.load_state_dict({"weight": torch.full((ROWS, DIM), 1.5, dtype=torch.float64)})
    assert torch.equal(emb.weight, torch.full((ROWS, DIM), 1.5, dtype=torch.bfloat16))
    assert torch.equal(emb.table.read_state("exp_avg", [1]), state)


def test_table_too_large_for_memory_says_to_save_it(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = made()
    optimizer = flatbed.optim.Adam(emb)
    emb([1]).sum().backward()
    optimizer.step()
    monkeypatch.setattr(embedding, "available_bytes", lambda: 100)
    for ask in (Model(emb).state_dict, optimizer.state_dict):
        with pytest.raises(flatbed.FlatbedError, match=r"table\.save\(path\) or flatbed\.save_checkpoint"):
            ask()


# ---- modes


def test_eval_no_grad_and_inference_mode() -> None:
    emb = made()
    ids = torch.tensor([1, 2])
    expected = emb(ids).detach()
    assert emb.eval()(ids).requires_grad
    with torch.no_grad():
        assert not emb(ids).requires_grad
    with torch.inference_mode():
        found = emb(ids)
        assert found.is_inference()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("ahead", [False, True])
def test_table_first_used_in_inference_mode_can_be_trained(storage: str, ahead: bool, tmp_path: Path) -> None:
    emb = made(storage, tmp_path)
    optimizer = flatbed.optim.Adam(emb, lr=0.1) if ahead else None
    with torch.inference_mode():
        before = emb([1, 2]).clone()
    optimizer = optimizer or flatbed.optim.Adam(emb, lr=0.1)
    emb([1]).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        assert not torch.equal(emb([1]), before[:1])
        assert torch.equal(emb([2]), before[1:])
    emb.write_rows([2], torch.zeros(1, DIM))
    if storage != "disk":
        emb.weight.fill_(1.0)
        assert not emb.table._storage.ensure_layout().memory.is_inference()  # type: ignore[union-attr]


def test_nothing_is_recorded_without_gradients() -> None:
    emb = made()
    with torch.no_grad():
        emb([1])
    emb([1])
    assert emb.table.grad is None
    assert emb.table.grad_rows is None


# ---- freezing


def ways_to_freeze(emb: flatbed.Embedding) -> dict[str, Any]:
    def by_weight(value: bool) -> None:
        emb.weight.requires_grad = value

    def by_table(value: bool) -> None:
        emb.table.requires_grad = value

    return {
        "module": emb.requires_grad_,
        "table": emb.table.requires_grad_,
        "weight": emb.weight.requires_grad_,
        "weight attribute": by_weight,
        "table attribute": by_table,
    }


@pytest.mark.parametrize("way", ways_to_freeze(flatbed.Embedding(1, 1)))
def test_freezing(way: str) -> None:
    emb = made()
    head = nn.Linear(DIM, 1)
    optimizer = flatbed.optim.SGD([*head.parameters(), emb.table], lr=0.1)
    before = emb.weight.clone()
    ways_to_freeze(emb)[way](False)
    assert not emb.table.requires_grad
    assert not emb.weight.requires_grad
    assert not emb([1]).requires_grad
    head(emb([1])).sum().backward()
    optimizer.step()
    assert emb.table.grad is None
    assert torch.equal(emb.weight, before)
    ways_to_freeze(emb)[way](True)
    assert emb.weight.requires_grad
    head(emb([1])).sum().backward()
    optimizer.step()
    assert not torch.equal(emb.weight, before)


def test_frozen_table_needs_no_optimizer() -> None:
    emb, head = made().requires_grad_(False), nn.Linear(DIM, 1)
    for _ in range(2):
        head(emb([1])).sum().backward()
    assert emb.table.grad is None
    assert torch.equal(head.weight.grad, 2 * emb.read_rows([1]))


# ---- gradients, however they come about


def check_steps(losses: Any, **options: Any) -> None:
    """Train ours and torch's by a function of an embedding; gradients and weights must be equal."""
    ours, theirs = both()
    optimizers = flatbed.optim.SGD(ours, lr=0.1, **options), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(2):
        for emb, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            losses(emb)
        torch.testing.assert_close(dense_grad(ours.table), theirs.weight.grad, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours.weight, theirs.weight.detach())


def test_retain_graph_twice() -> None:
    def losses(emb: Any) -> None:
        loss = emb(torch.tensor([1, 2, 2])).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check_steps(losses)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_gradients_once(reentrant: bool) -> None:
    def losses(emb: Any) -> None:
        scale = torch.ones(1, requires_grad=True)

        def part(scale: Tensor) -> Tensor:
            out: Tensor = emb(torch.tensor([1, 2, 2])) * scale
            return out.tanh()

        out = torch.utils.checkpoint.checkpoint(part, scale, use_reentrant=reentrant)
        (out.pow(2).sum() + emb(torch.tensor([2])).sum()).backward()

    check_steps(losses)


def test_gradient_penalty_on_the_rows() -> None:
    def losses(emb: Any) -> None:
        rows = emb(torch.tensor([1, 2, 2]))
        loss = rows.pow(3).sum()
        (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
        (loss + slope.pow(2).sum()).backward()

    check_steps(losses)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_leaves_no_graph_behind() -> None:
    emb = made()
    emb([1, 1]).pow(3).sum().backward(create_graph=True)
    assert not emb.table.grad.requires_grad  # type: ignore[union-attr]


def test_backward_for_other_inputs_only() -> None:
    emb, head = made(), nn.Linear(DIM, 1)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    head(emb([1])).sum().backward(inputs=[head.weight])
    torch.autograd.grad(head(emb([1])).sum(), head.weight)
    assert emb.table.grad is None
    head(emb([1])).sum().backward(inputs=[emb.table])
    assert emb.table.grad is not None
    assert head.bias.grad is None
    optimizer.step()


def test_strided_and_expanded_gradients() -> None:
    def losses(emb: Any) -> None:
        emb(torch.randint(ROWS, (3, 4))).transpose(0, 2)[::2].sum().backward()

    check_steps(losses)


def test_autocast() -> None:
    def losses(emb: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = emb(torch.tensor([1, 2, 2]))
            assert out.dtype == torch.float32
            loss = (out @ torch.full((DIM, 2), 0.5)).float().pow(2).sum()
        loss.backward()

    check_steps(losses)


def test_gradients_of_low_precision_are_summed_in_single() -> None:
    emb = made(dtype=torch.bfloat16, init="zeros")
    out = emb([1] * 1000)
    out.backward(torch.full_like(out, 1.0078125))
    assert emb.table.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert float(emb.table.grad[0, 0]) == 1007.8125  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what comes after a graph break
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str) -> None:
    torch._dynamo.reset()
    models = [Model(emb) for emb in both()]
    models[0].head.load_state_dict(models[1].head.state_dict())
    optimizers: list[Any] = [
        flatbed.optim.SGD(models[0], lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.1),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        compiled = torch.compile(model, backend=backend)
        for step in range(3):
            compiled(torch.tensor([step, 2, 2])).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(value, models[1].state_dict()[name])
