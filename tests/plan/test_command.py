"""`python -m megatron_fp4 plan`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_fp4 import __main__, get_recipe
from megatron_fp4.estimate import command
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.memory import saved_bytes
from megatron_fp4.recipes import uniform_recipes
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target


@pytest.fixture
def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Runs `megatron-fp4 plan` with these flags; returns what it prints."""

    def run(flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["megatron-fp4", "plan", *flags.split()])
        __main__.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("gpu", ["", "--gpu sm_90", "--gpu sm_100", "--gpu sm_120"])
@pytest.mark.parametrize(
    "layout", ["", "--tp 2", "--tp 2 --sequence-parallel", "--tp 4 --row --sequence-parallel"]
)
@pytest.mark.parametrize("recipe", uniform_recipes())
def test_every_operand_and_product_is_told(
    recipe: str,
    layout: str,
    gpu: str,
    printed: Callable[[str], str],
) -> None:
    text = printed(f"--recipe {recipe} {layout} {gpu}")
    assert text.startswith(f"recipe {recipe}: ")
    for gemm, letters in (("fprop", "X W"), ("dgrad", "dY W"), ("wgrad", "dY X")):
        [part] = re.findall(rf"^{gemm}  .*\n((?:  .*\n)+)", text, re.MULTILINE)
        assert [line.split()[0] for line in part.splitlines()] == [*letters.split(), "product"]
    assert ("ranks" in text.splitlines()[0]) == bool(layout)
    assert ("sequence parallelism" in text) == ("sequence" in layout)
    if gpu == "--gpu sm_90" and recipe in ("tetrajet", "mxfp4"):
        assert text.count("product  by hopper") == 3 and "by mxfp4 kernel" in text
    assert ("by pytorch" in text) == (gpu == "")
    if gpu and recipe == "ue5m3":
        assert text.count("product  by bf16") == 3
        reason = (
            "scales of e2m1 are not powers of two" if gpu == "--gpu sm_90" else "no instruction"
        )
        assert reason in text


