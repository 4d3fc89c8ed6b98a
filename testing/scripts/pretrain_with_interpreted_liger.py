"""Runs pretrain_gpt.py on a CPU with Liger-Kernel's kernels in Triton's interpreter."""

import os

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    cpu.install()
    from testing.kernels.liger_interpreter import mend

    mend()
    pretrain.main()
