"""Runs benchmarks.bytes_worker with a known mistake in the package, which its counts must show.

The mistake: X is gathered before it is saved for backward.
"""

from dataclasses import replace
from importlib import import_module
from typing import Any

from benchmarks import bytes_worker
from benchmarks.bytes import Case

linear: Any = import_module("megatron_fp4.linear")  # the package has a function of this name
save, load = linear._save, linear._load


def keep_gathered(ctx: Any, saved: Any, held: Any) -> None:
    ctx.part = saved.x  # what backward reads, so that its results stay correct
    if ctx.plan.setting.has_part("x"):
        saved = replace(saved, x=ctx.site.parallel.gather(saved.x).wait())
    save(ctx, saved, held)


if __name__ == "__main__":
    linear._save = keep_gathered
    linear._load = lambda ctx: replace(load(ctx), x=ctx.part)
    bytes_worker.CASES = [Case("bf16"), Case("mxfp4"), Case("tetrajet")]
    bytes_worker.main()
