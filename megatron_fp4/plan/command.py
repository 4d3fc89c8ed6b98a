"""The command `python -m megatron_fp4 plan`: prints what a recipe does to one linear.

The plan can be for this machine's device or for a GPU that is not present.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_fp4.arithmetic.messages import ELEMENTS, element_of
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.description import titled
from megatron_fp4.errors import ConfigError, SizeError
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.owned_codes import codes_in_turn, refusal, times_of, times_of_launch
from megatron_fp4.plan.show import show, show_exchange
from megatron_fp4.plan.sizes import check_sizes
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe, read_options
from megatron_fp4.setting import (
    MULTIPLIER,
    WEIGHT_CACHE,
    Setting,
    Sharding,
    column_parallel,
    fastest_of,
    keeps_w_of,
    row_parallel,
)
from megatron_fp4.target import Target, gpu_named, target_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FLAGS = {"tokens": "--tokens", "in_features": "--in", "out_features": "--out"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument("--recipe", default="tetrajet", help="a recipe, as --fp4-recipe takes it")
    parser.add_argument(
        "--recipe-option",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="options of the recipe",
    )
    parser.add_argument("--in", type=int, default=4096, dest="inputs", help="over all ranks")
    parser.add_argument("--out", type=int, default=4096, dest="outputs", help="over all ranks")
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the model")
    parser.add_argument("--gpu", metavar="sm_90", help="a GPU; default: the one that is here")
    add_sharding(parser)
    parser.add_argument("--bias", action="store_true", help="added before Y is rounded")
    parser.add_argument(
        "--swiglu", choices=["before", "after"], help="the linear stands before or after a SwiGLU"
    )
    parser.add_argument(
        "--activation-func-fp8-input-store",
        action="store_true",
        help="before and after a SwiGLU: keep what goes through it in E4M3",
    )
    parser.add_argument("--norm", action="store_true", help="the linear computes its RMSNorm")
    parser.add_argument(
        "--weight-cache",
        choices=WEIGHT_CACHE,
        default="packed",
    )
    parser.add_argument("--saved-x", choices=["packed", "bf16"], default="packed")
    parser.add_argument("--multiplier", choices=MULTIPLIER, default="auto")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument(
        "--grad-comm", choices=ELEMENTS, help="how they send dW, as --fp4-grad-comm says"
    )
    parser.add_argument("--grad-comm-element", choices=ELEMENTS["fp8"])
    parser.add_argument("--param-gather", action="store_true", help="W comes as the codes of fprop")
    parser.add_argument(
        "--optimizer-state", metavar="m=FORMAT,v=FORMAT", help="as --fp4-optimizer-state takes it"
    )
    parser.add_argument(
        "--layer",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="Megatron's flags of a model, or --hf-config and --seq-length, as the last arguments: "
        "print also what a layer saves, by tensor",
    )


def run(args: argparse.Namespace) -> str:
    """The plan as text. args: those of `add_arguments`.

    Raises ConfigError for an unknown recipe, option or GPU, and for sizes that are not multiples of
    the number of ranks or of a block.
    """
    recipe = get_recipe(args.recipe, **read_options(args.recipe_option))
    setting = _setting(args)
    if args.param_gather and (why := refusal(recipe.followed, "--param-gather")) is not None:
        raise ConfigError(why)
    for each in recipe.parts:
        check_sizes_of_flags(each, args.tokens, setting.inputs, setting.outputs, _FLAGS)
    element = _element(args)
    moments = None if args.optimizer_state is None else Moments.read(args.optimizer_state)
    shown = "".join(
        title + show(compile_plan(each, _setting_of(each, recipe, setting)), moments)
        for title, each in titled(recipe)
    )
    first = compile_plan(recipe, _setting_of(recipe, recipe, setting))
    return shown + show_exchange(first, args.dp, element)


def _setting(args: argparse.Namespace) -> Setting:
    """The setting that the flags describe. Raises ConfigError for flags that exclude each other."""
    sharding, tokens, inputs, outputs = sizes_on_rank(args, _FLAGS)
    if args.swiglu and args.bias:
        raise ConfigError(
            "--swiglu and --bias: a linear with a bias computes no SwiGLU: leave out one"
        )
    if args.norm and args.swiglu == "after":
        raise ConfigError(
            "--norm and --swiglu after: X is the result of one of them: leave out one"
        )
    if args.swiglu == "before" and outputs % 2:
        raise ConfigError(f"--swiglu before and --out {args.outputs}: give an even part to a rank")
    stores_fp8 = args.activation_func_fp8_input_store
    if stores_fp8 and not args.swiglu:
        raise ConfigError("--activation-func-fp8-input-store needs --swiglu: add it")
    dtype = _DTYPES[args.dtype]
    return Setting(
        tokens, inputs, outputs, dtype, target_given(args.gpu), dtype, sharding,
        main_grad=torch.float32,
        has_bias=args.bias,
        keeps_w=keeps_w_of(args.weight_cache),
        packs_x=args.saved_x == "packed",
        swiglu=args.swiglu or "",
        normed=args.norm,
        kept_y=torch.float8_e4m3fn if stores_fp8 else None,
        sent_w=args.param_gather,
        fastest=fastest_of(args.multiplier),
    )  # fmt: skip


def _element(args: argparse.Namespace) -> str | None:
    """The elements in which data-parallel ranks send dW; None: as they are. Raises ConfigError if
    there are no such ranks."""
    element = element_of(args.grad_comm, args.grad_comm_element, "--grad-comm")
    if args.dp < 1:
        raise ConfigError(f"--dp {args.dp}: give 1 or more")
    if args.dp == 1 and element is not None:
        raise ConfigError("--grad-comm needs --dp 2 or more: add it")
    return element


def _setting_of(part: Recipe, recipe: Recipe, setting: Setting) -> Setting:
    """`setting` as it is for a part of `recipe`, in which W may not come as codes."""
    whole = next(each for each in recipe.followed if part in each.in_turn)
    agrees = times_of(whole) == times_of_launch(recipe.followed)
    codes = agrees and codes_in_turn(whole)[whole.in_turn.index(part)]
    return setting if codes else replace(setting, sent_w=False)


def check_sizes_of_flags(
    recipe: Recipe, tokens: int, inputs: int, outputs: int, flags: Mapping[str, str]
) -> None:
    """Raises ConfigError if a block of the recipe does not divide one of these sizes.

    The message names the flag that sets the size. flags: the command's flag for each of "tokens",
    "in_features" and "out_features".
    """
    try:
        check_sizes(recipe, tokens, inputs, outputs, "this linear")
    except SizeError as error:
        raise ConfigError(
            f"{flags[error.axis]}: {error.size} on a rank is not a multiple of {error.multiple}, "
            f"{error.reason}"
        ) from error


def add_sharding(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how a linear is sharded over tensor-parallel ranks."""
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--row", action="store_true", help="row-parallel, not column-parallel")
    parser.add_argument("--sequence-parallel", action="store_true")


