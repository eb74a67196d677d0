"""Where kernels run: interpreted, or on a GPU."""

from tests.optim.conftest import kernel_device

__all__ = ["kernel_device"]
