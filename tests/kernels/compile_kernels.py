"""Compile all kernels, for every rule, for a GPU that need not be there.

Prints how many accesses of 16 bytes the dense step of each rule has, and what failed.
"""

from __future__ import annotations

import itertools
import json
import re
import traceback
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton import compile  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flatbed import optim  # noqa: E402
from flatbed.kernels._triton import cache as cache_kernels  # noqa: E402
from flatbed.kernels._triton import rows as row_kernels  # noqa: E402
from flatbed.kernels._triton.coefficients import prepare_kernel  # noqa: E402
from flatbed.kernels._triton.launch import element  # noqa: E402
from flatbed.kernels._triton.row_step import step_rows_kernel  # noqa: E402
from flatbed.kernels._triton.rows import mover_shape  # noqa: E402
from flatbed.kernels._triton.step import update_kernel  # noqa: E402

TYPES = {
    **dict.fromkeys(("coefficients_ptr", "hyperparameters_ptr", "stats_ptr", "partials_ptr"), "*fp64"),
    **dict.fromkeys(("grads_ptr", "sums_ptr", "values_ptr"), "*fp32"),
    **dict.fromkeys(("slot_of_row_ptr", "dirty_ptr"), "*i32"),
    **dict.fromkeys(("memory", "cached", "padding", "n_rows"), "i64"),
    **dict.fromkeys(("n", "index", "group", "first", "window", "n_slots", "per_program"), "i32"),
}
"""Arguments that are not constants; those that are not named here are pointers to int64."""
DENSE = {
    "grads_ptr": "*i64",
    "blocks_ptr": "*i32",
    "scale_ptr": "*fp32",
    "found_inf_ptr": "*fp32",
    "ema_weight": "fp32",
    "max_norm": "fp32",
    "salt": "i32",
    "n_parameters": "i32",
    "n_partials": "i32",
}
OPEN = ("scale_ptr", "found_inf_ptr")  # not assumed to be aligned
COUNTS = {"counts_ptr": "*i32", "rank_ptr": "*i32", "n_missing_ptr": "*i32", "n_blocks": "i32"}


def ptx(
    function: Any,
    changed: dict[str, str] | None = None,
    options: dict[str, int] | None = None,
    **constants: Any,
) -> str:
    types = {**TYPES, **(changed or {})}
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i64") for n in names}
    aligned = [n for n in names if signature[n].startswith("*") and n not in OPEN]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def dense_step(rule: Any) -> dict[str, int]:
    update = ptx(
        update_kernel,
        DENSE,
        RULE=element(rule.update),
        HAS=(1 << len(rule.state)) - 1,
        **dict.fromkeys(("PARAM_TYPE", "GRAD_TYPE", "STATE_TYPE", "COMPUTE"), tl.float32),
        **dict.fromkeys(("HAS_MASTER", "HAS_EMA", "STOCHASTIC", "STOCHASTIC_STATE"), False),
        VECTOR=4,
        BLOCK=512,
    )
    ptx(
        prepare_kernel,
        DENSE,
        RULE=element(rule.prepare),
        N_SCALARS=len(rule.scalars),
        **dict.fromkeys(("CLIP", "NORMED", "SKIPPING", "SCALED"), True),
        LANES=256,
        PARTIALS=4096,
    )
    loads, stores = (len(re.findall(rf"{op}\.global[.\w:]*\.v4", update)) for op in ("ld", "st"))
    return {"states": len(rule.state), "loads": loads, "stores": stores}