def sizes_on_rank(
    args: argparse.Namespace, flags: Mapping[str, str]
) -> tuple[Sharding, int, int, int]:
    """(sharding, tokens, inputs, outputs): how the linear is sharded, and its sizes on a rank.

    args: `tokens`, `inputs` and `outputs` over all ranks, and those of `add_sharding`. flags: as of
    `check_sizes_of_flags`. Raises ConfigError for sizes that are not multiples of the ranks.
    """
    sharding = _sharding(args)
    parts = sharding.ranks if sharding.scattered is not None else 1
    tokens = _part(args.tokens, parts, flags["tokens"])
    inputs, outputs = (
        _part(size, args.tp if axis == sharding.w else 1, flags[name])
        for size, axis, name in ((args.inputs, 1, "in_features"), (args.outputs, 0, "out_features"))
    )
    return sharding, tokens, inputs, outputs


def _sharding(args: argparse.Namespace) -> Sharding:
    if args.tp < 1:
        raise ConfigError(f"--tp {args.tp}: give 1 or more")
    if args.tp == 1 and (args.sequence_parallel or args.row):
        raise ConfigError("--row and --sequence-parallel need --tp 2 or more")
    if args.tp == 1:
        return Sharding()
    if args.row:
        return row_parallel(args.tp, sequence_parallel=args.sequence_parallel)
    scatters = args.sequence_parallel
    return column_parallel(args.tp, sequence_parallel=scatters, sums_dx=not scatters)


def _part(size: int, ranks: int, flag: str) -> int:
    if size < 1 or size % ranks:
        what = "1 or more" if ranks == 1 else f"a multiple of {ranks}, above 0"
        raise ConfigError(f"{flag} {size}: give {what}")
    return size // ranks


def target_given(gpu: str | None) -> Target:
    """The Target that --gpu names; without it the GPU of this machine, or its CPU."""
    if gpu is not None:
        return gpu_named(gpu)
    return target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
