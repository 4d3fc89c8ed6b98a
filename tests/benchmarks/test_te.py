"""Transformer Engine's rows: their flags as Megatron reads them, and rows that cannot be there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from benchmarks import linear, te, te_worker
from benchmarks.training_step import LOCAL, PLAIN, TE_LAYERS, asked
from benchmarks.training_step_worker import kind, stand_ins
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments import machine
from testing.builders.command_line import parse
from testing.oracles import normal
from testing.worlds.launch import MOCK_DATA

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "HAVE_TE", True)


def parsed(flags: list[str]) -> Any:
    return parse(*MOCK_DATA, "--bf16", *flags)


# --- flags ----------------------------------------------------------------------------------------


@without_a_gpu
@pytest.mark.parametrize("name", te.ROWS)
def test_megatron_reads_the_recipe(name: str, installed: None) -> None:
    args = parsed(asked(name))
    assert args.transformer_impl == "transformer_engine" and args.fp4_recipe is None
    if name in te.FP8:
        assert (args.fp8_recipe, args.fp8) == te.FP8[name]
    else:
        assert args.fp8 is None


@without_a_gpu
def test_further_flags_follow_the_recipe(installed: None) -> None:
    args = parsed(asked("te fp8 delayed --cross-entropy-loss-fusion"))
    assert (args.fp8_recipe, args.fp8) == te.FP8["te fp8 delayed"]
    assert args.cross_entropy_loss_fusion
    assert not parsed(asked("te fp8 delayed")).cross_entropy_loss_fusion  # the control


@without_a_gpu
def test_megatron_refuses_other_names_of_recipes(installed: None) -> None:
    with pytest.raises(ConfigError, match="--fp8-recipe: invalid choice"):
        parsed([*te.LAYERS, "--fp8-format", "hybrid", "--fp8-recipe", "current"])


@without_a_gpu
@pytest.mark.parametrize("name", ["upstream bf16", "bf16", "tetrajet"])
def test_other_rows_are_the_same_beside_transformer_engine(name: str, installed: None) -> None:
    args = parsed(asked(name))
    assert (args.transformer_impl, args.apply_rope_fusion) == ("local", False)
    default = parsed([flag for flag in asked(name) if flag not in LOCAL])  # the control
    assert (default.transformer_impl, default.apply_rope_fusion) == ("transformer_engine", True)


@without_a_gpu
@pytest.mark.parametrize("name", [*te.ROWS, TE_LAYERS, "tetrajet"])
def test_its_attention_is_fused_or_the_launch_ends(name: str, installed: None) -> None:
    backend = parsed(asked(name)).attention_backend
    assert backend is (AttnBackend.auto if name == "tetrajet" else AttnBackend.fused)


@without_a_gpu
def test_a_recipe_among_its_layers_keeps_this_package_s_linears(installed: None) -> None:
    args = parsed(asked(TE_LAYERS))
    assert (args.transformer_impl, args.fp4_recipe) == ("transformer_engine", "tetrajet")
    assert args.apply_rope_fusion and args.fp8 is None


@without_a_gpu
@pytest.mark.parametrize("name", te.ROWS)
def test_its_linears_add_to_main_grad_with_the_stand_in(
    name: str, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = asked(name)
    assert not parsed(flags).gradient_accumulation_fusion  # the control: neither Apex nor this
    for folder in stand_ins(flags):
        monkeypatch.syspath_prepend(folder)
    assert parsed(flags).gradient_accumulation_fusion


def test_other_rows_have_no_stand_in() -> None:
    rows = {*PLAIN, "tetrajet", TE_LAYERS} - {te.BF16}
    assert not any(stand_ins(asked(name)) for name in rows)


# --- rows that cannot be measured -----------------------------------------------------------------


@without_a_gpu
def test_a_row_without_its_package_is_left_out_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    te.tried.cache_clear()
    assert te.present(["mxfp4", te.BF16, TE_LAYERS]) == ["mxfp4"]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name} is left out: {te.NEEDED}" for name in (te.BF16, TE_LAYERS)]


def test_a_row_that_can_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = dict.fromkeys(te.ROWS, te.GRAPHS) | {"te fp8 blockwise": f"{te.ERROR}old CUDA"}
    monkeypatch.setattr(te, "tried", answers.__getitem__)
    names = ["bf16", TE_LAYERS, *te.ROWS]
    assert te.present(names) == names[:-1]
    longer = [f"{name} --cross-entropy-loss-fusion" for name in names]
    assert te.present(longer) == longer[:-1]


# --- the linear -----------------------------------------------------------------------------------


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t with a scale for the whole tensor, cast by torch and back."""
    scale = torch.finfo(dtype).max / t.abs().max()
    return (t * scale).to(dtype).float() / scale