def test_every_phase_is_told(tmp_path: Path, printed: Callable[[str], str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\nphases: [{after: 0.5, recipe: fp8}]\n")
    text = printed(f"--recipe {path} --gpu sm_90")
    first, late = text.split("\nafter 0.5 of training\n")
    assert first == printed("--gpu sm_90").replace("tetrajet", "mine")
    assert late == printed("--recipe fp8 --gpu sm_90")


def test_the_recipes_of_layers_are_told(tmp_path: Path, printed: Callable[[str], str]) -> None:
    path = tmp_path / "mine.yaml"
    entries = "{last: 2, recipe: fp8}, {modules: a.*, recipe: bf16}"
    path.write_text(f"base: tetrajet\nlayers: [{entries}]\n")
    text = printed(f"--recipe {path} --gpu sm_90")
    first, own = text.split("\nthe last 2 layers\n")
    own, named = own.split("\nlinears a.*\n")
    assert first == printed("--gpu sm_90").replace("tetrajet", "mine")
    assert own == printed("--recipe fp8 --gpu sm_90") and named.startswith("recipe bf16")


def test_codes_of_a_recipe_that_begins_or_stays_in_high_precision(
    tmp_path: Path, printed: Callable[[str], str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("phases: [{after: 0.5, recipe: tetrajet}]\n")
    first, late = printed(f"--recipe {path} --param-gather --dp 2").split("after 0.5 of training")
    assert "by the ranks that own W" not in first and "by the ranks that own W" in late
    path.write_text("layers: [{last: 2, recipe: mxfp4}]\n")
    with pytest.raises(SystemExit, match="because backward reads the unquantized W"):
        printed(f"--recipe {path} --param-gather --dp 2")
    path.write_text("layers: [{last: 2, recipe: tetrajet}]\n")
    first, own = printed(f"--recipe {path} --param-gather --dp 2").split("\nthe last 2 layers\n")
    assert "by the ranks that own W" not in first and "by the ranks that own W" in own


def test_outliers_are_among_what_is_kept(printed: Callable[[str], str]) -> None:
    text = printed("--recipe dge-occ")
    [line] = [line for line in text.splitlines() if line.startswith("kept for backward")]
    sizes = [float(size) for size in re.findall(r", ([\d.]+) MB", line)]
    setting = Setting(
        8192, 4096, 4096, torch.bfloat16, Target("cpu"), torch.bfloat16, keeps_w="packed"
    )
    saved = saved_bytes(compile_plan(get_recipe("dge-occ"), setting)) / 1e6
    assert "the outliers of X" in line and sum(sizes) == pytest.approx(saved, abs=0.15)


def test_bytes_and_reasons(printed: Callable[[str], str]) -> None:
    text = printed("--in 4096 --out 14336 --gpu sm_90")
    kept = 4096 * 8192 * (1 / 2 + 1 / 32)  # codes, and a scale for each block of 32
    assert f"kept for backward  X as codes of fprop, {kept / 1e6:.1f} MB" in text
    assert f"W's operands, packed: {2 * 4096 * 14336 * 17 / 32 / 1e6:.1f} MB" in text
    assert "in one pass with dY of wgrad" in text
    assert "by the ranks that own W" not in text
    text = printed("--in 4096 --out 14336 --gpu sm_90 --param-gather")
    codes = f"{4096 * 14336 * 17 / 32 / 1e6:.1f} MB"
    assert f"nearest by the ranks that own W, {codes}" in text
    assert f"kept over the run  W as codes of fprop, {codes}" in text
    assert f"held over a step  W's operands, packed: {codes}" in text  # those of dgrad
    assert "blackwell not used in fprop, dgrad, wgrad: FP4 tensor cores need" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--grad-comm fp8", "--grad-comm needs --dp 2 or more"),
        (
            "--dp 8 --grad-comm bf16 --grad-comm-element e5m2",
            "--grad-comm-element e5m2 needs --grad-comm fp8: add it, or leave out",
        ),
        ("--recipe nope", "unknown recipe 'nope'"),
        ("--recipe mxfp4 --param-gather", "because backward reads the unquantized W: leave"),
        ("--recipe tetrajet --recipe-option rule=up", "rule"),
        ("--tp 3", "--out 4096: give a multiple of 3"),
        ("--tp 0", "--tp 0: give 1 or more"),
        ("--in 0", "--in 0: give 1 or more"),
        ("--in 48", "--in: 48 on a rank is not a multiple of 32, which fprop"),
        ("--tokens 33", "--tokens: 33 on a rank is not a multiple of 32, which wgrad"),
        ("--recipe fp8 --swiglu before --out 33", "--out 33: give an even part"),
        ("--dp 0", "--dp 0: give 1 or more"),
        ("--norm --swiglu after", "X is the result of one of them: leave out one"),
        ("--swiglu before --bias", "a linear with a bias computes no SwiGLU: leave out one"),
        ("--row", "--row and --sequence-parallel need --tp 2"),
        ("--gpu h100", "'h100' is no GPU architecture; give sm_90"),
    ],
)
def test_a_mistake_is_one_line(
    text: str,
    says: str,
    printed: Callable[[str], str],
) -> None:
    with pytest.raises(SystemExit) as end:
        printed(text)
    assert says in str(end.value.code) and "\n" not in str(end.value.code)


@pytest.mark.parametrize("layout", ["", "--tp 2 --sequence-parallel"])
def test_the_input_of_a_norm_is_kept(layout: str, printed: Callable[[str], str]) -> None:
    """Of the tokens of this rank, in BF16, beside the codes of X."""
    sizes = f"--in 4096 --out 14336 --gpu sm_90 {layout}"
    kept = 2 * 4096 * 8192 / (2 if layout else 1)
    text = f"; the input of its RMSNorm, {kept / 1e6:.1f} MB"
    plain, normed = (printed(f"{sizes}{norm}") for norm in ("", " --norm"))
    [line] = re.findall(r"kept for backward  X as codes of .*", normed)
    assert line.endswith(text) and "RMSNorm" not in plain


@pytest.mark.parametrize(
    ("flags", "bits", "form"),
    [
        ("", 32, "by reduce-scatter, 7/8 of 32 bits a parameter, in float32"),
        ("--grad-comm fp8", 8 + 8 / 128, "by all-to-all, 7/8 of 8.06 bits a parameter, in FP8"),
        ("--grad-comm fp8 --grad-comm-element e5m2", 8 + 8 / 128, "a parameter, in FP8 (E5M2)"),
        ("--grad-comm bf16", 16, "by all-to-all, 7/8 of 16 bits a parameter, in BF16"),
    ],
)
def test_dw_between_data_parallel_ranks(
    flags: str,
    bits: float,
    form: str,
    printed: Callable[[str], str],
) -> None:
    """7/8 of the elements leave each of 8 ranks."""
    text = printed(f"--dp 8 {flags}")
    [line] = [line for line in text.splitlines() if line.startswith("dW  summed over 8 data")]
    sent, float32, bf16 = (
        f"{each / 8 * 4096 * 4096 * 7 / 8 / 1e6:.1f} MB" for each in (bits, 32, 16)
    )
    assert f"ranks: {sent} from each by " in line and form in line
    if flags:
        assert f"(by reduce-scatter in float32 {float32}, in BF16 {bf16})" in line
    else:
        assert f"(in BF16 {bf16}); all-reduce sends twice that" in line


@pytest.mark.parametrize(("tp", "dtype", "size"), [(1, "bf16", 2), (2, "bf16", 2), (1, "fp32", 4)])
def test_w_between_data_parallel_ranks(
    tp: int,
    dtype: str,
    size: int,
    printed: Callable[[str], str],
) -> None:
    """3/4 of W leave each of 4 ranks: 17 bytes for a block of 32, or 2 or 4 for each element."""
    own = 4096 * 4096 // tp * 3 / 4
    codes, plain = (f"{each * own / 1e6:.1f} MB" for each in (17 / 32, size))
    name = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    for flag, says in (
        ("", f"{plain} from each by all-gather, 3/4 of {8 * size} bits a parameter, in {name}"),
        (
            "--param-gather",
            f"{codes} from each by all-gather, 3/4 of 4.25 bits a parameter, as codes of fprop "
            f"(in {name} {plain})",
        ),
    ):
        text = printed(f"--dp 4 --tp {tp} --dtype {dtype} {flag}")
        assert f"W   gathered by 4 data-parallel ranks: {says}" in text
    for alone in ("", "--param-gather"):
        assert "data-parallel" not in printed(alone)


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp4", "plan", "--gpu", "sm_90"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "wgrad  dW = dY^T X   [4096, 4096]" in done.stdout


def test_the_page_s_excerpt_is_what_is_printed(printed: Callable[[str], str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
    [(flags, excerpt)] = re.findall(
        r"^    python -m megatron_fp4 plan (.*)\n\nAn excerpt.*\n\n((?:    .*\n)+)",
        page,
        re.MULTILINE,
    )
    text = printed(flags)
    lines = [line[4:] for line in excerpt.splitlines() if line.strip() != "..."]
    assert len(lines) > 8 and all(line in text.splitlines() for line in lines)


def test_scales_beside_scales_and_simulated_ones_are_told(
    tmp_path: Path, printed: Callable[[str], str]
) -> None:
    path = tmp_path / "mine.yaml"
    rows = "{rule: mse, row_max: 1}"
    within = "{scale: fp32, rule: absmax, block: [1, 16]}"
    path.write_text(
        f"backward: forward\nfprop: {{a: {rows}, b: {rows}}}\n"
        f"wgrad: {{a: {within}, b: {within}}}\ndgrad: {{a: {{rule: ceil}}}}\n"
    )
    text = printed(f"--recipe {path} --gpu sm_90")
    assert "E8M0 scales (mse, row scale for 1) for blocks of 32, nearest, by pytorch" in text
    assert re.findall(r"product  by (\w+)", text) == ["hopper", "bf16", "reference"]
    assert "float32 scales within a row are simulated" in text
    assert "times the row scales of the other operand" in text  # dY of dgrad
    kept = 4096 * 8192 * 17 / 32 + 8192 * 4  # codes, block scales, row scales
    assert f"kept for backward  X as codes of fprop, {kept / 1e6:.1f} MB" in text
    text = printed(f"--recipe {path} --gpu sm_100")
    assert "an operand has a scale for each row beside its block scales" in text


LLAMA = (
    "--seq-length 4096 --num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --vocab-size 32000 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)


def test_what_a_layer_saves_is_told_as_choose_layout_tells_it(
    printed: Callable[[str], str],
) -> None:
    text = printed(f"--gpu sm_90 --tp 2 --sequence-parallel --tokens 8192 --layer {LLAMA}")
    saved = text[text.index("saved by a layer") :].splitlines()
    # SwiGLU's input, in BF16: both halves of 14336 features on two ranks, for 8192 tokens.
    assert saved[8].split()[-2:] == [
        f"{14336 * 8192 * 2 / 1e6:.1f}",
        f"({14336 * 8192 * 2 / 1e6:.1f})",
    ]
    parts = [
        [float(size.strip("()").replace(",", "")) for size in line.split()[-2:]]
        for line in saved[1:]
    ]
    assert [sum(sizes) for sizes in zip(*parts[:-1], strict=True)] == pytest.approx(
        parts[-1], abs=0.5
    )
    chosen = command.run(
        f"--gpu h200 --gpus 2 --recipe tetrajet --global-batch-size 2 {LLAMA} --micro-batch-size 2 "
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity none "
        "--cuda-graph-impl none".split()
    )
    assert "\n".join(f"  {line}" for line in saved) in chosen


def test_what_a_layer_saves_depends_on_the_weight_cache(printed: Callable[[str], str]) -> None:
    def total(cache: str) -> float:
        text = printed(f"--gpu sm_90 --tokens 4096 --weight-cache {cache} --layer {LLAMA}")
        [line] = [line for line in text.splitlines() if line.startswith("  all ")]
        return float(line.split()[1].replace(",", ""))

    # Without a cache each call saves fprop's codes of W: 4.25 bits of 4 linears' weights.
    weights = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    assert total("off") - total("packed") == pytest.approx(weights * 4.25 / 8 / 1e6, abs=0.2)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--dtype fp16", "--layer does not support --dtype fp16"),
        ("--saved-x bf16", "--layer does not support --saved-x bf16"),
        ("--multiplier bf16", "--layer does not support --multiplier bf16"),
        ("--param-gather --dp 2", "--layer does not support --param-gather"),
        ("--tokens 6144", "--tokens 6144 is not a multiple of --seq-length 4096"),
        ("--tp 64", "TP 64: no more than the 8 GPUs of a host"),
    ],
)
def test_a_layer_that_cannot_be_told_is_refused(
    flags: str, what: str, printed: Callable[[str], str]
) -> None:
    with pytest.raises(SystemExit, match=f"^megatron-fp4: error: .*{what}"):
        printed(f"{flags} --layer {LLAMA}")


def test_options_may_be_given_several_times(printed: Callable[[str], str]) -> None:
    text = printed("--recipe-option rule=floor --recipe-option bias_gradient=raw")
    assert "E8M0 scales (floor)" in text


def test_recipes_of_layers_are_checked_and_shown_with_their_phases(
    tmp_path: Path, printed: Callable[[str], str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tetrajet\nlayers: [{last: 1, recipe: quartet-2}]\n")
    with pytest.raises(SystemExit, match="--tokens: 64 on a rank is not a multiple of 128"):
        printed(f"--recipe {path} --tokens 64")
    late = "recipe: {base: mxfp4, phases: [{after: 0.5, recipe: fp8}]}"
    path.write_text(f"base: tetrajet\nlayers: [{{last: 1, {late}}}]\n")
    assert "after 0.5 of training" in printed(f"--recipe {path}")
    path.write_text("base: tetrajet\nlayers: [{last: 1, recipe: bf16}]\n")
    assert "recipe bf16" in printed(f"--recipe {path} --param-gather")


def test_w_of_layers_is_judged_with_all_their_phases(
    tmp_path: Path, printed: Callable[[str], str]
) -> None:
    """W of layers whose phases differ from the launch's is gathered in BF16 in all of them."""
    path, sent = tmp_path / "mine.yaml", "by the ranks that own W"
    for late in ("tetrajet", "fp8"):
        own = f"base: tetrajet, options: {{rule: floor}}, phases: [{{after: 0.5, recipe: {late}}}]"
        path.write_text(f"base: tetrajet\nlayers: [{{last: 1, recipe: {{{own}}}}}]\n")
        assert printed(f"--recipe {path} --param-gather").count(sent) == 1
