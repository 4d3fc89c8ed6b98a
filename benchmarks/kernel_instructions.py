"""Counts the instructions of the kernels that quantize to MXFP4, as compiled for a Hopper GPU.

    python -m benchmarks.kernel_instructions

No GPU is needed. Each instruction of a program runs once, but for those of a transform's loop,
which run once for each part of the tile. *issue* is the time of a matrix of 8192 x 8192 if an H200
issued an instruction in every slot, four a cycle on each multiprocessor. *ALU* is that of the
instructions for logic, shifts, permutations, comparisons and additions of integers, whose units
take one every other cycle. *measured* and *copy* are of quantize_kernels-fused.json: the kernel,
and a copy of as many bytes. The kernel from codes with stochastic rounding is not in that file:
its times are those of X in a linear, of linear_kernels.json, which do not contain its correction.
*warps* run at once on each of the four parts of a multiprocessor, as far as registers allow.
"""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.estimate_rows import KERNELS, RESULTS, result
from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import blocks
from megatron_fp4.kernels.hadamard import transform_kernel
from megatron_fp4.kernels.launch import Launch
from megatron_fp4.kernels.quantize import transform_launch
from megatron_fp4.kernels.tile_hadamard import NO_TURN, Transform, turn_of
from testing.kernels.compiling import compiled_launch, quantize_launch, registers, sass
from tools.pages import table as markdown
from tools.stamp import stamp

SIZE = 8192  # rows and columns of the matrix
SLOTS = 132 * 4 * 1.98e9  # instructions of warps that an H200 issues a second
# Opcodes of the units that take an instruction every other cycle.
ALU = "LOP3 SHF PRMT IADD3 ISETP SEL LEA VIMNMX IMNMX FMNMX HMNMX2 FSETP FSEL PLOP3 HSETP2 HSET2"
# Of kernels for E4M3 scales: the recipe, and the GEMM whose first operand they make.
BLOCK_SCALES = {
    "nearest": ("nvfp4-nvidia", "fprop"),
    "stochastic": ("nvfp4-nvidia", "dgrad"),
    "four-over-six": ("four-over-six", "fprop"),
    "Hadamard 128 + unit gain": ("quartet-2", "dgrad"),
}
# What is left out by a branch over so many instructions is for few programs: four-over-six compares
# errors in float64 only where estimates do not decide.
SELDOM = 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FROM_CODES = "stochastic, along columns, from codes, with E4M3"
NOISY = Quantizer(rounding="stochastic")


def launches() -> dict[str, list[Launch]]:
    """The launches that make what a row of `benchmarks.quantize_kernels` times."""
    sizes = (SIZE, SIZE)
    along = {"along rows": (True, False), "along columns": (False, True), "both": (True, True)}
    found = {
        f"{rounding}, {name}": [
            quantize_launch(rounding, *wanted, sizes=sizes, rule="ceil", shared=name == "both")
        ]
        for rounding in ("nearest", "stochastic")
        for name, wanted in along.items()
    }
    two = quantize_launch("stochastic", True, True, sizes=sizes, rule="ceil")
    found["stochastic, both, two draws"] = [two]
    carried = partial(quantize_launch, "stochastic", sizes=sizes, rule="ceil")
    found[FROM_CODES] = [carried(False, E4M3, packed=32)]
    found["stochastic, both, with E5M2"] = [carried(E5M2, E5M2, shared=True)]
    of_gradient = carried(E5M2, E5M2, shared=True, reads="swiglu gradient")
    found["stochastic, both, of a SwiGLU's gradient, with E5M2"] = [of_gradient]
    rows, columns = (
        transform_launch(SIZE, SIZE, NOISY, axis, 64, "random", False, True) for axis in (1, 0)
    )
    for name, each in (
        ("along rows", [rows]),
        ("along columns", [columns]),
        ("both", [rows, columns]),
    ):
        found[f"Hadamard 64 + stochastic, {name}"] = each
    return found


