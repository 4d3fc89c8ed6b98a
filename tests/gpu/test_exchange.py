"""Gradients and weights in few bits between two GPUs, over NCCL."""

from importlib.util import find_spec

import pytest
import torch

from testing.worlds.checkpoints import MOE
from testing.worlds.launch import SCRIPTS, Result, result_of, spawn, tiny_on_mock_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU"),
]
needs_te = pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="no Transformer Engine"
)
OWNED = "--use-distributed-optimizer"
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 20000"
# Transformer Engine's Adam, which keeps the main weights too.
AWARE = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"


def run(script: str, flags: str, dtype: str = "--bf16") -> Result:
    words = tiny_on_mock_data(dtype, *flags.split())
    return result_of(spawn(2, SCRIPTS / f"pretrain_{script}.py", *words))


@pytest.mark.parametrize("layout", ["", BUCKETS, OWNED, f"{OWNED} {BUCKETS}"])
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_sums_are_the_reference_s(form: str, layout: str) -> None:
    """The script compares each exchange, which kernels encode and sum, with sums of the gathered
    gradients, which PyTorch encodes and sums."""
    found = run("exchanging", f"--fp4-grad-comm {form} {layout}")
    assert found.status == 0 and len(found.losses) == 4, found.output[-3000:]


OTHERS = {
    "FP16": ("--fp16", f"{OWNED} {BUCKETS} --initial-loss-scale 128"),
    "experts": ("--bf16", f"{MOE} {OWNED}"),
    "experts of FP16": ("--fp16", f"{MOE} {OWNED} {BUCKETS} --initial-loss-scale 128"),
    "experts, one rank for each": ("--bf16", f"{MOE} --expert-model-parallel-size 2 {BUCKETS}"),
    "Transformer Engine's Adam": ("--bf16", f"{OWNED} {BUCKETS} {AWARE}"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_te if AWARE in OTHERS[name][1] else ()) for name in OTHERS],
)
def test_other_launches(name: str) -> None:
    """With a recipe, as users launch them. Those without few bits have the first loss alike."""
    dtype, flags = OTHERS[name]
    flags = f"--fp4-recipe tetrajet {flags}"
    plain = run("exchanging", flags, dtype)
    found = run("exchanging", f"--fp4-grad-comm fp8 {flags}", dtype)
    assert (plain.status, found.status) == (0, 0), found.output[-3000:]
    assert found.losses[0] == plain.losses[0] and found.losses != plain.losses
    assert found.losses == pytest.approx(plain.losses, rel=1e-3)


def test_a_mistake_is_noticed() -> None:
    words = ["twice", *tiny_on_mock_data("--bf16", OWNED, "--fp4-grad-comm", "fp8")]
    found = result_of(spawn(2, SCRIPTS / "pretrain_exchanging.py", *words))
    assert found.status != 0 and "sums differ" in found.output


@pytest.mark.parametrize(
    "more",
    [
        "",
        f"{BUCKETS} --overlap-param-gather",
        f"{BUCKETS} --overlap-param-gather --fp4-bf16-after 0.5",
        pytest.param(AWARE, marks=needs_te),
    ],
)
def test_gathered_codes_train_as_gathered_weights(more: str) -> None:
    flags = f"--fp4-recipe tetrajet {OWNED} {more}"
    plain, gathered = run("gathering", flags), run("gathering", f"{flags} --fp4-param-gather")
    assert (plain.status, gathered.status) == (0, 0), gathered.output[-3000:]
    assert gathered.losses == plain.losses and len(plain.losses) == 4
