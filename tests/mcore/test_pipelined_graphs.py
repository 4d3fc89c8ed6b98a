"""CUDA graphs train as layers do: Megatron's code for graphs, with pretended graphs on a CPU.

tests/gpu/test_graphs.py does the same with those of a GPU.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

from megatron_fp4.mcore.loop import compat, pipelined_graphs
from testing.worlds.launch import ROOT, SCRIPTS, Result, result_of, spawn, tiny_on_mock_data

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")
SCRIPT = SCRIPTS / "pretrain_in_pretended_graphs.py"
NOISY = str(ROOT / "tests" / "gpu" / "noisy.yaml")
# Four microbatches a step; rank 0 has two of them in flight, or more with virtual stages.
FLAGS = """
    --bf16 --hidden-size 64 --ffn-hidden-size 128 --train-iters 3 --global-batch-size 8
    --seq-length 32 --max-position-embeddings 32 --cuda-graph-warmup-steps 1
""".split()
PIPELINE = ("--pipeline-model-parallel-size", "2")
VIRTUAL = (*PIPELINE, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
RECIPE = ("--fp4-weight-cache", "off", "--fp4-recipe")
GRAPHS = ("--cuda-graph-impl", "local")
PADDED_EXPERTS = """
    --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax
    --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01
    --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1
""".split()


@cache
def trained(processes: int, mistake: str, *flags: str) -> Result:
    return result_of(spawn(processes, SCRIPT, mistake, *tiny_on_mock_data(*FLAGS, *flags)))


def told(result: Result) -> tuple[list[str], list[float], list[float]]:
    """The digests of all ranks' weights after each step, and the losses."""
    assert result.status == 0, result.output[-4000:]
    digests = sorted(re.findall(r"weights of rank .*", result.output))
    assert digests and len(result.losses) == 3 and len(result.evaluations) == 2
    return digests, result.losses, result.evaluations


def same_training(processes: int, *flags: str) -> None:
    """With graphs and without, bit for bit."""
    replayed = trained(processes, "none", *flags, *GRAPHS)
    assert replayed.captures
    assert told(replayed) == told(trained(processes, "none", *flags))


def test_graphs_train_as_layers_do_under_pipeline_parallelism() -> None:
    same_training(2, *PIPELINE, *RECIPE, "mxfp4-rht-sr")  # signs differ between microbatches


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (*PIPELINE, *RECIPE, NOISY),
        (*VIRTUAL, *RECIPE, NOISY),
        (*PIPELINE, *RECIPE, "tetrajet"),
        (*PIPELINE, *RECIPE, "dge-occ", "--position-embedding-type", "learned_absolute"),
        (*PIPELINE, *RECIPE, NOISY, *PADDED_EXPERTS),
        PIPELINE,
    ],
    ids=["noisy", "virtual", "tetrajet", "dge-occ", "experts", "bf16"],
)
def test_graphs_train_as_layers_do_in_other_pipelines(flags: tuple[str, ...]) -> None:
    same_training(2, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [(), (*RECIPE, NOISY)], ids=["bf16", "noisy"])
@pytest.mark.parametrize(
    ("processes", "layout"), [(2, ()), (4, PIPELINE), (4, VIRTUAL)], ids=["tp2", "pp2", "vpp2"]
)
def test_graphs_train_as_layers_do_under_tensor_parallelism(
    processes: int, layout: tuple[str, ...], recipe: tuple[str, ...]
) -> None:
    same_training(processes, *TENSOR, *layout, *recipe)


@pytest.mark.slow
def test_padded_experts_can_be_captured() -> None:
    same_training(1, *RECIPE, NOISY, *PADDED_EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [PIPELINE, VIRTUAL], ids=["pipeline", "virtual"])
def test_one_clock_for_all_microbatches_would_be_noticed(flags: tuple[str, ...]) -> None:
    """Negative control: backward passes that draw the bits of a later microbatch."""
    flags = (*flags, *RECIPE, NOISY)
    wrong, wanted = told(trained(2, "one-clock", *flags, *GRAPHS)), told(trained(2, "none", *flags))
    assert wrong[1][0] == wanted[1][0]  # nothing is replayed in the first step
    assert wrong[1][2] != wanted[1][2] and not set(wrong[0][2:]) <= set(wanted[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("unmended", "counter-productive to free a view of another tensor"),
        ("all-uses", "assert fwd_buffer_reuse_ref_count == 0"),
        ("no-view", "nan"),
    ],
)
def test_megatron_s_errors_are_still_there(mistake: str, said: str) -> None:
    """Each fix is needed. Where one is not any more, it can go, as can its row in patches/."""
    failed = trained(2, mistake, *PIPELINE, *RECIPE, "mxfp4", *GRAPHS)
    assert failed.status and said in failed.output


