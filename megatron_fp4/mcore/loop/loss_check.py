"""When the loss of a microbatch is checked: as soon as its backward pass has been launched.

A check reads the loss on the host, which waits until the GPU has computed it. The GPU then has
nothing to do until the host has launched the backward pass. So the backward pass is launched first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable


def after_backward(losses: Tensor, check: Callable[[], None]) -> None:
    """Calls `check` at the end of the backward pass through `losses`, in the call that runs it; at
    once if there will be none.

    What `check` raises is raised by the backward pass.
    """
    if not losses.requires_grad:
        check()
        return

    def queue(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(check)

    losses.register_hook(queue)


def on_host(value: Tensor) -> Callable[[], Tensor]:
    """A function that returns a copy of `value` on the CPU, and waits for that alone.

    The copy is made by the GPU when it has computed `value`, whatever is launched after it.
    """
    if not value.is_cuda:
        copy = value.clone()
        return lambda: copy
    copy = value.to("cpu", non_blocking=True)  # in pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait
