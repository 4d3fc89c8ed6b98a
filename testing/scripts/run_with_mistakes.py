"""megatron_fp4/run.py with a known mistake: negative controls of test_own_megatron.py.

    torchrun ... run_with_mistakes.py MISTAKE SCRIPT FLAGS ...

uncounted: forward steps are not counted. unreplaced: linears are not replaced in the specification.
unattached: recipes are not attached. unkept: the optimizer does not keep the state beside weights.
"""

import sys
from typing import Any

from megatron_fp4 import run
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    from megatron_fp4.mcore.loop import plugin

    def nothing(self: Any, given: Any) -> Any:
        return given

    mistake = sys.argv.pop(1)
    if mistake == "uncounted":
        plugin.Run.counting = nothing  # type: ignore[method-assign, assignment]
    elif mistake == "unreplaced":
        plugin.followed = lambda spec: spec  # type: ignore[assignment]
    elif mistake == "unattached":
        plugin.Plugin._attach = nothing  # type: ignore[method-assign, assignment]
    else:
        assert mistake == "unkept"
        plugin.Plugin.making_optimizer = nothing  # type: ignore[method-assign, assignment]
    run.main()


if __name__ == "__main__":
    main()