EXPERTS = """
    --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax
    --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01
""".split()


@pytest.mark.slow
def test_megatron_in_bf16_captures_no_experts_of_varying_numbers_of_tokens() -> None:
    """Why --cuda-graph-modules is refused. With moe_router Megatron 0.19 captures nothing of a GPT,
    and with attn whole layers, whose experts replay the numbers of tokens of the capture."""
    eager = told(trained(1, "none", *EXPERTS))
    router = trained(1, "none", *EXPERTS, *GRAPHS, "--cuda-graph-modules", "moe_router")
    assert told(router) == eager and not router.captures
    whole = trained(1, "none", *EXPERTS, *GRAPHS, "--cuda-graph-modules", "attn", "moe_router")
    assert whole.captures and told(whole) != eager


@pytest.mark.slow
def test_megatron_in_bf16_recomputes_nothing_in_graphs() -> None:
    """Why recomputation is refused with graphs: an MLP is captured as if it were not recomputed.
    Only the first step, which is not captured yet, recomputes it."""
    recomputing = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    eager, captured = (trained(1, "count", *recomputing, *more) for more in ((), GRAPHS))
    assert told(eager) == told(captured) and captured.captures
    counts = [int(re.findall(r"recomputed: (\d+)", run.output)[-1]) for run in (eager, captured)]
    assert counts[0] == 3 * counts[1] > 0


def test_megatron_refuses_full_recomputation_in_graphs() -> None:
    """So no launch in BF16 has it either."""
    sizes = dict(num_layers=2, hidden_size=64, num_attention_heads=4)
    full = dict(recompute_method="uniform", recompute_num_layers=1)
    with pytest.raises(AssertionError, match="full recompute is only supported with full iter"):
        TransformerConfig(**sizes, **full, recompute_granularity="full", cuda_graph_impl="local")
    TransformerConfig(**sizes, **full, recompute_granularity="full")


def test_megatron_loses_the_gradients_of_a_recomputed_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph computes the gradients of the weights that are found from its outputs, and the weight
    of a norm in a CheckpointWithoutOutput is not. Without one it is."""
    monkeypatch.setattr(random, "_get_all_rng_states", tuple)
    layer = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(8), "linear": torch.nn.Linear(8, 8)})
    runner: Any = _CudaGraphRunner.__new__(_CudaGraphRunner)
    torch.nn.Module.__init__(runner)
    runner.base_module = layer
    x = torch.ones(2, 8, requires_grad=True)

    def found(normed: torch.Tensor) -> list[str]:
        weights = {id(weight) for weight in runner.get_connected_params(layer["linear"](normed))}
        return [name for name, weight in layer.named_parameters() if id(weight) in weights]

    linear = ["linear.weight", "linear.bias"]
    assert found(layer["norm"](x)) == ["norm.weight", *linear]
    recomputed = random.CheckpointWithoutOutput(fp8=None)
    assert found(recomputed.checkpoint(layer["norm"], x)) == linear


@pytest.mark.slow
def test_two_ranks_of_one_gpu_train_as_others_do() -> None:
    """The copies to the host, with which tests/gpu/test_graphs.py compares graphs on one GPU."""
    flags = (*tiny_on_mock_data(*FLAGS, *PIPELINE), "--distributed-backend", "gloo")
    copying = spawn(2, SCRIPTS / "pretrain_with_digests.py", "none", *flags)
    assert told(result_of(copying)) == told(trained(2, "none", *PIPELINE))


def test_the_fixes_are_applied_once() -> None:
    compat.install()
    once = _CudaGraphRunner.record_graph_capture, _CudaGraphRunner.replay_graph_capture
    compat.install()
    assert once == (_CudaGraphRunner.record_graph_capture, _CudaGraphRunner.replay_graph_capture)


def test_what_can_be_freed_stays_as_it_is() -> None:
    """So the fixes change nothing where Megatron has its own."""
    last = SimpleNamespace(is_last_layer=True, deallocate_pipeline_outputs=True)

    def sendable(*given: Any) -> Any:
        return pipelined_graphs._sendable(*given)

    own, base = (torch.ones(4, requires_grad=True) * 2 for _ in range(2))
    assert sendable(last, own) is own
    assert sendable(last, (own, None))[0] is own
    view = base[:]
    for kept, given in ((view, sendable(last, view)), (own, sendable(last, own, [own]))):
        assert given is not kept and given._base is None
        assert given.data_ptr() == kept.data_ptr() and given.requires_grad
    for name in vars(last):  # Negative control: other layers, and pipelines that free nothing.
        other = SimpleNamespace(**vars(last) | {name: False})
        assert sendable(other, view) is view
