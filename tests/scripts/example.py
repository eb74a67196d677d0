"""Run an example under torchrun, and end the process without the end of the interpreter.

torch caches how it sharded DTensors, and with that the mesh and its process groups: gloo's threads live on
after `destroy_process_group`, also without flatbed. A thread that drops its last tensor while the interpreter
ends aborts the process: https://github.com/pytorch/pytorch/issues/190489. Examples without DTensors have to
end these threads, and this script prints how many are left.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    atexit._run_exitfuncs()
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    sys.stdout.write(f"gloo threads left: {names.count('pt_gloo_runloop')}\n")  # at once, beside other ranks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
