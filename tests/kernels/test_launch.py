"""Launches of Triton's kernels."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flatbed.kernels._triton.launch import Kernel


def test_threads_that_launch_a_kernel_for_the_first_time_find_it_loaded() -> None:
    """Triton sets its launcher before the function is loaded."""
    loading = threading.Event()

    class Compiled:
        packed_metadata = ()
        function: int | None = None
        _run: Any = None

        @property
        def run(self) -> Any:
            if self._run is None:
                self._run = print
                loading.set()
                time.sleep(0.1)
                self.function = 7
            return self._run

    compiled = Compiled()

    class Function:
        arg_names = ("x_ptr",)

        def warmup(self, *_: Any, **__: Any) -> Compiled:
            return compiled

    kernel = Kernel(Function())

    def load() -> Any:
        return kernel._compile(("key",), (torch.empty(1),))[1]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load)
        assert loading.wait(10)
        assert (pool.submit(load).result(), first.result()) == (7, 7)
