"""Which fused kernels a launch takes, what it says of them, and what they compute in a model."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional as F

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.checkpoints.compare_numerics import compare
from megatron_fp4.mcore.launch import fused_kernels as launch
from megatron_fp4.mcore.model import fused_kernels
from megatron_fp4.mcore.model.mlp import GatedMLP
from megatron_fp4.mcore.model.norm import Norm
from megatron_fp4.mcore.model.replacement import fusable
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention
from testing.builders import command_line, small_gpt
from testing.builders.small_gpt import losses_and_gradients
from testing.worlds.launch import (
    MOCK_DATA,
    SCRIPTS,
    Result,
    result_of,
    spawn,
    tiny_on_mock_data,
)

needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="no liger_kernel")
LIGERS = "SwiGLU, norms, cross-entropy"
ROTATED = "rotary embedding in one kernel of this package"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the command line believe in a GPU and in packages."""

    def believe(*packages: str, version: str = "0.8.5") -> None:
        monkeypatch.setattr(machine, "runs_triton", lambda: True)
        monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(machine, "installed", lambda name: name in packages)
        monkeypatch.setattr(machine, "HAVE_TE", False)
        monkeypatch.setattr(launch, "version", lambda name: version)

    return believe


def parse(*flags: str) -> argparse.Namespace:
    return command_line.parse(*MOCK_DATA, *flags)


def given(**values: Any) -> argparse.Namespace:
    plain = {
        "fp4_fused_kernels": "auto",
        "transformer_impl": "local",
        "optimizer": "adam",
        "optimizer_cpu_offload": False,
        "optimizer_cuda_graph": False,
        "fp4_optimizer_state": None,
        "fp4": None,
        "fp4_recipe": None,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "save_activations_interval": None,
        "save_dgrads_interval": None,
    }
    return argparse.Namespace(**plain | values)


def settled(args: argparse.Namespace, is_checked: bool = True) -> tuple[bool, str | None, bool]:
    launch.settle(args, is_checked)
    return args.fp4_rotates, args.fp4_liger, args.fp4_fused_adamw


def test_a_cpu_takes_none() -> None:
    args = parse("--fp4-recipe", "tetrajet")
    assert (args.fp4_rotates, args.fp4_liger, args.fp4_fused_adamw) == (False, None, False)
    assert fused_kernels.attach(args, []) == ""


def test_auto_takes_what_is_there(gpu: Callable[..., None]) -> None:
    gpu("liger_kernel")
    assert settled(given()) == (True, "0.8.5", True)
    assert settled(given(fp4_fused_kernels="off")) == (False, None, False)
    assert settled(given(transformer_impl="transformer_engine")) == (False, None, True)
    assert settled(given(optimizer="sgd")) == (True, "0.8.5", False)
    assert settled(given(optimizer_cpu_offload=True)) == (True, "0.8.5", False)
    assert settled(given(fp4_optimizer_state="m=fp8,v=fp16")) == (True, "0.8.5", False)
    # A user's script without a recipe runs as it would without this package.
    assert settled(given(), is_checked=False) == (False, None, False)
    assert settled(given(fp4_fused_kernels="liger"), is_checked=False) == (True, "0.8.5", True)
    gpu()
    assert settled(given()) == (True, None, True)
    gpu("liger_kernel", version="0.8.4")
    assert settled(given()) == (True, None, True)
    gpu("liger_kernel", "apex")
    assert settled(given()) == (True, "0.8.5", False)


def test_linears_join_with_a_recipe_of_this_package_alone(gpu: Callable[..., None]) -> None:
    """--fp4-format is Megatron's own FP4, whose recipe nvfp4 is none of this package's."""
    gpu()
    for values, joins in (
        ({"fp4_recipe": "tetrajet"}, True),
        ({}, False),
        ({"fp4_recipe": "nvfp4", "fp4": "e2m1"}, False),
    ):
        args = given(**values)
        settled(args)
        assert (args.fp4_joins_swiglu, args.fp4_joins_norms) == (joins, joins)


