"""FP4 weights for compressed-tensors: the library unpacks what training multiplied."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Phase, Recipe, get_quantizer, get_recipe, quantize
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.convert import command
from megatron_fp4.convert.huggingface import compressed_tensors
from megatron_fp4.convert.torch_dist import Checkpoint
from testing.builders.fp4_checkpoint import checkpoint, export, recorded, run
from testing.builders.small_hf import MODELS
from testing.worlds.checkpoint_contents import weights
from testing.worlds.launch import ROOT, train

library = pytest.importorskip("compressed_tensors.compressors")
scheme = pytest.importorskip("compressed_tensors.quantization").QuantizationScheme
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers").utils.logging.set_verbosity_error()

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def recipe(w: Quantizer, x: Quantizer | None = None) -> Recipe:
    return Recipe(name="of-a-test", fprop=GemmRecipe(x, w))


QUANTIZERS = {
    "mxfp4": Quantizer(),
    "mxfp4-ceil": Quantizer(rule="ceil"),
    "mxfp4-blocks-of-64": Quantizer(block=(1, 64)),
    "mxfp4-32-x-32": Quantizer(block=(32, 32)),
    "nvfp4": get_quantizer("nvfp4"),
    "nvfp4-four-over-six": get_quantizer("nvfp4-four-over-six"),
    "nvfp4-17-16": get_quantizer("nvfp4-17-16"),
    "nvfp4-16-x-16": replace(get_quantizer("nvfp4"), block=(16, 16)),
    "e4m3-alone": replace(get_quantizer("nvfp4"), tensor_max=0.0),
}


def read(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.load_file(file)
    return found


def unpacked(folder: Path) -> dict[str, Tensor]:
    """The weights of an export by the name of their module, unpacked by compressed-tensors."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    compressor = library.BaseCompressor.get_value_from_registry(config["format"])
    of = scheme.model_validate(config["config_groups"]["group_0"])
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in read(folder).items():
        module, _, word = name.rpartition(".")
        parts.setdefault(module, {})[word] = value
    quantized = {name: words for name, words in parts.items() if "weight_packed" in words}
    return {name: compressor.decompress(words, of)["weight"] for name, words in quantized.items()}


