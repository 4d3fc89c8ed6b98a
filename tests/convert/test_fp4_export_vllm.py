"""Names, shapes and dtypes of the export against those that vLLM's loader creates.

vLLM does not run here. The tables are read off vLLM 0.33.0, in
vllm/model_executor/layers/quantization/compressed_tensors/:

compressed_tensors.py                       _is_mxfp4, _is_nvfp4_format, _get_scheme_from_parts
schemes/compressed_tensors_w4a4_mxfp4.py    CompressedTensorsW4A4Mxfp4.create_weights
schemes/compressed_tensors_w4a4_nvfp4.py    CompressedTensorsW4A4Fp4.create_weights
compressed_tensors_moe/compressed_tensors_moe.py            get_moe_method: the names of experts
compressed_tensors_moe/compressed_tensors_moe_w4a4_mxfp4.py create_weights
utils.py                                    should_ignore_layer: which linears must agree
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4 import get_quantizer, get_recipe
from megatron_fp4.recipe import GemmRecipe, Recipe
from testing.builders.fp4_checkpoint import checkpoint, export, recorded
from testing.builders.small_hf import MODELS
from tests.convert.test_fp4_export import read

pytest.importorskip("transformers").utils.logging.set_verbosity_error()

# Of a linear [out, in]: the name of each tensor, its dtype, and what its sizes are divided by.
# None: one number. A linear of vLLM joins those of FUSED, one below the other, and keeps the
# largest weight_global_scale: all must have the same.
LINEAR: dict[str, dict[str, tuple[torch.dtype, tuple[int, int] | None]]] = {
    "mxfp4-pack-quantized": {
        "weight_packed": (torch.uint8, (1, 2)),
        "weight_scale": (torch.uint8, (1, 32)),
    },
    "nvfp4-pack-quantized": {
        "weight_packed": (torch.uint8, (1, 2)),
        "weight_scale": (torch.float8_e4m3fn, (1, 16)),
        "weight_global_scale": (torch.float32, None),
    },
}
# What the schemes ask of the weights' arguments.
ARGUMENTS = {
    "mxfp4-pack-quantized": {"strategy": "group", "group_size": 32},
    "nvfp4-pack-quantized": {"strategy": "tensor_group", "group_size": 16},
}
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")]
# The names of an expert's matrices, for RoutedExperts in mixtral.py, qwen2_moe.py, qwen3_moe.py.
EXPERT = {"mixtral": r"block_sparse_moe\.experts\.\d+\.w[123]"}
OTHER_EXPERT = r"mlp\.experts\.\d+\.(gate|up|down)_proj"

RECIPES = {
    "mxfp4-pack-quantized": get_recipe("tetrajet"),
    "nvfp4-pack-quantized": Recipe(name="w", fprop=GemmRecipe(None, get_quantizer("nvfp4"))),
}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("form", LINEAR)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "gpt2"])
def test_tensors_are_those_that_the_loader_creates(form: str, model: str, tmp_path: Path) -> None:
    export(checkpoint(tmp_path, model, recorded(RECIPES[form])), tmp_path / "out")
    made, hf = read(tmp_path / "out"), read(tmp_path / "hf")
    linears = {name.removesuffix(".weight_packed") for name in made if name.endswith("_packed")}
    for linear in linears:
        sizes = hf[f"{linear}.weight"].shape
        for word, (dtype, divided) in LINEAR[form].items():
            value = made[f"{linear}.{word}"]
            shape = divided and tuple(size // by for size, by in zip(sizes, divided, strict=True))
            assert value.dtype == dtype and tuple(value.shape) == (shape or (1,))
    words = {name.rpartition(".")[2] for name in made if name.rpartition(".")[0] in linears}
    assert words - {"bias"} == set(LINEAR[form])
    experts = [name for name in linears if ".experts." in name]
    pattern = EXPERT.get(model, OTHER_EXPERT)
    assert all(re.search(pattern + "$", name) for name in experts)
    assert bool(experts) == ("moe" in model or model == "mixtral")


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_joined_linears_have_one_global_scale(model: str, tmp_path: Path) -> None:
    own = recorded(RECIPES["nvfp4-pack-quantized"])
    made = read(export(checkpoint(tmp_path, model, own), tmp_path / "out"))
    groups: dict[str, set[float]] = {}
    for name, value in made.items():
        stem, _, word = name.removesuffix(".weight_global_scale").rpartition(".")
        for group in FUSED:
            if name.endswith("global_scale") and word in group:
                groups.setdefault(f"{stem}.{group}", set()).add(float(value))
    assert groups and all(len(scales) == 1 for scales in groups.values())
    assert len(set().union(*groups.values())) > 1  # and another one in another linear


@pytest.mark.parametrize("form", LINEAR)
def test_the_scheme_is_recognized(form: str, tmp_path: Path) -> None:
    export(checkpoint(tmp_path, "llama", recorded(RECIPES[form])), tmp_path / "out")
    config = config_of(tmp_path / "out")
    [group] = config["config_groups"].values()
    wanted = ARGUMENTS[form] | {"num_bits": 4, "type": "float", "symmetric": True}
    assert group["weights"] | wanted == group["weights"]
    assert group["targets"] == ["Linear"] and config["quant_method"] == "compressed-tensors"
    if form == "nvfp4-pack-quantized":  # its activations would need an input_global_scale
        assert group["input_activations"] is None


@pytest.mark.parametrize("glob", ["*.0.mlp*", "decoder.layers.1.self_attention*", "*linear_fc1"])
def test_joined_linears_are_ignored_together(glob: str, tmp_path: Path) -> None:
    args = recorded(get_recipe("tetrajet"), ((glob, None),))
    export(checkpoint(tmp_path, "llama", args), tmp_path / "out")
    ignored = set(config_of(tmp_path / "out")["ignore"])
    assert len(ignored) > 1
    for name in ignored - {"lm_head"}:
        stem, _, word = name.rpartition(".")
        group = next((group for group in FUSED if word in group), (word,))
        assert {f"{stem}.{part}" for part in group} <= ignored
