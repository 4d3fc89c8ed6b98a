"""Experts in the layout of gpt-oss: transformers' own code unpacks them to what training had."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import get_quantizer, get_recipe, quantize
from megatron_fp4.convert import command
from megatron_fp4.convert.huggingface import gpt_oss
from megatron_fp4.recipe import GemmRecipe, Recipe
from testing.builders.fp4_checkpoint import checkpoint, export, recorded
from tests.convert.test_fp4_export import read

transformers = pytest.importorskip("transformers")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
transformers.utils.logging.set_verbosity_error()

OWN = get_recipe("tetrajet")
EXPERTS = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen2-moe": ("model.layers.{}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3-moe": ("model.layers.{}.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def exported(folder: Path, name: str) -> dict[str, Tensor]:
    source = checkpoint(folder, name, recorded(OWN))
    return read(export(source, folder / "out", "--format", "gpt-oss-experts"))


def unpacked(made: dict[str, Tensor], name: str) -> Tensor:
    """[experts, in, out], by transformers' code for gpt-oss."""
    found: Tensor = mxfp4.convert_moe_packed_tensors(made[f"{name}_blocks"], made[f"{name}_scales"])
    return found


def expected(hf: dict[str, Tensor], stem: str, names: tuple[str, ...]) -> Tensor:
    """[experts, in, out] of the quantized weights; with two names their columns alternate."""
    experts = []
    for e in range(4):
        parts = [
            quantize(hf[f"{stem}.{e}.{name}.weight"], "mxfp4-ceil").dequantize(torch.bfloat16)
            for name in names
        ]
        experts.append(torch.stack(parts, dim=1).flatten(0, 1).mT)
    return torch.stack(experts)


def is_right(folder: Path, name: str) -> bool:
    """Whether transformers unpacks the experts of every layer to what training multiplied."""
    made, hf = exported(folder, name), read(folder / "hf")
    pattern, (gate, up, down) = EXPERTS[name]
    right = []
    for stem in (pattern.format(i) for i in (0, 1)):
        for projection, names in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
            found = unpacked(made, f"{stem}.{projection}")
            right.append(torch.equal(found, expected(hf, stem, names)))
    return all(right)


@pytest.mark.parametrize("name", EXPERTS)
def test_transformers_unpacks_the_codes_of_training(name: str, tmp_path: Path) -> None:
    assert is_right(tmp_path, name)


def test_what_is_no_expert_is_as_it_was(tmp_path: Path) -> None:
    made, hf = exported(tmp_path, "qwen2-moe"), read(tmp_path / "hf")
    others = [name for name in made if not name.endswith(("_blocks", "_scales"))]
    assert all(torch.equal(made[name], hf[name]) for name in others)
    packed = [name for name in hf if ".experts." in name]
    assert set(hf) - set(others) == set(packed) and len(made) - len(others) == 8
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def _in_a_row(rows: Tensor, parts: int) -> Tensor:
    return rows


def _swapped(rows: Tensor, parts: int) -> Tensor:
    return torch.stack(rows.chunk(parts)[::-1], dim=1).flatten(0, 1)


@pytest.mark.parametrize("wrong", [_in_a_row, _swapped])
def test_another_order_of_rows_would_be_noticed(
    wrong: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt_oss, "_alternated", wrong)
    assert not is_right(tmp_path, "qwen3-moe")


def test_swapped_nibbles_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = gpt_oss.pack
    monkeypatch.setattr(gpt_oss, "pack", lambda codes, *rest: pack(codes << 4 | codes >> 4, *rest))
    assert not is_right(tmp_path, "qwen3-moe")


def test_gpt_oss_loads_what_is_packed_here(tmp_path: Path) -> None:
    """transformers loads a gpt-oss whose experts were packed here, and generates."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.15, layer_types=["full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for projection in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{projection}"
        made = [quantize(expert.mT.contiguous(), "mxfp4-ceil") for expert in state[name]]
        state[name] = torch.stack([one.dequantize(torch.bfloat16).mT for one in made])
        model.get_parameter(name).data.copy_(state[name])
        packed = [gpt_oss.pack(one.codes, one.scales, 1) for one in made]
        blocks, scales = (torch.stack(parts) for parts in zip(*packed, strict=True))
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
    plain = {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    written = {name: value.contiguous() for name, value in state.items() if name not in plain}
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(fields))
    save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    found = loaded.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    assert loaded.generate(torch.arange(8)[None], max_new_tokens=4, do_sample=False).shape[1] > 8


def test_transformers_refuses_these_experts_in_another_model(tmp_path: Path, capsys: Any) -> None:
    """As the export says: the layout is read into gpt-oss's own class alone."""
    exported(tmp_path, "qwen3-moe")
    assert "for gpt-oss models alone" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


NVFP4 = Recipe(name="nvfp4", fprop=GemmRecipe(None, get_quantizer("nvfp4")))


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        ("llama", OWN, "the model has no experts: use --format compressed-tensors"),
        ("mixtral", NVFP4, "e4m3 scales, which gpt-oss-experts cannot hold"),
        ("mixtral", get_recipe("dge-occ"), "fp32 scales for whole rows, which gpt-oss-experts"),
    ],
)
def test_refusals(model: str, recipe: Recipe, words: str, tmp_path: Path, capsys: Any) -> None:
    source = checkpoint(tmp_path, model, recorded(recipe))
    flags = ["--output", str(tmp_path / "out"), "--format", "gpt-oss-experts"]
    assert command.main(["export-hf", str(source), *flags]) == 1
    assert words in capsys.readouterr().err
