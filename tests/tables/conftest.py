"""Where the steps of tables run: as for other parameters."""

from tests.optim.conftest import kernel_device, where

__all__ = ["kernel_device", "where"]
