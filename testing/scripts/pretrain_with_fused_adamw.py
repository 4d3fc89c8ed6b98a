"""Runs pretrain_gpt.py on a CPU with the fused AdamW, which launches take on a GPU alone."""

from argparse import Namespace

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

if __name__ == "__main__":
    cpu.install()
    from megatron_fp4.mcore.launch import fused_kernels

    settle = fused_kernels.settle

    def settled(args: Namespace, is_checked: bool) -> None:
        settle(args, is_checked)
        args.fp4_fused_adamw = True

    fused_kernels.settle = settled
    pretrain.main()
