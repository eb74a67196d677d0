"""Drop-in replacements for nn.Embedding and nn.EmbeddingBag whose rows live on the host or on disk."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatbed.errors import FlatbedError
from flatbed.progress import note
from flatbed.tables.config import WITHOUT, Config, build_config
from flatbed.tables.ids import as_ids
from flatbed.tables.lookup import GatherFunction, LookupFunction, prepare_lookup
from flatbed.tables.record import WEIGHT
from flatbed.tables.row_io import shard_config
from flatbed.tables.storage.disk.format import is_disk_table
from flatbed.tables.table import Table
from flatbed.tables.weight_view import SavedWeight, WeightView
from flatbed.tables.whole_fields import whole_field, write_field

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self


class DenseStateDict(OrderedDict[str, Any]):
    """Destination for `Module.state_dict` that leaves out tables, which might not fit in memory."""


class TableModule(nn.Module):
    """A module whose parameter `weight` is a `Table`.

    `emb.table` is that parameter. `emb.weight` shows all weights as one tensor.
    """

    max_norm: float | None = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False
    """Options of torch's modules that tables do not have."""
    _by_position = "num_embeddings, embedding_dim and padding_idx"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *unnamed: Any,
        storage: str = "host",
        path: str | Path | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        init: Any = None,
        seed: int | None = None,
        resume: bool | None = None,
        replicate: bool = True,
        shard: str | None = None,
        mesh: DeviceMesh | None = None,
        process_group: Any = None,
        cache_rows: int | None = None,
        cache_bytes: int | None = None,
        cache_policy: str = "lfu",
        **unknown: Any,
    ) -> None:
        if unnamed:
            raise TypeError(
                f"flatbed.{type(self).__name__} takes {self._by_position} by position; found {unnamed[0]!r} "
                f"after them: give other arguments by name"
            )
        for name in unknown:
            hint = WITHOUT.get(name, "see help(flatbed.Embedding)")
            raise TypeError(f"flatbed.{type(self).__name__} has no argument {name!r}: {hint}")
        if not isinstance(replicate, bool):  # "False" would be true
            raise TypeError(f"replicate must be True or False; found {replicate!r}")
        config = build_config(
            num_embeddings,
            embedding_dim,
            padding_idx,
            storage=storage,
            path=path,
            dtype=dtype,
            init=init,
            seed=seed,
            cache_rows=cache_rows,
            cache_bytes=cache_bytes,
            cache_policy=cache_policy,
        )
        config, shards = shard_config(
            config, shard, replicate=replicate, mesh=mesh, process_group=process_group
        )
        _check_resume(config, resume)
        self._hold(Table(config, device=device, replicate=replicate or shards is not None, shards=shards))

    def _hold(self, table: Table) -> None:
        nn.Module.__init__(self)  # that of nn.Embedding would allocate all rows
        self._parameters[WEIGHT] = table

    @property
    def table(self) -> Table:
        """The table: the `nn.Parameter` that optimizers of `flatbed.optim` update."""
        table = self._parameters[WEIGHT]
        if not isinstance(table, Table):  # `torch.func.functional_call`, for example
            raise FlatbedError(
                f"the weight of {type(self).__name__} was replaced by a {type(table).__name__}, which cannot "
                "stand for a table: call the module itself"
            )
        return table

    @property
    def num_embeddings(self) -> int:
        """The number of rows at present: `table.resize` adds rows."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.table.embedding_dim

    @property
    def padding_idx(self) -> int | None:
        """The row that never gets a gradient."""
        return self.table._store.config.padding_idx

    @property
    def weight(self) -> Tensor:
        """All weights as one tensor, without a copy, for reading and for initialising."""
        return self.table.weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name != WEIGHT:
            super().__setattr__(name, value)
        elif not (isinstance(value, WeightView) and value._table is self.table):  # emb.weight += 1 is done
            raise AttributeError(
                "weight is a view of the table, and cannot be replaced: write into it (emb.weight.copy_(…)), "
                "or use from_pretrained"
            )

    def topk(
        self, queries: Any, k: int, *, metric: str = "dot", chunk_rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the k rows with the greatest scores: see `Table.topk`."""
        return self.table.topk(queries, k, metric=metric, chunk_rows=chunk_rows)

    def read_rows(self, ids: Any) -> Tensor:
        """Return a copy of some rows on the computing device: ids of any shape → (*shape, dim)."""
        return self.table.read_rows(ids)

    def write_rows(self, ids: Any, values: Any) -> None:
        """Replace the weights of some rows: ids of any shape, values (*shape, dim)."""
        self.table.write_rows(ids, values)

    def reset_parameters(self) -> None:
        """Draw all weights again, as `init` says, from another seed."""
        seed, shards = int(torch.randint(1 << 62, (), device="cpu")), self.table._shards
        if shards is not None:
            seed = shards.channel.first(seed, doing=shards.describe("new weights"))
        self.table._store.draw_again(seed)

    def extra_repr(self) -> str:
        config = self.table._store.config
        parts = [f"{self.num_embeddings}, {config.dim}"]
        parts += [] if self.padding_idx is None else [f"padding_idx={self.padding_idx}"]
        parts += [f"storage={config.storage!r}"]
        parts += [] if config.path is None else [f"path='{config.path}'"]
        parts += [] if config.n_shards == 1 else ["shard='row'"]
        parts += [] if config.dtype == torch.float32 else [f"dtype={config.dtype}"]
        parts += [] if config.cache_rows is None else [f"cache_rows={config.cache_rows}"]
        parts += [] if config.cache_bytes is None else [f"cache_bytes={config.cache_bytes}"]
        return ", ".join(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        table, parameters = self.table, self._parameters
        self._parameters = {name: one for name, one in parameters.items() if one is not table}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call,unused-ignore]
            probe = torch.empty(0, dtype=torch.uint8, device=table._store.device)
            table._move(fn(probe).device)
        finally:
            parameters.update(self._parameters)
            self._parameters = parameters
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(destination, DenseStateDict):
            del destination[prefix + WEIGHT]
            return
        self.table._check_whole("state_dict")
        self.table._deferred_checks.check_graphs()
        destination[prefix + WEIGHT] = SavedWeight.of(self.table, whole_field(self.table, WEIGHT))

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
            return
        if key in missing_keys:
            missing_keys.remove(key)
        if tuple(given.shape) != self.table.shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, "
                f"the shape in current model is {self.table.shape}."
            )
            return
        write_field(self.table, WEIGHT, given)

    @classmethod
    def from_table(cls, table: Table, **options: Any) -> Self:
        """Build a module over an existing table, for example one of `flatbed.load_table`."""
        if not isinstance(table, Table):
            raise TypeError(
                f"from_table takes a flatbed.Table; found {type(table).__name__} (weights: from_pretrained)"
            )
        made = cls.__new__(cls)
        made._hold(table)
        made._set_options(**options)
        return made

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor | Any, freeze: bool = True, *padding_idx: int | None, **options: Any
    ) -> Self:
        """Build a module with these weights, (num_embeddings, embedding_dim).

        As in torch, the third argument by position is `padding_idx` for an `Embedding`. An `EmbeddingBag`
        takes two, since torch's third one is `max_norm`. `init` and `seed` are for the new rows of `resize`.
        Without `seed`, it follows from the weights: as in torch, no random numbers are drawn (but for one, if
        the table is sharded). With ``storage="disk"``, the file at `path` must not exist, unless `resume` is
        True: the table then has the rows of the file, and `embeddings` says their number, width and dtype.
        """
        if isinstance(embeddings, str | Path):
            raise TypeError(
                f"embeddings must be a tensor or an array; found the path {embeddings}: load its weights "
                "first (numpy.load, torch.load), or use flatbed.load_table for safetensors and .bed files"
            )
        weights = embeddings if isinstance(embeddings, Tensor) else torch.as_tensor(embeddings, device="cpu")
        if weights.dim() != 2:
            raise ValueError(
                f"embeddings must be (num_embeddings, embedding_dim); found {tuple(weights.shape)}"
            )
        resumes = options.get("resume") is True
        if options.get("path") is not None:
            options["resume"] = resumes
        options = {"dtype": weights.dtype, "device": weights.device, **options}
        if options.get("seed") is None and options.get("shard") is None and not resumes:  # ranks agree on one
            options["seed"] = zlib.crc32(weights[:SEED_ROWS].detach().double().cpu().numpy().tobytes())
        make: Any = cls
        made: Self = make(*weights.shape, *padding_idx, **options)
        if not resumes:
            write_field(made.table, WEIGHT, weights)
        return made.requires_grad_(not freeze)

    def _set_options(self) -> None:
        """Set the options that a kind of module has besides its table."""


