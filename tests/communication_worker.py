"""Two ranks: what is gathered from parts of the tokens is what the whole would be.

torchrun --nproc-per-node 2 communication_worker.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4 import get_quantizer, list_quantizers
from megatron_fp4.communication import TensorParallel
from megatron_fp4.outliers import OutlierClamp
from megatron_fp4.quantizer import QuantizedTensor, Quantizer, absolute_max, quantize_matrix

TOKENS, FEATURES = 128, 96
MORE = {
    "fp8-tensor": Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax"),
    "fp8-row": Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax"),
    "square": Quantizer(block=(16, 16)),
}


def main() -> None:
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    parallel = TensorParallel(dist.group.WORLD, tokens="x")
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(TOKENS, FEATURES, generator=generator).bfloat16()
    whole[5, 7] = 80.0
    part = parallel.part(whole)
    for name in (*list_quantizers(), *MORE):
        for axis in (0, 1):
            quantizer = MORE.get(name) or get_quantizer(name)
            check_quantized(replace(quantizer, rounding="nearest"), axis, whole, part, parallel)
    for axis in (0, 1):
        gathered = parallel.gather(part.movedim(axis, -1), axis).wait()
        assert isinstance(gathered, Tensor) and torch.equal(gathered, whole.movedim(axis, -1))
    for scope in ("token", "channel", "tensor"):
        check_residual(scope, part, parallel)
    sums = parallel.scatter_sum(whole.float() * (dist.get_rank() + 1)).wait()
    assert torch.equal(sums, 3 * part.float())
    assert torch.equal(parallel.sum(whole.float()).wait(), 2 * whole.float())
    check_one_collective(parallel)
    dist.destroy_process_group()


def check_quantized(
    quantizer: Quantizer, axis: int, whole: Tensor, part: Tensor, parallel: TensorParallel
) -> None:
    widest = None
    if quantizer.scale_spans(0, axis):
        [widest] = parallel.maximum([absolute_max(part, quantizer, axis)])
    mine = quantize_matrix(part, quantizer, axis=axis, widest=widest)
    found, expected = parallel.gather(mine).wait(), quantize_matrix(whole, quantizer, axis=axis)
    assert isinstance(found, QuantizedTensor)
    assert (found.shape, found.axis) == (expected.shape, expected.axis)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
    assert torch.equal(found.dequantize(), expected.dequantize())


def check_residual(scope: Any, part: Tensor, parallel: TensorParallel) -> None:
    """The outliers of every rank's part, at their places in the whole."""
    _, residual = OutlierClamp(0.97, scope).split(part)
    found = parallel.gather_residual(residual).wait().dense()
    expected = parallel.gather(residual.dense()).wait()
    assert isinstance(expected, Tensor) and torch.equal(found, expected) and found.any()


def check_one_collective(parallel: TensorParallel) -> None:
    """Maxima of several operands travel together."""
    rank, calls = dist.get_rank(), []
    all_reduce = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    rows, top = parallel.maximum([torch.tensor([[1.0], [2.0]]) * (rank + 1), torch.tensor(-rank)])
    dist.all_reduce = all_reduce
    assert rows.tolist() == [[2.0], [4.0]] and top.tolist() == 0.0 and len(calls) == 1


if __name__ == "__main__":
    main()
