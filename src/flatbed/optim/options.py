"""Options of an optimizer: the options that torch lacks, their validation, and a description for ranks."""

from __future__ import annotations

import difflib
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatbed.distributed.dense_shards import Sharding, check_grad_kind, check_sharding
from flatbed.distributed.ranks import world_size
from flatbed.errors import FlatbedError
from flatbed.kernels.step import StepOptions
from flatbed.rule import Group, Rule
from flatbed.tables.table import Table
from flatbed.tables.weight_view import WeightView

if TYPE_CHECKING:
    from flatbed.optim.optimizer import Optimizer

Groups = list[dict[str, Any]]
ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]] | nn.Module
OF_NORM = ("max_norm", "skip_nonfinite")
LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


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


def named_params(groups: Sequence[Group], first: int = 0) -> Iterator[tuple[str, Tensor, int]]:
    """Yield all parameters and tables with a name for messages and the number of their group."""
    for number, group in enumerate(groups, first):
        given = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield (f"'{given[i]}'" if given else f"{i} of group {number}"), param, number


def describe_for_ranks(optimizer: Optimizer) -> dict[tuple[int, ...], list[tuple[str, str]]]:
    """Return parameters and options as names and values, for each set of ranks that compare them.

    Whole parameters may differ between ranks, unless their gradients are part of a norm.
    """
    groups, options, stages = optimizer.param_groups, optimizer._options, optimizer._norm_group
    stated = {}
    if stages is not None:
        alike = [(name, repr(getattr(options, name))) for name in OF_NORM]
        stated[tuple(dist.get_process_group_ranks(stages))] = alike
    common = [("the class of the optimizer", type(optimizer).__name__)]
    common += [(name, repr(value)) for name, value in asdict(options).items()]
    # Ranks of one pipeline stage are in different norm groups.
    common.append(("norm_group", "None" if stages is None else f"{stages.size()} ranks"))
    for number, group in enumerate(groups):
        for name, value in group.items():
            on_gpu = isinstance(value, Tensor) and value.device.type != "cpu"  # reading it would wait
            if name not in ("params", "param_names") and not on_gpu:
                common.append((f"{name} of group {number}", repr(value)))
    held = [
        (name, param, None if isinstance(param, Table) else optimizer._sharding_of(param))
        for name, param, _ in named_params(groups)
    ]
    for ranks in {sharding.ranks for *_, sharding in held if sharding is not None}:
        stated[ranks] = common + [
            (f"parameter {name}", _kind(param, sharding))
            for name, param, sharding in held
            if (options.needs_norm if sharding is None else sharding.ranks == ranks)
        ]
    return stated


def _kind(param: Tensor, sharding: Sharding | None) -> str:
    kind = f"{tuple(param.shape)} {param.dtype}"
    kind += f" placed {sharding.placements}" if sharding is not None else ""
    return kind + ("" if param.requires_grad else ", requires_grad=False")


# ---- validation

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


def check_group(rule: Rule, group: Mapping[str, Any]) -> None:
    """Raise for hyperparameters outside the ranges that torch allows, and for unsupported ones.

    The classes of `from_torch` check their own hyperparameters, which may have these names and other ranges.
    """
    if not rule.hyperparameters:
        return
    for name, (is_good, range_) in LIMITS.items():
        given = group.get(name, ())
        values = given if isinstance(given, (tuple, list)) else (given,)
        if name == "betas" and name in group and len(values) != 2:
            raise ValueError(f"betas must be two numbers; found {given!r}")
        for value in values:
            if not isinstance(value, (numbers.Real, Tensor)):
                raise TypeError(f"{name} must be a number; found {value!r}")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{name} must be one number; found a tensor of shape {tuple(value.shape)}")
            # Reading a tensor on a GPU would wait.
            is_known = not isinstance(value, Tensor) or value.device.type == "cpu"
            if is_known and not is_good(float(value)):  # nan is not good either
                raise ValueError(f"{name} must be {range_}; found {value}")
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov needs a momentum and no dampening; found momentum={group['momentum']}, "
            f"dampening={group['dampening']}"
        )
    if group.get("differentiable"):
        raise ValueError(
            "differentiable=True: these steps cannot be differentiated through; use torch.optim for that"
        )


def check_known(kind: type, extras: Iterable[str]) -> None:
    """Raise for options that an optimizer does not have."""
    if unknown := ", ".join(repr(name) for name in extras if name not in Extras.__annotations__):
        own = [name for name in inspect.signature(kind).parameters if name not in ("params", "extras")]
        known = ", ".join([*own, *Extras.__annotations__])
        raise TypeError(f"{kind.__name__} has no option {unknown}; it has {known}")


