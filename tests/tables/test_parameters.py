"""Tables among `model.parameters()`: the usual calls of torch and of frameworks act on them, or raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import FlatbedError, Table
from tests.tables.models import DIM, ROWS, Model, assert_same, pair
from tests.tables.tables import STORAGES, storage_options

IDS = torch.tensor([1, 5, 5, 3])


def loss(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    result: Tensor = model(ids).square().sum()
    return result


def test_names_shapes_and_counts_are_those_of_nn_embedding() -> None:
    ours, theirs = pair()
    kinds = [
        [(name, p.shape, p.dtype, p.dim(), p.ndim, p.numel()) for name, p in m.named_parameters()]
        for m in (ours, theirs)
    ]
    assert kinds[0] == kinds[1]
    assert [p.size(0) for p in ours.parameters()] == [p.size(0) for p in theirs.parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict())


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
    assert_same(ours, theirs)


@pytest.mark.parametrize("storage", STORAGES)
def test_skipped_batches_and_frozen_models(storage: str, tmp_path: Path) -> None:
    """`model.zero_grad(); continue` after a bad loss, and `requires_grad_(False)`, reach the table."""
    ours, theirs = pair()
    ours.emb = flatbed.Embedding.from_pretrained(
        theirs.emb.weight.detach(), freeze=False, **storage_options(storage, tmp_path)
    )
    optimizers = flatbed.optim.Adam(ours.parameters(), lr=0.1), torch.optim.Adam(theirs.parameters(), lr=0.1)
    for step in range(6):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model.requires_grad_(step != 4)
            found = loss(model, torch.arange(ROWS)) * (torch.nan if step == 2 else 1.0)
            if step != 4:
                found.backward()
            if not torch.isfinite(found):
                model.zero_grad()
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(ours, theirs)
    ours.emb.table.close(discard=True)


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
    nn.init.normal_(target.emb.weight)
    with torch.no_grad():
        for one, other in zip(target.parameters(), source.parameters(), strict=True):
            copy_all(one, other)
    assert_same(target, source)


@pytest.mark.parametrize("init", [nn.init.ones_, nn.init.uniform_, nn.init.xavier_uniform_])
def test_initialisers_draw_what_they_draw_for_torch(init: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = pair()
    for of_ours in (ours.emb.table, ours.emb.weight):
        for parameter in (of_ours, theirs.emb.weight):
            torch.manual_seed(1)
            init(parameter)
        assert torch.equal(ours.emb.weight, theirs.emb.weight.detach())
        nn.init.zeros_(of_ours)


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "exp": (torch.exp, "read_rows"),
    "zeros_like": (torch.zeros_like, "read_rows"),
    "add": (lambda table: table + 1, "read_rows"),
    "view": (lambda table: table.view(-1), "read_rows"),
    "detach": (lambda table: table.detach() + 1, "read_rows"),
    "norm": (lambda table: table.norm(), r"norm was called on a table.*: use emb\.weight"),
    "data": (lambda table: setattr(table, "data", torch.zeros(ROWS, DIM)), "copy_"),
    "hook": (lambda table: table.register_hook(print), "output of the lookup"),  # without the gradient
    "late hook": (lambda table: table.register_post_accumulate_grad_hook(print), "output of the lookup"),
    "layout": (lambda table: table.is_contiguous(), r"is_contiguous was called on a table.*fully_shard"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_raise(name: str) -> None:
    call, message = OTHERS[name]
    with pytest.raises(FlatbedError, match=message):
        call(flatbed.Embedding(ROWS, DIM).table)


def test_averaging_raises() -> None:
    model, _ = pair()
    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(FlatbedError, match="table"):
        average.update_parameters(model)


def test_weight_can_be_changed_and_not_replaced() -> None:
    emb = flatbed.Embedding(ROWS, DIM, init="zeros")
    with pytest.raises(AttributeError, match="from_pretrained"):
        emb.weight = nn.Parameter(torch.zeros(ROWS, DIM))
    emb.weight += 1
    assert emb.read_rows([1]).eq(1).all()


# ---- frameworks


def data() -> torch.utils.data.DataLoader[Any]:
    ids = torch.randint(ROWS, (24, 3), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=4)


@pytest.mark.filterwarnings("ignore")
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    ours, theirs = pair()
    for model, torchs in ((ours, False), (theirs, True)):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = (torch if torchs else flatbed).optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        prepared, optimizer, loader, schedule = accelerator.prepare(model, optimizer, data(), schedule)
        for (ids,) in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(ids).pow(2).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert_same(ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: Model, torchs: bool) -> None:
            super().__init__()
            self.model, self.torchs = model, torchs

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            out: Tensor = self.model(batch[0]).pow(2).mean()
            return out

        def configure_optimizers(self) -> Any:
            return (torch if self.torchs else flatbed).optim.SGD(self.model.parameters(), lr=0.1)

    ours, theirs = pair()
    for model, torchs in ((ours, False), (theirs, True)):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            gradient_clip_val=0.05,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        module = Module(model, torchs)
        trainer.fit(module, data())
        if not torchs:
            trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=False)
            saved = torch.load(tmp_path / "model.ckpt", weights_only=False)
            assert torch.equal(saved["state_dict"]["model.emb.weight"], ours.emb.weight)
    assert_same(ours, theirs)


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
        torch.testing.assert_close(ours.emb.table.read_rows(range(ROWS)), theirs.emb.weight.detach())
        with pytest.raises(FlatbedError, match="ignored_params"):
            fully_shard(pair()[0], mesh=mesh)
    finally:
        dist.destroy_process_group()
