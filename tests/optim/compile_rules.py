"""Compile every rule for a GPU that need not be there; print how many accesses of 16 bytes each has."""

from __future__ import annotations

import json
import re
import sys
import warnings

warnings.simplefilter("ignore")

import triton.language as tl  # noqa: E402
from triton import compile  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flatbed import optim  # noqa: E402
from flatbed.kernels._triton.coefficients import prepare_kernel  # noqa: E402
from flatbed.kernels._triton.launch import element  # noqa: E402
from flatbed.kernels._triton.step import update_kernel  # noqa: E402

POINTERS = {
    **dict.fromkeys(("table_ptr", "grads_ptr"), "*i64"),
    **dict.fromkeys(("hyperparameters_ptr", "coefficients_ptr", "stats_ptr", "partials_ptr"), "*fp64"),
    **dict.fromkeys(("scale_ptr", "found_inf_ptr"), "*fp32"),
    **dict.fromkeys(("ema_weight", "max_norm"), "fp32"),
    "blocks_ptr": "*i32",
}
OPEN = ("partials_ptr", "scale_ptr", "found_inf_ptr")  # not assumed to be aligned


def ptx(function, **constants):
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n].startswith("*") and n not in OPEN]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


def main(names: list[str]) -> None:
    found = {}
    for name in names:
        if name == "from_torch" or getattr(optim, name)._rule.for_tables is not None:
            continue
        rule = getattr(optim, name)._rule
        update = ptx(
            update_kernel,
            RULE=element(rule.update),
            HAS=(1 << len(rule.state)) - 1,
            **dict.fromkeys(("PARAM_TYPE", "GRAD_TYPE", "STATE_TYPE", "COMPUTE"), tl.float32),
            **dict.fromkeys(("HAS_MASTER", "HAS_EMA", "STOCHASTIC", "STOCHASTIC_STATE"), False),
            VECTOR=4,
            BLOCK=512,
        )
        ptx(
            prepare_kernel,
            RULE=element(rule.prepare),
            N_SCALARS=len(rule.scalars),
            N_COEFFICIENTS=rule.n_coefficients,
            **dict.fromkeys(("CLIP", "NORMED", "SKIPPING", "SCALED"), True),
            LANES=256,
            PARTIALS=4096,
        )
        counts = [len(re.findall(rf"{op}\.global[.\w:]*\.v4", update)) for op in ("ld", "st")]
        found[name] = {"states": len(rule.state), "loads": counts[0], "stores": counts[1]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] or list(optim.__all__))
