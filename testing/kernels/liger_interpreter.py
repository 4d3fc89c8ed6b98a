"""Makes Triton 3.6's interpreter run Liger-Kernel's kernels, which need more of it than this
package's: numbers as arguments, sizes that bound a loop, and the libdevice's rsqrt."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Changes the interpreter of this process. Call it once, before kernels run."""
    convert, patch = interpreter._implicit_cvt, interpreter._patch_lang_tensor

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            values = np.array([argument], dtype=np.float32)
            return tl.tensor(interpreter.TensorHandle(values, tl.float32), tl.float32)
        return convert(argument)

    def with_sizes(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # numpy 2.5 converts only arrays without axes to a number.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._implicit_cvt = with_floats
    interpreter._patch_lang_tensor = with_sizes
    from liger_kernel.ops import rms_norm

    rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