SEED_ROWS = 16  # of given weights, from which a seed follows

_announced: set[Path] = set()
# For `isinstance` alone: attributes are properties here, and signatures have no options that tables lack.
torch_embedding: Any = nn.Embedding
torch_embedding_bag: Any = nn.EmbeddingBag


def _check_resume(config: Config, resume: bool | None) -> None:
    """Raise unless a disk table's file exists as `resume` says. With None, an existing file is named once."""
    path = config.path
    if path is None:
        if resume is not None:
            raise ValueError(
                f'resume is for storage="disk"; found resume={resume}, storage={config.storage!r}'
            )
    elif resume is not None and bool(resume) != path.exists():
        if resume:
            remedy = "check the path, or leave resume out to make a new table"
            raise FlatbedError(f"resume=True, and {path} is missing: {remedy}")
        raise FlatbedError(
            f"{path} exists, and resume=False and from_pretrained make a new file: choose another path, or "
            "pass resume=True to go on with its rows"
        )
    elif resume is None and path not in _announced and is_disk_table(path):  # opening others raises
        _announced.add(path)
        note(
            f"{path} exists: the table has its rows instead of new ones (flatbed.load_checkpoint restores "
            "the rest of a checkpoint; resume=True silences this line, resume=False refuses the file)"
        )


