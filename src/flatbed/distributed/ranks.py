"""The processes of a distributed training, when they must do something all together or not at all."""

from __future__ import annotations

import secrets

import torch
import torch.distributed as dist

from flatbed.errors import FlatbedError


class Ranks:
    """All ranks of the default process group; a process on its own is the first of one."""

    def __init__(self) -> None:
        self.many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.first = not self.many or dist.get_rank() == 0

    def token(self) -> str:
        """A random word, the same on all ranks."""
        drawn = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device=self._link())
        if self.many:
            dist.broadcast(drawn, 0)
        return bytes(drawn.tolist()).hex()

    def agree(self, failure: BaseException | None, doing: str) -> None:
        """Raise on all ranks if one of them has failed. All of them wait here for the last."""
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=self._link())
        if self.many:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failure is not None:
            raise failure
        if bool(failed):
            raise FlatbedError(f"{doing} failed on another rank: see its error")

    def _link(self) -> torch.device:
        """The device that the process group sends from."""
        backend = str(dist.get_backend()) if self.many else ""
        if "nccl" in backend and "gloo" not in backend:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
