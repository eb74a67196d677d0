"""Modules that scripts of ranks share. torch.optim and DDP import torch._dynamo in every rank otherwise."""

# ruff: noqa: F401, I001
import tests.conftest  # first: imports Triton so that kernels can be interpreted

import pytest
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