@pytest.mark.parametrize(
    ("values", "packages", "says"),
    [
        (
            {},
            (),
            "needs the package liger_kernel 0.8.5 or newer: pip install 'liger-kernel>=",
        ),
        (
            {"transformer_impl": "inference_optimized"},
            ("liger_kernel",),
            "--transformer-impl local",
        ),
    ],
)
def test_what_is_asked_for_and_missing_is_refused(
    values: dict[str, Any], packages: tuple[str, ...], says: str, gpu: Callable[..., None]
) -> None:
    gpu(*packages)
    [refusal] = list(launch.refusals(given(fp4_fused_kernels="liger", **values)))
    assert says in refusal and "\n" not in refusal
    assert not list(launch.refusals(given(**values)))


def test_liger_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--fp4-fused-kernels liger needs "):
        parse("--fp4-fused-kernels", "liger")


def test_another_choice_is_told_when_a_run_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    saved, now = parse(), parse()
    compare(saved, now)
    assert not capsys.readouterr().out
    saved.fp4_joins_swiglu = saved.fp4_joins_norms = False
    now.fp4_liger, now.fp4_rotates, now.fp4_fused_adamw = "0.8.5", True, True
    now.fp4_joins_swiglu = now.fp4_joins_norms = True
    compare(saved, now)
    assert (
        "trained with fused kernels of none, this launch has Liger-Kernel 0.8.5 and rotary "
        "embedding and torch's AdamW and linears with SwiGLU and linears with RMSNorm "
        "(--fp4-fused-kernels): results differ in their last bits" in capsys.readouterr().out
    )


# --- a built model -------------------------------------------------------------------------------

SIZES = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4}


def built(**options: Any) -> MegatronModule:
    config = small_gpt.config(**SIZES | {"num_query_groups": 2} | options)
    return small_gpt.build(config, 96, 16)


def attached(model: MegatronModule, asked: str = "auto") -> str:
    args = given(
        fp4_fused_kernels=asked, fp4_liger="0.8.5", fp4_rotates=True, fp4_fused_adamw=False
    )
    return fused_kernels.attach(args, [model])


@needs_liger
def test_all_operations_of_a_llama_are_fused(one_rank: None) -> None:
    model = built()
    assert attached(model, "liger") == f"{ROTATED}; {LIGERS} in kernels of Liger-Kernel 0.8.5"
    for module in model.modules():
        if isinstance(module, RotatingSelfAttention):
            assert module.rotation is not None
        if isinstance(module, MLP):
            assert isinstance(module, GatedMLP) and module.activation is not None
        if isinstance(module, Norm):
            assert module.fused is not None
    assert model.state_dict().keys() == built().state_dict().keys()


@needs_liger
@pytest.mark.parametrize(
    ("options", "without"),
    [
        ({"rotary_interleaved": True}, "rotary embedding (--rotary-interleaved)"),
        ({"add_bias_linear": True}, "SwiGLU (fc1 has a bias)"),
        ({"glu_linear_offset": 1.0}, "SwiGLU (it is clamped or shifted)"),
        ({"normalization": "LayerNorm"}, "norms (LayerNorm)"),
        ({"fp32_residual_connection": True}, "norms (--fp32-residual-connection)"),
        ({"cross_entropy_loss_fusion": True}, "cross-entropy (Megatron's, by --cross-entropy-"),
    ],
)
def test_what_the_kernels_do_not_take_stays_torch_s(
    options: dict[str, Any], without: str, one_rank: None
) -> None:
    model = built(**options)
    operation = without.partition(" (")[0]
    line = attached(model)
    assert f"not {without}" in line and operation not in line.replace(f"not {without}", "")
    with pytest.raises(ConfigError, match=re.escape(f"kernel for this model's {without}")):
        attached(built(**options), "liger")


@needs_liger
def test_another_activation_and_other_positions_are_not_named(one_rank: None) -> None:
    config = small_gpt.config(**SIZES, gated_linear_unit=False, activation_func=F.gelu)
    model = small_gpt.build(config, 96, 16, position_embedding_type="learned_absolute")
    assert attached(model, "liger") == "norms, cross-entropy in kernels of Liger-Kernel 0.8.5"


