"""Drop-ins for nn.Embedding and nn.EmbeddingBag whose rows live where there is room."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatbed.cuda.host_memory import available_bytes
from flatbed.errors import FlatbedError
from flatbed.tables.arguments import FIXED, configured, refuse
from flatbed.tables.config import with_cache
from flatbed.tables.ids import as_ids
from flatbed.tables.lookup import gather, lookup, needs_grad, prepare_lookup
from flatbed.tables.record import WEIGHT
from flatbed.tables.table import Table, make
from flatbed.tables.view import WeightView

if TYPE_CHECKING:
    from typing_extensions import Self


class TableModule(nn.Module):
    """A module with a table, which is not among its parameters: DDP, `.to()` and the like leave it alone."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.__dict__["table"] = table

    table: Table

    @property
    def num_embeddings(self) -> int:
        """How many rows there are at present: tables can grow."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.table.embedding_dim

    @property
    def padding_idx(self) -> int | None:
        """The row that never has a gradient."""
        return self.table.store.config.padding_idx

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "table":
            raise AttributeError("a module's table cannot be replaced: use from_table to make another module")
        if name in FIXED:
            raise AttributeError(f"{name} cannot be set: {FIXED[name]}")
        if name == "weight":
            if isinstance(value, WeightView) and value._table is self.table:
                return  # emb.weight += 1: it is done
            raise AttributeError(
                "weight is a view of the table: write into it (emb.weight.copy_(…)), or use from_pretrained"
            )
        super().__setattr__(name, value)

    @property
    def weight(self) -> Tensor:
        """All weights as one tensor, without a copy, for reading and for initialising."""
        return self.table.weight

    def read_rows(self, ids: Any) -> Tensor:
        """The weights of some rows: ids of any shape → (*shape, dim), a copy on the computing device."""
        return self.table.read_rows(ids)

    def write_rows(self, ids: Any, values: Any) -> None:
        """Replace the weights of some rows: ids of any shape, values (*shape, dim)."""
        self.table.write_rows(ids, values)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze the table."""
        self.table.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the recorded gradients."""
        if not isinstance(set_to_none, bool):
            raise TypeError(f"set_to_none must be True or False; found {type(set_to_none).__name__}")
        self.table.grad = None

    def extra_repr(self) -> str:
        config = self.table.store.config
        parts = [f"{config.n_rows}, {config.dim}"]
        parts += [] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]
        parts += [f"storage={config.storage!r}"]
        parts += [] if config.path is None else [f"path='{config.path}'"]
        parts += [] if config.dtype == torch.float32 else [f"dtype={config.dtype}"]
        parts += [] if config.cache_rows is None else [f"cache_rows={config.cache_rows}"]
        parts += [] if config.cache_bytes is None else [f"cache_bytes={config.cache_bytes}"]
        return ", ".join(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call,unused-ignore]
        before = torch.empty(0, dtype=torch.uint8, device=self.table.store.device)
        self.table.store.move(fn(before).device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.table.deferred_checks.check_graphs()
        destination[prefix + WEIGHT] = whole_field(self.table, WEIGHT)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + WEIGHT
        rest = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        given = state_dict.get(key)
        if given is None:
            if strict:
                missing_keys.append(key)
            return
        shape = (self.table.num_embeddings, self.table.embedding_dim)
        if tuple(given.shape) != shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, "
                f"the shape in current model is {torch.Size(shape)}."
            )
            return
        write_field(self.table, WEIGHT, given)

    @classmethod
    def from_table(cls, table: Table, **options: Any) -> Self:
        """A module over a table that exists already, for example one of `flatbed.load_table`."""
        if not isinstance(table, Table):
            raise TypeError(
                f"from_table takes a flatbed.Table; found {type(table).__name__} (for a tensor of weights: "
                f"from_pretrained)"
            )
        allowed = inspect.signature(cls._options).parameters.keys() - {"self"}
        for name in options.keys() - allowed:
            raise TypeError(
                f"{cls.__name__}.from_table has no option {name!r} (it takes "
                f"{', '.join(sorted(allowed)) or 'none'})"
                f": the table is as it was made"
            )
        made = cls.__new__(cls)
        TableModule.__init__(made, table)
        made._options(**options)
        return made

    def _options(self) -> None:
        """What a kind of module has beside its table."""


class Embedding(TableModule):
    """`nn.Embedding` whose rows, and their optimizer state, live on the host or on disk.

    - `num_embeddings`, `embedding_dim`: rows, and numbers in each.
    - `padding_idx`: a row that begins as zeros and gets no gradient.
    - `storage`: "host", "disk" (a file, `path`) or "device" (the memory of the device that computes).
    - `path`: the file of ``storage="disk"``. One that exists is opened and gone on with, not overwritten.
    - `device`: where lookups and steps are computed; `.to()` changes it, and leaves rows at home.
    - `dtype`: of the weights, by default torch's default dtype; `.half()` and the like do not change it.
    - `init`: "normal", "uniform", "zeros", a number, ("normal", mean, std) or ("uniform", low, high).
    - `seed`: rows begin from (seed, row), whatever torch.manual_seed was. Give every table of a model a seed
      of its own: two of the same size, `init` and `seed` begin identical.
    - `replicate`: with several ranks, exchange gradients so that replicas stay equal; False leaves it to you.
    - `cache_rows`, or `cache_bytes`: how many records (weight and state together) of rows in use are kept on
      the device that computes; 0 for none. By default a few batches on a GPU, none on a CPU.
    - `cache_policy`: "lfu" or "lru": first to leave are rows used least of late, or not used for longest.

    >>> import flatbed, torch
    >>> emb = Embedding(1000, 8, init=("uniform", -0.1, 0.1))
    >>> optimizer = flatbed.optim.Adam(emb, lr=0.01)
    >>> emb(torch.tensor([[1, 5], [5, 2]])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        storage: str = "host",
        path: str | Path | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        init: Any = "normal",
        seed: int = 0,
        replicate: bool = True,
        cache_rows: int | None = None,
        cache_bytes: int | None = None,
        cache_policy: str = "lfu",
        **refused: Any,
    ) -> None:
        refuse(type(self), refused)
        config = configured(num_embeddings, embedding_dim, padding_idx, storage, path, dtype, init, seed)
        config = with_cache(config, cache_rows, cache_bytes, cache_policy)
        super().__init__(make(config, device, replicate=replicate))

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any
    ) -> Self:
        """A table with these weights, (num_embeddings, embedding_dim)."""
        return cast("Self", pretrained(cls, embeddings, freeze, padding_idx=padding_idx, **options))

    def forward(self, input: Any) -> Tensor:
        """Ids of any shape → (*shape, embedding_dim)."""
        if torch.compiler.is_compiling():
            return _untraced(self, input)
        return self._forward(input)

    def _forward(self, input: Any) -> Tensor:
        table = self.table
        record = needs_grad(table, training=self.training)
        batch = prepare_lookup(table, input, training=record)
        if record:
            return lookup(table, batch)
        rows = table.access.weights(batch.unique.rows)
        return rows.index_select(0, batch.unique.inverse).view(*batch.shape, self.embedding_dim)


