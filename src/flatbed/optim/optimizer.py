"""The optimizer: torch's interface around a rule, arenas of state and the steppers of each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flatbed.errors import FlatbedError
from flatbed.kernels.step import NORM, SKIPPED, Grads, ParamSlot, Scaling, Settings, Stepper
from flatbed.optim import checks
from flatbed.optim import state_dict as checkpoint
from flatbed.optim.change_tracking import Change, TensorTracker
from flatbed.optim.master_weights import MasterWeights
from flatbed.optim.owned_tables import OwnedTables
from flatbed.optim.state import Flag, Members, States
from flatbed.optim.state_builder import build_rows, keep_state, steppers_for
from flatbed.optim.table_step import TableSteps
from flatbed.rule import Rule
from flatbed.tables.grads import RowGrads
from flatbed.tables.replicas import any_replica
from flatbed.tables.table import Table

ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]] | nn.Module


class Extras(TypedDict, total=False):
    """What every optimizer of flatbed takes beside torch's arguments."""

    max_norm: float | None
    """Clip the gradients to this norm, as `torch.nn.utils.clip_grad_norm_` would; `p.grad` stays as it is."""
    skip_nonfinite: bool
    """Leave out steps whose gradients' norm is not finite, and count them in `skipped_steps`."""
    master_weights: bool
    """Keep an fp32 copy of bf16 and fp16 parameters, and update that; state is then fp32 too."""
    stochastic_rounding: bool
    """Round bf16 parameters up or down by chance, so that small updates are not lost."""
    state_dtype: torch.dtype | None
    """Dtype of the state; by default the parameter's, as in torch, or fp32 with `master_weights`."""
    ema_decay: float | None
    """Keep an exponential moving average of the parameters, for `ema_weights()`."""
    per_row_steps: bool
    """Count the steps of every row of a table for itself, instead of one count for the table."""


