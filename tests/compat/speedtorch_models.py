"""A small word2vec, trained with SpeedTorch's loop and by torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import flatbed.compat.speedtorch as SpeedTorch

N, DIM, BATCH, POS, NEG, STEPS = 40, 16, 12, 2, 3, 6
RESTING = 8
"""The last rows, which only the last steps use, when the optimizer already has state."""

O = torch.optim  # noqa: E741
DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adadelta": (O.Adadelta, {"lr": 0.5}),
    "Adamax": (O.Adamax, {"lr": 0.05}),
    "RMSprop": (O.RMSprop, {}),
    "RMSprop centered momentum": (O.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (O.Rprop, {"lr": 0.02}),
    "ASGD": (O.ASGD, {"lr": 0.1}),
    "ASGD averaging": (O.ASGD, {"lr": 0.1, "t0": 1}),
    "AdamW": (O.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam": (O.Adam, {"lr": 0.05}),
    "Adam amsgrad": (O.Adam, {"lr": 0.05, "amsgrad": True}),
    "Adam fused": (O.Adam, {"lr": 0.05, "fused": True}),
    "Adam tensor lr": (O.Adam, {"lr": torch.tensor(0.05), "foreach": False}),
    "NAdam": (O.NAdam, {"lr": 0.05}),
    "RAdam": (O.RAdam, {"lr": 0.05}),
    "Adagrad": (O.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}
SPARSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "SparseAdam": (O.SparseAdam, {"lr": 0.05}),
    "Adagrad": (O.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
REFUSED: dict[Any, str] = {O.Adafactor: "Adafactor.*its state 'row_var'", O.LBFGS: "LBFGS.*closure"}
if hasattr(O, "Muon"):  # since torch 2.9
    REFUSED[O.Muon] = "Muon.*depends on other elements"
STORAGES = ("device", "host", "disk")


class Trained(NamedTuple):
    """Losses, all rows of both embeddings, and the optimizer's state of the second."""

    losses: list[float]
    u: Tensor
    v: Tensor
    state: dict[str, Tensor]


def skip_gram(n_u: int, n_v: int, *, sparse: bool = False) -> nn.ModuleDict:
    """Embeddings with a slot for each id of a batch, or with all rows."""
    return nn.ModuleDict({name: nn.Embedding(n, DIM, sparse=sparse) for name, n in (("u", n_u), ("v", n_v))})


def loss_of(u: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """(batch, pos, dim) each, negative (batch, neg, dim)."""
    near = (u * positive).sum(2)
    far = torch.bmm(u, negative.transpose(1, 2))
    return -(nn.functional.logsigmoid(near).sum() + nn.functional.logsigmoid(-far).sum())


def batches(n: int = STEPS) -> Iterator[tuple[Any, Any, Any]]:
    """Yield ids of u, and positive and negative ids of v: int32 of numpy, with many repeats."""
    random = np.random.default_rng(5)
    for step in range(n):
        most = N if step >= n - 2 else N - RESTING
        u, v, negative = (random.integers(0, most, (BATCH, k)).astype(np.int32) for k in (POS, POS, NEG))
        u[3] = u[0]
        v[4] = negative[4, 0]
        negative[5:8] = negative[5, 1]
        yield u, v, negative


def touched() -> Tensor:
    """Rows of the second embedding that training uses."""
    return torch.tensor(
        sorted({int(row) for _, v, negative in batches() for row in (*v.flat, *negative.flat)})
    )


def start() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N, DIM, generator=generator), torch.randn(N, DIM, generator=generator)


def factories(storage: str, folder: Any) -> tuple[Any, Any]:
    """Return constructors of switchers: of a variable, and of its state."""
    on_disk = storage == "disk"

    def model(variable: Any, **options: Any) -> Any:
        if on_disk:
            return SpeedTorch.ModelFactoryMM(variable, N, DIM, diskname=f"{folder}/variable", **options)
        return SpeedTorch.ModelFactory(variable, N, DIM, CPUPinn=storage == "host", **options)

    def state(optimizer: Any, whole: nn.Module, name: str, **options: Any) -> Any:
        given = (optimizer, N, DIM, whole, name)
        if on_disk:
            return SpeedTorch.OptimizerFactoryMM(*given, diskname=f"{folder}/{name}", **options)
        return SpeedTorch.OptimizerFactory(*given, CPUPinn=storage == "host", **options)

    return model, state


def values(tensor: Tensor) -> Any:
    """Return a custom init that copies a tensor."""

    def fill(out: Tensor) -> None:
        out.copy_(tensor)

    return fill


class Loop(NamedTuple):
    """A variable, its optimizer and its switchers."""

    embedding: nn.Embedding
    optimizer: torch.optim.Optimizer
    rows: Any
    state: Any

    def before(self, ids: Any) -> None:
        for switcher in (self.rows, self.state):
            switcher.beforeForwardPass(ids)

    def backward(self, n: int) -> None:
        self.optimizer.zero_grad()
        self.embedding(torch.arange(n)).square().sum().backward()

    def learn(self, n: int = 2) -> None:
        self.backward(n)
        self.optimizer.step()

    def step(self, ids: Any) -> None:
        self.before(ids)
        self.learn(len(ids))

    def after(self, ids: Any) -> None:
        for switcher in (self.rows, self.state):
            switcher.afterOptimizerStep(ids)

    def train(self, ids: Any) -> None:
        self.step(ids)
        self.after(ids)

    def play(self, *calls: str) -> None:
        """Call methods of the loop, its optimizer or its switchers, given as "rows.before 1 2"."""
        for call in calls:
            name, *ids = call.split()
            name = name.replace(".before", ".beforeForwardPass").replace(".after", ".afterOptimizerStep")
            attrgetter(name)(self)(*[[int(one) for one in ids]] if ids else [])


