"""What the modules were asked for, looked at once at the door."""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatbed.tables import initializers as initial
from flatbed.tables.config import Config
from flatbed.tables.tensor_file import as_path

REFUSED = {
    "max_norm": (None, "renormalise rows with read_rows and write_rows"),
    "norm_type": (2.0, "it goes with max_norm"),
    "scale_grad_by_freq": (False, "divide the loss of frequent ids instead"),
    "sparse": (False, "only the rows of the batch are ever updated here; leave it out"),
    "_weight": (None, "use from_pretrained, or write to emb.weight"),
    "_freeze": (False, "use emb.requires_grad_(False)"),
}
"""Arguments of torch's modules that there is no equivalent for: torch's default, and what to do instead."""

FIXED = {
    "num_embeddings": "emb.table.resize(num_embeddings) makes the table grow",
    "embedding_dim": "it is given when the table is made",
    "padding_idx": "it is given when the table is made",
}
"""What a module shows of its table, and how it can be changed."""


def refuse(kind: type, options: dict[str, Any]) -> None:
    """Raise for arguments that would have an effect in torch's module and have none here."""
    for option, value in options.items():
        if option not in REFUSED:
            known = list(inspect.signature(kind).parameters)
            like = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {like[0]!r}?" if like else f"help(flatbed.{kind.__name__}) has all"
            raise TypeError(f"{kind.__name__} has no argument {option!r}: {hint}")
        default, remedy = REFUSED[option]
        if value is not default and value != default:
            raise TypeError(f"{kind.__name__} does not support {option}={value!r}: {remedy}")


def configured(
    num_embeddings: Any,
    embedding_dim: Any,
    padding_idx: int | None,
    storage: str,
    path: str | Path | None,
    dtype: torch.dtype | None,
    init: Any,
    seed: int,
) -> Config:
    """What was asked for, checked."""
    for what, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
        if isinstance(value, bool | Tensor) or not hasattr(value, "__index__"):
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"{what} must be an integer; found {found} (for weights: from_pretrained)")
    n_rows, dim = int(num_embeddings), int(embedding_dim)
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not hasattr(padding_idx, "__index__"):
            raise TypeError(f"padding_idx must be an integer or None; found {padding_idx!r}")
        padding_idx = int(padding_idx)
        if not -n_rows <= padding_idx < n_rows:
            raise ValueError(f"padding_idx must be within the {n_rows} rows; found {padding_idx}")
        padding_idx %= n_rows
    if storage == "disk" and path is None:
        raise ValueError('storage="disk" needs a path: path="items.bed", for example')
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer; found {seed!r}")
    config = Config(
        n_rows=n_rows,
        dim=dim,
        dtype=torch.get_default_dtype() if dtype is None else dtype,
        storage=storage,
        path=None if path is None else as_path(path).absolute(),
        init=initial.parse(init),
        seed=int(seed),
        padding_idx=padding_idx,
    )
    nothing = torch.empty((0, dim), dtype=config.dtype, device="cpu")
    initial.fill_(nothing, first_row=0, init=config.init, seed=config.seed)  # refuses what does not fit
    return config