class EmbeddingBag(TableModule):
    """`nn.EmbeddingBag` whose rows, and their optimizer state, live on the host or on disk.

    - `mode`: how the rows of a bag become one: "mean", "sum" or "max".
    - `include_last_offset`: whether the last of the offsets is the end of the last bag.

    The other arguments are those of `Embedding`.

    >>> import torch
    >>> bag = EmbeddingBag(1000, 8, mode="sum")
    >>> bag(torch.tensor([1, 5, 5, 2]), torch.tensor([0, 2])).shape
    torch.Size([2, 8])
    """

    mode: str
    include_last_offset: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        storage: str = "host",
        path: str | Path | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        init: Any = "normal",
        seed: int = 0,
        replicate: bool = True,
        cache_rows: int | None = None,
        cache_bytes: int | None = None,
        cache_policy: str = "lfu",
        **refused: Any,
    ) -> None:
        refuse(type(self), refused)
        config = configured(num_embeddings, embedding_dim, padding_idx, storage, path, dtype, init, seed)
        config = with_cache(config, cache_rows, cache_bytes, cache_policy)
        _check_mode(mode)
        super().__init__(make(config, device, replicate=replicate))
        self._options(mode=mode, include_last_offset=include_last_offset)

    def _options(self, *, mode: str = "mean", include_last_offset: bool = False) -> None:
        _check_mode(mode)
        self.mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any
    ) -> Self:
        """A table with these weights, (num_embeddings, embedding_dim)."""
        return cast("Self", pretrained(cls, embeddings, freeze, padding_idx=padding_idx, **options))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Bags of ids, (bags, length) or (n,) with offsets → (bags, embedding_dim)."""
        if torch.compiler.is_compiling():
            return _untraced(self, input, offsets, per_sample_weights)
        return self._forward(input, offsets, per_sample_weights)

    def _forward(self, input: Any, offsets: Any, per_sample_weights: Tensor | None) -> Tensor:
        table = self.table
        record = needs_grad(table, training=self.training)
        batch = prepare_lookup(table, input, for_bag=True, training=record)
        device = table.store.device
        if len(batch.shape) not in (1, 2):
            raise ValueError(f"bags are (bags, length), or (n,) with offsets; found {tuple(batch.shape)}")
        found = batch.unique
        rows = gather(table, batch) if record else table.access.weights(found.rows)
        if offsets is not None:
            offsets = as_ids(offsets).to(device)
        if per_sample_weights is not None:
            if not isinstance(per_sample_weights, Tensor):
                raise TypeError(
                    f"per_sample_weights must be a tensor of the ids' shape; found "
                    f"{type(per_sample_weights).__name__}"
                )
            per_sample_weights = per_sample_weights.to(device)
        return functional.embedding_bag(
            found.inverse.view(batch.shape),
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if self.padding_idx is None else 0,
        )


@torch._disable_dynamo  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
def _untraced(module: Any, *args: Any) -> Tensor:
    """A lookup inside of what is being compiled: nothing in it is for tracing."""
    rows: Tensor = module._forward(*args)
    return rows


def _check_mode(mode: str) -> None:
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode must be 'sum', 'mean' or 'max'; found {mode!r}")


def pretrained(cls: Any, embeddings: Any, freeze: bool, **options: Any) -> Any:
    """A module with given weights."""
    if isinstance(embeddings, nn.Module | dict | str | Path):
        raise TypeError(
            f"embeddings must be a tensor or an array (num_embeddings, embedding_dim); found "
            f"{type(embeddings).__name__}: give the weight that is in it"
        )
    if "init" in options:
        raise TypeError(f"from_pretrained has its weights, and no init; found init={options['init']!r}")
    if not isinstance(embeddings, Tensor):
        embeddings = torch.as_tensor(embeddings, device="cpu")
    if embeddings.dim() != 2:
        raise ValueError(
            f"embeddings must be (num_embeddings, embedding_dim); found {tuple(embeddings.shape)}"
        )
    if "device" not in options:
        options["device"] = embeddings.device
    path = options.get("path")
    if path is not None and Path(path).exists():
        raise FlatbedError(f"{path} exists, and from_pretrained would overwrite it: choose another path")
    made = cls(*embeddings.shape, init="zeros", **{"dtype": embeddings.dtype, **options})
    write_field(made.table, WEIGHT, embeddings)
    return made.requires_grad_(not freeze)


def whole_field(table: Table, name: str) -> Tensor:
    """A field of all rows as one contiguous tensor; on the GPU for tables that live there."""
    store = table.store
    field = store.record[name]
    nbytes = table.num_embeddings * field.nbytes
    on_gpu = store.config.storage == "device" and store.device.type == "cuda"
    if not on_gpu and nbytes > available_bytes():
        raise FlatbedError(
            f"{name} of this table takes {nbytes / 1e9:.1f} GB, and {available_bytes() / 1e9:.1f} GB are "
            f"free: write it to a file with table.save(path) or flatbed.save_checkpoint instead"
        )
    device = store.device if on_gpu else torch.device("cpu")
    whole = torch.empty((table.num_embeddings, field.count), dtype=field.dtype, device=device)
    for start, stop in store.field_blocks(name):
        whole[start:stop] = store.read_field(name, start, stop)
    return whole


@torch.no_grad()
def write_field(table: Table, name: str, values: Tensor) -> None:
    """The inverse of `whole_field`."""
    for start, stop in table.store.field_blocks(name):
        table.store.write_field(name, start, values[start:stop].detach())


def named_tables(module: nn.Module) -> Iterator[tuple[str, Table]]:
    """The tables in a module by the path of their embedding, each once."""
    seen: set[int] = set()
    for name, child in module.named_modules():
        if isinstance(child, TableModule) and id(child.table) not in seen:
            seen.add(id(child.table))
            yield (f"{name}.table" if name else "table"), child.table


def named_trainables(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and tables, each once, a table where `nn.Embedding` would have its weight.

    In this order, state dicts fit those of torch's optimizers for the same model with `nn.Embedding`.
    """
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        own = child.named_parameters(recurse=False)
        if isinstance(child, TableModule):
            own = chain(own, [("table", child.table)])
        for name, one in own:
            if id(one) not in seen:
                seen.add(id(one))
                yield (f"{prefix}.{name}" if prefix else name), one


def tables(module: nn.Module) -> list[Table]:
    """All tables in a module. They are not among its `parameters()`.

    >>> tables(nn.Sequential(Embedding(10, 4), nn.Linear(4, 1)))
    [Table(10 × 4, torch.float32, host)]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"tables takes a torch.nn.Module; found {type(module).__name__}: give the model itself, or an "
            f"nn.ModuleList of several"
        )
    return [table for _, table in named_tables(module)]
