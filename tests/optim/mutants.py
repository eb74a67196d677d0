"""Rules with one mistake each, which the comparisons must catch."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.optim.optimizers import CASES, Case


@dataclass(frozen=True)
class Wrong:
    """A mistake in the functions of an optimizer: text that should be there, and what is there instead."""

    part: Literal["reference", "fused", "kernel"]
    case: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.case}: {self.wrong}"


WRONG = [
    Wrong("reference", "sgd-dampening", "if scalars[0] == 0:", "if False:"),
    Wrong("reference", "sgd-nesterov", "buffers, alpha=momentum)", "buffers, alpha=1)"),
    Wrong("reference", "adam", "(1 - beta2**step) ** 0.5", "1 - beta2**step"),
    Wrong("reference", "adam-amsgrad", '"max_exp_avg_sq" if group', '"exp_avg_sq" if group'),
    Wrong("reference", "adamax", "(sizes, group", "(sizes, 0 * group"),
    Wrong("reference", "nadam", "(step, step + 1)", "(step, step)"),
    Wrong("reference", "radam", "if rho > 5.0", "if rho > 4.0"),
    Wrong("reference", "rmsprop", "(denominator, group", "(denominator, 2 * group"),
    Wrong("reference", "rmsprop-centered", "value=-1)", "value=0)"),
    Wrong("reference", "adagrad-decay", "(step - 1)", "step"),
    Wrong("reference", "adadelta", '["acc_delta"], deltas, deltas', '["acc_delta"], grads, grads'),
    Wrong("reference", "lion", "1 - beta2)\n    return", "1 - beta1)\n    return"),
    Wrong("fused", "adam", "torch.scalar_tensor(scalars[0] + 1,", "torch.scalar_tensor(scalars[0] + 2,"),
    Wrong("fused", "sgd-dampening", "is_first_step=first", "is_first_step=False"),
    Wrong(
        "fused",
        "sgd-nesterov",
        "is_first_step=first, **options",
        "is_first_step=first, **{**options, 'nesterov': False}",
    ),
    Wrong("fused", "adagrad-decay", "torch.scalar_tensor(scalars[0] + 1,", "torch.scalar_tensor(scalars[0],"),
    Wrong("kernel", "sgd-dampening", "tl.where(s[0] == 0, 1.0, 1 - dampening)", "1 - dampening"),
    Wrong("kernel", "sgd-nesterov", "g = tl.where(c[4] != 0, g + c[2] * buffer, buffer)", "g = buffer"),
    Wrong("kernel", "adam", "tl.sqrt(1 - tl.exp(step * tl.log(beta2)))", "1 - tl.exp(step * tl.log(beta2))"),
    Wrong("kernel", "adam", "c[4] * g * g", "(1 - c[3]) * g * g"),  # 1 - 0.999 in fp32
    Wrong("kernel", "adam-amsgrad", "second = tl.maximum", "unused = tl.maximum"),
    Wrong("kernel", "adamax", "c[2] * state[1]", "state[1]"),
    Wrong("kernel", "nadam", "(step + 1) * log", "step * log"),
    Wrong("kernel", "radam", "rectified = rho > 5.0", "rectified = rho > 4.0"),
    Wrong("kernel", "rmsprop-centered", "square_avg - grad_avg * grad_avg", "square_avg"),
    Wrong("kernel", "rmsprop-momentum", "direction = buffer", "direction += buffer"),
    Wrong("kernel", "adagrad-decay", "1 + s[0] * lr_decay", "1 + (s[0] + 1) * lr_decay"),
    Wrong("kernel", "adadelta", "c[2] * delta * delta", "c[2] * g * g"),
    Wrong("kernel", "lion", "c[3] * (g - exp_avg)", "c[2] * (g - exp_avg)"),
]


def broken(wrong: Wrong, folder: Path) -> Case:
    """The case with the mistake. It has to be a file: Triton reads the source of functions."""
    case = next(case for case in CASES if case.name == wrong.case)
    source = Path(importlib.import_module(case.kind.__module__).__file__ or "").read_text()
    rule = case.kind._rule
    functions = {"reference": [rule.reference], "fused": [rule.fused], "kernel": [rule.prepare, rule.update]}
    bodies = [inspect.getsource(function) for function in functions[wrong.part]]
    assert sum(body.count(wrong.right) for body in bodies) == 1
    for body in bodies:
        source = source.replace(body, body.replace(wrong.right, wrong.wrong))
    path = folder / f"wrong_{case.kind.__name__.lower()}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return replace(case, kind=getattr(module, case.kind.__name__))
