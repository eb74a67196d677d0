import gc
import importlib
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings

os.environ["FLATBED_DEBUG_LOCKS"] = "1"

if not torch.cuda.is_available():
    # Triton's functions, its own and ours, become compiled or interpreted ones when they are imported.
    # Tests that want kernels interpreted set the variable again, for flatbed looks at it, too.
    os.environ["TRITON_INTERPRET"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import triton.language

        import flatbed.kernels._triton.cache
        import flatbed.kernels._triton.row_step  # noqa: F401
    del os.environ["TRITON_INTERPRET"]
    # The interpreter patches the language in each call of each function, in half of its time. Once is enough.
    _interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _modules = {"tl": triton.language, "core": triton.language.core}
    _scope = _interpreter._patch_lang(SimpleNamespace(__globals__=_modules))
    _interpreter._patch_lang = lambda fn: type(_scope)()

# A shared machine may stall any single example; the suite as a whole has its own limit.
settings.register_profile("flatbed", deadline=None)
settings.load_profile("flatbed")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # otherwise each collection of garbage looks at all modules again, for 0.2 seconds


def pytest_sessionfinish() -> None:
    gc.unfreeze()
