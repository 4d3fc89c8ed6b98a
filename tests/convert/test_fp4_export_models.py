"""Models with FP4 weights in transformers: they load, generate, and compute what training did."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_recipe, quantize
from megatron_fp4.convert.huggingface import settings
from megatron_fp4.convert.huggingface.import_hf import HuggingFaceModel
from testing.builders.fp4_checkpoint import checkpoint, export, recorded
from testing.builders.small_hf import MODELS, TOKENS, VOCABULARY, tokens
from testing.worlds.launch import SCRIPTS, spawn
from tests.convert.test_fp4_export import read, recipe, unpacked

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
TETRAJET = get_recipe("tetrajet")
NVFP4 = recipe(Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=448.0))
WITHOUT_EXPERTS = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")
WITH_EXPERTS = [name for name in MODELS if name not in (*WITHOUT_EXPERTS, "gpt2")]


def load(folder: Path, **options: Any) -> Any:
    """The model in `folder`, of which transformers must find every tensor, and no other."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model.eval()


def dense(folder: Path) -> Any:
    """The model in folder/hf with the weights that the library unpacks from folder/out."""
    from safetensors.torch import save_file

    shutil.copytree(folder / "hf", folder / "dense")
    weights = read(folder / "hf")
    found = {f"{name}.weight": value for name, value in unpacked(folder / "out").items()}
    assert found.keys() < weights.keys()
    save_file(weights | found, folder / "dense" / "model.safetensors", {"format": "pt"})
    return load(folder / "dense")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(tokens()).logits.float()
    return found


def apart(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, relative to that of `wanted`."""
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("name", "own"),
    [
        *((name, TETRAJET) for name in MODELS if name != "gpt2"),
        *((name, NVFP4) for name in ("llama", "qwen2")),
    ],
)
def test_transformers_loads_it_and_generates(name: str, own: Any, tmp_path: Path) -> None:
    export(checkpoint(tmp_path, name, recorded(own)), tmp_path / "out", "--activations", "bf16")
    model, plain = load(tmp_path / "out"), dense(tmp_path)
    assert torch.equal(logits(model), logits(plain))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens()[:, :8], **options)
    assert written.shape[1] > 8
    assert torch.equal(written, plain.generate(tokens()[:, :8], **options))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_weights_are_packed_in_files_and_in_memory(name: str, tmp_path: Path) -> None:
    export(checkpoint(tmp_path, name, recorded(TETRAJET)), tmp_path / "out")
    model = load(tmp_path / "out")
    assert model.model.layers[0].self_attn.o_proj.weight_packed.dtype == torch.uint8
    sizes = {
        name: value.numel() * value.itemsize
        for name, value in read(tmp_path / "out").items()
        if name.endswith(("_packed", "_scale"))
    }
    plain = sum(value.numel() * 2 for value in unpacked(tmp_path / "out").values())
    assert sum(sizes.values()) == plain * 4.25 / 16


def test_nvfp4_experts_are_wrong_in_transformers(tmp_path: Path, capsys: Any) -> None:
    """As the export says; if this fails, transformers has corrected it, and the line can go."""
    export(checkpoint(tmp_path, "qwen3-moe", recorded(NVFP4)), tmp_path / "out")
    assert "WARNING: transformers 5.23 ignores weight_global_scale" in capsys.readouterr().out
    assert apart(logits(load(tmp_path / "out")), logits(dense(tmp_path))) > 0.5


def test_experts_in_high_precision_are_refused_by_transformers(tmp_path: Path, capsys: Any) -> None:
    """As the export says; if this fails, transformers has corrected it, and the line can go."""
    args = recorded(TETRAJET, (("decoder.layers.0.*", None),))
    export(checkpoint(tmp_path, "qwen3-moe", args), tmp_path / "out")
    assert "WARNING: transformers 5.23 refuses a model with experts" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        load(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("own", [TETRAJET, NVFP4], ids=["mxfp4", "nvfp4"])
def test_a_model_in_another_dtype_is_loaded_as_the_export_says(
    own: Any, dtype: torch.dtype, tmp_path: Path, capsys: Any
) -> None:
    """If this fails, transformers unpacks weights to the model's dtype, and the line can go."""
    out = export(checkpoint(tmp_path, "llama", recorded(own), dtype), tmp_path / "out")
    said = capsys.readouterr().out
    name = str(dtype).removeprefix("torch.")
    assert "WARNING: transformers 5.23 unpacks weights to BF16" in said
    assert f"cannot multiply them by activations in {name}: load the model with" in said
    with pytest.raises(RuntimeError, match="same dtype"):
        logits(load(out))
    assert "dtype=torch.bfloat16, or with CompressedTensorsConfig(dequantize=True)" in said
    assert load(out, dtype=torch.bfloat16)(tokens()).logits.dtype == torch.bfloat16
    assert load(out, quantization_config=dequantized())(tokens()).logits.dtype == dtype


def test_a_model_in_bf16_is_loaded_as_it_is(tmp_path: Path, capsys: Any) -> None:
    export(checkpoint(tmp_path, "llama", recorded(TETRAJET)), tmp_path / "out")
    assert "WARNING" not in capsys.readouterr().out


# --- activations ---------------------------------------------------------------------------------


def by_the_rule_of_compressed_tensors(x: Tensor) -> Tensor:
    """X in MXFP4 where a block scale is OCP's, or twice that if the block's maximum is at least
    1.75 times a power of two."""
    blocks = x.double().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    scale = torch.exp2(exponent - 3.0 + (mantissa >= 0.875))
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    middle = (grid[1:] + grid[:-1]) / 2
    scaled = (blocks / scale).abs().clamp(max=6.0)
    up, down = torch.bucketize(scaled, middle, right=True), torch.bucketize(scaled, middle)
    index = torch.where(up % 2 == 0, up, down)  # a tie goes to the even code
    made = torch.copysign(grid[index], blocks) * scale
    return torch.where(largest > 0, made, 0.0).flatten(-2).to(x.dtype)


def with_x(model: Any, quantized: Any) -> Any:
    """`model` whose linears, but for the head, multiply quantized(x) in place of x."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (quantized(args[0].contiguous()),))
    return model


@pytest.mark.outside
def test_transformers_quantizes_x_by_a_rule_of_its_own(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "llama", recorded(TETRAJET))
    found = logits(load(export(source, tmp_path / "out")))
    plain = export(source, tmp_path / "plain", "--activations", "bf16")

    def by(rule: Any) -> Tensor:
        return logits(with_x(load(plain, quantization_config=dequantized()), rule))

    assert torch.equal(found, by(by_the_rule_of_compressed_tensors))
    assert apart(found, by(lambda x: quantize(x, "mxfp4-ceil").dequantize(x.dtype))) > 0.02
    assert apart(found, logits(load(plain))) > 0.02


def dequantized() -> Any:
    return transformers.CompressedTensorsConfig(dequantize=True)


# --- Megatron's forward pass ---------------------------------------------------------------------

# Two float32 forward passes that sum in other orders. A token whose codes are the same in both
# differs by the rounding of sums: of at most 160 terms, some 50 of them one after the other, each
# with an error of up to 2**-24. Where a value lies nearer than that to a boundary of rounding, a
# code differs, and with it the token by much more. There are some 700 codes for each token, and a
# value lies so near to a boundary with a probability of about 4 * 160**0.5 * 2**-24 / 0.25, so
# about one token in 500 has such a code, and changes those after it in its sequence. One of the two
# sequences may therefore differ.
SUMS = 4 * (50 * 160) ** 0.5 * 2**-24
OTHER_CODES = 0.5


def megatron_logits(folder: Path, *flags: str) -> Tensor:
    """Megatron's logits of `tokens()` in a forward pass of training."""
    torch.save(tokens(), folder / "tokens.pt")
    own = settings.flags(HuggingFaceModel(folder / "hf", 1).settings)
    launch = f"--seq-length {TOKENS} --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 "
    launch += "--train-iters 2 --eval-iters 1 --attention-dropout 0 --hidden-dropout 0 --mock-data "
    launch += f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} "
    launch += f"--load {folder / 'megatron'} --fp4-load-anyway"
    files = str(folder / "tokens.pt"), str(folder / "logits.pt")
    done = spawn(1, SCRIPTS / "logits.py", *files, *own, *launch.split(), *flags)
    assert (folder / "logits.pt").exists(), done.stdout[-3000:]
    found: Tensor = torch.load(folder / "logits.pt")
    return found[..., :VOCABULARY]


