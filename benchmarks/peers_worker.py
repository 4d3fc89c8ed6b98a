"""Measures one package's linear or quantizer, for benchmarks/peers.py.

    python -m benchmarks.peers_worker NAME [--eager | --check]

It runs in a process of its own, so that an exception or a broken CUDA context does not affect the
other measurements.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.linear import SHAPES, Problem, bf16, problem, quantized
from benchmarks.timing import medians
from megatron_fp4 import get_recipe, quantize
from megatron_fp4.mcore.runtime import cpu

SIDE = 8192  # of the square matrix that quantizers are timed on
BITS = {"mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16}  # of an element, with its share of a scale


@dataclass(frozen=True)
class Linear:
    """A linear of a package.

    operation: what it computes, in words. make: replaces an nn.Linear by the package's linear;
    None: this package's linear with `recipe`.
    """

    package: str
    operation: str
    make: Callable[[nn.Linear], nn.Module] | None = None
    recipe: str = ""


@dataclass(frozen=True)
class Quantizing:
    """A package's quantizer along rows.

    operation: what it computes, in words. call: quantizes a BF16 matrix. values: decodes the result
    of `call`; None if it cannot be decoded.
    """

    package: str
    operation: str
    ours: str  # the quantizer of this package that should give the same codes and scales
    call: Callable[[Tensor], Any]
    values: Callable[[Any], Tensor] | None = None


# --- torchao --------------------------------------------------------------------------------------


def torchao_mx(layer: nn.Linear) -> nn.Module:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear

    config = MXFakeQuantizeConfig(scaling_mode=ScaleCalculationMode.FLOOR)
    return MXFakeQuantizedLinear.from_linear(layer, config, config)


def torchao_nvfp4(layer: nn.Linear) -> nn.Module:
    from torchao.prototype.qat.nvfp4 import NVFP4FakeQuantizeConfig, NVFP4FakeQuantizedLinear

    config = NVFP4FakeQuantizeConfig()
    return NVFP4FakeQuantizedLinear.from_linear(layer, config, config)


def torchao_nvfp4_training(layer: nn.Linear) -> nn.Module:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

    return NVFP4Linear.from_linear(layer)


def torchao_to_mx(x: Tensor, rule: str) -> Any:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode(rule))


def torchao_to_nvfp4(x: Tensor) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))


def dequantized(tensor: Any) -> Tensor:
    return tensor.dequantize(torch.float32)


# --- fouroversix ----------------------------------------------------------------------------------

# Its scale rule for training in each format. backend None lets fouroversix choose the backend.
RULES = {"mxfp4": "static_6", "nvfp4": "mse"}


def four_over_six(layer: nn.Linear, element: str, backend: str | None) -> nn.Module:
    from fouroversix import FourOverSixLinear, ModuleQuantizationConfig

    config = ModuleQuantizationConfig(
        dtype=element,
        scale_rule=RULES[element],
        keep_master_weights=True,
        weight_scale_2d=True,
        quantize_backend=backend,
        matmul_backend=backend,
    )
    return FourOverSixLinear(layer, config)


def four_over_six_quantize(x: Tensor, element: str, backend: str | None) -> Any:
    from fouroversix import QuantizationConfig, quantize_to_fp4

    config = QuantizationConfig(dtype=element, scale_rule=RULES[element], backend=backend)
    return quantize_to_fp4(x, config)


def four_over_six_values(tensor: Any) -> Tensor:
    from fouroversix import dequantize

    return dequantize(tensor)


# --- modelopt -------------------------------------------------------------------------------------


def modelopt(layer: nn.Linear, name: str) -> nn.Module:
    import modelopt.torch.quantization as quantization

    x = torch.randn(64, layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype)
    config = copy.deepcopy(getattr(quantization, name))
    return quantization.quantize(nn.Sequential(layer), config, lambda model: model(x))


# --- qwantize -------------------------------------------------------------------------------------


def qwantize(x: Tensor) -> Tensor:
    from qwantize import mxfp4_naive, mxfp4_naive_triton

    naive = mxfp4_naive_triton if x.is_cuda else mxfp4_naive
    return naive(x.view(-1, 32), return_dequant=True)[2].view(x.shape)


# --- all ------------------------------------------------------------------------------------------


def compiled(make: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Linear], nn.Module]:
    return lambda layer: torch.compile(make(layer))  # type: ignore[return-value]


def ours(x: Tensor) -> Any:
    from benchmarks.quantize_kernels import Made, kernel

    return kernel(x, Made("mxfp4", (1,)))()


EMULATED = "X and W: quantize, dequantize, BF16 GEMM; nearest; backward in BF16, dY as it is"
ALL_SIX = "all six operands; dY stochastic; Hadamard in wgrad"
PLAIN_SIX = f"{ALL_SIX}; plain PyTorch: quantize, dequantize, FP32 GEMM"
LINEARS = {
    "tetrajet": Linear("", "MXFP4, all six operands; FP8 tensor cores", recipe="tetrajet"),
    "mxfp4": Linear("", "MXFP4, all six operands; FP8 tensor cores", recipe="mxfp4"),
    "torchao QAT, MXFP4": Linear("torchao", EMULATED, torchao_mx),
    "torchao QAT, MXFP4, compiled": Linear("torchao", EMULATED, compiled(torchao_mx)),
    "torchao QAT, NVFP4": Linear("torchao", "X and W; FP4 tensor cores", torchao_nvfp4),
    "torchao training, NVFP4": Linear(
        "torchao", f"{ALL_SIX}; FP4 tensor cores", torchao_nvfp4_training
    ),
    "modelopt QAT, MXFP4": Linear(
        "nvidia-modelopt", EMULATED, partial(modelopt, name="MXFP4_DEFAULT_CFG")
    ),
    "modelopt QAT, NVFP4": Linear(
        "nvidia-modelopt", EMULATED, partial(modelopt, name="NVFP4_DEFAULT_CFG")
    ),
}
CODES, VALUES = "codes and scales", "scales, and values in float32"
PLAIN_CODES = f"{CODES}; plain PyTorch"
MX_FLOOR, MX_CEIL = (partial(torchao_to_mx, rule=rule) for rule in ("floor", "rceil"))
QUANTIZERS = {
    "to MXFP4": Quantizing("", CODES, "mxfp4", ours),
    "to NVFP4": Quantizing("", PLAIN_CODES, "nvfp4", partial(quantize, quantizer="nvfp4")),
    "torchao to MXFP4, floor": Quantizing("torchao", CODES, "mxfp4", MX_FLOOR, dequantized),
    "torchao to MXFP4, floor, compiled": Quantizing(
        "torchao", CODES, "mxfp4", torch.compile(MX_FLOOR), dequantized
    ),
    "torchao to MXFP4, rceil": Quantizing("torchao", CODES, "mxfp4-ceil", MX_CEIL, dequantized),
    "torchao to NVFP4": Quantizing("torchao", CODES, "nvfp4", torchao_to_nvfp4, dequantized),
    "torchao to NVFP4, compiled": Quantizing(
        "torchao", CODES, "nvfp4", torch.compile(torchao_to_nvfp4), dequantized
    ),
    "qwantize to MXFP4": Quantizing("qwantize", VALUES, "mxfp4", qwantize, lambda values: values),
}
for element, own in {"mxfp4": "mxfp4-ceil", "nvfp4": "nvfp4-four-over-six"}.items():
    for backend, linear, codes in ((None, ALL_SIX, CODES), ("pytorch", PLAIN_SIX, PLAIN_CODES)):
        suffix = f"{element.upper()}{', PyTorch' if backend else ''}"
        options: dict[str, Any] = {"element": element, "backend": backend}
        LINEARS[f"fouroversix, {suffix}"] = Linear(
            "fouroversix", linear, partial(four_over_six, **options)
        )
        QUANTIZERS[f"fouroversix to {suffix}"] = Quantizing(
            "fouroversix",
            codes,
            own,
            partial(four_over_six_quantize, **options),
            four_over_six_values,
        )


def step_of(peer: Linear, p: Problem) -> Callable[[], None]:
    """A function that runs the forward and backward pass of `peer` once, on the problem's tensors.

    Another package's linear writes dW to a BF16 .grad. This package's linear and the BF16 linear
    write it in float32.
    """
    if peer.make is None:
        return quantized(p, get_recipe(peer.recipe))
    outputs, inputs = p.w.shape
    layer = nn.Linear(inputs, outputs, bias=False, device=p.w.device, dtype=p.w.dtype)
    layer.weight.data.copy_(p.w.detach())
    module = peer.make(layer)
    x, dy = p.x.detach()[None].requires_grad_(), p.dy[None]

    def step() -> None:
        torch.autograd.backward(module(x), dy)
        x.grad = layer.weight.grad = None

    return step


def linear_rows(name: str, graphs: bool) -> list[dict[str, Any]]:
    rows = []
    for inputs, outputs in SHAPES:
        p = problem(inputs, outputs)
        calls = {"bf16": bf16(p), name: step_of(LINEARS[name], p)}
        taken = medians(calls, each=3, eager=() if graphs else calls)
        row = {"in": inputs, "out": outputs, "ms": taken[name] * 1e3}
        rows.append(row | {"bf16 ms": taken["bf16"] * 1e3, "ratio": taken["bf16"] / taken[name]})
    return rows


def sample(rows: int, columns: int, device: str) -> Tensor:
    """Normal values, scaled differently in each row as tokens are, with two blocks of zeros."""
    torch.manual_seed(1)
    sizes = torch.exp2(torch.randint(-3, 4, (rows, 1), device=device).float())
    x = (torch.randn(rows, columns, device=device) * sizes).bfloat16()
    x[0, :64] = 0
    return x


def equal(peer: Quantizing, x: Tensor) -> float | None:
    """The share of elements whose decoded values equal those of this package's quantizer.

    The relative tolerance of 2^-7 is less than a step of a code or a scale, and more than the
    rounding of their product.
    """
    if peer.values is None:
        return None
    values, own = peer.values(peer.call(x)).float(), quantize(x, peer.ours).dequantize()
    return torch.isclose(values, own, rtol=2**-7, atol=0).float().mean().item()


def quantizer_rows(name: str, graphs: bool) -> list[dict[str, Any]]:
    """The time of a quantizer, and GB/s of the bytes that it must at least move: 16 bits read and
    the format's bits written for each element."""
    peer, x = QUANTIZERS[name], sample(SIDE, SIDE, "cuda")
    taken = medians({name: partial(peer.call, x)}, each=3, eager=() if graphs else [name])[name]
    moved = x.numel() * (16 + BITS[peer.ours.split("-")[0]]) / 8
    return [{"us": taken * 1e6, "GB/s": moved / taken / 1e9, "equal": equal(peer, x)}]


