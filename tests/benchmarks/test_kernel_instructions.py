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


@pytest.mark.slow
def test_the_result_is_that_of_the_present_kernels() -> None:
    """Where a kernel changes, run the benchmark again."""
    found = result("kernel_instructions")
    assert kernel_instructions.rows() == found["rows"]
    assert kernel_instructions.of_block_scales() == found["block scales"]
