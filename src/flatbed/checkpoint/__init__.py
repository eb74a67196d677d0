"""A whole training run in a folder: model, optimizers and tables, all of one moment or none of them.

    CURRENT.json            {"token": …, "version": …, "previous": […]}: replaced atomically, names the valid
                            version and earlier ones that are kept
    .lock                   held by the process that saves
    v0000012-1f0c9a3e/      number and token
      .flatbed              mark of a version; locked by processes that read it
      checkpoint.json       names and encoded values, checksums of all files
      model.safetensors     parameters and buffers by name, without the tables
      optimizer.json        param groups and numbers of state
      optimizer-0.safetensors
      table-0.safetensors   a table with its state; ranks of a sharded table write it together
      state.safetensors     tensors of schedulers, scaler and random generators

Tables on disk stay in their own files and take part in two phases. They prepare a checkpoint that holds if
CURRENT.json has its token, and commit it once CURRENT.json is written. After a crash, opening such a table
looks there. A sharded table has a file for each rank, and the same token decides for all of them.
"""

from flatbed.checkpoint.load import load_checkpoint
from flatbed.checkpoint.save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
