"""SpeedTorch's training loop: `flatbed.compat.speedtorch` beside the original's copies and beside torch.

A skip-gram model trains rows of two embeddings under Adagrad. Ids are int32 arrays, unique in a batch.

- host: all rows in host memory (`CPUPinn=True`), pinned for a GPU.
- device: all rows on the device.

The original copies rows and state of a batch by indexing, before the forward pass and after the step, and the
model's inputs are static. It needs CuPy; its variants for torch do the same with tensors, and so does the
variant here: like them it reaches the state through `optimizer.state_dict()`. `copies by hand` are the same
copies through `optimizer.state`, without a class around them. `torch sparse` has all rows in
`nn.Embedding(sparse=True)` on the device, and converts ids to int64 in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatbed
import flatbed.compat.speedtorch as SpeedTorch
import flatbed.optim
from benchmarks.harness import SEED, Options, Plan, each, free_memory, time_in_turns
from benchmarks.rows import Row, percentiles

CASES = ("host", "device")
LR = 0.1
TOLERANCE = 1e-5
PLAN = Plan(turns=10, warm_up=5, blocks=1, block_steps=20)
SMALL_PLAN = Plan(turns=2, warm_up=1, blocks=1, block_steps=2)


class Shape(NamedTuple):
    """Size of both embeddings and of a batch."""

    n_rows: int
    dim: int
    batch: int
    negatives: int = 5

    @property
    def n_slots(self) -> dict[str, int]:
        """Ids per step, by embedding."""
        return {"u": self.batch, "v": self.batch * (1 + self.negatives)}


TINY = Shape(400, 8, 8)
SHAPES = {
    "cpu": [Shape(50_000, 128, 16), Shape(50_000, 128, 64), Shape(50_000, 128, 512)],
    "cuda": [Shape(1_000_000, 128, 512), Shape(1_000_000, 128, 8192)],
}
Ids = dict[str, Any]
"""Ids of a batch by embedding: "v" has the positive ids and then the negative ones."""


class SkipGram(nn.Module):
    """Negative sampling with two embeddings of any kind: ids of `Shape.n_slots` → loss."""

    def __init__(self, u: nn.Module, v: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.u, self.v, self.shape = u, v, shape

    def forward(self, u: Any, v: Any) -> Tensor:
        words, others = self.u(u), self.v(v)
        batch, dim = self.shape.batch, self.shape.dim
        near = (words * others[:batch]).sum(1)
        far = torch.bmm(others[batch:].view(batch, -1, dim), words[:, :, None])
        return -(F.logsigmoid(near).sum() + F.logsigmoid(-far).sum()) / batch


def first_rows(shape: Shape) -> dict[str, Tensor]:
    """Return the same first rows for every variant."""
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randn((2, shape.n_rows, shape.dim), generator=generator) * 0.1
    return dict(zip("uv", rows, strict=True))


# ---- variants


class Variant:
    """A skip-gram model under Adagrad. By default the model's embeddings have all rows."""

    def __init__(self, model: SkipGram, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device

    def inputs(self, ids: Ids) -> dict[str, Any]:
        return {name: torch.from_numpy(own).long().to(self.device) for name, own in ids.items()}

    def step(self, ids: Ids) -> None:
        self.before(ids)
        loss = self.model(**self.inputs(ids))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after(ids)

    def before(self, ids: Ids) -> None:
        """Load rows."""

    def after(self, ids: Ids) -> None:
        """Store rows."""

    def rows(self) -> Tensor:
        """Return all rows of the second embedding, on the CPU."""
        found: Tensor = self.model.v.weight  # type: ignore[assignment]
        return found.detach().cpu()


def torch_sparse(shape: Shape, storage: str, device: torch.device) -> Variant:
    """Train with all rows on the device."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    first = first_rows(shape)
    u, v = (nn.Embedding(shape.n_rows, shape.dim, sparse=True, _weight=first[name]) for name in "uv")
    model = SkipGram(u, v, shape).to(device)
    return Variant(model, torch.optim.Adagrad(model.parameters(), lr=LR), device)


class Flatbed(Variant):
    """`flatbed.Embedding` under `flatbed.optim`, which SpeedTorch's users can move to."""

    def __init__(self, shape: Shape, storage: str, device: torch.device) -> None:
        first = first_rows(shape)
        u, v = (
            flatbed.Embedding(shape.n_rows, shape.dim, storage=storage, device=device, init="zeros")
            for _ in "uv"
        )
        for module, name in ((u, "u"), (v, "v")):
            module.write_rows(np.arange(shape.n_rows), first[name].to(device))
        model = SkipGram(u, v, shape)
        super().__init__(model, flatbed.optim.Adagrad(model.parameters(), lr=LR), device)

    def inputs(self, ids: Ids) -> dict[str, Any]:
        return ids

    def rows(self) -> Tensor:
        module: Any = self.model.v
        found: Tensor = module.read_rows(np.arange(module.num_embeddings))
        return found.cpu()


class Slots(Variant):
    """A model of as many rows as a batch has ids, with static inputs."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        u, v = (nn.Embedding(n_slots, shape.dim) for n_slots in shape.n_slots.values())
        model = SkipGram(u, v, shape).to(device)
        super().__init__(model, torch.optim.Adagrad(model.parameters(), lr=LR), device)
        self.static = {name: torch.arange(n, device=device) for name, n in shape.n_slots.items()}

    def inputs(self, ids: Ids) -> dict[str, Any]:
        return self.static


class ByHand(Slots):
    """The original's copies: index rows and state on the way in and on the way out."""

    def __init__(self, shape: Shape, storage: str, device: torch.device) -> None:
        super().__init__(shape, device)
        kept = torch.device("cpu") if storage == "host" else device
        is_pinned = storage == "host" and device.type == "cuda"
        self.tables: dict[str, list[Tensor]] = {}
        for name, rows in first_rows(shape).items():
            tables = [rows, torch.zeros_like(rows)]
            self.tables[name] = [table.pin_memory() if is_pinned else table.to(kept) for table in tables]

    def before(self, ids: Ids) -> None:
        for name, own in ids.items():
            rows, state = (table[torch.from_numpy(own)].to(self.device) for table in self.tables[name])
            variable = getattr(self.model, name).weight
            variable.data = rows
            self.state(name)["sum"] = state

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[getattr(self.model, name).weight]
        return found

    def after(self, ids: Ids) -> None:
        for name, own in ids.items():
            variable, state = getattr(self.model, name).weight, self.state(name)["sum"]
            for table, part in zip(self.tables[name], (variable.data, state), strict=True):
                table[torch.from_numpy(own)] = part.to(table.device)

    def rows(self) -> Tensor:
        return self.tables["v"][0].cpu()


class Original(ByHand):
    """The original's own way to the optimizer's state."""

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state_dict()["state"]["uv".index(name)]
        return found


class Compat(Slots):
    """`flatbed.compat.speedtorch`, in the order of SpeedTorch's documentation."""

    def __init__(self, shape: Shape, storage: str, device: torch.device) -> None:
        super().__init__(shape, device)
        self.switchers: dict[str, list[Any]] = {}
        size, pinned = (shape.n_rows, shape.dim), {"CPUPinn": storage == "host"}
        for name, rows in first_rows(shape).items():
            weights = SpeedTorch.ModelFactory(getattr(self.model, name), *size, **pinned)
            weights.customInit(lambda whole, rows=rows: whole.copy_(rows))
            state = SpeedTorch.OptimizerFactory(self.optimizer, *size, self.model, name, **pinned)
            state.optInit()
            self.switchers[name] = [weights, state]

    def before(self, ids: Ids) -> None:
        for name, own in ids.items():
            for switcher in self.switchers[name]:
                switcher.beforeForwardPass(own)

    def after(self, ids: Ids) -> None:
        for name, own in ids.items():
            for switcher in self.switchers[name]:
                switcher.afterOptimizerStep(own)

    def rows(self) -> Tensor:
        return torch.from_numpy(self.switchers["v"][0].getNumpyVersion())


ORIGINAL = "SpeedTorch's copies with torch"
VARIANTS: dict[str, Callable[[Shape, str, torch.device], Variant]] = {
    ORIGINAL: Original,
    "copies by hand": ByHand,
    "torch sparse": torch_sparse,
    "flatbed.compat.speedtorch": Compat,
    "flatbed.Embedding": Flatbed,
}


# ---- runs


def run(options: Options) -> Iterator[Row]:
    """Measure the storages that were asked for."""
    variants = options.choose(VARIANTS)
    for storage in CASES:
        if options.wants(storage):
            ok = {name: is_right(make, storage, options) for name, make in variants.items()}
            for shape in [TINY] if options.quick else SHAPES[options.device.type]:
                for row in run_shape(shape, storage, variants, options):
                    yield {**row, "ok": ok[row["variant"]]}
                free_memory(options.device)


def run_shape(shape: Shape, storage: str, variants: dict[str, Any], options: Options) -> Iterator[Row]:
    """Time steps in turns."""
    made = {name: make(shape, storage, options.device) for name, make in variants.items()}
    random = np.random.default_rng(SEED)
    found = time_in_turns(
        {name: each(variant.step) for name, variant in made.items()},
        lambda n: draw(shape, random, n),
        SMALL_PLAN if options.quick else PLAN,
        options,
    )
    setting = {"storage": storage, "optimizer": "adagrad", "rows": shape.n_rows, "dim": shape.dim}
    setting["ids"] = sum(shape.n_slots.values())
    for name, readings in found.items():
        times = percentiles(readings.back_to_back)
        metrics: dict[str, Any] = {"back_to_back_ms": times}
        if ORIGINAL in found:
            metrics["original_ratio"] = times["p50"] / median(found[ORIGINAL].back_to_back)
        n = len(readings.back_to_back)
        yield options.row("speedtorch step", name, setting, metrics, n_samples=n, ok=True)


def draw(shape: Shape, random: np.random.Generator, n_batches: int) -> list[Ids]:
    """Draw batches of unique ids: the original loses updates of repeated ones."""
    return [
        {
            name: random.choice(shape.n_rows, n, replace=False).astype(np.int32)
            for name, n in shape.n_slots.items()
        }
        for _ in range(n_batches)
    ]


def is_right(make: Callable[..., Variant], storage: str, options: Options) -> bool:
    """Train small embeddings beside torch's; tell whether all rows are the same within rounding."""
    batches = draw(TINY, np.random.default_rng(SEED + 1), 5)
    found, expected = make(TINY, storage, options.device), torch_sparse(TINY, storage, options.device)
    for variant in (found, expected):
        for ids in batches:
            variant.step(ids)
    return bool((found.rows() - expected.rows()).abs().max() <= TOLERANCE)
