"""Tables whose rows are divided among ranks: how they are built, and collective access to all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flatbed.distributed.row_shards import RowShards, group_of
from flatbed.tables.config import Config, part_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divided(
    config: Config,
    shard: str | None,
    *,
    replicate: bool,
    mesh: DeviceMesh | None = None,
    process_group: Any = None,
) -> tuple[Config, RowShards | None]:
    """Return the config of this rank's rows, and their division; None if this rank holds all rows."""
    if shard not in (None, "row"):
        raise ValueError(f'shard must be "row" or None; found {shard!r}')
    if shard is None:
        if mesh is not None or process_group is not None:
            raise ValueError('mesh and process_group are for shard="row"; found shard=None')
        return config, None
    if not replicate:
        raise ValueError('shard="row" divides the rows of one table, and replicate=False asks for several')
    group = group_of(mesh, process_group)
    if group is None:
        return part_of(config, 0, 1, config.n_rows), None
    shards = RowShards(config.n_rows, group)
    config = replace(config, seed=shards.channel.first(config.seed))
    return part_of(config, shards.rank, shards.n_ranks, shards.n_local()), shards