class Embedding(TableModule, torch_embedding):  # type: ignore[misc]
    """`nn.Embedding` whose rows, and their optimizer state, live on the host or on disk.

    - `num_embeddings`, `embedding_dim`: number of rows, and of weights in each row.
    - `padding_idx`: a row that starts as zeros and gets no gradient.
    - `storage`: "host", "disk" (a file, `path`) or "device" (memory of the computing device).
    - `path`: the file of ``storage="disk"``. An existing file is opened, not overwritten, if shape, dtype,
      `padding_idx`, and `init` and `seed` if given, are those of the file.
    - `resume`: True if the file at `path` must exist, False if it must not. By default either is right, and
      a line on stderr tells that an existing file is used.
    - `device`: where lookups and steps are computed. `.to()` changes it, and leaves rows in their storage.
    - `dtype`: dtype of the weights, by default torch's default dtype; `.half()` does not change it.
    - `init`: "normal" (the default), "uniform", "zeros", a number, ("normal", mean, std) or
      ("uniform", low, high).
    - `seed`: the first weights of a row depend on (seed, row). By default a seed is drawn from torch's
      generator, so that tables start different and `torch.manual_seed` makes them repeatable.
    - `replicate`: with several ranks, average gradients over them, so that replicas stay equal. With False
      the caller keeps replicas equal, or different.
    - `shard`: "row" shards the rows across the ranks of the default process group, of `process_group`, or of
      `mesh`, which has one dimension. Every rank builds, looks up and steps the table; ids differ. With one
      rank the table is an ordinary one. Without `seed`, that of the first rank is used.
    - `cache_rows` or `cache_bytes`: size of the cache of records (weight and state) on the computing device;
      0 for none. By default four batches on a GPU, none on a CPU.
    - `cache_policy`: "lfu" evicts rows that were used least of late, "lru" rows not used for longest.

    >>> import flatbed, torch
    >>> emb = flatbed.Embedding(1000, 8, init=("uniform", -0.1, 0.1))
    >>> optimizer = flatbed.optim.Adam(emb.parameters(), lr=0.01)
    >>> emb(torch.tensor([[1, 5], [5, 2]])).sum().backward()
    >>> optimizer.step()
    """

    def to_torch(self) -> nn.Embedding:
        """Copy the weights into an nn.Embedding, in host memory unless the table is on a GPU.

        If the table is sharded, all ranks call this, and each gets all rows.
        """
        weights, freeze = whole_field(self.table, WEIGHT, collective=True), not self.table.requires_grad
        made = nn.Embedding.from_pretrained(weights, freeze, self.padding_idx)  # type: ignore[no-untyped-call,unused-ignore]
        return cast(nn.Embedding, made.train(self.training))

    def forward(self, input: Any) -> Tensor:
        """Ids of any shape → (*shape, embedding_dim)."""
        if torch.compiler.is_compiling():
            return _untraced(self.forward, input)
        table = self.table
        records_grad = table._records_grad(training=self.training)
        batch = prepare_lookup(table, input, records_grad=records_grad)
        if records_grad:
            return cast(Tensor, LookupFunction.apply(table, batch))  # type: ignore[no-untyped-call,unused-ignore]
        rows = table._row_io.weights(batch.unique.rows, batch)  # without the time of an autograd function
        return rows.index_select(0, batch.unique.inverse).view(*batch.shape, self.embedding_dim)


