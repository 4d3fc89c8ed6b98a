"""Finds reductions that Triton compiles wrongly, in the TTGIR of a kernel.

Where the elements of a reduced axis lie in several warps, Triton 3.6 exchanges them through shared
memory. It numbers the warps along each axis as if the bits of a warp's number that belong to the
axis were neighbours. Layouts after a reshape and a transpose may have other bits between them. Such
a reduction takes elements of other rows.
"""

import ast
import re
from collections.abc import Iterator

Layouts = dict[str, list[list[int]]]  # for each bit of a warp's number, its step along each axis


def scattered_reductions(ttgir: str) -> list[str]:
    """The axis and the layout of each reduction that Triton 3.6 compiles wrongly; see above."""
    layouts = _layouts(ttgir)
    found = []
    for axis, layout in _reductions(ttgir):
        bits = _bits(layout, axis, layouts)
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append(f"axis {axis} of {layout}")
    return found


def _layouts(ttgir: str) -> Layouts:
    """The linear layouts by name. The warps of a blocked layout always have neighbouring bits."""
    lines = re.findall(r"^(#\w+) = #ttg\.linear<.*warp = (\[.*?\]), block", ttgir, re.M)
    return {name: ast.literal_eval(bits) for name, bits in lines}


def _reductions(ttgir: str) -> Iterator[tuple[int, str]]:
    """(axis, layout of the operand) of each reduction."""
    pattern = r'"tt\.reduce".*?axis = (\d+).*?\}\) : \(tensor<[^,]*, (.*?)>(?:, tensor.*?)?\) ->'
    for axis, layout in re.findall(pattern, ttgir, re.S):
        yield int(axis), layout


def _bits(layout: str, axis: int, layouts: Layouts) -> list[int]:
    """The bits of a warp's number that belong to this axis of a layout."""
    if outer := re.fullmatch(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>?", layout):
        return _bits(outer[2], axis + (axis >= int(outer[1])), layouts)
    return [bit for bit, steps in enumerate(layouts.get(layout, [])) if steps[axis]]
