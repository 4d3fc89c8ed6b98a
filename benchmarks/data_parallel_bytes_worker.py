"""One rank of benchmarks/data_parallel_bytes.py.

It runs pretrain_gpt.py, counts the bytes that the rank sends in one step, by what they are for, and
then those that its optimizer holds.

    torchrun -m benchmarks.data_parallel_bytes_worker <Megatron's flags>
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.traffic import Traffic
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu
from testing.patching import patched

# Methods of Megatron's groups of buckets, which data-parallel ranks exchange by them.
METHODS = {
    "gradients": ("start_grad_sync", "finish_grad_sync"),
    "weights": ("start_param_sync", "finish_param_sync"),
}
Sent = dict[str, dict[str, int]]  # bytes by what they are for, and by kind of collective
found: dict[str, Any] = {}


def counted(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron's train_step. In the step COUNTED_STEP it writes to `found` the number of
    parameters, the bytes that this rank sends, and the bytes that its optimizer holds."""
    steps = itertools.count()

    def step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) != int(os.environ["COUNTED_STEP"]):
            return train_step(*args, **kwargs)
        _, _, chunks, optimizer, *_ = args
        with Traffic() as traffic, by_purpose(traffic, chunks) as sent:
            done = train_step(*args, **kwargs)
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        found.update(parameters=parameters, sent=sent, held=held(optimizer))
        return done

    return step


@contextmanager
def by_purpose(traffic: Traffic, chunks: list[Any]) -> Iterator[Sent]:
    """A context in which `traffic` counts gradients and weights apart from all others.

    chunks: of the model, wrapped in Megatron's DDP.
    """
    from megatron_fp4.mcore.exchange.buckets import groups_of

    sent: Sent = {"gradients": {}, "weights": {}, "others": traffic.sent}
    with ExitStack() as patches:
        for _, group in groups_of(chunks):
            for purpose, names in METHODS.items():
                for name in names:
                    method = counting(getattr(group, name), traffic, sent[purpose])
                    patches.enter_context(patched(group, name, method))
        yield sent


def counting(method: Callable[..., None], traffic: Traffic, sent: dict[str, int]) -> Any:
    """The method, during which `traffic` counts into `sent`."""

    def counted(*args: Any, **kwargs: Any) -> None:
        with patched(traffic, "sent", sent):
            method(*args, **kwargs)

    return counted


def held(optimizer: Any) -> dict[str, int]:
    """The bytes of the main weights, and of Adam's moments with their scales, of this rank."""
    from megatron_fp4.mcore.model.optimizers import stepping_optimizers

    sizes = {"main weights": 0, "moments": 0}
    for each in stepping_optimizers(optimizer):
        for group in each.optimizer.param_groups:
            for weight in group["params"]:
                state = each.optimizer.state[weight].values()
                moments = [x for x in state if isinstance(x, Tensor) and x.dim()]  # not the step
                sizes["main weights"] += weight.nbytes
                sizes["moments"] += sum(x.nbytes for x in moments)
    return sizes


def main() -> None:
    cpu.install()
    from megatron.training import training

    training.train_step = counted(training.train_step)
    pretrain.main()
    Path(os.environ["FOUND"], os.environ["RANK"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
