"""The case table: every optimizer, its options paired rather than crossed, and what it is compared with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, optim, tensor

import flatbed.optim
from flatbed.optim.optimizer import Optimizer


@dataclass(frozen=True)
class Case:
    """An optimizer of ours with options, and torch's of the same arithmetic."""

    name: str
    kind: type[Optimizer]
    torch_kind: type[optim.Optimizer]
    options: dict[str, Any]

    def ours(self, params: Any, **more: Any) -> Any:
        # Copied: schedulers write into a learning rate that is a tensor.
        return self.kind(params, **copy.deepcopy({**self.options, **more}))

    def theirs(self, params: Any, **more: Any) -> Any:
        return self.torch_kind(params, **copy.deepcopy({**self.options, **more}))

    def same_rounding(self, dtype: torch.dtype = torch.float32, *, whole: bool = True) -> dict[str, bool]:
        """Options with which torch's optimizer rounds as ours does on a CPU.

        Its fused kernels know nothing of holes, and SGD's leaves out most of a tensor in half precision
        (pytorch/pytorch#191763).
        """
        spoiled = self.torch_kind is optim.SGD and dtype in (torch.bfloat16, torch.float16)
        fused = self.kind._rule.fused is not None and whole and not spoiled
        return {"fused": True} if fused else {"foreach": False}

    def without_fused(self) -> Case:
        """The same as plain torch operations, whether torch has a fused kernel or not."""
        rule = replace(self.kind._rule, fused=None)
        return replace(self, kind=type(self.kind.__name__, (self.kind,), {"_rule": rule}))


class PlainLion(optim.Optimizer):
    """Lion as its paper writes it, which torch does not have."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "foreach": foreach})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = -p.grad if group["maximize"] else p.grad
                exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = exp_avg.lerp(g, 1 - beta1).sign()
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr)
                exp_avg.lerp_(g, 1 - beta2)


PLAIN = {"Lion": PlainLion}


def case(name: str, kind: str, **options: Any) -> Case:
    return Case(name, getattr(flatbed.optim, kind), getattr(optim, kind, None) or PLAIN[kind], options)


CASES = [
    case("sgd", "SGD", lr=0.05, weight_decay=0.1),
    case("sgd-momentum", "SGD", lr=tensor(0.05), momentum=0.9),
    case("sgd-dampening", "SGD", lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    case("sgd-nesterov", "SGD", lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01),
    case("adam", "Adam", lr=0.01, weight_decay=0.1),
    case("adam-amsgrad", "Adam", lr=tensor(0.01), amsgrad=True, betas=(0.8, 0.9), maximize=True),
    case("adam-forgetful", "Adam", lr=0.01, betas=(0.0, 0.0), eps=1e-3),
    case("adam-decoupled", "Adam", lr=0.01, weight_decay=0.3, decoupled_weight_decay=True),
    case("adamw", "AdamW", lr=0.01),
    case("adamw-amsgrad", "AdamW", lr=tensor(0.01), amsgrad=True, weight_decay=0.3, maximize=True),
    case("adamax", "Adamax", lr=0.01, weight_decay=0.1),
    case("adamax-forgetful", "Adamax", lr=tensor(0.01), betas=(0.0, 0.5), maximize=True),
    case("nadam", "NAdam", lr=0.01, weight_decay=0.1, maximize=True),
    case("nadam-decoupled", "NAdam", lr=tensor(0.01), weight_decay=0.3, decoupled_weight_decay=True),
    case("nadam-decay", "NAdam", lr=0.01, momentum_decay=0.3, betas=(0.99, 0.9)),
    case("radam", "RAdam", lr=0.01, weight_decay=0.1, maximize=True),
    case("radam-decoupled", "RAdam", lr=tensor(0.01), weight_decay=0.3, decoupled_weight_decay=True),
    case("radam-unrectified", "RAdam", lr=0.01, betas=(0.0, 0.6)),  # would divide by 0
    case("rmsprop", "RMSprop", lr=0.01, weight_decay=0.1),
    case("rmsprop-momentum", "RMSprop", lr=tensor(0.01), momentum=0.9, maximize=True),
    case("rmsprop-centered", "RMSprop", lr=0.01, centered=True, alpha=0.9),
    case("rmsprop-both", "RMSprop", lr=0.01, centered=True, momentum=0.5, weight_decay=0.01),
    case("adagrad", "Adagrad", lr=0.05, weight_decay=0.1),
    case("adagrad-decay", "Adagrad", lr=tensor(0.05), lr_decay=0.1, maximize=True),
    case("adagrad-initial", "Adagrad", lr=0.05, initial_accumulator_value=0.1, eps=1e-3),
    case("adadelta", "Adadelta"),
    case("adadelta-decay", "Adadelta", lr=tensor(0.5), rho=0.7, weight_decay=0.1, maximize=True),
    case("lion", "Lion", lr=0.01),
    case("lion-decay", "Lion", lr=tensor(0.01), betas=(0.0, 0.5), weight_decay=0.1, maximize=True),
]
