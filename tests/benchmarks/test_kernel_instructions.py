"""benchmarks/kernel_instructions.py: what is counted, and the table of the note."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import kernel_instructions
from benchmarks.estimate_rows import result
from benchmarks.kernel_instructions import executed

ROOT = Path(__file__).parents[2]
LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0020*/              @!P1 LOP3.LUT R3, R2, 0xff, RZ, 0xc0, !PT ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
        /*0040*/                   NOP ;
        /*0050*/                   EXIT ;
.L_x_1:
        /*0060*/                   BRA `(.L_x_1);
"""


def test_a_loop_is_counted_as_often_as_it_runs() -> None:
    """Its three instructions once or four times, with one before it and one behind it."""
    assert executed(LOOP, 1) == ["MOV", "IADD3", "LOP3", "BRA", "EXIT"]
    assert executed(LOOP, 4) == ["MOV", *["IADD3", "LOP3", "BRA"] * 4, "EXIT"]


def test_what_few_programs_do_is_not_counted() -> None:
    def text(between: int) -> str:
        many = "        /*0020*/                   DADD R2, R2, R4 ;\n" * between
        head = "        /*0010*/               @P3 BRA `(.L_x_11) ;\n"
        return f"{head}{many}.L_x_11:\n        /*0030*/                   EXIT ;\n"

    many = text(kernel_instructions.SELDOM)
    assert executed(many, 1, skips=True) == ["BRA", "EXIT"]
    assert executed(many, 1).count("DADD") == kernel_instructions.SELDOM
    assert executed(text(3), 1, skips=True) == ["BRA", "DADD", "DADD", "DADD", "EXIT"]


def test_the_table_is_that_of_the_result() -> None:
    found = result("kernel_instructions")["rows"]
    page = (ROOT / "docs/notes/quantize-kernels.md").read_text()
    assert "\n".join(kernel_instructions.table(found)) in page
    rows = {row["kernel"]: row for row in found}
    both, turned = rows["stochastic, both"], rows["Hadamard 64 + stochastic, both"]
    assert (
        f"have {both['issue us']:.0f} µs of instructions and {both['copy us']:.0f} µs of memory "
        f"traffic, and take {both['us']:.0f} µs: with three warps" in page
    )
    assert both["warps"] == 3
    one = [rows[f"Hadamard 64 + stochastic, along {name}"] for name in ("rows", "columns")]
    plain = [rows[f"stochastic, along {name}"] for name in ("rows", "columns")]
    assert [row["warps"] for row in one] == [row["warps"] for row in plain]
    assert (
        f"with {one[0]['issue us']:.0f} µs of instructions and {one[0]['copy us']:.0f} µs of "
        f"traffic, takes {one[0]['us']:.0f} to {one[1]['us']:.0f} µs" in page
    )
    assert abs(turned["us"] / (one[0]["us"] + one[1]["us"]) - 1) < 0.02  # "add up"
    bound = f"can reach {turned['copy us'] / turned['issue us']:.0%} of a copy at most"
    assert f"has {turned['issue us']:.0f} µs of instructions, so that it {bound}" in page


def test_what_the_note_says_of_the_kernels_of_a_linear() -> None:
    page = (ROOT / "docs/notes/quantize-kernels.md").read_text()
    rows = {row["kernel"]: row for row in result("kernel_instructions")["rows"]}
    codes = rows[kernel_instructions.FROM_CODES]
    gradient = rows["stochastic, both, of a SwiGLU's gradient, with E5M2"]
    taken = {r["what"]: r["us"] for r in result("linear_kernels")["rows"] if r["in"] == 8192}
    w, x = (taken[what] for what in ("W for dgrad, from codes", "X for wgrad, from codes"))
    after = [row["issue us"] + row["copy us"] for row in (codes, gradient)]
    apart = [after[0] / codes["us"], after[1] / gradient["us"]]
    assert all(0.9 < share < 1.1 for share in apart)  # "about as long as"
    assert codes["us"] == x and (codes["warps"], gradient["warps"]) == (3, 2)
    for text in (
        f"it takes {w:.0f} µs for W and {x:.0f} µs for X",
        f"has {codes['issue us']:.0f} µs of instructions and {codes['copy us']:.0f} µs of memory "
        "traffic. Three warps",
        f"has {gradient['issue us']:.0f} µs of instructions and {gradient['copy us']:.0f} µs of "
        f"traffic, and takes {gradient['us']:.0f} µs",
        f"one after the other: {after[0]:.0f} and {after[1]:.0f} µs",
        f"fits in {gradient['registers']} registers",
    ):
        assert text in page


@pytest.mark.slow
def test_the_result_is_that_of_the_present_kernels() -> None:
    """Where a kernel changes, run the benchmark again."""
    found = result("kernel_instructions")
    assert kernel_instructions.rows() == found["rows"]
    assert kernel_instructions.of_block_scales() == found["block scales"]