def share_apart(found: Tensor, wanted: Tensor) -> float:
    """The share of tokens whose logits differ by more than the rounding of sums."""
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float((off > SUMS).float().mean())


@pytest.mark.outside
@pytest.mark.parametrize(
    ("name", "rule"), [("llama", "ceil"), ("llama", "floor"), ("qwen2", "ceil"), ("qwen3", "ceil")]
)
def test_with_training_s_x_it_is_training_s_forward_pass(
    name: str, rule: str, tmp_path: Path
) -> None:
    """In float32, where all codes of X are training's too."""
    own, flag = get_recipe("mxfp4", rule=rule), f"rule={rule}"
    source = checkpoint(tmp_path, name, recorded(own), torch.float32)
    export(source, tmp_path / "out", "--activations", "bf16")
    options = {"quantization_config": dequantized(), "dtype": torch.float32}
    trained = megatron_logits(tmp_path, "--fp4-recipe", "mxfp4", "--fp4-recipe-option", flag)

    def share(x: str) -> float:
        model = with_x(
            load(tmp_path / "out", **options), lambda t: quantize(t, x).dequantize(t.dtype)
        )
        return share_apart(logits(model), trained)

    same, other = ("mxfp4-ceil", "mxfp4") if rule == "ceil" else ("mxfp4", "mxfp4-ceil")
    assert share(same) <= OTHER_CODES
    assert share(other) > 0.99
    # And other weights would be noticed, with the right X.
    wrong = recorded(get_recipe("mxfp4", rule="floor" if rule == "ceil" else "ceil"))
    export(checkpoint(tmp_path, name, wrong, torch.float32), tmp_path / "out")
    assert share(same) > 0.99