def expected(
    weights: dict[str, Tensor], modules: set[str], w: Quantizer, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """The weights of a model of transformers, quantized as Megatron's fused weights are."""
    found: dict[str, Tensor] = {}
    for name in modules:
        stem, _, last = name.rpartition(".")
        group = next((group for group in FUSED if last in group), (last,))
        parts = [weights[f"{stem}.{part}.weight"] for part in group]
        made = quantize(torch.cat(parts), w).dequantize(dtype)
        for part, value in zip(group, made.split([len(part) for part in parts]), strict=True):
            found[f"{stem}.{part}"] = value
    return found


def different(folder: Path, w: Quantizer) -> int:
    """How many elements the library unpacks from folder/out that are not folder/hf's, quantized."""
    found = unpacked(folder / "out")
    wanted = expected(read(folder / "hf"), set(found), w)
    assert found.keys() == wanted.keys() and len(found) >= 14
    return sum(int((found[name] != wanted[name]).sum()) for name in found)


@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt2"])
@pytest.mark.parametrize("name", ["mxfp4", "tetrajet"])
def test_the_codes_are_those_of_training(name: str, model: str, tmp_path: Path) -> None:
    own = get_recipe(name)
    export(checkpoint(tmp_path, model, recorded(own)), tmp_path / "out")
    assert own.fprop.b is not None and different(tmp_path, own.fprop.b) == 0


@pytest.mark.parametrize("name", QUANTIZERS)
def test_each_quantizer_that_fits(name: str, tmp_path: Path) -> None:
    w = QUANTIZERS[name]
    # Sizes that blocks of 64 divide, and heads that blocks of 32 rows divide: a block with rows of
    # two heads would have neighbours in Megatron's weight and not in that of transformers.
    sizes: dict[str, Any] = {"intermediate_size": 192, "head_dim": 32}
    export(checkpoint(tmp_path, "llama", recorded(recipe(w)), **sizes), tmp_path / "out")
    if w.scale == "e8m0":
        assert different(tmp_path, w) == 0
        return
    # The library divides a block scale by 1 / g, where training multiplied, and rounds to BF16:
    # three roundings with a relative error of up to 2**-24, and one with up to 2**-8.
    found = unpacked(tmp_path / "out")
    wanted = expected(read(tmp_path / "hf"), set(found), w, torch.float64)
    for module, value in found.items():
        bound = 2**-8 + 4 * 2**-24
        torch.testing.assert_close(value.double(), wanted[module], rtol=bound, atol=0)
    codes(tmp_path, w)


def codes(folder: Path, w: Quantizer) -> None:
    """Asserts that codes, block scales and tensor scales are those of each fused weight."""
    made, hf = read(folder / "out"), read(folder / "hf")
    for i in range(2):
        at = f"model.layers.{i}.self_attn"
        parts = [hf[f"{at}.{name}.weight"] for name in FUSED[0]]
        fused = quantize(torch.cat(parts), w)
        first = [made[f"{at}.{name}.weight_packed"] for name in FUSED[0]]
        assert torch.equal(torch.cat(first), fused.codes)
        scales = torch.cat([made[f"{at}.{name}.weight_scale"] for name in FUSED[0]])
        rows = fused.scales.repeat_interleave(w.block[0], 0)
        assert torch.equal(scales.view(torch.uint8), rows)
        for name in FUSED[0]:
            inverse = made[f"{at}.{name}.weight_global_scale"]
            scale = torch.ones(()) if fused.tensor_scale is None else fused.tensor_scale
            assert abs(float(inverse * scale) - 1) < 2**-22


def test_zeros_and_tiny_weights(tmp_path: Path) -> None:
    own = get_recipe("tetrajet")
    model = checkpoint(tmp_path, "llama", recorded(own), initializer_range=1e-37)
    export(model, tmp_path / "out")
    assert own.fprop.b is not None and different(tmp_path, own.fprop.b) == 0


def _swapped(made: dict[str, Tensor]) -> dict[str, Tensor]:
    codes = made["weight_packed"]
    return made | {"weight_packed": (codes << 4) | (codes >> 4)}


def _larger(made: dict[str, Tensor]) -> dict[str, Tensor]:
    return made | {"weight_scale": made["weight_scale"] + 1}


def _next_block(made: dict[str, Tensor]) -> dict[str, Tensor]:
    return made | {"weight_scale": made["weight_scale"].roll(1, dims=1)}


@pytest.mark.parametrize("wrong", [_swapped, _larger, _next_block])
def test_wrong_packing_would_be_noticed(
    wrong: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = compressed_tensors.pack
    monkeypatch.setattr(compressed_tensors, "pack", lambda made: wrong(pack(made)))
    export(checkpoint(tmp_path, "llama", recorded(get_recipe("mxfp4"))), tmp_path / "out")
    assert different(tmp_path, Quantizer()) > 1000


def test_another_scale_rule_would_be_noticed(tmp_path: Path) -> None:
    export(checkpoint(tmp_path, "llama", recorded(get_recipe("mxfp4"))), tmp_path / "out")
    assert different(tmp_path, Quantizer(rule="ceil")) > 1000


# --- which linears -------------------------------------------------------------------------------

OTHER = get_recipe("mxfp4", rule="ceil")


def ended(after: float) -> Recipe:
    return replace(OTHER, phases=(Phase(after, Recipe("bf16")),))


@pytest.mark.parametrize(
    ("args", "in_fp4"),
    [
        (recorded(OTHER, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0), {1}),
        (recorded(OTHER, (("decoder.layers.1.*", None),)), {0}),
        (recorded(OTHER, (("*.1.*", None), ("*fc2", OTHER))), {0, 1}),
        (recorded(ended(0.5), (("*.1.*", OTHER),), train_iters=0), {0, 1}),
    ],
    ids=["first-last", "glob", "last-glob-wins", "phase-not-begun"],
)
def test_linears_in_bf16_stay_so(args: dict[str, Any], in_fp4: set[int], tmp_path: Path) -> None:
    export(checkpoint(tmp_path, "llama", args), tmp_path / "out")
    found, made = unpacked(tmp_path / "out"), read(tmp_path / "out")
    assert {int(re.findall(r"\d+", name)[0]) for name in found} == in_fp4
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())
    linears = {
        name.removesuffix(".weight")
        for name, value in made.items()
        if name.endswith(".weight") and value.dim() == 2 and "embed" not in name
    }
    assert set(ignored["quantization_config"]["ignore"]) == linears
    hf = read(tmp_path / "hf")
    assert all(torch.equal(made[f"{name}.weight"], hf[f"{name}.weight"]) for name in linears)


def test_a_tied_head_and_routers_are_ignored(tmp_path: Path) -> None:
    for model, wanted in {
        "llama-tied": {"lm_head"},
        "qwen2-moe": {"lm_head"}
        | {
            f"model.layers.{i}.mlp.{gate}"
            for i in (0, 1)
            for gate in ("gate", "shared_expert_gate")
        },
    }.items():
        export(checkpoint(tmp_path, model, recorded(OTHER)), tmp_path / "out")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert set(config["quantization_config"]["ignore"]) == wanted


def refusal(
    folder: Path, args: dict[str, Any], capsys: Any, *flags: str, model: str = "llama"
) -> str:
    source = checkpoint(folder, model, args)
    capsys.readouterr()
    words = ["export-hf", str(source), "--output", str(folder / "out"), *flags]
    words += [] if "--format" in flags else ["--format", "compressed-tensors"]
    assert command.main(words) == 1 and not (folder / "out").exists()
    [line] = capsys.readouterr().err.splitlines()
    return str(line)


UE5M3 = Quantizer(scale="ue5m3", block=(1, 16), rule="nearest")
REFUSED = {
    "mxfp4-rht-sr": (get_recipe("mxfp4-rht-sr"), "without FP4 weights in the forward pass"),
    "bf16": (None, "without FP4 weights in the forward pass"),
    "ended": (ended(0.0), "without FP4 weights in the forward pass"),
    "dge-occ": (get_recipe("dge-occ"), "fp32 scales for whole rows"),
    "fp8": (get_recipe("mxfp4-rht-sr", forward="fp8"), "e4m3 elements"),
    "ue5m3": (recipe(UE5M3), "ue5m3 scales"),
    "e1m2": (recipe(Quantizer(element="e1m2")), "e1m2 elements"),
    "blocks-of-16": (recipe(Quantizer(block=(1, 16))), "blocks of 16 under e8m0 scales"),
    "rows": (recipe(Quantizer(block=(1, 0))), "e8m0 scales for whole rows"),
    "tensors": (
        recipe(Quantizer(scale="e4m3", block=(0, 0), rule="nearest")),
        "e4m3 scales for whole tensors",
    ),
    "stochastic": (recipe(Quantizer(rounding="stochastic")), "stochastic rounding of W"),
    "hadamard": (
        Recipe(name="t", fprop=GemmRecipe(Quantizer(), Quantizer(), Hadamard(32, "none"))),
        "a Hadamard transform of W",
    ),
    "ema": (get_recipe(str(ROOT / "tests/mcore/ema.yaml")), "an average of W"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_named(name: str, tmp_path: Path, capsys: Any) -> None:
    own, words = REFUSED[name]
    line = refusal(tmp_path, recorded(own), capsys)
    assert words in line and "--quantize-as" in line and "--format plain" in line


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (get_recipe("tetrajet-fp8", fp8_after=0), "mxfp4-ceil"),
        (replace(get_recipe("tetrajet"), phases=(Phase(0, Recipe("bf16")),)), "mxfp4-ceil"),
        (get_recipe(str(ROOT / "tests/mcore/ema.yaml")), "mxfp4-ceil"),
        (get_recipe("mxfp4", ema_beta=0.5), "mxfp4"),
        (recipe(replace(Quantizer(rule="ceil"), rounding="stochastic")), "mxfp4-ceil"),
        (recipe(Quantizer(rule="ceil", block=(1, 16))), "mxfp4-ceil"),
        (recipe(get_quantizer("nvfp4-sr")), "nvfp4"),
        (recipe(get_quantizer("nvfp4-17-16-sr")), "nvfp4-17-16"),
        (replace(get_recipe("four-over-six"), phases=(Phase(0, Recipe("bf16")),)),
         "nvfp4-four-over-six"),
        (recipe(Quantizer(rule="mse", block=(1, 16))), "mxfp4"),
        (replace(get_recipe("tetrajet"), phases=(Phase(0, recipe(Quantizer(block=(1, 16)))),)),
         "mxfp4"),
        (get_recipe("dge-occ"), "mxfp4"),
        (None, "mxfp4"),
    ],
    ids=["fp8-late", "bf16-late", "ema", "ema-floor", "stochastic", "blocks-of-16", "nvfp4-sr",
         "17-16", "four-over-six", "mse", "the-last-phase", "rows", "bf16"],
)  # fmt: skip
def test_a_refusal_suggests_the_rule_of_training(
    own: Recipe | None, wanted: str, tmp_path: Path, capsys: Any
) -> None:
    line = refusal(tmp_path, recorded(own), capsys)
    assert f" --quantize-as {wanted} to quantize " in line
    export(tmp_path / "megatron", tmp_path / "out", "--quantize-as", wanted)


@pytest.mark.parametrize("name", ["dge-occ", "mxfp4-rht-sr", "bf16"])
@pytest.mark.parametrize("form", ["mxfp4-ceil", "nvfp4"])
def test_weights_are_quantized_if_asked(name: str, form: str, tmp_path: Path, capsys: Any) -> None:
    source = checkpoint(tmp_path, "llama", recorded(REFUSED[name][0]))
    export(source, tmp_path / "out", "--quantize-as", form)
    said = capsys.readouterr().out
    assert "8 of 8 linears: quantized now by --quantize-as; training did not" in said
    if form == "nvfp4":
        codes(tmp_path, get_quantizer(form))
    else:
        assert different(tmp_path, get_quantizer(form)) == 0


def test_asked_or_not_what_flags_keep_in_bf16_stays(tmp_path: Path) -> None:
    args = recorded(get_recipe("dge-occ"), (("decoder.layers.1.*", None),))
    export(checkpoint(tmp_path, "llama", args), tmp_path / "out", "--quantize-as", "mxfp4")
    assert all(".layers.0." in name for name in unpacked(tmp_path / "out"))


def test_other_refusals(tmp_path: Path, capsys: Any) -> None:
    plain = recorded(get_recipe("mxfp4"))
    assert "Conv1D" in refusal(tmp_path, plain, capsys, model="gpt2")
    asks = "--format", "plain", "--quantize-as", "mxfp4"
    assert "needs --format compressed-tensors" in refusal(tmp_path, plain, capsys, *asks)
    mixed = recorded(get_recipe("mxfp4"), (("*fc2", recipe(get_quantizer("nvfp4"))),))
    assert "MXFP4 and others in NVFP4" in refusal(tmp_path, mixed, capsys)


def test_a_weight_with_a_nan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = checkpoint(tmp_path, "llama", recorded(OTHER))
    plain = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda *where: plain(*where) * float("nan"))
    words = ["export-hf", str(source), "--output", str(tmp_path / "out")]
    assert command.main([*words, "--format", "compressed-tensors"]) == 1
    assert "has a NaN or an Inf" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- activations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "flags", "wanted"),
    [
        (get_recipe("tetrajet"), (), 4),
        (get_recipe("tetrajet"), ("--activations", "bf16"), None),
        (recipe(Quantizer()), (), None),
        (recipe(get_quantizer("nvfp4"), get_quantizer("nvfp4")), (), None),
        (replace(get_recipe("dge-occ"), fprop=GemmRecipe(Quantizer(), Quantizer())), (), None),
        (get_recipe("dge-occ"), ("--quantize-as", "mxfp4"), None),
    ],
    ids=["training", "asked", "x-in-bf16", "calibrated", "outliers", "anew"],
)
def test_activations(
    own: Recipe, flags: tuple[str, ...], wanted: int | None, tmp_path: Path, capsys: Any
) -> None:
    export(checkpoint(tmp_path, "llama", recorded(own)), tmp_path / "out", *flags)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    x = scheme.model_validate(config["config_groups"]["group_0"]).input_activations
    assert (x and x.num_bits) == wanted
    said = capsys.readouterr().out
    assert ("activations: not quantized" in said) == (wanted is None)


