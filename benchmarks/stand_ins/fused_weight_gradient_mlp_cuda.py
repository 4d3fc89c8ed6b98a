"""Stands in for Apex's extension of this name, which adds dW to main_grad inside the GEMM.

Megatron imports the extension by this name, and has --gradient-accumulation-fusion only with it.
benchmarks/training_step_worker.py adds this folder to the path where Apex is not installed.
"""

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    """Adds dY^T X to `main_grad` (outputs, inputs) in float32, in one GEMM of cuBLAS.

    x (tokens, inputs), dy (tokens, outputs): BF16, on a GPU.
    """
    torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)