def loop(
    n_slots: int = 2,
    kind: Any = torch.optim.Adam,
    *,
    sparse: bool = False,
    storage: str = "device",
    folder: Any = None,
    **options: Any,
) -> Loop:
    embedding = nn.Embedding(n_slots, DIM, sparse=sparse)
    optimizer = kind(embedding.parameters(), **options)
    make, make_state = factories(storage, folder)
    rows, state = make(embedding), make_state(optimizer, nn.Sequential(embedding), "0")
    rows.customInit(values(start()[0]))
    state.optInit()
    return Loop(embedding, optimizer, rows, state)


def switched(
    kind: Any,
    options: dict[str, Any],
    storage: str,
    folder: Any,
    *,
    sparse: bool = False,
    device: str = "cpu",
    spare: int = 0,
    dtype: torch.dtype = torch.float32,
    as_ids: Any = lambda ids: ids,
) -> Trained:
    """Train with switchers, in the order of SpeedTorch's examples."""
    model = skip_gram(BATCH * POS + spare, BATCH * (POS + NEG) + spare, sparse=sparse).to(device, dtype)
    optimizer = kind(model.parameters(), **options)
    make, make_state = factories(storage, folder)
    switchers = {
        name: (make(model[name], datatype=dtype), make_state(optimizer, model, name, dtype=dtype))
        for name in model
    }
    for (rows, state), first in zip(switchers.values(), start(), strict=True):
        rows.customInit(values(first))
        state.optInit()
    u_rows, (v_rows, v_state) = switchers["u"][0], switchers["v"]
    u_in = torch.from_numpy(u_rows.variableTransformer(BATCH, POS)).to(device)
    v_in, n_in = (torch.from_numpy(x).to(device) for x in v_rows.variableTransformer(BATCH, POS, NEG))
    losses = []
    for batch in batches():
        u, v, negative = (as_ids(ids) for ids in batch)
        calls = [(s, given) for name, given in (("u", (u,)), ("v", (v, negative))) for s in switchers[name]]
        for switcher, given in calls:
            switcher.beforeForwardPass(*given)
        optimizer.zero_grad()
        loss = loss_of(model["u"](u_in), model["v"](v_in), model["v"](n_in))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for switcher, given in calls:
            switcher.afterOptimizerStep(*given)
        losses.append(loss.item())
    found = [torch.from_numpy(rows.getNumpyVersion()) for rows in (u_rows, v_rows)]
    kept = v_state.getNumpyVersion() if v_state.optVarList else {}
    for switcher in (*switchers["u"], *switchers["v"]):
        switcher.close()
    return Trained(losses, found[0], found[1], {n: torch.from_numpy(a) for n, a in kept.items()})


def whole(
    kind: Any, options: dict[str, Any], *, sparse: bool = False, dtype: torch.dtype = torch.float32
) -> Trained:
    """Train nn.Embedding with all rows; reset rows and state that are not in the batch after each step.

    The first step creates the state, which is not reset.
    """
    model = skip_gram(N, N, sparse=sparse).to(dtype=dtype)
    with torch.no_grad():
        for name, first in zip(model, start(), strict=True):
            model[name].weight.copy_(first)
    weight_u, weight_v = model.parameters()
    optimizer = kind(model.parameters(), **options)
    losses = []
    for batch in batches():
        u, v, negative = (torch.from_numpy(ids).long() for ids in batch)
        both = torch.cat([v.flatten(), negative.flatten()])
        optimizer.zero_grad()
        near, far = model["v"](both).split([v.numel(), negative.numel()])
        loss = loss_of(model["u"](u), near.view(BATCH, POS, DIM), far.view(BATCH, NEG, DIM))
        loss.backward()  # type: ignore[no-untyped-call]
        _restricted_step(optimizer, [(weight_u, u), (weight_v, both)])
        losses.append(loss.item())
    state = {n: s for n, s in optimizer.state.get(weight_v, {}).items() if _per_element(s, weight_v)}
    return Trained(losses, weight_u.detach(), weight_v.detach(), state)


def _restricted_step(optimizer: Any, touched: list[tuple[Tensor, Tensor]]) -> None:
    before = []
    for param, ids in touched:
        rest = torch.ones(N, dtype=torch.bool)
        rest[ids.flatten()] = False
        held = {n: s.clone() for n, s in optimizer.state.get(param, {}).items() if _per_element(s, param)}
        before.append((param, rest, param.detach().clone(), held))
    optimizer.step()
    with torch.no_grad():
        for param, rest, values_before, held in before:
            param[rest] = values_before[rest]
            for name, value in held.items():
                optimizer.state[param][name][rest] = value[rest]


def _per_element(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and not value.is_sparse