# --- real training -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [(1, ""), (2, "--tensor-model-parallel-size 2 --use-distributed-optimizer "
     "--dist-ckpt-optim-fully-reshardable")],
)  # fmt: skip
def test_rounding_towards_the_average_of_a_run(processes: int, layout: str, tmp_path: Path) -> None:
    file = ROOT / "tests" / "mcore" / "ema.yaml"
    sizes = "--ffn-hidden-size 128 --eval-iters 0 --bf16 --lr 1e-1 --train-iters 3"
    save = f"--save {tmp_path / 'run'} --save-interval 3 --fp4-recipe {file}"
    train(processes, *f"{sizes} {layout} {save}".split())
    export(tmp_path / "run", tmp_path / "out")
    found = unpacked(tmp_path / "out")
    run("strip", tmp_path / "run", "--output", tmp_path / "stripped", "--keep-average")
    of_stripped = unpacked(export(tmp_path / "stripped", tmp_path / "out-of-stripped"))
    assert all(torch.equal(of_stripped[name], value) for name, value in found.items())
    saved = weights(tmp_path / "run" / "iter_0000003")
    key = "decoder.layers.mlp.linear_fc2.weight"
    [average] = [value for name, value in saved.items() if name.endswith(f"fp4_average.{key}")]
    w = get_recipe(str(file)).fprop.b
    assert w is not None
    for i in range(2):
        made = quantize(saved[key][i], w, average=average[i]).dequantize(torch.bfloat16)
        assert torch.equal(found[f"model.layers.{i}.mlp.down_proj"], made)
        nearest = quantize(saved[key][i], replace(w, rounding="nearest"))
        assert not torch.equal(made, nearest.dequantize(torch.bfloat16))
