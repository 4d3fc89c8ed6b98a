"""pretrain_gpt.py in which steps and saves take longer, by SLOW_STEP and SLOW_SAVE seconds each.

With UNKEPT=1 the helper processes of saving get signals as in upstream.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    from megatron.training import training

    from megatron_fp4.mcore.checkpoints import saving
    from megatron_fp4.mcore.loop import gpt

    gpt.forward_step = slower(gpt.forward_step, "SLOW_STEP")  # type: ignore[assignment]
    training.save_checkpoint_and_time = slower(training.save_checkpoint_and_time, "SLOW_SAVE")
    if "UNKEPT" in os.environ:
        saving._helpers_kept = lambda _: contextlib.nullcontext()  # type: ignore
    pretrain.main()


def slower(function: Callable[..., Any], variable: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(float(os.environ.get(variable, "0")))
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    main()
