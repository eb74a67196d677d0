"""Tables among `model.parameters()`: the usual calls of torch and of frameworks act on them, or raise."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import FlatbedError, Table

ROWS, DIM = 12, 4
IDS = torch.tensor([1, 5, 5, 3])


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """The same model with `flatbed.Embedding` and with `nn.Embedding`."""
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    ours = nn.Sequential(
        flatbed.Embedding.from_pretrained(theirs[0].weight.detach(), freeze=False), nn.Linear(DIM, 2)
    )
    ours[1].load_state_dict(theirs[1].state_dict())
    return ours, theirs


def loss(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).square().sum()
    return result


def table_of(model: nn.Sequential) -> Table:
    table: Table = model[0].table  # type: ignore[assignment]
    return table


def check_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_names_shapes_and_counts_are_those_of_nn_embedding() -> None:
    ours, theirs = pair()
    kinds = [
        [(name, p.shape, p.dtype, p.dim(), p.ndim, p.numel()) for name, p in m.named_parameters()]
        for m in (ours, theirs)
    ]
    assert kinds[0] == kinds[1]
    assert [p.size(0) for p in ours.parameters()] == [p.size(0) for p in theirs.parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_a_shared_table_is_one_parameter() -> None:
    emb = flatbed.Embedding(ROWS, DIM)
    model = nn.ModuleList([emb, flatbed.EmbeddingBag.from_table(emb.table)])
    assert list(model.parameters()) == [emb.table]
    assert flatbed.tables(model) == [emb.table]


@pytest.mark.parametrize("clip", ["torch", "optimizer", "value"])
def test_training_with_the_usual_calls(clip: str) -> None:
    ours, theirs = pair()
    options = {"max_norm": 0.1} if clip == "optimizer" else {}
    optimizers = [
        flatbed.optim.SGD(ours.parameters(), lr=0.1, **options),
        torch.optim.SGD(theirs.parameters(), lr=0.1),
    ]
    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for _ in range(2):  # accumulated
                loss(model, (IDS + step) % ROWS).backward()
            if clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            elif clip == "torch" or model is theirs:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            (model if step % 2 else optimizer).zero_grad(set_to_none=step != 2)
    check_equal(ours, theirs)


def test_the_norm_counts_row_gradients() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        loss(model).backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1e9) for model in (ours, theirs)]
    torch.testing.assert_close(norms[0], norms[1])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_gradients(set_to_none: bool) -> None:
    model, _ = pair()
    optimizer = flatbed.optim.Adam(model.parameters(), lr=0.1)
    before = table_of(model).read_rows(range(ROWS))
    loss(model).backward()
    model.zero_grad(set_to_none=set_to_none)
    assert table_of(model).grad is None
    optimizer.step()
    assert torch.equal(table_of(model).read_rows(range(ROWS)), before)


def test_gradients_stay_until_zero_grad() -> None:
    model, _ = pair()
    optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1)
    loss(model).backward()
    optimizer.step()
    grad = table_of(model).grad
    assert grad is not None
    assert float(grad.norm()) > 0
    optimizer.zero_grad()
    assert table_of(model).grad is None


def test_requires_grad_freezes() -> None:
    model, _ = pair()
    model.requires_grad_(False)
    assert not table_of(model).requires_grad
    assert not model(IDS).requires_grad
    model.requires_grad_(True)
    loss(model).backward()
    assert table_of(model).grad is not None


def test_grad_scaler_unscales_and_skips() -> None:
    model, _ = pair()
    optimizer = flatbed.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss(model).backward()
    expected = table_of(model).grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    scaler.scale(loss(model)).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(table_of(model).grad.clone(), expected)  # type: ignore[union-attr]
    table_of(model).grad.mul_(float("inf"))  # type: ignore[union-attr]
    model.zero_grad()
    scaler.update()
    before = table_of(model).read_rows(range(ROWS))
    (scaler.scale(loss(model)) * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(table_of(model).read_rows(range(ROWS)), before)


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1, fused=True),
    lambda params: torch.optim.Adam(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    lambda params: torch.optim.Rprop(params, lr=0.1),
]


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_torch_optimizers_raise_with_the_remedy(build: Callable[..., torch.optim.Optimizer]) -> None:
    model, _ = pair()
    optimizer = build(flatbed.tables(model))
    before = table_of(model).read_rows(range(ROWS))
    loss(model).backward()
    with pytest.raises(FlatbedError, match=r"flatbed\.optim"):
        optimizer.step()
    assert torch.equal(table_of(model).read_rows(range(ROWS)), before)


def test_averaging_raises() -> None:
    model, _ = pair()
    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(FlatbedError, match="table"):
        average.update_parameters(model)


@pytest.mark.parametrize(
    "copy_all",
    [
        lambda target, source: target.data.copy_(source.data),
        lambda target, source: target.copy_(source),
        lambda target, source: target.data.mul_(0.0).add_(source.data),
    ],
)
def test_target_networks_follow(copy_all: Callable[[Any, Any], object]) -> None:
    source, target = pair()[0], pair()[0]
    nn.init.normal_(target[0].weight)
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            copy_all(one, other)
    check_equal(target, source)


def test_initialisers_act_on_all_rows() -> None:
    model, _ = pair()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    assert torch.equal(table_of(model).read_rows(range(ROWS)), torch.full((ROWS, DIM), 0.5))
    before = table_of(model).read_rows(range(ROWS))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    assert not torch.equal(table_of(model).read_rows(range(ROWS)), before)


@pytest.mark.parametrize(
    "call", [torch.exp, torch.zeros_like, lambda t: t + 1, lambda t: t.view(-1), lambda t: t.detach() + 1]
)
def test_other_operations_raise(call: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(FlatbedError, match="read_rows"):
        call(flatbed.Embedding(ROWS, DIM).table)


def test_copies_and_pickles_train_on() -> None:
    model, _ = pair()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    copies.append(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
    for one in [model, *copies]:
        optimizer = flatbed.optim.Adam(one.parameters(), lr=0.1)
        for _ in range(2):
            loss(one).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one in copies:
        check_equal(one, model)


def test_state_dicts_go_both_ways() -> None:
    ours, theirs = pair()
    optimizers = flatbed.optim.Adam(ours.parameters(), lr=0.1), torch.optim.Adam(theirs.parameters(), lr=0.1)
    everything = torch.arange(ROWS)  # dense Adam moves rows outside of the batch, too
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        loss(model, everything).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours.load_state_dict(theirs.state_dict())
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    theirs.load_state_dict(ours.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        loss(model, everything).backward()
        optimizer.step()
    check_equal(ours, theirs)


def test_missing_and_unexpected_keys() -> None:
    model, _ = pair()
    found = model.load_state_dict({}, strict=False)
    assert "0.weight" in found.missing_keys
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**model.state_dict(), "0.weight": torch.zeros(3, DIM)})


def test_a_compiled_model_trains() -> None:
    ours, theirs = pair()
    compiled = torch.compile(ours, backend="eager")
    optimizers = (
        flatbed.optim.SGD(compiled.parameters(), lr=0.1),
        torch.optim.SGD(theirs.parameters(), lr=0.1),
    )
    for model, optimizer in zip((compiled, theirs), optimizers, strict=True):
        for _ in range(2):
            loss(model).backward()  # type: ignore[arg-type]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    check_equal(ours, theirs)


def test_dtype_conversions_leave_tables_as_they_are() -> None:
    model, _ = pair()
    model.half()
    assert table_of(model).dtype == torch.float32
    assert next(model.parameters()).device == torch.device("cpu")


def test_weight_cannot_be_replaced() -> None:
    model, _ = pair()
    with pytest.raises(AttributeError, match="from_pretrained"):
        model[0].weight = nn.Parameter(torch.zeros(ROWS, DIM))
    model[0].weight += 1  # type: ignore[operator]
    with pytest.raises(FlatbedError, match="copy_"):
        table_of(model).data = torch.zeros(ROWS, DIM)


@pytest.mark.filterwarnings("ignore")
def test_lightning_clips_tables() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, model: nn.Module, kind: Any) -> None:
            super().__init__()
            self.model, self.kind = model, kind

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return loss(self.model, batch[0])

        def configure_optimizers(self) -> Any:
            return self.kind(self.parameters(), lr=0.5)

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randint(ROWS, (12,))), batch_size=4
    )
    ours, theirs = pair()
    for model, kind in ((ours, flatbed.optim.SGD), (theirs, torch.optim.SGD)):
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        lightning.Trainer(accelerator="cpu", max_epochs=2, gradient_clip_val=0.05, **quiet).fit(
            Module(model, kind), data
        )
    check_equal(ours, theirs)


def test_accelerate_clips_tables() -> None:
    accelerate = pytest.importorskip("accelerate")
    ours, theirs = pair()
    for model, kind in ((ours, flatbed.optim.SGD), (theirs, torch.optim.SGD)):
        accelerator = accelerate.Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.5))
        for step in range(3):
            accelerator.backward(loss(prepared, (IDS + step) % ROWS))
            accelerator.clip_grad_norm_(prepared.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    check_equal(ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_fsdp2_ignores_tables_when_told_to(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        ours, theirs = pair()
        fully_shard(ours, mesh=mesh, ignored_params=set(flatbed.tables(ours)))
        dense = [p for p in ours.parameters() if not isinstance(p, Table)]
        for model, optimizers in (
            (ours, [flatbed.optim.SGD(flatbed.tables(ours), lr=0.1), torch.optim.SGD(dense, lr=0.1)]),
            (theirs, [torch.optim.SGD(theirs.parameters(), lr=0.1)]),
        ):
            loss(model).backward()
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(table_of(ours).read_rows(range(ROWS)), theirs[0].weight.detach())
        with pytest.raises(FlatbedError, match="ignored_params"):
            fully_shard(pair()[0], mesh=mesh)
    finally:
        dist.destroy_process_group()