class EmbeddingBag(TableModule, torch_embedding_bag):  # type: ignore[misc]
    """`nn.EmbeddingBag` whose rows, and their optimizer state, live on the host or on disk.

    - `mode`: how the rows of a bag are reduced: "mean", "sum" or "max".
    - `include_last_offset`: the last offset is the end of the last bag. Without ids and offsets there are no
      bags.

    The other arguments are those of `Embedding`.

    >>> import flatbed, torch
    >>> bag = flatbed.EmbeddingBag(1000, 8, mode="sum")
    >>> bag(torch.tensor([1, 5, 5, 2]), torch.tensor([0, 2])).shape
    torch.Size([2, 8])
    """

    mode: str
    include_last_offset: bool
    _by_position = "num_embeddings and embedding_dim"  # torch's next one is max_norm

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *unnamed: Any,
        padding_idx: int | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, *unnamed, **options)
        self._set_options(mode=mode, include_last_offset=include_last_offset)

    def _set_options(self, *, mode: str = "mean", include_last_offset: bool = False) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be 'sum', 'mean' or 'max'; found {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def to_torch(self) -> nn.EmbeddingBag:
        """Copy the weights into an nn.EmbeddingBag: see `Embedding.to_torch`."""
        made = nn.EmbeddingBag.from_pretrained(
            whole_field(self.table, WEIGHT, collective=True),
            freeze=not self.table.requires_grad,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
        return made.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Bags of ids, (bags, length) or (n,) with offsets → (bags, embedding_dim)."""
        if torch.compiler.is_compiling():
            return _untraced(self.forward, input, offsets, per_sample_weights)
        table = self.table
        records_grad = table._records_grad(training=self.training)
        batch = prepare_lookup(table, input, for_bag=True, records_grad=records_grad)
        if offsets is None and len(batch.shape) == 1:
            raise ValueError(
                f"found ids of shape {tuple(batch.shape)} without offsets: give the position at which each "
                f"bag starts (offsets=[0] for one bag), or bags as rows, (bags, length): ids.unsqueeze(0)"
            )
        rows = GatherFunction.apply(table, batch)  # type: ignore[no-untyped-call,unused-ignore]
        device = table._store.device
        if offsets is not None:
            offsets = as_ids(offsets, name="offsets")
            if offsets.device.type == "cpu" and offsets.dim() == 1:
                starts = offsets.numpy()  # numpy takes a half to a quarter of torch's time
                if np.count_nonzero(starts[1:] < starts[:-1]):
                    raise ValueError(f"offsets must not decrease; found {offsets.tolist()[:20]}")
            offsets = offsets.to(device)
            if self.include_last_offset and not offsets.numel() and not batch.keys.numel():
                offsets = offsets.new_zeros(1)  # no bags: `offsets[:0]` of a Prefetcher with uneven="empty"
        if per_sample_weights is not None:
            per_sample_weights = torch.as_tensor(per_sample_weights, device=device)
        return functional.embedding_bag(
            batch.unique.inverse.view(batch.shape),
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=None if self.padding_idx is None else 0,
        )


@torch._disable_dynamo  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
def _untraced(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a lookup inside of what is being compiled: nothing in it is for tracing."""
    return forward(*args)


def named_tables(module: nn.Module) -> Iterator[tuple[str, Table]]:
    """Yield the tables in a module by name, each once."""
    return ((name, one) for name, one in module.named_parameters() if isinstance(one, Table))


def tables(module: nn.Module) -> list[Table]:
    """Return all tables in a module, each once.

    >>> import flatbed
    >>> from torch import nn
    >>> flatbed.tables(nn.Sequential(flatbed.Embedding(10, 4), nn.Linear(4, 1)))
    [Table(10 × 4, torch.float32, host)]
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"tables takes a torch.nn.Module; found {type(module).__name__}: give the model itself, or an "
            f"nn.ModuleList of several"
        )
    return [table for _, table in named_tables(module)]
