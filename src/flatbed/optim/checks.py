"""Argument validation for optimizers."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from flatbed.distributed.dtensor import check_grad_kind, check_sharding
from flatbed.distributed.ranks import world_size
from flatbed.errors import FlatbedError
from flatbed.kernels.step import StepOptions
from flatbed.tables.view import WeightView

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        (
            "lr", "eps", "weight_decay", "momentum", "lr_decay", "momentum_decay", "alpha",
            "initial_accumulator_value",
        ),
        (lambda value: value >= 0, "≥ 0"),
    ),
    "betas": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "rho": (lambda value: 0 <= value <= 1, "in [0, 1]"),
}  # fmt: skip


def check_group(group: Mapping[str, Any]) -> None:
    """Raise for hyperparameters outside the ranges that torch allows, and for unsupported ones."""
    for name, (good, range_) in LIMITS.items():
        if name not in group:
            continue
        value = group[name]
        values = value if isinstance(value, (tuple, list)) else (value,)
        if name == "betas" and len(values) != 2:
            raise ValueError(f"betas must be two numbers; found {value!r}")
        for one in values:
            _check_number(name, one, good, range_)
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov needs a momentum and no dampening; found momentum={group['momentum']}, "
            f"dampening={group['dampening']}"
        )
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True: these steps cannot be differentiated through; use torch.optim for that"
        )


def _check_number(name: str, value: Any, good: Callable[[float], bool], range_: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be a number or a tensor of one element; found shape {tuple(value.shape)}"
            )
        if value.device.type != "cpu":
            if name != "lr":
                raise ValueError(f"only lr may be a tensor on a GPU; found {name} on {value.device}")
            return  # reading it would wait for the GPU
        value = value.item()
    if not isinstance(value, numbers.Real):  # numpy's too
        raise TypeError(f"{name} must be a number; found {value!r}")
    if math.isnan(value) or not good(float(value)):
        raise ValueError(f"{name} must be {range_}; found {value}")


def check_known(kind: type, unknown: Iterable[str], extras: Iterable[str]) -> None:
    """Raise for options that an optimizer does not have."""
    if named := ", ".join(map(repr, unknown)):
        own = [name for name in inspect.signature(kind).parameters if name not in ("params", "extras")]
        raise TypeError(f"{kind.__name__} has no option {named}; it has {', '.join([*own, *extras])}")


def check_param(param: Tensor, name: str) -> None:
    """Raise for parameters that no step can update."""
    if isinstance(param, WeightView):
        raise TypeError(f"parameter {name} is a view of a table's weights: give emb.table instead")
    check_sharding(param, name)
    if param.dtype.is_complex:
        raise TypeError(
            f"parameter {name} is complex ({param.dtype}); make torch.view_as_real(parameter) the parameter, "
            f"or use torch.optim for it"
        )
    if isinstance(param, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise ValueError(f"parameter {name} is lazy and has no shape yet: run one forward pass first")


def check_norm(options: StepOptions, param: Tensor, name: str) -> None:
    """Raise if the norm of this rank's gradients would not be the norm of all."""
    if options.needs_norm and is_fsdp_shard(param) and world_size() > 1:
        raise FlatbedError(
            f"parameter {name} is a shard of FSDP: max_norm and skip_nonfinite would measure this rank's "
            f"gradients alone. Leave both out, and call clip_grad_norm_ of the FSDP module before the step"
        )


def is_fsdp_shard(param: Tensor) -> bool:
    """Tell if FullyShardedDataParallel has marked a parameter as its own."""
    return getattr(param, "_fsdp_flattened", False)


def check_grad(param: Tensor, grad: Tensor, name: str) -> None:
    """Raise for gradients that no step can use."""
    if param.is_meta or isinstance(param, FakeTensor):
        raise FlatbedError(
            f"parameter {name} is a {'meta' if param.is_meta else 'fake'} tensor without values: materialize "
            f"the model first. To estimate memory, step torch's optimizer of the same name"
        )
    if grad.layout != torch.strided:
        raise FlatbedError(
            f"the gradient of parameter {name} is sparse ({grad.layout}); build the layer with sparse=False, "
            f"or give its parameters to torch.optim.SparseAdam"
        )
    if grad.dtype.is_complex:
        raise FlatbedError(f"the gradient of parameter {name} is complex ({grad.dtype})")
    for what, dtype in (("parameter", param.dtype), ("gradient of parameter", grad.dtype)):
        if dtype not in DTYPES:
            raise FlatbedError(
                f"the {what} {name} is {dtype}; expected float32, bfloat16, float16 or float64"
            )
    check_grad_kind(param, grad, name)
    if grad.shape != param.shape or grad.device != param.device:
        raise FlatbedError(
            f"the gradient of parameter {name} has shape {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(param.shape)} on {param.device}"
        )


def check_max_norm(max_norm: Any) -> None:
    """Raise for what is no norm. Zero is allowed, as in torch; infinity only measures."""
    if max_norm is not None and not (isinstance(max_norm, numbers.Real) and float(max_norm) >= 0):
        raise ValueError(f"max_norm must be a number ≥ 0, or None for no clipping; found {max_norm!r}")


def check_shard_state(ranks: Any) -> None:
    """Raise for what names no ranks."""
    if ranks is None or ranks is False:
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise FlatbedError("shard_state needs ranks: call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    if ranks is not True and not isinstance(ranks, (dist.ProcessGroup, DeviceMesh)):
        raise TypeError(f"shard_state must be True, a process group or a DeviceMesh; found {ranks!r}")
    if isinstance(ranks, DeviceMesh) and ranks.ndim != 1:
        raise ValueError(f'shard_state takes a mesh of one dimension, such as mesh["dp"]; found {ranks}')
    if isinstance(ranks, DeviceMesh) and ranks.get_coordinate() is None:
        raise FlatbedError(
            f"rank {dist.get_rank()} is not part of the mesh of shard_state, whose ranks are "
            f"{ranks.mesh.tolist()}: build this optimizer on those ranks only"
        )


def check_options(options: StepOptions) -> None:
    """Raise for wrong values of the options that torch's optimizers do not have."""
    for name in ("skip_nonfinite", "master_weights", "stochastic_rounding", "per_row_steps"):
        if not isinstance(value := getattr(options, name), bool):
            raise TypeError(f"{name} must be True or False; found {value!r}")
    check_max_norm(options.max_norm)
    decay: Any = options.ema_decay
    dtype = options.state_dtype
    if decay is not None and not (isinstance(decay, numbers.Real) and 0 <= float(decay) < 1):
        raise ValueError(f"ema_decay must be in [0, 1), or None; found {decay!r}")
    if dtype is not None and dtype not in STATE_DTYPES:
        allowed = ", ".join(map(str, STATE_DTYPES))
        raise ValueError(f"state_dtype must be one of {allowed} (fp16 is too narrow); found {dtype!r}")
    if options.master_weights and options.stochastic_rounding:
        raise ValueError("master_weights=True makes stochastic_rounding=True useless: choose one")