def test_rotation_needs_no_liger(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = given(
        fp4_liger=None, fp4_rotates=True, fp4_fused_adamw=False,
        fp4_joins_swiglu=False, fp4_joins_norms=False,
    )  # fmt: skip
    why = f"in torch's kernels (Liger-Kernel fuses their kernels: {launch.INSTALL})"
    assert fused_kernels.attach(args, [built()]) == f"{ROTATED}; {LIGERS} {why}"
    args.fp4_joins_swiglu = args.fp4_joins_norms = True  # by linears
    others = "other norms, cross-entropy"
    assert fused_kernels.attach(args, [built()]) == f"{ROTATED}; {others} {why}"
    args.fp4_rotates, args.fp4_fused_kernels = False, "off"
    assert fused_kernels.attach(args, [built()]).startswith(f"rotary embedding, {others} in torch")


def test_a_user_s_layers_can_be_given_kernels() -> None:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer = fusable(spec).submodules
    assert layer.self_attention.module is RotatingSelfAttention
    assert layer.self_attention.submodules.core_attention is DotProductAttention
    assert layer.input_layernorm is Norm
    assert layer.mlp.func == GatedMLP.as_mlp_submodule
    assert spec.submodules.mlp.func == MLP.as_mlp_submodule  # the user's tree is as it was


def test_modules_call_what_they_were_given(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own operations in the place of Liger's, in upstream's order of axes."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    model = built(hidden_dropout=0.0, attention_dropout=0.0)
    wanted = losses_and_gradients(model)
    seen = []

    def swiglu(gate_and_up: Tensor) -> Tensor:
        seen.append("swiglu")
        gate, up = gate_and_up.chunk(2, -1)
        return F.silu(gate) * up

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        seen.append("norm")
        return F.rms_norm(x, weight.shape, weight + offset, eps)

    for module in model.modules():
        if isinstance(module, GatedMLP):
            module.activation = swiglu
        elif isinstance(module, Norm):
            module.fused = rms_norm
    for found, expected in zip(losses_and_gradients(model), wanted, strict=True):
        torch.testing.assert_close(found, expected)
    assert [seen.count(name) for name in ("swiglu", "norm")] == [2, 5]
    # Negative control: gate and up exchanged.
    for module in model.modules():
        if isinstance(module, GatedMLP):
            module.activation = lambda x: swiglu(torch.cat(x.chunk(2, -1)[::-1], -1))
    assert not torch.allclose(losses_and_gradients(model)[0], wanted[0])


# --- training, in Triton's interpreter -----------------------------------------------------------

SMALL = """
    --num-layers 1 --hidden-size 64 --ffn-hidden-size 64 --seq-length 32 --train-iters 2
    --max-position-embeddings 32 --global-batch-size 2 --eval-iters 0 --fp4-recipe tetrajet
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
""".split()
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--micro-batch-size", "1")


def interpreted(processes: int, *flags: str) -> Result:
    script = SCRIPTS / "pretrain_with_interpreted_liger.py"
    words = tiny_on_mock_data(*SMALL, *flags)
    done = result_of(spawn(processes, script, *words, fresh=True))
    assert done.status == 0, done.output[-4000:]
    return done


def norms(result: Result) -> list[float]:
    return [float(norm) for norm in re.findall(r"grad norm: (\S+)", result.output)]


@needs_liger
@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "flags"), [(1, ("--fp4-recipe", "off")), (2, TP2)], ids=("plain", "tp2")
)
def test_a_run_learns_what_one_of_torch_s_kernels_does(
    processes: int, flags: tuple[str, ...]
) -> None:
    plain, fused = (
        interpreted(processes, *flags, "--fp4-fused-kernels", choice) for choice in ("off", "liger")
    )
    # With a recipe the linears compute SwiGLU.
    names = LIGERS if "off" in flags else LIGERS.replace("SwiGLU, ", "")
    line = f"{ROTATED}; {names} in kernels of Liger-Kernel {version('liger-kernel')}"
    assert line in fused.output and line not in plain.output
    assert len(fused.losses) == 2 and fused.losses == pytest.approx(plain.losses, rel=1e-5)
    assert norms(fused) == pytest.approx(norms(plain), rel=2e-3)
