"""Weights, gradients and the optimizer's state on each rank are those of a run of Megatron's."""

import re
from dataclasses import replace

import pytest

from megatron_fp4.arithmetic.moments import FLOAT32, Moments
from megatron_fp4.estimate.layout import Layout, Stage, stages
from megatron_fp4.estimate.memory import states
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import recipe_named
from testing.worlds.launch import SCRIPTS, spawn, tiny_on_mock_data

MODEL = Model(2, 64, 128, 4, 2, 16, 512, 64)  # TINY of testing.worlds.launch, with FFN
PARAMETERS = 17  # of MODEL, of which a shard ends with a short block
FFN = ("--ffn-hidden-size", "128")
EXPERTS = replace(MODEL, experts=4, expert_ffn=96)
EXPERT_FLAGS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96
    --moe-token-dispatcher-type allgather
""".split()  # gloo has no all-to-all
LINE = re.compile(r"rank (\d+) has (\d+) bytes of weights, (\d+) of gradients, (\d+) of the opt")

LAYOUTS = {
    "tp2-sp": Layout(2, tp=2, sp=True, batch=4),
    "pp2": Layout(2, pp=2, batch=4),
    "dp2": Layout(2, batch=4, sharded=True),
    "ep2": Layout(2, ep=2, batch=4, sharded=True),
    "tp2-pp2": Layout(4, tp=2, pp=2, batch=4),
    "tp2-sp-ep2-dp2": Layout(4, tp=2, sp=True, ep=2, batch=4, sharded=True),
    "tp2-sp-low": Layout(2, tp=2, sp=True, batch=4, moments=Moments()),
    "dp2-low": Layout(2, batch=4, sharded=True, moments=Moments()),
}


def model_of(layout: Layout) -> Model:
    return EXPERTS if layout.ep > 1 else MODEL


def stage_of(layout: Layout, rank: int) -> Stage:
    """The stage of a rank. Megatron numbers tensor-, then data-, then pipeline-parallel ranks."""
    return stages(model_of(layout), layout)[rank // (layout.gpus // layout.pp)]


CASES = [("tetrajet", name) for name in LAYOUTS]
CASES += [(f"tetrajet-{method}", name) for method in ("ema", "ramping")
          for name in ("tp2-sp", "dp2", "ep2")]  # fmt: skip


@pytest.mark.outside
@pytest.mark.parametrize(("recipe_name", "name"), CASES)
def test_states_are_those_of_a_run(recipe_name: str, name: str) -> None:
    layout = LAYOUTS[name]
    model, recipe = model_of(layout), recipe_named(recipe_name)
    flags = " ".join(layout.flags(bool(model.experts))).split()
    words = [*flags, *FFN, *(EXPERT_FLAGS if model.experts else []), "--bf16", "--train-iters", "2"]
    script = SCRIPTS / "pretrain_counting_bytes.py"
    done = spawn(layout.gpus, script, *tiny_on_mock_data(*words, "--fp4-recipe", recipe_name))
    assert done.returncode == 0, done.stdout[-4000:]
    measured = {int(rank): list(map(int, rest)) for rank, *rest in LINE.findall(done.stdout)}
    assert sorted(measured) == list(range(layout.gpus))
    optimizer = 0.0
    for rank, (weights, gradients, own) in measured.items():
        estimate = states(model, layout, recipe, stage_of(layout, rank))
        assert (weights, gradients) == estimate[:2]
        # Shards of a distributed optimizer have one size with padding, which is not counted here.
        # A short block has a scale of its own in each moment.
        scales = 0.0 if layout.moments == FLOAT32 else 2.0 * PARAMETERS
        rel = 0.1 if layout.sharded else 0.0
        assert own == pytest.approx(estimate[2], rel=rel, abs=scales)
        optimizer += estimate[2]
        # The control: the states of another layout are others.
        other = replace(layout, tp=1, pp=1, ep=1, sharded=not layout.sharded)
        assert states(model, other, recipe, stages(model, other)[0]) != estimate
        if layout.moments != FLOAT32:
            plain = replace(layout, moments=FLOAT32)
            assert own < 0.7 * states(model, plain, recipe, stage_of(layout, rank))[2]
    measured_optimizer = sum(own for *_, own in measured.values())
    assert measured_optimizer == pytest.approx(optimizer, rel=0.0, abs=scales * layout.gpus)
