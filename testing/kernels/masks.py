"""A workaround for the interpreter of Triton 3.9, in which some masks are integers.

A comparison keeps the dtype of what it compares, and `and` of two masks takes it on. A mask that is
broadcast, or the `and` of two, is then no mask for tl.load and tl.store, which raise "mask has
unsupported dtype". Triton's compiler, and its interpreter up to 3.8, make masks of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Makes masks of comparisons, and of what is computed from two masks."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        return
    builder: Any = interpreter.InterpreterBuilder
    upstream = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        found = upstream(self, lhs, rhs, op)
        of_masks = lhs.data.dtype == rhs.data.dtype == np.bool_
        if of_masks or found.data.dtype == np.bool_:
            return interpreter.TensorHandle(found.data.astype(np.bool_), tl.int1)
        return found

    builder.binary_op = binary_op
