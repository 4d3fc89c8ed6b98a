"""Two ranks that train megatron_fp4.Linear under DDP and FSDP2.

torchrun --nproc-per-node 2 testing/scripts/data_parallel.py <folder for checkpoints>
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from megatron_fp4 import (
    ConfigError,
    Linear,
    Recipe,
    get_quantizer,
    get_recipe,
    linear,
    name_layers,
    quantize,
    update_averages,
)
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.mcore.runtime import gloo

TOKENS, SIZE, STEPS = 64, 64, 24


def main() -> None:
    gloo.use_one_worker()
    dist.init_process_group("gloo")
    errors_average_out_over_ranks()
    resuming_repeats(Path(sys.argv[1]))
    for recipe in (get_recipe("tetrajet"), get_recipe("tetrajet-ema", ema_beta=0.5, ema_delay=0)):
        fsdp_is_ddp(Path(sys.argv[1]), recipe)
    dtensors_are_refused()
    dist.destroy_process_group()


def drawn(seed: int) -> Tensor:
    return torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(seed))


# --- random bits ----------------------------------------------------------------------------------


def errors_average_out_over_ranks() -> None:
    """Checks that averaging over two ranks halves the squared error of a gradient.

    Both ranks have the same data, so only the random bits differ. Negative control: if the ranks
    share their random bits, the squared error stays as it is.
    """
    ratios = error_ratios(replica=None)
    standard_error = ratios.std() / STEPS**0.5
    assert abs(ratios.mean() - 1 / 2) < 5 * standard_error, (ratios.mean(), standard_error)
    assert standard_error < 0.02
    assert (error_ratios(replica=0) == 1).all()


def error_ratios(replica: int | None) -> Tensor:
    """The squared error of DDP's dW divided by that of this rank's own dW: float64 [STEPS].

    replica: of both linears; None: the rank.
    """
    torch.manual_seed(0)
    own = Linear(SIZE, SIZE, bias=False, recipe="tetrajet", replica=replica)
    shared = DistributedDataParallel(copy.deepcopy(own))
    own.name = shared.module.name = "fc"
    x, dy = drawn(1), drawn(2)
    forward = quantize_matrix(x, get_quantizer("mxfp4-ceil"), axis=1).dequantize(torch.float64)
    expected = dy.double().t() @ forward  # what tetrajet's dW estimates
    ratios = []
    for _ in range(STEPS):
        gradients = []
        for module in (own, shared):
            module.zero_grad()
            module(x).backward(dy)
            [weight] = module.parameters()
            assert weight.grad is not None
            gradients.append(weight.grad)
        alone, averaged = ((g.double() - expected).square().sum() for g in gradients)
        ratios.append(averaged / alone)
    return torch.stack(ratios)


# --- resuming -------------------------------------------------------------------------------------


def network(recipe: Recipe | str = "tetrajet") -> nn.Module:
    torch.manual_seed(0)
    layers = [Linear(SIZE, SIZE, recipe=recipe) for _ in range(2)]
    return name_layers(nn.Sequential(layers[0], nn.GELU(), layers[1]))


def train(model: nn.Module, steps: range) -> None:
    """Trains for these steps; the data depend on the step and the rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        model(drawn(10 + 2 * step + dist.get_rank())).square().mean().backward()
        optimizer.step()
        update_averages(model, step + 1, 10)


def full(model: nn.Module) -> list[Tensor]:
    parameters = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(full(a), full(b), strict=True))


def resuming_repeats(folder: Path) -> None:
    whole, begun = (DistributedDataParallel(network()) for _ in range(2))
    train(whole, range(6))
    train(begun, range(3))
    if dist.get_rank() == 0:
        torch.save(begun.module.state_dict(), folder / "begun.pt")
    dist.barrier()
    saved = torch.load(folder / "begun.pt", weights_only=True)
    for forgets_steps in (False, True):
        resumed = network()
        resumed.load_state_dict(
            {k: v for k, v in saved.items() if not (forgets_steps and k.endswith("_extra_state"))}
        )
        resumed = DistributedDataParallel(resumed)
        train(resumed, range(3, 6))
        assert equal(resumed, whole) != forgets_steps


def fsdp_is_ddp(folder: Path, recipe: Recipe) -> None:
    """Checks that FSDP2 (fully_shard) trains as DDP does, and that its checkpoints keep `steps` and
    averages of weights."""
    ddp, sharded = DistributedDataParallel(network(recipe)), sharded_network(recipe)
    train(ddp, range(3))
    train(sharded, range(3))
    assert isinstance(next(sharded.parameters()), DTensor) and equal(ddp, sharded)
    place = folder / recipe.name
    checkpoint.save(get_model_state_dict(sharded), checkpoint_id=place)
    resumed = sharded_network(recipe)
    state = get_model_state_dict(resumed)
    checkpoint.load(state, checkpoint_id=place)
    set_model_state_dict(resumed, state)
    for model in (ddp, resumed):
        train(model, range(3, 5))
    assert equal(ddp, resumed)


def sharded_network(recipe: Recipe) -> nn.Module:
    model = network(recipe)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.children():
        if isinstance(layer, Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# --- tensor parallelism by DTensor ----------------------------------------------------------------


def dtensors_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    spread = distribute_tensor(drawn(1), mesh, [Replicate()])
    calls: list[Callable[[], Any]] = [
        lambda: linear(spread, drawn(2), recipe="tetrajet"),
        lambda: linear(drawn(2), spread, recipe="tetrajet"),
        lambda: quantize(spread, "mxfp4"),
    ]
    for call in calls:
        try:
            call()
        except ConfigError as error:
            assert "a DTensor" in str(error) and "FSDP2" in str(error) and "\n" not in str(error)
        else:
            raise AssertionError("a DTensor was taken")


if __name__ == "__main__":
    main()
