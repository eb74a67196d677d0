"""Tables with modules, schedulers, state dicts, loaders, processes and frameworks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatbed
from flatbed import Embedding, FlatbedError, optim
from flatbed.tables.storage.disk import DiskStorage
from tests.tables.models import DIM, EVERY, ROWS, Model, assert_same, pair

ROOT = Path(__file__).parents[2]
STORAGES = ("host", "device", "disk")


def train(model: nn.Module, optimizer: Any, n_steps: int = 3) -> None:
    """Train all rows, as torch's dense optimizers do."""
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(EVERY).pow(2).sum().backward()
        optimizer.step()


# ---- modules


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
    assert first.weight[:, 0].tolist() == [0, -4, 0, -1] + [0] * 12
    assert torch.equal(first.weight, second.weight)


def test_changes_of_dtype_leave_the_table_alone() -> None:
    model = Model(flatbed.Embedding(ROWS, DIM))
    before = model.emb.weight.clone()
    for change in (model.double, model.half, model.bfloat16, lambda: model.to(torch.float64), model.float):
        change()
        assert model.emb.weight.dtype == torch.float32
        assert model.emb([1]).dtype == torch.float32
    model.to(memory_format=torch.channels_last).cpu().to("cpu").type(torch.float32).share_memory()
    assert torch.equal(model.emb.weight, before)


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
@pytest.mark.parametrize("storage", STORAGES)
def test_default_device_is_ignored(storage: str, tmp_path: Path) -> None:
    path = tmp_path / "table" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path, device="cpu", padding_idx=1)
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    for options in ({"max_norm": 1.0}, {"per_row_steps": True}):
        emb.table.drop_state()
        optimizer = flatbed.optim.Adam(emb, **options)  # type: ignore[arg-type]
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
    weights = torch.ones(3, 2, device="cpu")
    assert flatbed.Embedding.from_pretrained(weights)([1]).device.type == "cpu"


# ---- optimizers


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.7**t),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-1, total_steps=10),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, tensor_lr: bool) -> None:
    ours, theirs = pair()
    rates = [torch.tensor(0.05) if tensor_lr else 0.05 for _ in range(2)]
    optimizers = flatbed.optim.Adam(ours, lr=rates[0]), torch.optim.Adam(theirs.parameters(), lr=rates[1])
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        schedule = SCHEDULERS[name](optimizer)
        for _ in range(5):
            train(model, optimizer, 1)
            schedule.step(1.0) if name == "plateau" else schedule.step()
    assert_same(ours, theirs)


def test_state_dicts_go_to_torch_and_back() -> None:
    ours, theirs = pair()
    params = [ours.emb.table, *ours.head.parameters()]  # in the order of torch's
    a, b = flatbed.optim.Adam(params, lr=0.1), torch.optim.Adam(theirs.parameters(), lr=0.1)
    assert not any(held["exp_avg"].any() for held in a.state_dict()["state"].values())
    train(ours, a)
    train(theirs, b)
    state, torchs = a.state_dict(), b.state_dict()
    assert state["state"][0].keys() == torchs["state"][0].keys()
    for key, held in torchs["state"].items():
        for name, value in held.items():
            torch.testing.assert_close(state["state"][key][name], value)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    fresh_ours, fresh_theirs = pair()
    for fresh, source in ((fresh_ours, theirs), (fresh_theirs, ours)):
        fresh.load_state_dict(source.state_dict())
    into_torch = torch.optim.Adam(fresh_theirs.parameters(), lr=1.0)
    into_torch.load_state_dict(saved)
    into_ours = flatbed.optim.Adam([fresh_ours.emb.table, *fresh_ours.head.parameters()], lr=1.0)
    into_ours.load_state_dict(torchs)
    assert into_ours.param_groups[0]["lr"] == 0.1
    assert float(into_ours.state[fresh_ours.emb.table]["step"]) == 3
    for model, optimizer in (
        (ours, a),
        (theirs, b),
        (fresh_ours, into_ours),
        (fresh_theirs, into_torch),
    ):
        train(model, optimizer)
    for model in (theirs, fresh_ours, fresh_theirs):
        assert_same(ours, model)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("options", [{}, {"per_row_steps": True}, {"amsgrad": True}], ids=str)
def test_state_dict_resumes_bitwise(storage: str, options: Any, tmp_path: Path) -> None:
    def made(name: str) -> tuple[Model, Any]:
        path = tmp_path / name if storage == "disk" else None
        model = Model(flatbed.Embedding(ROWS, DIM, storage=storage, path=path))
        return model, flatbed.optim.Adam(model, lr=0.1, **options)

    model, optimizer = made("first")
    steps = [[1, 2], [2, 3, 3], [9]]
    for ids in steps:
        optimizer.zero_grad()
        model(ids).pow(2).sum().backward()
        optimizer.step()
    twin, second = made("second")
    twin.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    for one, its in ((model, optimizer), (twin, second)):
        for ids in steps:
            its.zero_grad()
            one(ids).pow(2).sum().backward()
            its.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name])
    for name in model.emb.table.state_names:
        assert torch.equal(*(m.emb.table.read_state(name, EVERY) for m in (model, twin)))