class Optimizer(torch.optim.Optimizer):
    """What the optimizers have in common. Derived classes bring a `rule` and a constructor."""

    rule: ClassVar[Rule]
    fixed: ClassVar[dict[str, Any]] = {}
    """Options that no checkpoint may change."""
    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf

    def __init__(
        self,
        params: ParamsT,
        options: dict[str, Any],
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype | None = None,
        ema_decay: float | None = None,
        per_row_steps: bool = False,
        **unknown: Any,
    ) -> None:
        checks.check_known(type(self), unknown, Extras.__annotations__)
        checks.check_params(params)
        not_options = ("self", "params", "extras", "__class__")
        defaults = {name: value for name, value in options.items() if name not in not_options}
        checks.check_group(defaults)
        checks.check_settings(
            max_norm=max_norm,
            ema_decay=ema_decay,
            state_dtype=state_dtype,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            skip_nonfinite=skip_nonfinite,
            per_row_steps=per_row_steps,
        )
        rounded_state = state_dtype == torch.bfloat16
        self.settings = Settings(max_norm, skip_nonfinite, stochastic_rounding, rounded_state, ema_decay)
        self.master_weights = master_weights
        self.state_dtype = state_dtype
        self.per_row_steps = per_row_steps
        self._forget()
        if isinstance(params, nn.Module):
            params = params.named_parameters()
        elif isinstance(params, list | tuple):
            checks.check_members([one for one in params if not isinstance(one, dict)])
        try:
            super().__init__(params, defaults)
        except ValueError as error:
            if "empty parameter list" not in str(error):
                raise
            raise ValueError(
                "empty parameter list: there is nothing to train. Tables are not among "
                "module.parameters(), which can be read once: give the module itself, or emb.table"
            ) from error
        self.state = States(Flag(), self.state)
        if self.rule.eager:
            self._rebuild(everything=True)
        self._complete = True  # nothing can fail any more: tables may leave their optimizers for this one
        for name, table, group in self._named_tables(self.param_groups):
            self._tables.add(name, table, group)

    def _forget(self) -> None:
        """Start without knowledge of where anything lies; it is found out at the next step."""
        self._complete = False
        self._rows: list[ParamSlot] = []
        self._idle: list[Tensor] = []  # parameters that have had no gradient yet
        self._steppers: list[tuple[Stepper, list[int]]] = []
        self._watch: TensorTracker | None = None
        self._known_state: Any = None
        self._flag = Flag()
        self._kinds: list[int] = []
        self._known_groups: list[Any] = []
        self._known_list: Any = None
        self._sentinels: list[tuple[Tensor, int]] = []
        self._retired: list[Stepper] = []  # captured graphs still read their tables
        self._shared: dict[torch.device, Tensor] = {}
        self._masters = MasterWeights([])
        self._on_loan = False
        self._tables = OwnedTables(self)
        self._rounds = 0.0  # how often had been rounded by chance before a checkpoint was loaded

    # ---- torch's interface

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own."""
        checks.check_new_group(param_group, self.param_groups)
        if own := [name for name in param_group if name in Extras.__annotations__]:
            raise ValueError(
                f"{', '.join(own)}: an option of the whole optimizer, not of a param group; found in a group"
            )
        merged = {**self.defaults, **{k: v for k, v in param_group.items() if k != "params"}}
        checks.check_group(merged)
        n_before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            for name, param in self._names(self.param_groups[n_before:], n_before):
                checks.check_param(param, name)
                if self.rule.for_tables is not None:
                    raise TypeError(
                        f"{type(self).__name__} is for tables, and parameter {name} is none: "
                        f"{self.rule.for_tables}"
                    )
            found = list(self._named_tables(self.param_groups[n_before:], n_before))
            for name, table, group in found:
                self._tables.check(name, table, group)
        except Exception:
            del self.param_groups[n_before:]
            raise
        for name, table, group in found if self._complete else ():
            self._tables.add(name, table, group)
        self._watch = None

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

    step.hooked = True  # type: ignore[attr-defined]  # torch would wrap it, hooks or not

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            checks.check_closure(closure)
            with torch.enable_grad():
                loss = closure()
        if self._on_loan:
            raise FlatbedError("the model holds averaged weights (`with ema_weights()`): step outside of it")
        with torch.no_grad():
            packs = self._tables.look() if self._tables.members else []
            grads, addresses = self._look()
            if self._rows or any(pack is not None for pack in packs):
                try:
                    self._run(grads, addresses, packs)
                except BaseException:
                    self._watch = None  # whatever was on its way may not have arrived
                    raise
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero."""
        checks.check_set_to_none(set_to_none)
        if not set_to_none:
            for (
                member
            ) in self._tables.members:  # rows without gradient are not updated; with zeros they would be
                member.table.grad = None
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """State by torch's keys and in torch's format: `torch.optim` can load it."""
        return checkpoint.plain(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's; nothing changes if it does not fit."""
        checkpoint.load(self, state_dict)

    def __repr__(self) -> str:
        extras = {name: getattr(self.settings, name) for name in self.settings.__slots__}
        extras |= {"master_weights": self.master_weights, "state_dtype": self.state_dtype}
        extras |= {"per_row_steps": self.per_row_steps}
        asked = {name: value for name, value in extras.items() if value and name != "stochastic_state"}
        lines = "".join(f"    {name}: {value}\n" for name, value in asked.items())
        return f"{super().__repr__()[:-1]}{'All groups' + chr(10) if asked else ''}{lines})"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("settings", "master_weights", "state_dtype", "per_row_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(self.fixed)
        self._complete = True
        for name, table, number in self._named_tables(self.param_groups):
            self._tables.add(name, table, number)

    # ---- what torch's optimizers do not have

    @property
    def max_norm(self) -> float | None:
        """The norm that gradients are clipped to."""
        return self.settings.max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        checks.check_max_norm(value)
        self.settings.max_norm = value

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step, before clipping: a tensor on their device."""
        for shared in chain(self._shared.values(), self._tables.shared.values()):
            if self.settings.normed:
                return shared[NORM].float()
        return None

    @property
    def skipped_steps(self) -> Tensor:
        """How many steps were skipped for gradients that are not finite, as a tensor on their device."""
        for shared in chain(self._shared.values(), self._tables.shared.values()):
            return shared[SKIPPED].long()
        return torch.zeros((), dtype=torch.long)

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradients are not finite at present. Waits for the GPU."""
        bad = [m.name.strip("'") for m in self._tables.members if not _finite(m.table.grad)]
        for name, param in self._names(self.param_groups):
            if param.grad is None or bool(torch.isfinite(param.grad).all()):
                continue
            owner = getattr(param, "_owner", None)  # a flat parameter's, which knows the names inside
            bad += [name.strip("'")] if owner is None else owner.nonfinite()
        return list(dict.fromkeys(bad))

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """The averaged weights are in the model inside this context; the trained ones return after it."""
        if self.settings.ema_decay is None:
            raise FlatbedError("there is no average: build the optimizer with ema_decay=0.999, for example")
        if self._on_loan:
            raise FlatbedError("ema_weights() inside ema_weights(): the model holds the averages already")
        with torch.no_grad():
            if self._watch is None:
                self._rebuild()
            self._masters.follow()
        averaged = [(row.param, row.ema) for row in self._rows if row.ema is not None]
        trained = [param.detach().clone() for param, _ in averaged]
        with torch.no_grad():
            for param, average in averaged:
                param.copy_(average)
        self._on_loan = True
        try:
            yield
        finally:
            self._on_loan = False
            with torch.no_grad():
                for (param, _), value in zip(averaged, trained, strict=True):
                    param.copy_(value)
            self._masters.note()

    # ---- a step

    def _all_params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from (p for p in group["params"] if not isinstance(p, Table))

    def _names(self, groups: list[dict[str, Any]], first: int = 0) -> Iterator[tuple[str, Tensor]]:
        """The parameters that are no tables."""
        for name, param, _ in self._everything(groups, first):
            if not isinstance(param, Table):
                yield name, param

    def _named_tables(self, groups: list[dict[str, Any]], first: int = 0) -> Iterator[tuple[str, Table, int]]:
        for name, param, number in self._everything(groups, first):
            if isinstance(param, Table):
                yield name, param, number

    def _everything(self, groups: list[dict[str, Any]], first: int) -> Iterator[tuple[str, Tensor, int]]:
        for number, group in enumerate(groups, first):
            given = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield (f"'{given[i]}'" if given else f"{i} of group {number}"), param, number

    def _look(self) -> tuple[Grads, list[int] | None]:
        """The gradients; and their addresses, if those are not the last step's. All has its place then."""
        watch = self._watch
        if watch is None:
            if self._tables.members and next(self._all_params(), None) is None:
                return [], None
            return self._rebuild()
        grads = [p.grad for p in watch.params]
        if not self._unchanged(watch):
            return self._rebuild()
        verdict = watch.look(grads)
        if verdict is Change.NEW:
            for row, grad in zip(self._rows, grads, strict=True):
                if grad is not None:
                    checks.check_grad(row.param, grad, row.name)
                    if grad.dtype != row.grad_dtype:
                        return self._rebuild()
            watch.learn(grads)
        return grads, None if verdict is Change.SAME else watch.addresses

    def _unchanged(self, watch: TensorTracker) -> bool:
        """Whether rows and tables still describe the parameters and their state."""
        return (
            self.state is self._known_state
            and not self._flag.raised
            and self.param_groups is self._known_list
            and len(self.param_groups) == len(self._known_groups)
            and all(
                group["params"] is known
                for group, known in zip(self.param_groups, self._known_groups, strict=True)
            )
            and self._kinds == [self.rule.has(group) for group in self.param_groups]
            and watch.params_unchanged()
            and all(tensor.data_ptr() == address for tensor, address in self._sentinels)
            and all(p.grad is None for p in self._idle)
        )

    @torch.no_grad()
    def _rebuild(self, *, everything: bool = False, anew: bool = False) -> tuple[Grads, list[int]]:
        """Give every parameter that has a gradient or state its row, and every device its tables."""
        if any(p.is_cuda for p in self._all_params()) and torch.cuda.is_current_stream_capturing():
            raise FlatbedError(
                "take one eager step before the capture, with gradients for all parameters that are to be "
                "trained: state and tables would be made inside the graph, and anew at every replay"
            )
        states = self.state if isinstance(self.state, States) else States(Flag(), self.state)
        self.state, self._flag = states, states.flag
        for group in self.param_groups:
            if not isinstance(group["params"], Members) or group["params"].flag is not self._flag:
                group["params"] = Members(self._flag, group["params"])
        self._watch = None
        self._retired += [stepper for stepper, _ in self._steppers if stepper.captured]
        self._rows = build_rows(self, everything=everything, anew=anew)
        held = {id(row.param) for row in self._rows}
        self._idle = [p for p in self._all_params() if id(p) not in held]
        self._steppers = steppers_for(self)
        for row in self._rows:
            keep_state(self.state, row)
        self._kinds = [self.rule.has(group) for group in self.param_groups]
        self._known_list = self.param_groups
        # State that is moved by `.data = …`, to the host and back for example, is moved as a whole.
        ends = [self._rows[0], self._rows[-1]] if self._rows else []
        self._sentinels = [(t, t.data_ptr()) for row in ends for t in row.state.values()]
        self._known_groups = [group["params"] for group in self.param_groups]
        self._known_state = self.state
        self._flag.raised = False
        self._masters = MasterWeights(self._rows)
        if not anew:  # the weights may be loaded after the optimizer
            self._masters.take_over()
        self._masters.note()
        grads = [row.param.grad for row in self._rows]
        if not self._rows:
            return [], []
        addressed = any(stepper.addressed for stepper, _ in self._steppers)
        self._watch = TensorTracker([row.param for row in self._rows], addressed=addressed)
        self._watch.learn(grads)
        return grads, self._watch.addresses

    def _run(self, grads: Grads, addresses: list[int] | None, packs: list[RowGrads | None]) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._tables.members and (scale is not None or found_inf is not None):
            found_inf = any_replica(found_inf, [member.table for member in self._tables.members])
        scaling = None if scale is None and found_inf is None else Scaling(scale, found_inf)
        self._masters.follow()
        if not self._rows:
            self._run_apart([], frozenset(), None, scaling, packs)
            return
        watch = cast(TensorTracker, self._watch)
        unordered = watch.unordered
        if len(self._steppers) == 1 and not any(pack is not None for pack in packs):
            stepper = self._steppers[0][0]
            scaling = None if scaling is None else scaling.to(stepper.device)
            stepper.place(grads, unordered, addresses)
            if self.settings.normed:
                stepper.squares(self.settings, scaling)
            stepper.update(self.settings, scaling, None)
        else:
            self._run_apart(grads, unordered, addresses, scaling, packs)
        moved = watch.params
        if not watch.complete:
            moved = [param for param, grad in zip(moved, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(moved)
        self._masters.note()

    def _run_apart(
        self,
        grads: Grads,
        unordered: frozenset[int],
        addresses: list[int] | None,
        scaling: Scaling | None,
        packs: list[RowGrads | None],
    ) -> None:
        """Several devices, or tables: each measures its gradients, and all clip by the norm of all."""
        steppers: list[Stepper | TableSteps] = []
        if any(pack is not None for pack in packs):  # first, since files may fail
            steppers += self._tables.place(packs)
        for stepper, held in self._steppers if self._rows else ():
            here = frozenset(n for n, i in enumerate(held) if i in unordered)
            places = None if addresses is None else [addresses[i] for i in held]
            stepper.place([grads[i] for i in held], here, places)
            steppers.append(stepper)
        squares: list[Tensor] = []
        if self.settings.normed:
            for step in steppers:
                scaled = None if scaling is None else scaling.to(step.device)
                squares.append(step.squares(self.settings, scaled))
        for step in steppers:
            together = torch.cat([s.to(step.device) for s in squares]) if squares else None
            step.update(self.settings, None if scaling is None else scaling.to(step.device), together)

    # ---- tables

    def set_table_scalars(self, table: Table, scalars: Mapping[str, float]) -> None:
        """Go on from these numbers of state; those that are not given begin anew."""
        if not any(member.table is table for member in self._tables.members):
            raise ValueError(
                f"{type(self).__name__} does not have this table; found {table!r}: give it to it first"
            )
        self._tables.restore(self._tables[table], scalars)

    def state_dict_without_tables(self) -> dict[str, Any]:
        """`state_dict()` without what belongs to tables: they are saved by themselves."""
        return checkpoint.plain(self, super().state_dict(), with_tables=False)

    def load_state_dict_without_tables(self, state_dict: dict[str, Any]) -> None:
        """`load_state_dict()` that leaves tables and their state as they are."""
        checkpoint.load(self, state_dict, with_tables=False)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Let the masters follow parameters that were written to.

        Steps do so by themselves. Only writes that autograd does not see (`p.data.copy_(…)`) and writes
        before the capture or between the replays of a CUDA graph need it.
        """
        if self._watch is None:
            self._rebuild()
        self._masters.take_over()
        self._masters.note()


def _finite(grad: Tensor | None) -> bool:
    return grad is None or bool(torch.isfinite(grad).all())


@torch._disable_dynamo  # type: ignore[attr-defined]
def _untraced_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """A step inside of what is being compiled: nothing in it is for tracing."""
    return self._step(closure)


_hooked_step = torch.optim.Optimizer.profile_hook_step(_untraced_step)