def warn_of_misspelt(kind: type, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Warn of keys that are nearly those of hyperparameters. Others may be the user's, as in torch."""
    for key in group.keys() - defaults.keys() - {"params", "param_names"}:
        if near := difflib.get_close_matches(key, defaults, n=1, cutoff=0.85):
            warnings.warn(
                f"{kind.__name__} does not read {key!r} of a param group: is it {near[0]}?", stacklevel=4
            )


def check_no_extras(options: StepOptions, group: Mapping[str, Any]) -> None:
    """Raise if a param group has options of the whole optimizer, unless a wrapper has copied them there."""
    for name in Extras.__annotations__:
        is_copy = name not in OF_NORM and name in group and group[name] == getattr(options, name, None)
        if name in group and not is_copy:
            raise ValueError(
                f"{name} is an option of the whole optimizer; found in a param group: pass it to the "
                f"constructor. With ZeroRedundancyOptimizer, which has no norm over all ranks, call "
                f"torch.nn.utils.clip_grad_norm_ before its step"
            )


def check_options(options: StepOptions) -> None:
    """Raise for wrong values of the options that torch's optimizers do not have."""
    for name in ("skip_nonfinite", "master_weights", "stochastic_rounding", "per_row_steps"):
        if not isinstance(value := getattr(options, name), bool):
            raise TypeError(f"{name} must be True or False; found {value!r}")
    check_max_norm(options.max_norm)
    if options.ema_decay is not None and not 0 <= float(options.ema_decay) < 1:
        raise ValueError(f"ema_decay must be in [0, 1), or None; found {options.ema_decay!r}")
    if options.state_dtype not in (None, *STATE_DTYPES):
        allowed = ", ".join(map(str, STATE_DTYPES))
        raise ValueError(
            f"state_dtype must be one of {allowed} (fp16 is too narrow); found {options.state_dtype!r}"
        )
    if options.master_weights and options.stochastic_rounding:
        raise ValueError("master_weights=True makes stochastic_rounding=True useless: choose one")


def check_max_norm(max_norm: Any) -> None:
    """Raise if a value is not a norm. Infinity only measures the norm.

    Zero would drop all gradients, as in torch; programs that give it mean no clipping.
    """
    is_number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
    if max_norm is not None and not (is_number and float(max_norm) > 0):
        raise ValueError(f"max_norm must be a number > 0, or None for no clipping; found {max_norm!r}")


def check_shard_state(ranks: Any) -> None:
    """Raise if there are no ranks to shard state across, or if this rank is not one of them."""
    if not (dist.is_available() and dist.is_initialized()):
        raise FlatbedError("shard_state needs ranks: call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    is_mesh = isinstance(ranks, DeviceMesh)
    if not (ranks is True or isinstance(ranks, dist.ProcessGroup) or (is_mesh and ranks.ndim == 1)):
        raise TypeError(
            f'shard_state must be True, a process group, or a mesh of one dimension, such as mesh["dp"]; '
            f"found {ranks!r}"
        )
    if is_mesh and ranks.get_coordinate() is None:
        raise FlatbedError(
            f"rank {dist.get_rank()} is not part of the mesh of shard_state, whose ranks are "
            f"{ranks.mesh.tolist()}: build this optimizer on those ranks only"
        )


def check_param(options: StepOptions, param: Tensor, name: str) -> None:
    """Raise for parameters that no step can update, or whose norm would only include this rank."""
    if isinstance(param, WeightView):
        raise TypeError(f"parameter {name} is a view of a table's weights: give emb.table instead")
    check_sharding(param, name)
    if options.needs_norm and is_fsdp_shard(param) and world_size() > 1:
        raise FlatbedError(
            f"parameter {name} is a shard of FSDP: max_norm and skip_nonfinite would measure this rank's "
            f"gradients alone. Leave both out, and call clip_grad_norm_ of the FSDP module before the step"
        )


def is_fsdp_shard(param: Tensor) -> bool:
    """Return whether FullyShardedDataParallel has marked a parameter as its own."""
    return getattr(param, "_fsdp_flattened", False)


def check_grad(param: Tensor, grad: Tensor, name: str) -> None:
    """Raise for gradients that no step can use."""
    if param.is_meta:
        raise FlatbedError(
            f"parameter {name} is a meta tensor without values: materialize the model first. To estimate "
            f"memory, step torch's optimizer of the same name"
        )
    if grad.layout != torch.strided:
        raise FlatbedError(
            f"the gradient of parameter {name} is sparse ({grad.layout}); build the layer with sparse=False, "
            f"or give its parameters to torch.optim.SparseAdam"
        )
    for what, dtype in (("parameter", param.dtype), ("gradient of parameter", grad.dtype)):
        if dtype not in DTYPES:
            raise FlatbedError(
                f"the {what} {name} is {dtype}; expected float32, bfloat16, float16 or float64. Of a complex "
                f"one, make torch.view_as_real(parameter) the parameter, or use torch.optim for it"
            )
    check_grad_kind(param, grad, name)
    if grad.shape != param.shape or grad.device != param.device:
        raise FlatbedError(
            f"the gradient of parameter {name} has shape {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(param.shape)} on {param.device}"
        )
