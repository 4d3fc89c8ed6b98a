"""Runs benchmarks.bytes_worker with a known mistake in the package, which its counts must show.

The mistake: X is gathered before it is saved for backward.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks import bytes_worker
from benchmarks.bytes import Case
from megatron_fp4.execution import autograd as passes

autograd: Any = passes
run, put_together = autograd.forward, autograd._put_together
parts: dict[int, Any] = {}  # of X, by the address of the gathered X


def keeps_gathered(plan: Any, x: Tensor, weight: Tensor, bias: Any, site: Any, *rest: Any) -> Any:
    y, saved = run(plan, x, weight, bias, site, *rest)
    if plan.setting.has_part("x"):
        gathered = site.parallel.gather(saved.x).wait()
        parts[address(gathered)] = saved.x  # what backward reads, so that its results are correct
        saved = replace(saved, x=gathered)
    return y, saved


def reads_part(*given: Any) -> Any:
    saved = put_together(*given)
    return replace(saved, x=parts.pop(address(saved.x), saved.x))


def address(x: Any) -> int:
    return int(getattr(x, "codes", x).data_ptr())


if __name__ == "__main__":
    autograd.forward, autograd._put_together = keeps_gathered, reads_part
    bytes_worker.CASES = [Case("bf16"), Case("mxfp4"), Case("tetrajet")]
    bytes_worker.main()
