"""pretrain_gpt.py whose graphs run the first step's first microbatch again and again: a negative
control of test_graphs.py."""

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

if __name__ == "__main__":
    cpu.install()
    from megatron_fp4.mcore.model import graphs

    graphs.Clock.set = lambda self, step, microbatch: None  # type: ignore[method-assign]
    pretrain.main()
