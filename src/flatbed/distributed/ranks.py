"""The default process group: collectives of replicated tables; checkpoints that all ranks complete, or none.

Reason for it besides `Channel`: a checkpoint needs no process group but the user's, which may be NCCL alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from flatbed.distributed.failures import ExchangeError, naming_missing, reason_of
from flatbed.distributed.meeting import Meeting
from flatbed.errors import FlatbedError

PATIENCE = 30.0  # seconds that the first rank waits for others; training keeps them within a step
LONG = 1800.0  # seconds that others wait for the first rank, which may be evaluating


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return int(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank; 0 without a process group."""
    return int(dist.get_rank()) if world_size() > 1 else 0


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


def communicating(doing: str) -> AbstractContextManager[None]:
    """Turn an error of a collective into an `ExchangeError` that names missing ranks."""
    return naming_missing(doing, dist.group.WORLD, range(world_size()))


class Lockstep:
    """A `with` block of several steps on all ranks, which an error on one of them ends on all.

    All ranks enter the block, and call `meet` as often: before every collective, and where none may continue
    without the others. A rank that fails answers the next `meet` of the others when it leaves the block, so
    that they raise. `undo` then runs on every rank. With `alone`, this rank works without the others.
    """

    def __init__(self, doing: str, *, alone: bool = False) -> None:
        self.doing = doing
        self.many = world_size() > 1 and not alone
        self.first = not self.many or dist.get_rank() == 0
        self.undo: Callable[[], None] = lambda: None
        self._is_over = False

    def __enter__(self) -> Lockstep:
        """Wait until all ranks are here; raise if they do not come, before a collective would hang or mix."""
        patience = PATIENCE if self.first else LONG

        def give_up(waited: float, absent: Callable[[], list[int]]) -> str | None:
            if waited < patience:
                return None
            return (
                f"{self.doing} began on some of the {world_size()} ranks alone; found that rank "
                f"{', '.join(map(str, absent()))} did not follow within {waited:.0f} s: call it on every "
                f"rank, not within `if rank == 0:`. If a rank may be later than that, call "
                f"torch.distributed.barrier() first, which waits as long as the process group's timeout"
            )

        if self.many:
            Meeting(range(world_size())).hold([("the call", self.doing)], give_up)
        return self

    def of_first(self, value: str) -> str:
        """Return the string that the first rank gives."""
        held = [value]
        if self.many:
            only_gpus = "gloo" not in str(dist.get_backend())
            with communicating(self.doing):
                dist.broadcast_object_list(held, src=0, device=torch.device("cuda" if only_gpus else "cpu"))
        return held[0]

    def meet(self) -> None:
        """Wait for all ranks; raise if one of them has failed since the last call."""
        try:
            self._agree(None)
        except BaseException:
            self._is_over = True
            raise

    def _agree(self, failure: BaseException | None) -> None:
        """Raise on all ranks if one of them has failed.

        After an `ExchangeError` no rank waits: all have one, or have ended.
        """
        reasons: list[str | None] = [None] * world_size()
        if self.many and not isinstance(failure, ExchangeError):
            try:
                with communicating(self.doing):
                    dist.all_gather_object(reasons, None if failure is None else reason_of(failure))
            except ExchangeError:
                if failure is None:
                    raise
        if failure is not None:
            raise failure
        for number, reason in enumerate(reasons):
            if reason is not None:
                raise FlatbedError(f"{self.doing} failed on rank {number} ({reason})")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if not self._is_over:
                self._is_over = True
                self._agree(error)
        except BaseException as found:
            error = found
            raise
        finally:
            if error is not None:
                self.undo()