def row_step(name: str, dim: int, weight: Any, per_row: bool) -> None:
    rule = getattr(optim, name)._rule
    numbers = len(rule.scalars) if per_row else 0
    nbytes = weight.primitive_bitwidth // 8
    size = max(4, nbytes) * (1 if rule.rowwise else dim)
    at = [-(-dim * nbytes // 16) * 16 + i * -(-size // 16) * 16 for i in range(len(rule.state) + 2)]
    state = (*at[: len(rule.state)], 0, 0, 0, 0)[:4]
    ptx(
        step_rows_kernel,
        {
            "grads_ptr": "*fp64" if weight == tl.float64 else "*fp32",
            "weights_ptr": "*" + {"bfloat16": "bf16"}.get(weight.name, weight.name),
        },
        PREPARE=element(rule.prepare),
        UPDATE=element(rule.update),
        HAS=(1 << len(rule.state)) - 1,
        N_SCALARS=len(rule.scalars),
        STRIDE=-(-(at[-1] + 32) // 128) * 128,
        **{f"AT{i}": offset for i, offset in enumerate(state)},
        FIRST=at[-1],
        SECOND=at[-1] + 16,
        ROWWISE=rule.rowwise,
        WEIGHT=weight,
        **dict.fromkeys(("STATE", "COMPUTE"), tl.float64 if weight == tl.float64 else tl.float32),
        PER_ROW=bool(numbers),
        STOCHASTIC=weight == tl.bfloat16,
        STAGED=per_row,
        FETCHED=not per_row,
        CACHED=dim == 128,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=512 // triton.next_power_of_2(dim),
    )


def others() -> None:
    for keys, ticks in (("*i64", False), ("*i32", True)):
        ptx(row_kernels.heads_kernel, {"sorted_ptr": keys, **COUNTS}, TICKS=ticks, BLOCK=1024)
        ptx(row_kernels.mark_kernel, {"sorted_ptr": keys, "sentinel": "i64", **COUNTS}, BLOCK=1024)
    ptx(row_kernels.to_int32_keys_kernel, {"keys_ptr": "*i32"}, BLOCK=1024)
    for kind, wide in (("*fp32", tl.float32), ("*bf16", tl.float32), ("*fp64", tl.float64)):
        sums = "*fp64" if wide == tl.float64 else "*fp32"
        changed = {"grads_ptr": kind, "sums_ptr": sums, "values_ptr": sums}
        ptx(row_kernels.sum_squares_kernel, changed, BLOCK=1024)
        changed |= {"partials_ptr": sums, "rank_ptr": "*i32"}
        chunks = {"CHUNK": 64, "DIM": 48, "COLUMNS": 64}
        runs = {"WIDE": wide, "ROWS": 8, "AT_ONCE": 2, "CHUNK_AT_ONCE": 8}
        ptx(row_kernels.segment_sum_kernel, {**changed, "n_tiles": "i32"}, **runs, **chunks)
        ptx(row_kernels.sum_chunks_kernel, changed, AT_ONCE=16, **chunks)
    for writes, cached in itertools.product((True, False), repeat=2):
        shape = {"STRIDE": 1536, "WORDS": 192, "COLUMNS": 256, "ROWS": 4}
        ptx(row_kernels.move_kernel, WRITES=writes, CACHED=cached, **shape)


def cache() -> None:
    maps = {"slot_of_row_ptr": "*i32", "dirty_ptr": "*i32", "frequency_ptr": "*fp32", "ageing": "fp32"}
    maps |= {"n_missing_ptr": "*i32"}
    ptx(cache_kernels.keep_kernel, {}, BLOCK=512)
    for by_frequency in (True, False):
        ptx(cache_kernels.probe_kernel, maps, FREQUENCY=by_frequency, BLOCK=512)
        for direct in (True, False):
            flags = {"DIRECT": direct, "FREQUENCY": by_frequency, "ROUNDS": 16, "BLOCK": 128}
            ptx(cache_kernels.select_victims_kernel, maps, **flags)
    sizes = (64, 128, 256, 512, 1024, 1536, 2048, 4096, 4608)
    for nbytes, in_clusters in itertools.product(sizes, (False, True)):
        shape = mover_shape(nbytes, both_ways=True, in_clusters=in_clusters)
        _, kernel = cache_kernels._fill_kernel(nbytes, torch.device("cpu"), shape)
        names = kernel.function.arg_names[-len(kernel.constants) :]
        constants = dict(zip(names, kernel.constants, strict=True))
        code = ptx(kernel.function, maps, kernel.options, **constants)
        assert (".reqnctapercluster 2" in code) == (in_clusters and nbytes >= 512), nbytes
        # A thread that reads a word of a victim also replaces it. A barrier would hint at other layouts.
        assert not any(word in code for word in ("bar.sync", ".shared", "mapa")), nbytes
        assert len(re.findall(r"(?:ld|st)\.global[.\w:]*\.(?:v2\.b64|v4\.b32)", code)) >= 4, nbytes
    for keys in ("*i32", "*i64"):
        shape = {"STRIDE": 1536, "DIM": 48, "COLUMNS": 64, "ROWS": 16}
        changed = {**maps, "ids_ptr": keys, "out_ptr": "*bf16"}
        ptx(cache_kernels.lookup_kernel, changed, TYPE=tl.bfloat16, **shape)


EVEN = (128, tl.float32, False), (48, tl.bfloat16, True), (48, tl.float64, False)
ODD = (128, tl.bfloat16, False), (48, tl.float32, True), (1, tl.float16, False)


def main() -> None:
    found, failed = {}, {}
    names = [name for name in optim.__all__ if name != "from_torch"]
    for number, name in enumerate(names):
        rule = getattr(optim, name)._rule
        if rule.for_tables is None:
            found[name] = dense_step(rule)
        for dim, weight, per_row in ODD if number % 2 else EVEN:
            try:
                row_step(name, dim, weight, per_row)
            except Exception:
                failed[f"{name}, {dim}, {weight}, {per_row}"] = traceback.format_exc(limit=0)[-1500:]
    for rest in (others, cache):
        try:
            rest()
        except Exception:
            failed[rest.__name__] = traceback.format_exc(limit=1)[-1500:]
    print(json.dumps({"rules": names, "dense": found, "failed": failed}))


if __name__ == "__main__":
    main()
