"""Trains several times, one after the other, in one torchrun world: torch and Megatron are
imported once, and each training is a process of its own, forked from there.

    torchrun ... relay.py 'flags of the first' 'flags of the second' ...

`dies=step` or `dies=save` before the flags of the last: rank 1 is killed within the third step, or
with half of its file of the fourth written; torchrun sees it, since that one is not forked.
`without=adam`: without what compat.py mends of the distributed optimizer.
"""

import atexit
import os
import shlex
import signal
import sys
import traceback
from typing import Any

import torch

from megatron_fp4.mcore import cpu, pretrain

LIMIT_S = 120  # of one training: a rank whose neighbour has died may wait for half an hour


def main() -> None:
    cpu.install()
    from megatron_fp4.mcore import gpt  # noqa: F401  (what the children need is imported here)

    rank, ranks = int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    common = torch.distributed.TCPStore(address, port, is_master=False)
    for number, flags in enumerate(sys.argv[1:]):
        if rank == 0:  # each training meets at a store of its own, which outlives it as torchrun's
            store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            common.set(f"port {number}", str(store.port))
        os.environ["MASTER_PORT"] = common.get(f"port {number}").decode()
        status = training(flags) if flags.startswith("dies=") else in_a_child(flags)
        common.set(f"{number} of {rank}", "ended")
        if rank == 0:
            common.wait([f"{number} of {each}" for each in ranks])
            print(f"\n=== ended with {status}", flush=True)


def in_a_child(flags: str) -> int:
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(LIMIT_S)
    status = training(flags)
    # As a script ends: without it the process that saving started would live on. What follows in
    # a script would join the threads of the parent's store, which a fork has not got.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def training(flags: str) -> int:
    """The exit status that pretrain_gpt.py would have."""
    words = shlex.split(flags)
    if words[0].startswith("dies=") and os.environ["RANK"] == "1":
        {"step": die_in_step, "save": die_in_save}[words[0][5:]]()
    if words[0] == "without=adam":
        from megatron_fp4.mcore import compat

        compat._mend_distributed_adam = lambda: None
    sys.argv[1:] = words[1:] if "=" in words[0] else words
    try:
        pretrain.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def die() -> None:
    """Kills this rank and the helper process that saving started, as a node that goes down."""
    os.killpg(0, signal.SIGKILL)  # torchrun gives each rank a group of its own


def die_in_step() -> None:
    from megatron_fp4.mcore import gpt

    forward_step, calls = gpt.forward_step, 0

    def forward(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # the second microbatch of the third step
            die()
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
