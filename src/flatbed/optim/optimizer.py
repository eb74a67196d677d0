"""The optimizer: torch's interface to a rule, a plan of dense steps, and the steps of tables."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flatbed.distributed.dense_shards import Sharding, is_dtensor, local_of, on_several_meshes
from flatbed.distributed.peers import Peers
from flatbed.distributed.ranks import ExchangeError, world_size
from flatbed.distributed.state_shards import StateSharding
from flatbed.errors import FlatbedError
from flatbed.kernels import check_values_exist
from flatbed.kernels.step import NORM, SKIPPED, StepOptions
from flatbed.optim import options as checks
from flatbed.optim.options import ParamsT, describe_for_ranks, named_params
from flatbed.optim.plan import Plan, build_plan
from flatbed.optim.state import lacks_state
from flatbed.optim.state_dict import ROUNDS, build_state_dict, load_state_dict
from flatbed.optim.table_step import OptimizerTables, check_table
from flatbed.optim.update import StepStats, update_all
from flatbed.rule import Group, Rule
from flatbed.tables.captured_lookups import current_capture
from flatbed.tables.table import Table


class Optimizer(torch.optim.Optimizer):
    """The base of all optimizers. Derived classes have a `_rule` and a constructor."""

    _rule: ClassVar[Rule]
    _fixed: ClassVar[dict[str, Any]] = {}
    """Hyperparameters that no checkpoint may change."""
    _module: weakref.ref[nn.Module] | None

    def __init__(self, params: ParamsT, options: dict[str, Any], **extras: Any) -> None:
        self._peers = Peers.of_new_optimizer()
        try:
            self._build(params, options, extras)
        except Exception as error:
            if self._peers is not None:
                self._peers.tell_failure(error)  # other ranks may wait for this one
            raise

    def _build(self, params: ParamsT, options: dict[str, Any], extras: dict[str, Any]) -> None:
        checks.check_known(type(self), extras)
        not_options = ("self", "params", "extras", "__class__")
        defaults = {name: value for name, value in options.items() if name not in not_options}
        checks.check_group(self._rule, defaults)
        self._norm_group = extras.pop("norm_group", None)
        self._state_sharding = None
        ranks = extras.pop("shard_state", None)
        if ranks is not None and ranks is not False:
            checks.check_shard_state(ranks)
            self._state_sharding = StateSharding(ranks)
        self._options = StepOptions(**extras)
        checks.check_options(self._options)
        if self._options.stochastic_rounding or self._options.stochastic_state:
            defaults[ROUNDS] = 0
        self._reset()
        if isinstance(params, nn.Module):
            self._module = weakref.ref(params)
            params = params.named_parameters()
        super().__init__(params, defaults)
        self._check_ranks()
        self._make_state_early(copies_weights=False)
        self._own_tables()  # last: it takes tables from their former optimizers, and nothing may fail then

    def _reset(self) -> None:
        """Start without a plan and without tables."""
        self._plan: Plan | None = None
        self._tables = OptimizerTables(self._rule)
        self._stats = StepStats()
        self._retired: list[Plan] = []  # former plans, since CUDA graphs hold launches of their steppers
        self._owns_tables = False
        self._averages_in_model = False
        self._has_partial_step = False
        """True while parameters change, and after a change that did not end, until a step does, or a load."""
        self._module = None

    def _make_state_early(self, *, copies_weights: bool) -> None:
        """Make state before the first gradient where torch does, and where checkpoints would lack it.

        Without state, `torch.distributed.checkpoint` takes a step with gradients of zero. That step would be
        counted, and tables cannot have gradients of zero.
        """
        params = list(named_params(self.param_groups))
        eager = self._rule.eager
        has_shards_or_tables = any(is_dtensor(p) or isinstance(p, Table) for _, p, _ in params)
        if not (eager or self._state_sharding or has_shards_or_tables):
            return
        for _, p, _ in params:
            if p.is_meta and p.requires_grad and is_dtensor(p):  # its state is made once it has values
                self.state.setdefault(p, {})
        lacking = {
            id(p)
            for _, p, number in params
            if (eager or (p.requires_grad and not p.is_meta))
            and not isinstance(p, Table)
            and lacks_state(self, self.param_groups[number], p, copies_weights=copies_weights)
        }
        if lacking:
            self._rebuild(early=lacking, copies_weights=copies_weights)

    def _sharding_of(self, param: Tensor) -> Sharding | None:
        """Return the sharding of a DTensor, or of the state of a whole parameter."""
        if self._state_sharding is None or is_dtensor(param):
            return Sharding.of(param)
        return self._state_sharding.shard(param)

    def _row_scalars(self, group: Group) -> tuple[str, ...]:
        """Return the scalars that a table of this group has in every record."""
        return self._rule.scalars_of_rows(group, per_row_steps=self._options.per_row_steps)

    def _own_tables(self, first: int = 0) -> None:
        self._owns_tables = True
        for name, param, number in named_params(self.param_groups[first:], first):
            if isinstance(param, Table):
                self._tables.add(self, name, param, number)

    # ---- torch's interface

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own."""
        n_before = len(self.param_groups)
        module = param_group.get("params") if isinstance(param_group, dict) else None
        if isinstance(module, nn.Module):  # its parameters get names, unless other groups have none
            has_names = not n_before or "param_names" in self.param_groups[0]
            params = module.named_parameters() if has_names else module.parameters()
            param_group = {**param_group, "params": list(params)}
        # Unwrapped: torch's decorator, which is only needed for tracing, takes a second to import dynamo.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        try:
            self._check_group(self.param_groups[n_before], n_before)
            if self._owns_tables:  # otherwise the constructor compares all groups at once
                self._check_ranks()
        except Exception as error:
            try:
                if not isinstance(error, ExchangeError):
                    self._check_ranks(error)
            finally:
                del self.param_groups[n_before:]
            raise
        checks.warn_of_misspelt(type(self), param_group, self.defaults)
        if self._owns_tables:
            self._own_tables(n_before)

    def _check_ranks(self, failure: Exception | None = None) -> None:
        """Raise on all ranks if their DTensors or options differ, or if one rank has failed."""
        if self._peers is None:
            return
        stated = describe_for_ranks(self)
        if not stated and failure is None:
            n_params = sum(len(group["params"]) for group in self.param_groups)
            self._peers.tell_whole(type(self).__name__, n_params)
        self._peers.agree(stated, failure)

    def _check_group(self, group: dict[str, Any], number: int) -> None:
        checks.check_group(self._rule, group)
        checks.check_no_extras(self._options, group)
        for name, param, _ in named_params([group], number):
            if isinstance(param, Table):
                check_table(self, name, param, group)
                continue
            checks.check_param(self._options, param, name)
            if self._rule.for_tables is not None:
                raise TypeError(
                    f"{type(self).__name__} is for tables, and parameter {name} is none: "
                    f"{self._rule.for_tables}"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or torch.autograd.profiler._is_profiler_enabled
        ):
            return _hooked_step(self, closure) if closure is not None else _hooked_step(self)
        if torch.compiler.is_compiling():
            return _untraced_step(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # otherwise torch wraps `step`, even without hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero."""
        if not set_to_none:
            for owned in self._tables.owned:  # rows with a gradient of zero would be updated
                owned.table.grad = None
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, with torch's keys: `torch.optim` can load it."""
        # Master weights and averages cannot start from the model while it holds averages.
        self._make_state_early(copies_weights=not self._averages_in_model)
        return build_state_dict(self, _torch_state_dict(self), with_tables=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's; nothing changes if it does not fit."""
        load_state_dict(self, state_dict, with_tables=True)

    def _state_dict_without_tables(self) -> dict[str, Any]:
        """Return `state_dict()` without the state of tables, which checkpoints save separately."""
        return build_state_dict(self, _torch_state_dict(self), with_tables=False)

    def _load_state_dict_without_tables(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict without changing tables and their state."""
        load_state_dict(self, state_dict, with_tables=False)

    def __repr__(self) -> str:
        lines = [f"    {name}: {value}\n" for name, value in asdict(self._options).items() if value]
        return "".join([super().__repr__()[:-1], *(["All groups\n", *lines] if lines else []), ")"])

    def __getstate__(self) -> dict[str, Any]:
        names = ("_options", "_norm_group", "_state_sharding", "_stats")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**super().__getstate__(), **own}

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        for shared in (self._norm_group, self._state_sharding):
            memo[id(shared)] = shared  # process groups cannot be copied
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        given = None if self._state_sharding is None else self._state_sharding.given
        if any(
            group is not None and isinstance(group, dist.ProcessGroup) for group in (self._norm_group, given)
        ):
            raise FlatbedError(
                f"{type(self).__name__} has a process group (norm_group or shard_state), which cannot be "
                f"pickled: save optimizer.state_dict() instead, and build the optimizer again"
            )
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self._norm_group = self._state_sharding = self._peers = None
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(self._fixed)
        self._own_tables()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves unscaling and skipping to the step, instead of doing both before it.

        As in torch, `fused=True` asks for that: the host then does not wait for the GPU. Otherwise,
        frameworks that clip gradients or count skipped steps work as with torch's default.

        Some cases always need it: a GradScaler cannot wait inside of a CUDA graph, it refuses fp16 gradients,
        and it does not know other ranks. Before a capture it must not skip a step, which makes the state.
        """
        capture = current_capture()
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call,unused-ignore]
        return (
            (bool(self._tables.owned) and world_size() > 1)
            or self._norm_group is not None
            or any(group.get("fused") for group in self.param_groups)
            or (has_cuda and torch.cuda.is_current_stream_capturing())
            or (capture is not None and bool(capture.inputs))
            or on_several_meshes(p for group in self.param_groups for p in group["params"])
            or any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])
        )

    # ---- what torch's optimizers do not have

    @property
    def max_norm(self) -> float | None:
        """The norm that gradients are clipped to."""
        return self._options.max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        checks.check_max_norm(value)
        for name, param, _ in named_params(self.param_groups):
            needs_ranks = self._norm_group is not None or is_dtensor(param)
            if needs_ranks and (value is None) != (self.max_norm is None):
                raise FlatbedError(
                    f"max_norm of parameters on several ranks ({name}) cannot become {value} later, since a "
                    f"step would wait for ranks that did not follow: build the optimizer with "
                    f"max_norm=float('inf') to measure the norm, and set another number then"
                )
            checks.check_param(replace(self._options, max_norm=value), param, name)
        self._options = replace(self._options, max_norm=value)

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step, before clipping: a tensor on their device."""
        vector = self._stats.latest
        return vector[NORM].float() if self._options.needs_norm and vector is not None else None

    @property
    def skipped_steps(self) -> Tensor:
        """The number of steps skipped because of gradients that are not finite: a tensor on their device."""
        vector = self._stats.latest
        return torch.zeros((), dtype=torch.long) if vector is None else vector[SKIPPED].long()

    def nonfinite(self) -> list[str]:
        """Return the names of the parameters whose gradients are not finite now. Waits for the GPU.

        Of a DTensor's gradient, only this rank's shard is looked at.
        """
        bad: list[str] = []
        for name, param, _ in named_params(self.param_groups):
            if param.grad is not None and not bool(torch.isfinite(local_of(param.grad)).all()):
                # A flat parameter knows the names of the parameters in it.
                flat = None if isinstance(param, Table) else getattr(param, "_owner", None)
                bad += [name.strip("'")] if flat is None else flat.nonfinite()
        return list(dict.fromkeys(bad))

    @contextmanager
    def ema_weights(self, model: nn.Module | None = None) -> Iterator[None]:
        """Put the averaged weights into the model inside this context, and the trained ones back after it.

        With DTensors, `model` is needed unless the optimizer was built from the model: modules of FSDP2 that
        hold gathered weights must gather them again.
        """
        if self._options.ema_decay is None:
            raise FlatbedError("there is no average: build the optimizer with ema_decay=0.999, for example")
        if self._averages_in_model:
            raise FlatbedError("ema_weights() inside ema_weights(): the model holds the averages already")
        if model is None and self._module is not None:
            model = self._module()
        with torch.no_grad():
            plan = self._current_plan()
            if plan.has_dtensors and model is None:
                raise FlatbedError(
                    "ema_weights() does not know the model whose shards it changes: call ema_weights(model)"
                )
            plan.masters.sync_written()
            trained = [param.detach().clone() for param in plan.averaged_params()]
            had_partial_step, self._has_partial_step = self._has_partial_step, True
            plan.write_averaged([slot.ema for slot in plan.slots if slot.ema is not None], model)
        self._averages_in_model = True
        try:
            yield
        finally:
            self._averages_in_model = False
            with torch.no_grad():
                plan.write_averaged(trained, model)
            plan.masters.record_versions()
            self._has_partial_step = had_partial_step

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Update the master weights of parameters that were written to.

        Steps do so themselves. Only writes that autograd does not see (`p.data.copy_(…)`) and writes before
        the capture or between the replays of a CUDA graph need this call.
        """
        self._check_no_averages("refresh master weights")
        plan = self._current_plan()
        plan.masters.sync(plan.masters.slots)
        plan.masters.record_versions()

    def _check_no_averages(self, doing: str) -> None:
        """Raise inside `ema_weights()`, where the model does not hold the trained weights."""
        if self._averages_in_model:
            raise FlatbedError(
                f"the model holds averaged weights (`with ema_weights()`): {doing} outside of it"
            )

    # ---- a step

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._peers is not None:
            self._peers.begin_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_no_averages("step")
        check_values_exist("a step")
        with torch.no_grad():
            plan = self._current_plan()
            # Errors here keep the plan: a CUDA graph can be captured next, without another eager step.
            table_steppers = self._tables.prepare_step(self) if self._tables.owned else []
            try:
                update_all(self, plan, table_steppers)
            except BaseException:
                self._drop_plan()  # uploads may not have been issued
                raise
        return loss

    def _refuse_replaced_params(self) -> None:
        """Raise if only parameters outside of this optimizer have a gradient: a step would train nothing."""
        model = None if self._module is None else self._module()
        own = {id(param) for group in self.param_groups for param in group["params"]}
        others = [] if model is None else [one for one in model.named_parameters() if id(one[1]) not in own]
        name = next((name for name, param in others if param.grad is not None), None)
        if name is not None:
            raise FlatbedError(
                f"no parameter of {type(self).__name__} has a gradient, but '{name}' of the model that it "
                f"was built from has one: parameters were replaced. Build the optimizer after fully_shard"
            )

    def _current_plan(self) -> Plan:
        """Return the plan. It is built again if groups, state or parameters have changed."""
        plan = self._plan
        if plan is None or plan.built_from != plan.fingerprint(self.param_groups, self.state):
            plan = self._rebuild()
        return plan

    @torch.no_grad()
    def _rebuild(self, **how: Any) -> Plan:
        self._tables.sync(self)
        plan = build_plan(self, **how)
        self._drop_plan()
        self._plan = plan
        return plan

    def _drop_plan(self) -> None:
        if self._plan is not None and any(stepper.captured for stepper in self._plan.steppers):
            self._retired.append(self._plan)
        self._plan = None


# `state_dict` without torch's guard against tracing. The guard's first call imports dynamo. Control-C
# during the import would leave modules half imported, and no state could be saved any more.
_torch_state_dict: Callable[[Any], dict[str, Any]] = inspect.unwrap(torch.optim.Optimizer.state_dict)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _untraced_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Run a step inside of what is being compiled, without tracing it."""
    return self._step(closure)


_hooked_step = torch.optim.Optimizer.profile_hook_step(_untraced_step)
