"""pretrain_gpt.py on a CPU whose linears run in C++, as on a GPU.

    torchrun ... pretrain_in_cpp.py [mistake=old-rows | mistake=no-flag] FLAGS ...

Recipes for which PyTorch draws random bits stay in Python. Prints "forward passes in Python: N", of
the linears of this rank. old-rows: metrics take the rows of W that the step before held. no-flag:
C++ does not tell Megatron that it added dW to main_grad.
"""

import sys
from typing import Any

from torch import Tensor

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    from megatron_fp4.cpp import extension
    from megatron_fp4.cpp.executor import CppExecutor
    from megatron_fp4.linear import execute_by
    from megatron_fp4.mcore.model import executor

    def start(run: Any, plans: Any) -> executor.Started:
        execute_by(CppExecutor(extension.load(), on_cpu=True))
        run.monitor.from_cpp = extension.load().Tallies()
        return executor.Started()

    executor.start = start
    if sys.argv[1].startswith("mistake="):
        make(sys.argv.pop(1).removeprefix("mistake="))
    calls = counting_calls()
    pretrain.main()
    print(f"forward passes in Python: {len(calls)}", flush=True)


def make(mistake: str) -> None:
    if mistake == "old-rows":
        take_old_rows()
    else:
        from megatron_fp4.cpp import extension
        from testing.scripts.compare_executors import leave_out_flag

        leave_out_flag(extension.load())


def counting_calls() -> list[None]:
    """Will have an entry for each forward pass that ran in Python."""
    from megatron_fp4.execution import autograd

    calls, forward = list[None](), autograd.forward

    def counted(*args: Any) -> Any:
        calls.append(None)
        return forward(*args)

    patched: Any = autograd
    patched.forward = counted
    return calls


def take_old_rows() -> None:
    from megatron_fp4.mcore.loop.metrics import Metrics

    take, before = Metrics.held, dict[str, Any]()

    def held(self: Metrics, site: Any, w: Tensor, now: Any) -> None:
        take(self, site, w, before.get(site.name, now))
        before[site.name] = now

    patched: Any = Metrics
    patched.held = held


if __name__ == "__main__":
    main()
