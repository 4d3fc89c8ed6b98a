"""Times linears of the model that pretrain_gpt.py builds; a process of benchmarks/host.py.

Training does not begin: in its place the first layer's MLP linears run forward and backward, again
and again, beside torch's own linear of the same sizes in BF16. The model is Megatron's, with its
DistributedDataParallel, so that hooks on gradients count.

    FOUND=DIR torchrun -m benchmarks.host_worker <Megatron's flags>
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import host_medians
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu

LINEARS = ("linear_fc1", "linear_fc2")  # column- and row-parallel
WARM_UP = 20  # passes before those that are timed


class Timed(Exception):
    """Ends the launch where training would begin."""


def passes(layer: Any, tokens: int) -> Callable[[], None]:
    """A function that runs a forward and a backward pass of `layer`, one of Megatron's linears.

    tokens: of this rank's X, which is [tokens, 1, in].
    """
    weight = layer.weight
    x = torch.randn(tokens, 1, weight.shape[1], device=weight.device, dtype=weight.dtype)
    x.requires_grad_()
    run = None if getattr(layer, "fp4", None) is None else layer.fp4.run
    if run is not None:
        run.awaits_steps = False  # `once` counts the passes
    dy = torch.randn_like(layer(x)[0])

    def once() -> None:
        if run is not None:
            run.passes += 1  # as for another microbatch
        y, _ = layer(x)
        torch.autograd.backward(y, dy)
        x.grad = None

    return once


def plain(tokens: int, weight: Tensor) -> Callable[[], None]:
    """A function that runs a forward and a backward pass of torch's linear.

    tokens: of X [tokens, in]. weight: [out, in], of which the sizes, the dtype and the device are
    taken. dW goes to `grad`, and not to a main_grad as in Megatron.
    """
    x = torch.randn(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype)
    w = torch.randn_like(weight).requires_grad_()
    x.requires_grad_()
    dy = torch.randn(tokens, len(weight), device=weight.device, dtype=weight.dtype)

    def once() -> None:
        torch.autograd.backward(torch.nn.functional.linear(x, w), dy)
        x.grad = w.grad = None

    return once


def linears(model: list[Any]) -> Iterator[tuple[str, Any]]:
    """(name, module) of the first of each of LINEARS."""
    modules = [each for chunk in model for each in chunk.named_modules()]
    for name in LINEARS:
        yield name, next(module for path, module in modules if path.endswith(name))


def train(forward_step: Any, model: list[Any], *others: Any, **named: Any) -> None:
    """Times the linears, in place of Megatron's `train`, and writes the microseconds of each to
    the folder FOUND; then raises Timed, which ends the launch."""
    from megatron.training import get_args

    args = get_args()
    args.curr_iteration = args.iteration = 1  # not the first step, so that schedules have ended
    tokens = args.seq_length * args.micro_batch_size
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    steps, runs = {}, []
    for name, layer in linears(model):
        # Under sequence parallelism a row-parallel linear has the tokens of all ranks.
        whole = name == "linear_fc2" and args.sequence_parallel
        own = tokens * (args.tensor_model_parallel_size if whole else 1)
        steps[name] = passes(layer, own)
        steps[f"torch {name}"] = plain(own, layer.weight)
        if getattr(layer, "fp4", None) is not None:
            runs.append(layer.fp4.run)

    def drop() -> None:
        """Drops what a training step would report, so that memory does not grow."""
        for run in runs:
            run.monitor.drop()

    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds = host_medians(steps, after_round=drop)
    found = {name: taken * 1e6 for name, taken in seconds.items()}
    Path(os.environ["FOUND"], os.environ["RANK"]).write_text(json.dumps(found))
    raise Timed


def main() -> None:
    cpu.install()
    from megatron.training import training

    training.train = train
    try:
        pretrain.main()
    except Timed:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
