"""What tables, optimizers and checkpoints need of the default process group."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.distributed.meeting import Meeting
from flatbed.errors import FlatbedError

PATIENCE = 30.0  # seconds that the first rank waits for others; training keeps them within a step
LONG = 1800.0  # seconds that others wait for the first rank, which may be evaluating


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def communication_device(device: torch.device) -> torch.device:
    """Return the device that tensors must be on for a collective, given where they are computed."""
    backend = str(dist.get_backend()) if world_size() > 1 else "gloo"
    if "nccl" not in backend:
        return torch.device("cpu")
    if device.type == "cuda":
        return device
    if "gloo" not in backend:
        raise FlatbedError(
            "the process group (nccl) communicates between GPUs only, and this table computes on the CPU: "
            'move the model to its GPU, or use dist.init_process_group("cpu:gloo,cuda:nccl")'
        )
    return torch.device("cpu")


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def any_rank(flag: Tensor) -> Tensor:
    """Return the largest value of a flag over all ranks, on the device of the flag."""
    found = flag.to(communication_device(flag.device), torch.float32).reshape(1).clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.to(flag.device)


class Ranks:
    """All ranks of the default process group, for work that all of them complete, or none."""

    def __init__(self) -> None:
        self.many = world_size() > 1
        self.first = not self.many or dist.get_rank() == 0
        only_gpus = self.many and "gloo" not in str(dist.get_backend())
        self._device = torch.device("cuda" if only_gpus else "cpu")

    def meet(self, doing: str) -> None:
        """Wait until all ranks call this; raise if they do not, before a collective would hang or mix."""
        if not self.many:
            return
        patience = PATIENCE if self.first else LONG

        def give_up(waited: float, absent: Callable[[], list[int]]) -> str | None:
            if waited < patience:
                return None
            return (
                f"{doing} was called on some of the {world_size()} ranks alone; found that rank "
                f"{', '.join(map(str, absent()))} did not follow within {waited:.0f} s: call it on every "
                f"rank, not within `if rank == 0:`"
            )

        Meeting(range(world_size())).hold([("the call", doing)], give_up)

    def token(self) -> str:
        """Return a random word, the same on all ranks."""
        drawn = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8, device=self._device)
        if self.many:
            dist.broadcast(drawn, 0)
        return bytes(drawn.tolist()).hex()

    def agree(self, failure: BaseException | None, doing: str) -> None:
        """Raise on all ranks if one of them has failed. Waits for the last rank."""
        if self.many and failure is None:
            if bool(any_rank(torch.zeros(1, device=self._device))):
                raise FlatbedError(f"{doing} failed on another rank: see its error")
        elif failure is not None:
            if self.many:
                any_rank(torch.ones(1, device=self._device))
            raise failure
