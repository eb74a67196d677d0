"""Functions for rules that Triton does not have in this form."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sqrt(x):
    """The square root, rounded correctly: Triton's own is approximate, its exact one is for fp32 only."""
    if x.dtype == tl.float64:
        root = tl.sqrt(x)
    else:
        root = tl.sqrt_rn(x)
    return root
