"""The order in which block-scaled tensor cores read scales, against torch's own test code and
cuBLAS's formula."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4.kernels.scaled_mm import swizzle

SHAPES = [(128, 4), (256, 8), (1, 1), (200, 13), (33, 4), (129, 5), (384, 3)]


def torchs(name: str) -> Callable[..., Tensor]:
    """A function of torch's test code, whose module imports what torch's developers have."""
    file = Path(torch.__file__).parent / "testing/_internal/common_quantized.py"
    parsed = ast.parse(file.read_text())
    wanted: list[ast.stmt] = [
        node
        for node in parsed.body
        if isinstance(node, ast.FunctionDef) and node.name in (name, "ceil_div")
    ]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(wanted, []), str(file), "exec"), names)
    return names[name]


to_blocked, from_blocked = torchs("to_blocked"), torchs("from_blocked")


def scales(rows: int, blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(1, 255, (rows, blocks), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_own_order(shape: tuple[int, int]) -> None:
    given = scales(*shape)
    found = swizzle(given)
    assert found.is_contiguous() and torch.equal(found, to_blocked(given))
    back = from_blocked(torch.empty(shape[0], 32 * shape[1]), found, 32)
    assert torch.equal(back, given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cublass_formula(shape: tuple[int, int]) -> None:
    """ "1D block scaling factors layout": the offset of each scale, one by one."""
    given, found = scales(*shape), swizzle(scales(*shape))
    tiles_across = -(-shape[1] // 4)
    expected = torch.zeros_like(found)
    for outer in range(shape[0]):
        for inner in range(shape[1]):
            tile = outer // 128 * tiles_across + inner // 4
            within = outer % 32 * 16 + outer % 128 // 32 * 4 + inner % 4
            expected[512 * tile + within] = given[outer, inner]
    assert torch.equal(found, expected)


def test_rows_as_they_lie_are_another_order() -> None:
    """The control: without the swizzle, and with tiles in the order of columns."""
    given = scales(256, 8)
    assert not torch.equal(given.flatten(), to_blocked(given))
    turned = to_blocked(given).view(2, 2, 512).transpose(0, 1).flatten()
    assert not torch.equal(turned, to_blocked(given))
