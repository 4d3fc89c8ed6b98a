"""Trainings in which one of Megatron's chained optimizers has no parameters on any rank: a stub.

Its torch optimizer is None, and where it is a DistributedOptimizer it has no buffers.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_fp4 import get_recipe
from megatron_fp4.mcore.loop.metrics_shares import gradient_part
from megatron_fp4.mcore.model.optimizers import stepping_optimizers
from megatron_fp4.mcore.model.weight_states import WeightStates
from megatron_fp4.mcore.runtime.cpu import _HostIsTheDevice
from testing.worlds.checkpoints import EP2, MOE, SIZES, run_in_turn
from testing.worlds.metrics import kinds, read


def test_a_stub_keeps_no_state(one_rank: None) -> None:
    linear = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(linear)
    # As Megatron's DistributedDataParallel would have it.
    model.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)  # type: ignore
    config = OptimizerConfig(optimizer="adam", lr=0.1, bf16=True, use_distributed_optimizer=True)
    with _HostIsTheDevice():
        optimizer = get_megatron_optimizer(config, [model])
    [stub] = optimizer.chained_optimizers
    assert isinstance(stub, DistributedOptimizer) and stub.is_stub_optimizer
    assert not hasattr(stub, "buffers")
    assert stepping_optimizers(optimizer) == []

    states = WeightStates()
    copy = states.add(linear, "linear", 1, get_recipe("tetrajet-ema"))
    states.follow(optimizer, Namespace())
    states.gather()
    assert copy is not None and torch.equal(copy, linear.weight)
    assert gradient_part(linear.weight, True, stepping_optimizers(optimizer)) == slice(None)
    with pytest.raises(AttributeError):  # the control
        gradient_part(linear.weight, True, [stub])


@pytest.mark.slow
def test_experts_alone_are_trained(tmp_path: Path) -> None:
    """Sharded or not: with averages of the experts' weights, and metrics of their gradients."""
    alone = f"trains=.experts. {MOE} {EP2} --clip-grad 0"
    ema = f"{alone} --fp4-recipe tetrajet-ema --fp4-recipe-option ema_delay=0"
    saving = f"--save {tmp_path} --save-interval 1000 --no-save-optim --fp4-metrics-interval 2"
    results = run_in_turn(
        2,
        {
            "whole": ema,
            "sharded": f"{ema} --use-distributed-optimizer {saving}",
            "nearest": f"{alone} --fp4-recipe tetrajet",
        },
        SIZES,
    )
    for name, result in results.items():
        assert result.status == 0, (name, result.output[-4000:])
    whole, sharded, nearest = (results[name].losses for name in results)
    assert sharded == whole and len(whole) == 4
    assert nearest != whole  # the control: averages are read
    norms = {r["layer"]: r["metrics"]["norm"] for r in kinds(read(tmp_path), "gradient")}
    assert norms and all(norm > 0 and ".experts." in layer for layer, norm in norms.items())
