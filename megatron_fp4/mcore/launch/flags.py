"""The plugin's flags, and the text of docs/flags.md. Does not import Megatron."""

from __future__ import annotations

import argparse
from typing import Any

import megatron_fp4
from megatron_fp4.arithmetic.messages import ELEMENTS
from megatron_fp4.recipe import GEMMS
from megatron_fp4.recipes import ALIASES, list_recipes
from megatron_fp4.setting import MULTIPLIER, WEIGHT_CACHE

TITLE = "megatron-fp4"
_UNSAID: tuple[object, ...] = (
    None,
    False,
    [],
    argparse.SUPPRESS,
)  # defaults that docs/flags.md does not show
_HEAD = """# The plugin's flags

Made from the parser by `python -m megatron_fp4 flags > docs/flags.md`. `pretrain_gpt.py --help` \
shows them with Megatron's own.

"""


def are_in(parser: argparse.ArgumentParser) -> bool:
    """Whether `add_flags` has added the plugin's flags to `parser`."""
    return any(group.title == TITLE for group in parser._action_groups)


def defaults() -> dict[str, Any]:
    """The arguments, by name, of a command line on which no flag of the plugin's is given."""
    return vars(add_flags(argparse.ArgumentParser()).parse_args([]))


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's flags to `parser`, as the first group that --help shows; returns it.

    Megatron's own --fp4-recipe, which has two choices, is replaced by one that takes any string,
    because a recipe can also be a file or an importable object. `fp4_arguments.recipe_of` refuses
    unknown recipes.
    """
    group = parser.add_argument_group(TITLE, conflict_handler="resolve")
    parser._action_groups.insert(0, parser._action_groups.pop())
    _add_recipe(group)
    _add_operands(group)
    _add_communication(group)
    _add_running(group)
    _add_checkpoints(group)
    # None is treated as True, but shows that the user did not give --verify-integrity.
    parser.set_defaults(verify_integrity=None)
    # What fp4_arguments.settle and fused_kernels.settle set.
    parser.set_defaults(
        fp4_gathers_codes=False,
        fp4_liger=None,
        fp4_rotates=False,
        fp4_fused_adamw=False,
        fp4_joins_swiglu=False,
        fp4_joins_norms=False,
    )
    return parser


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    """Flags that say what a recipe is, and where it holds."""
    group.add_argument(
        "--fp4-recipe",
        default=None,
        metavar="RECIPE",
        help=f"FP4 recipe: {', '.join(list_recipes())}, auto (which is {ALIASES['auto']}), a "
        ".yaml file, or package.module:object; off or bf16 trains without one, as leaving out the "
        "flag does",
    )
    group.add_argument(
        "--fp4-recipe-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the recipe; may be given several times",
    )
    group.add_argument(
        "--fp4-seed",
        type=int,
        default=None,
        metavar="N",
        help="64-bit seed of stochastic rounding and random signs (default: --seed)",
    )
    group.add_argument(
        "--fp4-bf16-after",
        type=float,
        default=None,
        metavar="SHARE",
        help="share of training, 0 to 1, after which GEMMs return to BF16",
    )
    group.add_argument(
        "--fp4-bf16-gemms",
        nargs="+",
        choices=GEMMS,
        default=None,
        help="which GEMMs --fp4-bf16-after returns to BF16 (default: all)",
    )
    group.add_argument(
        "--fp4-module-recipe",
        action="append",
        default=[],
        metavar="GLOB=RECIPE[,KEY=VALUE...]",
        help="another recipe, or bf16, for the linears whose global name matches, as in "
        "'decoder.layers.0.*=bf16'; may be given several times, and the last match counts",
    )


def _add_operands(group: argparse._ArgumentGroup) -> None:
    """Flags of what is kept of quantized operands, and of the precision of evaluation."""
    group.add_argument(
        "--fp4-weight-cache",
        choices=WEIGHT_CACHE,
        default=None,
        help="keep the quantized weights over a step's microbatches: as 4-bit codes (the default), "
        "as the GEMM takes them (more memory, less work), as the 4-bit codes of the forward pass "
        "alone (less memory, more work), or not (the default with CUDA graphs); remade: nor from "
        "the forward to the backward pass, which quantizes them again (least memory, most work)",
    )
    group.add_argument(
        "--fp4-param-gather",
        action="store_true",
        help="with the distributed optimizer: gather weights as the 4-bit codes and the scales "
        "that the forward pass multiplies, and not in BF16; in phases of recipes that multiply "
        "nothing else of W, with the same bits (with --fp4-format it is Megatron's flag of this "
        "name)",
    )
    group.add_argument(
        "--fp4-saved-x",
        choices=("packed", "bf16"),
        default="packed",
        help="what is kept of X where backward quantizes X itself: its 4-bit codes, or X",
    )
    group.add_argument(
        "--fp4-eval-forward",
        choices=("fp4", "bf16"),
        default="fp4",
        help="precision of the linears in evaluation",
    )
    group.add_argument(
        "--fp4-offload-calibration",
        action="store_true",
        help="keep what a calibration of Q-Ramping copies and sums (12 to 28 bytes a parameter) in "
        "the host's memory; slower, with the same results",
    )


def _add_communication(group: argparse._ArgumentGroup) -> None:
    """Flags of the gradients that data-parallel ranks send, and of the optimizer's state."""
    group.add_argument(
        "--fp4-grad-comm",
        choices=tuple(ELEMENTS),
        default=None,
        help="data-parallel ranks send gradients in FP8 with a scale for each block, or in BF16, "
        "stochastically rounded, and sum them in float32; with a recipe or without one",
    )
    group.add_argument(
        "--fp4-grad-comm-element",
        choices=ELEMENTS["fp8"],
        default=None,
        help="the elements of --fp4-grad-comm fp8 (default: e4m3)",
    )
    group.add_argument(
        "--fp4-optimizer-state",
        default=None,
        metavar="m=FORMAT,v=FORMAT",
        help="with a recipe: store Adam's first moment as fp8, bf16 or fp32 and its second as "
        "fp16, fp8 (of its root), bf16 or fp32, as in m=fp8,v=fp16, which is 3.02 bytes a "
        "parameter in place of 8; rounded stochastically, or with ,round=nearest to nearest, by "
        "which moments may stop changing (default: float32)",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    """Flags of the metrics, the executor of linears, and the fused kernels."""
    group.add_argument(
        "--fp4-metrics-interval",
        type=int,
        metavar="N",
        help="every N steps write metrics of all quantized operands, weights and gradients to "
        "metrics.jsonl in the folder of --save (or of --tensorboard-dir), to TensorBoard and to "
        "Weights & Biases; 0 is off, which is the default without a folder, with CUDA graphs, "
        "with --fp4-param-gather and without a recipe; else the default is 100. Without a recipe "
        "any N but 0 writes the log's steps and evaluations to metrics.jsonl, and nothing else",
    )
    group.add_argument(
        "--fp4-executor",
        choices=("auto", "python"),
        default="auto",
        help="what runs the passes of linears on a GPU: an extension in C++, which is built in "
        "about a minute the first time, where a C++ compiler, ninja and Python's headers are "
        "installed, or Python, with the same bits and more host overhead",
    )
    group.add_argument(
        "--fp4-multiplier",
        choices=MULTIPLIER,
        default="auto",
        help="what multiplies quantized operands: the fastest that can on this GPU, or torch's "
        "BF16 GEMMs of the same decoded codes, to see whether a problem is one of FP8 or FP4 GEMMs",
    )
    group.add_argument(
        "--fp4-fused-kernels",
        choices=("auto", "liger", "off"),
        default="auto",
        help="fused kernels outside the linears, without Transformer Engine: one for rotary "
        "embedding, Liger-Kernel's for SwiGLU, RMSNorm and cross-entropy, and torch's for AdamW; "
        "and SwiGLU and RMSNorm in the kernels that quantize for a recipe, on every device; auto "
        "takes on a GPU those that are installed and fit the model, liger refuses a launch that "
        "cannot have the rotary embedding's and all of Liger-Kernel's, and off takes none",
    )
    group.add_argument(
        "--activation-func-fp8-input-store",
        action="store_true",
        help="keep the input of SwiGLU (fc1's output) for backward in FP8 (E4M3), in half the "
        "memory: Megatron's setting of this name, which has no flag in Megatron-core 0.19; numbers "
        "above 464 become NaN in backward",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    """Flags of checkpoints and of what is printed."""
    group.add_argument(
        "--fp4-load-anyway",
        action="store_true",
        help="resume from a checkpoint of another recipe, seed, phase, micro-batch size, version, "
        "padding of the vocabulary or other numerics",
    )
    group.add_argument(
        "--no-verify-integrity",
        dest="verify_integrity",
        action="store_false",
        help="save checkpoints without the SHA-256 of their files, and load them unverified "
        "(--verify-integrity is the default)",
    )
    group.add_argument(
        "--fp4-verbose",
        action="store_true",
        help="print all that Megatron says while it starts; without it, warnings and errors alone",
    )
    group.add_argument(
        "--version",
        action="version",
        version=f"megatron-fp4 {megatron_fp4.__version__}",
        help="print the version of this package",
    )


def reference() -> str:
    """The text of docs/flags.md: a Markdown table of the plugin's flags."""
    parser = add_flags(argparse.ArgumentParser(add_help=False))
    lines = ["| flag | meaning |", "|---|---|"]
    for action in parser._actions:
        value = argparse.HelpFormatter("")._format_args(action, action.dest.upper())
        flag = f"`{action.option_strings[0]} {value}".rstrip() + "`"
        default = "" if action.default in _UNSAID else f" (default: `{action.default}`)"
        lines.append(f"| {_cell(flag)} | {_cell(action.help or '')}{default} |")
    return _HEAD + "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
