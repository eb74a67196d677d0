"""Where the steps of tables run: as for other parameters."""

import os
import warnings

import torch

from tests.optim.conftest import kernel_device, where

if not torch.cuda.is_available():
    # As in the other conftest: interpreted, whoever imports them first.
    os.environ["TRITON_INTERPRET"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import flatbed.kernels._triton.row_stepper  # noqa: F401
    del os.environ["TRITON_INTERPRET"]

__all__ = ["kernel_device", "where"]
