"""Known mistakes in the kernels, made one at a time: the comparisons notice each."""

import shutil
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from testing.kernels.interpreter import ROOT, differences
from testing.kernels.mistakes import MISTAKES as INJECTED

# One case each is enough for most.
NEAREST, EMA = "floor nearest 1.0 axes (1, 0).", "ceil ema 1.0 axes (1, 0)."
STOCHASTIC = "floor stochastic 1.0 axes (1, 0) shard"
CARRIED = "ceil nearest 1.0 axes (1, 0) torch.float8_e4m3fn ."
# The file, the cases that each is tried on, and the edit.
MISTAKES = {
    "ties go up": ("encode", NEAREST, "(magnitudes, whole", "(magnitudes + 0x10001, whole"),
    "from 4 on steps of 1": ("encode", NEAREST, "smaller(first, second,", "smaller(first, first,"),
    "beyond 6": ("encode", NEAREST, "codes = smaller(codes, above", "smaller(codes, above"),
    "6 is 4": ("encode", NEAREST, "above + 0x00030003", "above + 0x00020003"),
    "Inf in the next column": (
        "mxfp4",
        "huge",
        "nearest_pairs(kept,",
        "nearest_pairs(blocked & 0x7FFF7FFF,",
    ),
    "1.5 is clipped": (
        "encode",
        "ceil nearest 1.0 axes (1, 0).",
        "each * 0x3F if",
        "each * 0x40 if",
    ),
    "a whole's noise": ("philox", STOCHASTIC, "at_rows * per_row", "at_rows * 12"),
    "sums for differences": (
        "hadamard",
        "0.75 axes (1,) group 64.",
        "first - second",
        "first + second",
    ),
    "signs of another half": (
        "hadamard",
        "axes (1, 0) group 64 shard",
        "!= 0, w1, w0",
        "!= 0, w0, w1",
    ),
    "no step in memory": ("mxfp4", "memory", "step = tl.load(step_ptr)", "step = 0 * step"),
    "no draw in memory": ("hadamard", "memory", "draw = tl.load(draw_ptr)", "draw = 0 * draw"),
    "the draw's place": (
        "philox",
        "axes (1, 0) group 64 shard signs",
        "draw.to(tl.int64) << 32",
        "draw",
    ),
    "signs of no step": (
        "philox",
        "axes (1, 0) group 64 shard signs",
        "32, step, stream",
        "32, 0 * step, stream",
    ),
    "the next group's rows": ("hadamard", "(0,) group 32", "== 32 else 4  #", "== 64 else 4  #"),
    "words in another order": ("philox", STOCHASTIC, "tl.join(w0, w2)", "tl.join(w0, w1)"),
    "half a draw twice": ("philox", STOCHASTIC, "(words >> 8) &", "(words << 8) &"),
    "NaN is hidden": ("encode", NEAREST, "(widest < 0x7F800000,", "(widest >= 0,"),
    "no sign of odd columns": ("encode", NEAREST, "12) & 0x00080008", "12) & 0x00000008"),
    "no sign of zeros": ("encode", STOCHASTIC, "return (odd & -0x7F7F7F80) |", "return"),
    "carriers of another power": (
        "fp8",
        CARRIED,
        "0x3C383000 + k *",
        "0x3C383000 + 2 * k *",
    ),
    "all blocks fit": (
        "carrier",
        CARRIED,
        "there & ~fits & ~lowest",
        "there & (scales < 0)",
    ),
    "a subnormal byte": ("fp8", "nearest 1.0 axes (1, 0) packed torch", "{3: -7", "{3: -8"),
    "NaN fits": ("carrier", "huge", " & (scales < 255)", ""),
    "what is not finite is a sample": (
        "fp8",
        "Inf in columns",
        "low < 0x7F80, low",
        "low < 0x8000, low",
    ),
    "zeros do not fit": ("carrier", "zeros in rows", " & ~lowest", ""),
    "the lowest block is of zeros": ("carrier", "subnormal rows", "wrong |= ", "wrong + "),
    "the rule's fold for all": (
        "carrier",
        CARRIED,
        "tl.where(wanted, fold, likely)",
        "fold",
    ),
    "midway goes down": ("encode", EMA, "== middle, nearest_up,", "== middle, toward > middle,"),
    "an average's magnitude": ("encode", EMA, "bits < 0, -toward", "toward < 0, -toward"),
    "the grid's points move": ("encode", EMA, "(rest > 0) |", "(rest >= 0) |"),
    "zeros move": ("encode", EMA, " & ((bits & 0x7FFFFFFF) != 0)", ""),
    "small numbers stay": ("encode", EMA, "(code == 0) &", "(code < 0) &"),
    "an average that is no number": ("mxfp4", EMA, "live &= tl.max(_live", "live |= tl.max(_live"),
    "1/2 is decoded as 3/4": ("decode", "packed", "magnitude < 2", "magnitude < 1"),
}
CARRIER_MISTAKES = {  # where, the matrix, and the edit
    "halves go down": ("fp8", "48 x", " + ((bits >> cut) & 1)) >> cut", ") >> cut"),
    "a NaN is the largest": ("carrier", "16 x 96", "tl.where(scales == 255, 0, scales)", "scales"),
    "zeros are counted": (
        "carrier",
        "48 x",
        "(words | (words >> 1) | (words >> 2))",
        "(words | ~words)",
    ),
    "the other half first": (
        "carrier",
        "16 x 96",
        "tl.join(first, second)",
        "tl.join(second, first)",
    ),
    "the first operand's place": ("carrier", "16 x 96", "program - first, B", "program, B"),
    "the first tile for all": ("carrier", "9632", "across = program % tiles", "across = 0"),
}


# One of each kernel, for the quick tier.
QUICK = {"ties go up", "a whole's noise", "sums for differences", "NaN fits"}
QUICK |= {"midway goes down", "1/2 is decoded as 3/4", "halves go down", "no NaN", "up is nearest"}


def tiered(name: str, label: str, *values: str) -> ParameterSet:
    """A mistake, in the quick tier or the slow one."""
    return pytest.param(*values, id=label, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("mistake", [tiered(name, name, name) for name in MISTAKES])
def test_a_mistake_in_the_kernel_is_noticed(mistake: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megatron_fp4", tmp_path / "megatron_fp4")
    file, cases, right, wrong = MISTAKES[mistake]
    path = tmp_path / f"megatron_fp4/kernels/{file}.py"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    assert differences(tmp_path, cases=cases) != [""]


# The file, the comparison, the cases and the edit.
OTHERS = [(f, "carriers", name, *edit) for name, (f, *edit) in CARRIER_MISTAKES.items()]


@pytest.mark.parametrize(
    ("file", "comparison", "cases", "right", "wrong"),
    [tiered(name, f"{of}-{name}", file, of, *r) for file, of, name, *r in OTHERS],
)
def test_a_mistake_in_another_kernel_is_noticed(
    file: str, comparison: str, cases: str, right: str, wrong: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "megatron_fp4", tmp_path / "megatron_fp4")
    path = tmp_path / f"megatron_fp4/kernels/{file}.py"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    assert differences(tmp_path, cases=cases, comparison=comparison) != [""]


@pytest.mark.parametrize(
    ("comparison", "name"),
    [
        tiered(name, f"{of}-{name}", of, name)
        for of, mistakes in INJECTED.items()
        for name in mistakes
    ],
)
def test_an_injected_mistake_is_noticed(comparison: str, name: str) -> None:
    cases = INJECTED[comparison][name].cases
    assert differences(cases=cases, comparison=comparison, mistake=name) != [""]