@pytest.mark.parametrize("wrong", ["shape", "transposed", "missing", "groups", "option"])
def test_state_dict_that_does_not_fit_changes_nothing(wrong: str) -> None:
    ours, theirs = pair()
    optimizer = flatbed.optim.Adam(ours, lr=0.1)
    train(ours, optimizer)
    state = optimizer.state_dict()
    of_table = state["state"][2]
    if wrong == "shape":
        of_table["exp_avg"] = torch.zeros(ROWS + 1, DIM)
    elif wrong == "transposed":
        of_table["exp_avg"] = torch.zeros(DIM, ROWS)
    elif wrong == "missing":
        del of_table["exp_avg_sq"]
    elif wrong == "groups":
        state["param_groups"][0]["params"].pop()
    else:
        state["param_groups"][0]["lr"] = -1.0
    before = optimizer.state_dict()
    with pytest.raises((ValueError, flatbed.FlatbedError)):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, held in before["state"].items():
        for name, value in held.items():
            assert torch.equal(after["state"][key][name], value)
    theirs.load_state_dict(ours.state_dict())
    train(ours, optimizer, 1)


# ---- steps and gradients


def trained(**options: Any) -> tuple[Embedding, Any]:
    emb = Embedding(10, 4, **options)
    optimizer = optim.Adam(emb, lr=0.1)
    emb(torch.arange(5)).sum().backward()
    optimizer.step()
    return emb, optimizer


def test_full_disk_stops_a_step_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleDict(
        {
            "one": Embedding(50, 4),
            "two": Embedding(50, 4, storage="disk", path=tmp_path / "t.bed"),
            "head": nn.Linear(4, 1),
        }
    )
    optimizer = optim.Adam(model, lr=0.1)

    def backward() -> None:
        ids = torch.arange(20)
        model["head"](model["one"](ids) + model["two"](ids)).sum().backward()

    backward()
    before = [
        model["one"].read_rows(range(50)),
        model["two"].read_rows(range(50)),
        model["head"].weight.clone(),
    ]
    room = DiskStorage.make_room

    def full(self: DiskStorage, ids: Tensor) -> None:
        raise FlatbedError("no space left")

    monkeypatch.setattr(DiskStorage, "make_room", full)
    with pytest.raises(FlatbedError, match="no space left"):
        optimizer.step()
    now = [model["one"].read_rows(range(50)), model["two"].read_rows(range(50)), model["head"].weight]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert model["one"].table.scalars() == model["two"].table.scalars() == {"step": 0.0}
    monkeypatch.setattr(DiskStorage, "make_room", room)
    optimizer.step()
    assert model["one"].table.scalars() == model["two"].table.scalars() == {"step": 1.0}
    assert not torch.equal(model["head"].weight, before[2])
    assert not torch.equal(model["two"].read_rows(range(50)), before[1])


