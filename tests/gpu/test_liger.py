"""On a GPU: Liger-Kernel's kernels against float64, in graphs, and in training."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_fp4.arithmetic.fused_adamw import FusedAdamW
from testing.worlds.launch import Result, train
from tests.arithmetic import test_fused_adamw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="no liger_kernel")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
# Weights stand still, so that what differs in one step does not grow in the next.
FLAGS = """
    --bf16 --hidden-size 128 --ffn-hidden-size 256 --train-iters 4 --lr 1e-12 --min-lr 1e-13
""".split()
ALL = (
    "rotary embedding in one kernel of this package; SwiGLU, norms, cross-entropy in kernels of "
    "Liger-Kernel"
)
OFF, LIGER = ("--fp4-fused-kernels", "off"), ("--fp4-fused-kernels", "liger")
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Scores of attention are far from equal, so that the loss depends on the rotation.
LARGE = ("--init-method-std", "0.2")
TETRAJET = ("--fp4-recipe", "tetrajet")


@needs_liger
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_results_are_those_of_float64_and_mistakes_are_noticed(dtype: torch.dtype) -> None:
    from testing.kernels.compare_liger import differences

    assert list(differences(dtype, "cuda")) == []


@needs_liger
def test_a_graph_computes_what_the_functions_do() -> None:
    from megatron_fp4.mcore.model import liger
    from megatron_fp4.mcore.model.rotary import Rotation

    torch.manual_seed(0)
    rotation = Rotation()
    shapes = [(64, 1, 2, 128), (64, 1, 256), (64, 1, 128)]
    inputs = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    gain = torch.randn(128, device="cuda").bfloat16().requires_grad_()
    half = torch.randn(64, 1, 1, 16, device="cuda")
    freqs, labels = torch.cat((half, half), -1), torch.arange(64, device="cuda")[None]

    def passes() -> tuple[torch.Tensor, ...]:
        mixed, gate_and_up, x = (t * 1 for t in inputs)
        query, key, value = rotation.split(mixed, 32, freqs, 1.0)
        y = liger.rms_norm(x + liger.swiglu(gate_and_up), gain, 1e-5, 0.0)
        losses = liger.cross_entropy(None, labels, y)  # type: ignore[arg-type]
        total = losses.sum() + (query.float() ** 2).sum() + (key.float() * value).sum()
        return losses, *torch.autograd.grad(total, [*inputs, gain])

    passes()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes()
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        for tensor in inputs:
            tensor.data.normal_()
        graph.replay()
        assert all(map(torch.equal, found, passes()))
        outputs.append(found[0].clone())
    assert not torch.equal(*outputs)  # Negative control: a replay reads its inputs.


def close(one: Result, other: Result) -> bool:
    """To more than twice what BF16 in place of FP32 changes in these models on a CPU: 8e-4 of the
    losses, 0.01 of the gradients' norms."""
    norms = [[float(n) for n in re.findall(r"grad norm: (\S+)", r.output)] for r in (one, other)]
    found, wanted = ([*r.losses, *r.evaluations] for r in (one, other))
    return found == pytest.approx(wanted, rel=2e-3) and norms[0] == pytest.approx(norms[1], 0.03)


def said(flags: tuple[str, ...]) -> str:
    """The line of the start table. With a recipe the linears compute SwiGLU."""
    return ALL.replace("SwiGLU, ", "") if "--fp4-recipe" in flags else ALL


@needs_liger
@pytest.mark.parametrize(
    "flags",
    [
        LARGE,
        (*LARGE, "--cuda-graph-impl", "local"),
        TETRAJET,
        (*TETRAJET, *RECOMPUTED.split()),
        (*TETRAJET, "--cuda-graph-impl", "local"),
        (*TETRAJET, "--use-distributed-optimizer"),
        (*TETRAJET, "--qk-layernorm"),
    ],
    ids=" ".join,
)
def test_a_run_learns_what_one_of_torch_s_kernels_does(flags: tuple[str, ...]) -> None:
    plain, fused = (train(1, *FLAGS, *flags, *choice) for choice in (OFF, LIGER))
    assert said(flags) in fused.output and said(flags) not in plain.output
    assert len(plain.losses) == 4 and close(fused, plain)


@pytest.mark.parametrize(
    ("flags", "mistake"),
    [(LARGE, ("--rotary-interleaved",)), (TETRAJET, ("--norm-epsilon", "1e-3"))],
    ids=("pairs rotated in place of halves", "epsilon"),
)
def test_a_mistake_would_be_noticed(flags: tuple[str, ...], mistake: tuple[str, ...]) -> None:
    """Negative controls."""
    plain = train(1, *FLAGS, *flags, *OFF)
    assert not close(train(1, *FLAGS, *flags, *mistake, *OFF), plain)


@needs_liger
@two_gpus
def test_two_gpus_learn_what_torch_s_kernels_do() -> None:
    layout = (*TETRAJET, "--tensor-model-parallel-size", "2", "--sequence-parallel")
    plain, fused = (train(2, *FLAGS, *layout, *choice) for choice in (OFF, LIGER))
    assert said(layout) in fused.output and close(fused, plain)


@needs_liger
@pytest.mark.parametrize("flags", [(), TETRAJET], ids=("bf16", "tetrajet"))
def test_memory_is_lower(flags: tuple[str, ...]) -> None:
    """With activations that weigh more than weights."""
    wide = "--seq-length 4096 --max-position-embeddings 4096 --train-iters 2 --log-interval 1"
    peaks = []
    for choice in (OFF, LIGER):
        done = train(1, *FLAGS, *wide.split(), *flags, *choice)
        [peak] = set(re.findall(r"max allocated: ([\d.]+)", done.output)[-1:])
        peaks.append(float(peak))
    assert peaks[1] < peaks[0]


@needs_liger
def test_a_resume_with_other_kernels_is_told(tmp_path: Path) -> None:
    folder = ("--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2")
    train(1, *FLAGS, *OFF, *folder, "--exit-interval", "2")
    again = train(1, *FLAGS, *LIGER, *folder)
    assert "trained with fused kernels of none, this launch has Liger-Kernel" in again.output
    assert len(again.losses) == 2


# --- AdamW ---------------------------------------------------------------------------------------


def test_the_fused_adamw_is_torch_s() -> None:
    def trained(fused: bool | None) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(w.cuda()) for w in test_fused_adamw.weights()]
        optimizer = torch.optim.AdamW(weights, **test_fused_adamw.OPTIONS, fused=fused)
        if fused is None:
            optimizer = FusedAdamW.in_place_of(optimizer)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).cuda()
            optimizer.step()
        return [weight.detach().clone() for weight in weights]

    assert all(map(torch.equal, trained(None), trained(True)))


@pytest.mark.parametrize("layout", [(), ("--use-distributed-optimizer",)], ids=("plain", "sharded"))
def test_a_run_with_the_fused_adamw_resumes(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Bit for bit, as far as is printed."""
    model = ("--bf16", "--hidden-size", "128", "--ffn-hidden-size", "256", "--train-iters", "6")
    flags = (*model, *layout, "--save", str(tmp_path), "--save-interval", "3")
    whole = train(1, *flags)
    assert "AdamW in torch's fused kernel" in whole.output
    again = train(1, *flags, "--load", str(tmp_path), "--ckpt-step", "3")
    assert len(again.losses) == 3 and again.losses == whole.losses[3:]
    assert whole.losses[-1] < whole.losses[0]
