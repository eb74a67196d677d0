"""Arguments that every optimizer of flatbed takes besides torch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

OF_NORM = ("max_norm", "skip_nonfinite")
ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]] | nn.Module


class Extras(TypedDict, total=False):
    """Options that every optimizer of flatbed has besides torch's."""

    max_norm: float | None
    """Clip the gradients to this norm, as `torch.nn.utils.clip_grad_norm_` does; `p.grad` is not clipped."""
    skip_nonfinite: bool
    """Skip steps whose gradient norm is not finite, and count them in `skipped_steps`."""
    master_weights: bool
    """Keep an fp32 copy of bf16 and fp16 parameters, and update that; state is then fp32 too."""
    stochastic_rounding: bool
    """Round bf16 parameters up or down at random, so that small updates are not lost."""
    state_dtype: torch.dtype | None
    """Dtype of the state; by default the parameter's, as in torch, or fp32 with `master_weights`."""
    ema_decay: float | None
    """Keep an exponential moving average of the parameters, for `ema_weights()`."""
    per_row_steps: bool
    """Count the steps of every row of a table separately, instead of one count for the table."""
    norm_group: Any
    """A process group whose ranks hold other parameters (pipeline stages) that the norm includes."""
    shard_state: Any
    """Shard the state across the ranks of DDP: True, or a process group, or a mesh of one dimension."""
