"""State dicts and distributed checkpoints of DTensors and tables, with changing numbers of ranks.

The folder carries a checkpoint from one group of ranks to the next: 4 save, 3 load and save, 1 loads.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import flatbed
from tests.distributed.fsdp import Model, assert_same_shards, backward, batch, full, sharded, world_mesh
from tests.distributed.processes import assert_equal_on_all_ranks, main
from tests.distributed.sharded_checkpoints import contents, difference

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True)
OPTIONS: dict[str, Any] = {"lr": 0.01, "amsgrad": True, "ema_decay": 0.5, "max_norm": 1.0}


def ours(model: nn.Module, **options: Any) -> Any:
    return flatbed.optim.AdamW(model.parameters(), **{**OPTIONS, **options})


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)  # the same batch on all ranks, so that their number does not matter
    model(torch.randn(4, 7)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- one group after the other


def moves_between_numbers_of_ranks(folder: Path) -> None:
    world = dist.get_world_size()
    model = sharded(Model())
    optimizer = ours(model)
    for options, name in ((None, "nested"), (FLAT, "flat")):
        path = folder / name
        if path.exists():
            state = {"model": get_model_state_dict(model), "optimizer": _state(model, optimizer, options)}
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
            assert difference(contents(model, [optimizer]), torch.load(folder / f"{name}.pt")) is None
    for seed in range(2):
        step(model, optimizer, 10 * world + seed)
    for options, name in ((None, "nested"), (FLAT, "flat")):
        state = {"model": get_model_state_dict(model), "optimizer": _state(model, optimizer, options)}
        future = dcp.async_save(state, checkpoint_id=folder / name) if options else None
        if future is None:
            dcp.save(state, checkpoint_id=folder / name)
        else:
            future.result()  # type: ignore[union-attr]
        whole = contents(model, [optimizer])
        if dist.get_rank() == 0:
            torch.save(whole, folder / f"{name}.pt")


def _state(model: nn.Module, optimizer: Any, options: StateDictOptions | None) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=options)


# ---- within one group


def state_of_torch_and_back(_: Path) -> None:
    """From torch.optim on DTensors to ours and back: bitwise the same training as without the change."""
    model, other = sharded(Model()), sharded(Model())
    kept = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
    state = None
    for kind in (torch.optim.AdamW, flatbed.optim.AdamW, torch.optim.AdamW):
        options: Any = {"fused": True} if kind is torch.optim.AdamW else {}
        optimizer: Any = kind(model.parameters(), lr=0.01, **options)
        if state is not None:
            loose = StateDictOptions(strict=False)  # torch has no state for what has no gradient
            set_optimizer_state_dict(model, optimizer, state, options=loose)
        for seed in range(2):
            backward(model, seed)
            backward(other, seed)
            optimizer.step()
            kept.step()
            optimizer.zero_grad()
            kept.zero_grad()
        assert_same_shards(model, other)
        state = get_optimizer_state_dict(model, optimizer)


def whole_state_dicts(_: Path) -> None:
    """Whole tensors are saved for one process, and loaded into shards."""
    model, alone = sharded(Model()), Model()
    optimizer, of_alone = ours(model), ours(alone)
    step(model, optimizer, 1)
    step(alone, of_alone, 1)
    saved = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    set_optimizer_state_dict(alone, of_alone, saved)
    found = contents(alone, [of_alone])
    torch.testing.assert_close(contents(model, [optimizer]), found, rtol=1e-4, atol=1e-6)
    again = ours(model)
    set_optimizer_state_dict(model, again, saved, options=WHOLE)
    assert difference(contents(model, [optimizer]), contents(model, [again])) is None
    # Without torch's help: a plain state dict into shards, and shards into plain parameters.
    again = ours(model)
    again.load_state_dict(of_alone.state_dict())
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        for key, value in of_alone.state.get(q, {}).items():
            assert torch.equal(full(again.state[p][key]), value), key
    of_alone.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        for key, value in optimizer.state.get(p, {}).items():
            assert torch.equal(of_alone.state[q][key], full(value)), key


def state_is_made_without_a_step(_: Path) -> None:
    """A state dict before the first step has all keys, and counts no step."""
    for kind in (flatbed.optim.AdamW, flatbed.optim.SGD, flatbed.optim.Adagrad):
        model = sharded(Model(torch.bfloat16))
        optimizer = kind(model, lr=0.1, master_weights=True, ema_decay=0.9)
        state: Any = get_optimizer_state_dict(model, optimizer)["state"]
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert {"ema", "master_weight"} <= set(state[name]), (kind, name)
                assert float(state[name].get("step", 0.0)) == 0
        other = kind(model, lr=0.5, master_weights=True, ema_decay=0.9)
        set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, optimizer))
        assert other.param_groups[0]["lr"] == 0.1
    with torch.device("meta"):
        model = sharded(Model())
    optimizer = flatbed.optim.AdamW(model)  # before there are values
    model.to_empty(device="cpu")
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert float(state["one"]["step"]) == 0


class TableModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb = flatbed.Embedding(20, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.emb(ids))
        return found


def tables_beside_shards(folder: Path) -> None:
    """An optimizer that holds tables and shards: norms, state dicts, checkpoints."""
    for kind in (flatbed.optim.Adam, flatbed.optim.SGD):
        for n, options in enumerate((None, FLAT)):
            models = []
            for _run in range(2):
                model = TableModel()
                fully_shard(model.head, mesh=world_mesh())
                models.append((model, kind(model, lr=0.1, max_norm=0.5)))
            (model, optimizer), (other, of_other) = models
            for seed in range(2):
                ids = batch(seed).argsort(1)
                model(ids).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                assert_equal_on_all_ranks(optimizer.grad_norm)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
            name = f"tables-{dist.get_world_size()}-{kind.__name__}-{n}"
            dcp.save(state, checkpoint_id=folder / name)
            loaded = {"optimizer": get_optimizer_state_dict(other, of_other, options=options)}
            dcp.load(loaded, checkpoint_id=folder / name)
            set_optimizer_state_dict(other, of_other, loaded["optimizer"], options=options)
            left, right = (
                {key: entry for key, entry in one.state_dict()["state"].items() if entry}
                for one in (optimizer, of_other)
            )
            assert set(left) == set(right), (kind, options)
            for key, entry in left.items():
                for field, value in entry.items():
                    assert torch.equal(full(value), full(right[key][field])), (kind, key, field)


SCENARIOS = [
    *(moves_between_numbers_of_ranks, state_of_torch_and_back, whole_state_dicts),
    *(state_is_made_without_a_step, tables_beside_shards),
]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(SCENARIOS)