def check(name: str) -> list[dict[str, Any]]:
    """Runs a small case on the CPU, without times.

    Returns the relative errors of a linear against BF16, or for a quantizer the share of `equal`.
    """
    if name in QUANTIZERS:
        return [{"equal": equal(QUANTIZERS[name], sample(256, 1024, "cpu"))}]
    make = LINEARS[name].make
    assert make is not None, "this package's own"
    cpu.install()  # some packages create tensors on "cuda"
    torch.manual_seed(1)
    layer = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    x = torch.randn(1, 128, 256).bfloat16().requires_grad_()
    dy = torch.randn(1, 128, 512).bfloat16()
    found = []
    for module in (make(layer), layer):
        y = module(x)
        found.append((y, *torch.autograd.grad(y, (x, layer.weight), dy)))
    errors = [(a - b).norm() / b.norm() for a, b in zip(*found, strict=True)]
    return [{f"error of {of}": e.item() for of, e in zip(("Y", "dX", "dW"), errors, strict=True)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=[*LINEARS, *QUANTIZERS])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--check", action="store_true", help="without times, small, on the CPU")
    args = parser.parse_args()
    time = linear_rows if args.name in LINEARS else quantizer_rows
    try:
        rows = check(args.name) if args.check else time(args.name, not args.eager)
    except Exception as error:  # other packages may raise anything
        first, *more = [line.strip() for line in str(error).strip().splitlines() if line] or [""]
        told = " ".join([first, *more[:1]]) if first.endswith(":") else first
        sys.exit(f"error: {type(error).__name__}: {told}")
    print(f"result: {json.dumps(rows)}")


if __name__ == "__main__":
    main()
