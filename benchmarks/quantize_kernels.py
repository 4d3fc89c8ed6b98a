"""Compares the quantization kernels with the bandwidth of a copy, in one run on one GPU.

    python -m benchmarks.quantize_kernels

For each element a kernel reads 2 bytes (BF16), or 4.25 bits (codes and scales). To compute a SwiGLU
or an RMSNorm it reads 4 bytes, and to compute the gradient of a SwiGLU 3 bytes, or 2 where Y is in
E4M3. For each operand that it makes it writes 4.25 bits, and a byte if it also writes FP8 carriers,
whose rows a second kernel then checks. Its share is the bandwidth at which it moves these bytes,
divided by the bandwidth at which a copy of the same BF16 matrix moves its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.timing import medians
from megatron_fp4.arithmetic.philox import Key, Noise, Placement, Signs
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.kernels.carrier import carried
from megatron_fp4.kernels.quantize import Copy, quantize
from megatron_fp4.operands import Matrix, Normed, Swiglu, SwigluGradient
from tools import pages
from tools.stamp import stamp, write

SHAPES = ((8192, 8192), (8192, 14336))


@dataclass(frozen=True)
class Made:
    """The work of one kernel of the benchmark: which operands it makes, and from what.

    quantizer: the quantizer's name.
    axes: the contracted axis of each operand.
    group: the size of the Hadamard transform; 0 for none.
    carrier: the FP8 dtype of carriers, if they are written too.
    packed: whether the kernel reads codes in place of BF16.
    block: how many elements share a scale.
    rule: the rule of the scales, if it is not the quantizer's.
    two_draws: whether each operand has random bits of its own. Both operands of dY have the same.
    computes: what the kernel computes of the matrix as it reads it.
    kept_y: the dtype of the Y of which it computes the gradient of a SwiGLU.
    """

    quantizer: str
    axes: tuple[int, ...]
    group: int = 0
    carrier: torch.dtype | None = None
    packed: bool = False
    block: int = 32
    rule: Literal["", "mse"] = ""
    two_draws: bool = False
    computes: Literal["", "SwiGLU", "gradient", "norm"] = ""
    kept_y: torch.dtype = torch.bfloat16

    @property
    def bytes(self) -> float:
        """The bytes that are moved for each element of the matrix."""
        codes = 0.5 + 1 / self.block
        written = codes + (self.carrier is not None)
        gradient = 1.0 + self.kept_y.itemsize
        read = {"": codes if self.packed else 2.0, "SwiGLU": 4.0, "gradient": gradient}
        read["norm"] = 4.0  # of which 2 for the factors of the rows
        return read[self.computes] + len(self.axes) * written


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KERNELS = {
    "nearest, along rows": Made("mxfp4-ceil", (1,)),
    "nearest, along columns": Made("mxfp4-ceil", (0,)),
    "nearest, both": Made("mxfp4-ceil", (1, 0)),
    "stochastic, along rows": Made("mxfp4-ceil-sr", (1,)),
    "stochastic, along columns": Made("mxfp4-ceil-sr", (0,)),
    "stochastic, both": Made("mxfp4-ceil-sr", (1, 0)),
    "stochastic, both, two draws": Made("mxfp4-ceil-sr", (1, 0), two_draws=True),
    "Hadamard 64 + stochastic, along rows": Made("mxfp4-sr", (1,), 64),
    "Hadamard 64 + stochastic, along columns": Made("mxfp4-sr", (0,), 64),
    "Hadamard 64 + stochastic, both": Made("mxfp4-sr", (1, 0), 64),
    "nearest, along rows, with E4M3": Made("mxfp4-ceil", (1,), carrier=E4M3),
    "nearest, along columns, from codes, with E4M3": Made(
        "mxfp4-ceil", (0,), carrier=E4M3, packed=True
    ),
    "stochastic, along columns, from codes, with E4M3": Made(
        "mxfp4-ceil-sr", (0,), carrier=E4M3, packed=True
    ),
    "stochastic, both, with E5M2": Made("mxfp4-ceil-sr", (1, 0), carrier=E5M2),
    "nearest, along rows, of a SwiGLU, with E4M3": Made(
        "mxfp4-ceil", (1,), carrier=E4M3, computes="SwiGLU"
    ),
    "nearest, along rows, of a norm, with E4M3": Made(
        "mxfp4-ceil", (1,), carrier=E4M3, computes="norm"
    ),
    "stochastic, both, of a SwiGLU's gradient, with E5M2": Made(
        "mxfp4-ceil-sr", (1, 0), carrier=E5M2, computes="gradient"
    ),
    "stochastic, both, of a SwiGLU's gradient, Y in E4M3, with E5M2": Made(
        "mxfp4-ceil-sr", (1, 0), carrier=E5M2, computes="gradient", kept_y=E4M3
    ),
    "nearest, both, blocks of 16": Made("mxfp4-ceil", (1, 0), block=16),
    "stochastic, both, blocks of 16": Made("mxfp4-ceil-sr", (1, 0), block=16),
    "nearest, along rows, rule mse": Made("mxfp4-ceil", (1,), rule="mse"),
    "nearest, both, rule mse": Made("mxfp4-ceil", (1, 0), rule="mse"),
}
# Of one direction, and of both.
AIMS = {"nearest": (0.85, 0.65), "stochastic": (0.70, 0.65), "Hadamard": (0.60, 0.45)}


def study(having: str) -> list[dict[str, Any]]:
    """Times each kernel whose name contains `having` on each shape; returns a row for each."""
    rows, chosen = [], {name: made for name, made in KERNELS.items() if having in name}
    for shape in SHAPES:
        x = torch.randn(*shape, device="cuda").bfloat16()
        copy = torch.empty_like(x)
        calls: dict[str, Callable[[], Any]] = {"copy": partial(copy.copy_, x)}
        for name, made in chosen.items():
            calls[name] = kernel(x, made)
        taken = medians(calls)
        speed = 4 * x.numel() / taken["copy"]
        for name, made in chosen.items():
            moved = x.numel() * made.bytes
            aim = AIMS[name.split(",")[0].split()[0]][len(made.axes) - 1]
            rows.append(
                {
                    "shape": list(shape),
                    "kernel": name,
                    "us": taken[name] * 1e6,
                    "TB/s": moved / taken[name] / 1e12,
                    "copy TB/s": speed / 1e12,
                    "share": moved / taken[name] / speed,
                    "aim": aim,
                }
            )
    return rows


def kernel(x: torch.Tensor, made: Made) -> Callable[[], Any]:
    """A call as in training, with the random bits of the rows that a data-parallel rank holds."""
    named, group = get_quantizer(made.quantizer), made.group
    quantizer = replace(named, block=(1, made.block), rule=made.rule or named.rule)
    place = Placement(rows=torch.arange(len(x), device="cuda") + 3 * len(x))
    copies = [
        Copy(
            axis,
            Noise(Key(7, 3), 5 + axis * made.two_draws, place) if quantizer.stochastic else None,
            Signs(Key(7), 9 + axis) if group else None,
            made.carrier,
        )
        for axis in made.axes
    ]
    source: Matrix = x
    if made.packed:
        source = quantize(x, replace(quantizer, rounding="nearest"), [Copy(1)])[0].operand
    elif made.computes == "SwiGLU":
        source = Swiglu(torch.cat([x, x], 1))
    elif made.computes == "gradient":
        source = SwigluGradient(x[:, : x.shape[1] // 2].contiguous(), x.to(made.kept_y))

    norm = RmsNorm(x[0].clone(), 1e-5)

    def make() -> None:
        matrix = Normed(x, norm) if made.computes == "norm" else source
        for operand in quantize(matrix, quantizer, copies, group):
            codes, carriers = operand.operand, operand.carriers
            if carriers is not None and isinstance(codes, QuantizedTensor):
                carried([(codes, carriers.element, carriers)])

    return make


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    body = []
    for row in rows:
        size = " × ".join(str(n) for n in row["shape"])
        cells = [size, row["kernel"], f"{row['us']:.1f}", f"{row['TB/s']:.2f}"]
        cells += [f"{row['share']:.0%}", f"{row['aim']:.0%}"]
        body.append(cells)
    return pages.table(["matrix", "kernel", "µs", "TB/s", "of a copy", "target"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/quantize_kernels.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--having", default="", help="a word of the kernels' names (all kernels)")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the kernels are timed on a GPU, and this machine shows none")
    rows = study(args.having)
    result: dict[str, Any] = {
        "what": "quantize kernels against a copy",
        "stamp": stamp(args.commit),
        "rows": rows,
        "table": table(rows),
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
