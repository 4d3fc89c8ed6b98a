"""Runs a Megatron training script without the plugin, on a machine without a GPU.

    torchrun ... run_on_a_cpu.py SCRIPT FLAGS ...

Only the CPU takes the place of the GPU, and the helper that the wheel brings compiled is not
compiled again.
"""

import runpy
import sys
from pathlib import Path

from megatron_fp4.mcore.runtime import cpu

if __name__ == "__main__":
    cpu.install()
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
