"""pretrain_gpt.py for tests of checkpoints: as it is, or with a fault that is injected.

    torchrun ... pretrain_with_faults.py [FAULT] FLAGS ...

`dies=step`, `dies=calibration` or `dies=save`: rank 1 is killed within the third step, within the
calibration after it, or with half of its file of the fourth written. `spoils=save`: within the
third step, the folder of --save becomes a file. `without=NAME`: without _mend_NAME of
optimizer_compat.py. `freezes=PART`: parameters with PART in their names get no gradient.
`trains=PART`: the others get none.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

# The forward pass of a step of two microbatches: the second of the third step, and of the first
# step of a calibration after it.
PASSES = {"dies=step": 6, "dies=calibration": 8}


def main() -> None:
    cpu.install()
    first = sys.argv[1]
    if first.startswith("dies=") and os.environ["RANK"] == "1":
        die_in_save() if first == "dies=save" else before_pass(PASSES[first], die)
    if first == "spoils=save" and os.environ["RANK"] == "0":
        before_pass(PASSES["dies=step"], spoil)
    if first.startswith("without="):
        from megatron_fp4.mcore.checkpoints import optimizer_compat

        setattr(optimizer_compat, f"_mend_{first[8:]}", lambda: None)
    if first.startswith("freezes="):
        train_where(lambda name: first.removeprefix("freezes=") not in name)
    if first.startswith("trains="):
        train_where(lambda name: first.removeprefix("trains=") in name)
    if "=" in first:
        del sys.argv[1]
    pretrain.main()


def train_where(is_trained: Callable[[str], bool]) -> None:
    from megatron_fp4.mcore.loop import plugin

    attach = plugin.attach

    def attach_frozen(run: Any, model: list[Any], fuse: Any = None) -> None:
        for name, parameter in (pair for chunk in model for pair in chunk.named_parameters()):
            parameter.requires_grad = is_trained(name)
        attach(run, model, fuse)

    plugin.attach = attach_frozen


def die() -> None:
    """Kills this rank and the helper process that saving started, as a node that goes down."""
    os.killpg(0, signal.SIGKILL)  # torchrun gives each rank a group of its own


def spoil() -> None:
    from megatron.training import get_args

    shutil.rmtree(get_args().save)
    Path(get_args().save).touch()


def before_pass(number: int, act: Callable[[], None]) -> None:
    """Acts before the forward pass `number`, from 1, of this rank."""
    from megatron_fp4.mcore.loop import gpt

    forward_step, calls = gpt.forward_step, 0

    def forward(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return forward_step(*args)

    gpt.forward_step = forward  # type: ignore[assignment]


def die_in_save() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    write_item, calls = filesystem_async._write_item, 0

    def write(transforms: Any, stream: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += "iter_0000004" in stream.name
        if calls == 20:
            stream.flush()
            die()
        return write_item(transforms, stream, *args, **kwargs)

    filesystem_async._write_item = write


if __name__ == "__main__":
    main()
