#!/usr/bin/env python3
"""Pretrains a GPT or LLaMA model: Megatron's own loop and flags, and FP4 linears by one flag more.

    torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 --mock-data ...

On a machine without a GPU it trains on the CPU; the flags are the same.
"""

from megatron_fp4.mcore.pretrain import main

if __name__ == "__main__":
    main()