@pytest.mark.parametrize("drop", ["optimizer", "module", "grad"])
def test_dropping_gradients_hides_no_bad_ids(drop: str) -> None:
    """Ids on a GPU are checked by the step at the latest."""
    emb, optimizer = trained()
    before = emb.weight.detach().clone()
    emb.table._deferred_checks.add(torch.tensor([1, 99]), torch.tensor([1]), n_rows=emb.num_embeddings)
    if drop == "optimizer":
        optimizer.zero_grad()
    elif drop == "module":
        emb.zero_grad()
    else:
        emb.table.grad = None
    with pytest.raises(IndexError, match="id 99 at position 1 is out of range for a table of 10 rows"):
        optimizer.step()
    assert torch.equal(emb.weight, before)
    emb([1]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("storage", ["host", "device", "disk"])
def test_growing_before_a_pending_layout(storage: str, tmp_path: Path) -> None:
    path = tmp_path / "t.bed" if storage == "disk" else None
    emb = Embedding(20, 4, seed=0, storage=storage, path=path)
    before = emb.read_rows(range(20)).clone()
    optim.Adam(emb)
    emb.table.resize(30)
    assert torch.equal(emb.read_rows(range(20)), before)
    assert torch.equal(emb.read_rows(range(30)), Embedding(30, 4, seed=0).read_rows(range(30)))


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
def test_training_continues_from_state_dicts_of_torch(kind: Any, options: dict[str, Any], by: str) -> None:
    theirs = nn.Embedding(6, 4)
    reference = kind(theirs.parameters(), lr=0.1, **options)
    factors = [torch.randn(6, 4) for _ in range(5)]

    def step(module: nn.Module, optimizer: Any, factor: Tensor) -> None:
        (module(torch.arange(6)) * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for factor in factors[:3]:
        step(theirs, reference, factor)
    emb = Embedding(6, 4)
    if by == "rule":
        optimizer = getattr(optim, kind.__name__)(emb, lr=0.1, **options)
    else:
        optimizer = optim.from_torch(kind, emb, lr=0.1, **options)
    emb.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    for factor in factors[3:]:
        step(theirs, reference, factor)
        step(emb, optimizer, factor)
    torch.testing.assert_close(emb.weight.detach(), theirs.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loaded", [False, True])
def test_state_stays_when_records_move(loaded: bool) -> None:
    """As when a trained table moves to a GPU."""
    emb, optimizer = trained()
    if loaded:
        other = Embedding(10, 4)
        loading = optim.Adam(other, lr=0.1)
        other.load_state_dict(emb.state_dict())
        loading.load_state_dict(optimizer.state_dict())
        emb = other
    before = emb.table.read_state("exp_avg", range(10)).clone()
    assert before.any()
    emb.table._storage.relayout(emb.table._storage.record)
    assert torch.equal(emb.table.read_state("exp_avg", range(10)), before)


def test_gradients_of_frozen_tables_are_dropped() -> None:
    emb, optimizer = trained()
    before = emb.weight.detach().clone()
    emb([1]).sum().backward()
    emb.requires_grad_(False)
    optimizer.step()
    emb.requires_grad_(True)
    emb([2]).sum().backward()
    optimizer.step()
    assert torch.equal(emb.weight[1], before[1])
    assert not torch.equal(emb.weight[2], before[2])


# ---- loaders and processes


class Ids(torch.utils.data.Dataset[Tensor]):
    """A dataset that holds the model; with `use`, its workers try to read rows."""

    def __init__(self, emb: flatbed.Embedding, use: bool = False) -> None:
        self.emb, self.use = emb, use

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if not self.use:
            repr(self.emb)
            return torch.tensor([index, index + 1])
        try:
            self.emb.read_rows([index])
        except flatbed.FlatbedError as error:
            return torch.tensor("in the training process" in str(error))
        return torch.tensor(False)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("storage", STORAGES)
def test_forked_workers(storage: str, tmp_path: Path) -> None:
    """Workers may hold a table; using one raises, and the training process is not disturbed."""
    path = tmp_path / "table" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path)
    optimizer = flatbed.optim.SGD(emb, lr=0.1)
    emb([0])
    expected = emb.read_rows(EVERY)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": 4}
    for ids in torch.utils.data.DataLoader(Ids(emb), **options):
        emb(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected[:9] -= 0.1
    expected[1:8] -= 0.1  # in two of the pairs
    torch.testing.assert_close(emb.read_rows(EVERY), expected)
    for refused in torch.utils.data.DataLoader(Ids(emb, use=True), **options):
        assert refused.all()
    torch.testing.assert_close(emb.read_rows(EVERY), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("storage", STORAGES)
def test_tables_raise_in_a_forked_child(storage: str, tmp_path: Path) -> None:
    path = tmp_path / "table" if storage == "disk" else None
    emb = flatbed.Embedding(ROWS, DIM, storage=storage, path=path)
    bag = flatbed.EmbeddingBag.from_table(emb.table)
    weight = None if storage == "disk" else emb.weight
    before = emb.read_rows(EVERY)
    uses: list[Callable[[], Any]] = [
        lambda: emb([1]),
        lambda: bag([[1]]),
        lambda: emb.read_rows([1]),
        lambda: emb.write_rows([1], torch.zeros(1, DIM)),
        lambda: emb.table.resize(ROWS * 2),
        lambda: emb.state_dict(),
    ]
    if weight is not None:
        uses += [lambda: weight.fill_(0.0), lambda: emb.weight]
    child = os.fork()
    if child == 0:  # no pytest in here
        refused = 0
        for use in uses:
            try:
                use()
            except flatbed.FlatbedError:
                refused += 1
            except BaseException:
                os._exit(100)
        emb.table.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(uses)
    assert torch.equal(emb.read_rows(EVERY), before)


EXIT = """
import sys, torch, flatbed
sys.kept = []  # alive until the interpreter exits
for storage in ("host", "device", "disk"):
    emb = flatbed.Embedding(1000, 8, storage=storage, path=sys.argv[1] if storage == "disk" else None)
    optimizer = flatbed.optim.Adam(emb)
    emb([1, 2]).sum().backward()
    optimizer.step()
    view = None if storage == "disk" else emb.weight
    sys.kept += [emb, optimizer, view, emb([3])]
raise SystemExit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_processes_end_quietly(code: int, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXIT, str(tmp_path / "table"), str(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


# ---- frameworks


def data() -> torch.utils.data.DataLoader[Any]:
    ids = torch.randint(ROWS, (24, 3), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=4)


def optimizers(model: Model, *, torchs: bool) -> Any:
    if torchs:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0)
    return flatbed.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    ours, theirs = pair()
    for model, torchs in ((ours, False), (theirs, True)):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = optimizers(model, torchs=torchs)
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

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, model: Model, torchs: bool) -> None:
            super().__init__()
            self.model, self.torchs = model, torchs

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            out: Tensor = self.model(batch[0]).pow(2).mean()
            return out

        def configure_optimizers(self) -> Any:
            return optimizers(self.model, torchs=self.torchs)

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
