"""Runs pretrain_gpt.py with a known mistake: all replays of CUDA graphs draw the same random bits.

The step and the microbatch in GPU memory are not updated. A negative control of test_graphs.py.
"""

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

if __name__ == "__main__":
    cpu.install()
    from megatron_fp4.mcore.model import graphs

    graphs.Clock.set = lambda self, step, microbatch: None  # type: ignore[method-assign]
    pretrain.main()