def drawn(seed: int) -> Tensor:
    return normal((128, 128), seed, torch.bfloat16)


def results(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    return [x @ w.t(), dy @ w, dy.t() @ x]


@pytest.mark.parametrize("name", te.ROWS)
def test_a_linear_s_results_are_those_of_its_format(name: str) -> None:
    p = linear.Problem(drawn(1), drawn(2), drawn(3), torch.empty(0))
    x, w, dy = (t.float() for t in (p.x, p.w, p.dy))
    in_bf16 = [t.bfloat16() for t in results(x, w, dy)]
    in_fp8 = results(
        rounded(x, torch.float8_e4m3fn),
        rounded(w, torch.float8_e4m3fn),
        rounded(dy, torch.float8_e5m2),
    )

    def wrong(found: list[Tensor]) -> str | None:
        return te_worker.wrong(name, te_worker.errors(p, found))

    its, other = (in_fp8, in_bf16) if name in te.FP8 else (in_bf16, in_fp8)
    assert wrong(its) is None
    assert str(wrong(other)).startswith("its Y differs")
    y, dx, dw = its
    assert str(wrong([y, dx, torch.zeros_like(dw)])).startswith("its dW differs")
    assert str(wrong([y, dx, 2 * dw])).startswith("its dW differs")
    assert str(wrong([y, dx * torch.nan, dw])).startswith("its dX differs")


def test_ratios_of_linears_are_to_the_faster_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row says if its linear could not be captured."""
    times = {"bf16": 4.0, te.BF16: 3.0, "te fp8 delayed": 2.0, "products": 1.0, "copy": 1.0}
    asked_for = {}

    def medians(calls: dict[str, Any], each: int, eager: list[str]) -> dict[str, float]:
        asked_for["eager"] = eager
        return {name: times[name] for name in calls}

    for made in ("bf16", "products", "quantized", "engine"):
        monkeypatch.setattr(linear, made, lambda *of: None)
    monkeypatch.setattr(linear, "problem", lambda *of: SimpleNamespace(dy=torch.ones(2)))
    monkeypatch.setattr(linear, "medians", medians)
    monkeypatch.setattr(te, "tried", {te.BF16: te.GRAPHS, "te fp8 delayed": te.EAGER}.__getitem__)
    rows = linear.study([te.BF16, "te fp8 delayed"])[:3]
    assert [row["ratio"] for row in rows] == [0.75, 1.0, 1.5]
    assert asked_for["eager"] == ["te fp8 delayed"]
    names = [line.split(" | ")[1] for line in linear.table(rows)[2:]]
    assert names == ["bf16", te.BF16, "te fp8 delayed, eager"]


# --- its kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "of"),
    [
        ("transformer_engine::(anonymous namespace)::block_scaled_1d_cast_transpose_kernel", "q"),
        ("transformer_engine::(anonymous namespace)::block_scaled_cast_transpose_kernel", "q"),
        ("transformer_engine::detail::cast_transpose_general_kernel", "q"),
        ("cast_transpose_optimized_kernel", "q"),
        ("transformer_engine::(anonymous namespace)::amax_kernel", "q"),
        ("transformer_engine::delayed_scaling_recipe::amax_and_scale_update_impl::kernel", "q"),
        ("transformer_engine::fused_rope_forward_kernel", "other"),
        ("transformer_engine::normalization::rmsnorm_fwd_tuned_kernel", "other"),
        ("void multi_tensor_apply_kernel<transformer_engine::multi_tensor_adam::...>", "optimizer"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
    ],
)
def test_its_kernels_are_told_apart(kernel: str, of: str) -> None:
    assert kind(kernel) == {"q": "quantize"}.get(of, of)


def test_the_stand_in_is_named_as_megatron_imports_it() -> None:
    from megatron.core.tensor_parallel import layers

    [folder] = stand_ins(te.LAYERS)
    [module] = Path(folder).glob("*.py")
    source = Path(layers.__file__).read_text()
    assert f"import {module.stem}\n" in source
    assert f"{module.stem}.wgrad_gemm_accum_fp32(" in source
    assert "def wgrad_gemm_accum_fp32(" in module.read_text()