def counted(launch: Launch) -> dict[str, float]:
    """Instructions an element, those of ALU, registers of a thread, and warps that run at once."""
    cubin = compiled_launch(launch, 90)["cubin"]
    compares = launch.constants.get("RULE") == "four-over-six"
    codes = executed(sass(cubin), _repeats(launch), skips=compares)
    rows, columns = _tile(launch)
    share = 32 * launch.options["num_warps"] / (rows * columns)
    used = registers(cubin)
    return {
        "instructions": len(codes) * share,
        "alu": sum(code in ALU.split() for code in codes) * share,
        "registers": used,
        "warps": min(16, 2**14 // (32 * -(-used // 8 * 8))),
    }


def _tile(launch: Launch) -> tuple[int, int]:
    """Rows and columns of the matrix that a program handles."""
    constants = launch.constants
    if "TILE" in constants:
        return constants["TILE"].ROWS, constants["TILE"].COLUMNS
    return constants["ROWS"], constants["COLUMNS"]  # kernels/blocks.py


def _repeats(launch: Launch) -> int:
    """How often a program runs the loop of its kernel.

    A kernel of kernels/hadamard.py loops over its tile, by 16 rows where it transforms along the
    rows, by 64 where along the columns. The others have no loop: 1.
    """
    if launch.kernel is not transform_kernel:
        return 1
    return _tile(launch)[0] // (16 if launch.constants["AXIS"] == 1 else 64)


def executed(text: str, repeats: int, skips: bool = False) -> list[str]:
    """The opcodes of the instructions that one warp executes, in their order.

    text: the kernel's instructions, as nvdisasm prints them. repeats: how often the loop of the
    kernel runs; it has one at most, which may not contain a branch. skips: whether a
    branch forward over SELDOM instructions or more is taken.
    """
    found: list[str] = []
    labels: dict[str, int] = {}
    lines = text.splitlines()
    seldom = _over_many(lines) if skips else set()
    ends = ""
    for line in lines:
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(found)
            ends = "" if ends == label[1] else ends
        if ends:
            continue
        code = re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z0-9]+)", line)
        if code is None or code[2] == "NOP":
            continue
        found.append(code[2])
        target = re.search(r"@.* BRA `\(\.(L_x_\d+)\)", line)
        if target and target[1] in labels:
            found += found[labels[target[1]] :] * (repeats - 1)
        elif target and target[1] in seldom:
            ends = target[1]
        elif code[2] == "EXIT":
            break
    return found


def _over_many(lines: list[str]) -> set[str]:
    """The labels to which a branch leads over SELDOM lines or more."""
    starts: dict[str, int] = {}
    for at, line in enumerate(lines):
        if target := re.search(r"@.* BRA `\(\.(L_x_\d+)\)", line):
            starts.setdefault(target[1], at)
    ends = {line.split(":")[0][1:]: at for at, line in enumerate(lines) if line.startswith(".L_x")}
    return {name for name, at in starts.items() if ends[name] - at >= SELDOM}


def rows() -> list[dict[str, Any]]:
    """A row for each kernel. Where two launches make the two operands their counts are added."""
    found, elements = [], SIZE * SIZE / 32 / SLOTS * 1e6
    for name, each in launches().items():
        counts = [counted(launch) for launch in each]
        total = {key: sum(one[key] for one in counts) for key in ("instructions", "alu")}
        found.append(
            {"kernel": name, **total}
            | {"registers": max(one["registers"] for one in counts)}
            | {"warps": min(one["warps"] for one in counts)}
            | {"issue us": total["instructions"] * elements, "alu us": 2 * total["alu"] * elements}
            | measured(name)
        )
    return found


def measured(name: str) -> dict[str, Any]:
    """The microseconds of a kernel, and of a copy of as many bytes."""
    if name == FROM_CODES:  # X in a linear of tetrajet, without corrections
        [row] = [
            r
            for r in result("linear_kernels")["rows"]
            if (r["in"], r["out"], r["what"]) == (SIZE, SIZE, "X for wgrad, from codes")
        ]
        return {"us": row["us"], "copy us": row["floor us"]}
    [row] = [
        r for r in result(KERNELS)["rows"] if r["kernel"] == name and r["shape"] == [SIZE, SIZE]
    ]
    return {"us": row["us"], "copy us": row["us"] * row["share"]}


def of_block_scales() -> list[dict[str, Any]]:
    """What `counted` returns for each of BLOCK_SCALES: its kernel along the rows, without the one
    that finds the largest magnitude.

    The slow path of divisions, for very large and small numbers, is not counted.
    """
    found = []
    for name, (recipe, gemm) in BLOCK_SCALES.items():
        asked = get_recipe(recipe).gemm(gemm)
        assert asked.a is not None
        turn = NO_TURN
        if asked.hadamard is not None:
            group = asked.hadamard.group
            turn = turn_of(Transform(group, torch.ones(group, dtype=torch.int32)))
        launch = blocks._cast_launch(SIZE, SIZE, asked.a, 1, False, False, turn, torch.bfloat16)
        found.append({"kernel": name, **counted(launch)})
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    head = ["kernel", "instructions", "of ALU", "registers", "warps"]
    lines = [
        [row["kernel"], f"{row['instructions']:.1f}", f"{row['alu']:.1f}", f"{row['registers']}"]
        + [f"{row['warps']}"]
        + [f"{row[key]:.0f}" for key in ("issue us", "alu us", "copy us", "us")]
        for row in found
    ]
    return markdown([*head, "issue, µs", "ALU, µs", "copy, µs", "measured, µs"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel_instructions.json")
    args = parser.parse_args()
    found = rows()
    kept = {"stamp": stamp(), "rows": found, "block scales": of_block_scales()}
    args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
