"""The FP4 flags: read them, and refuse what cannot work, before anything is built."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import megatron_fp4
from megatron_fp4 import te
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch.flags import flag_of
from megatron_fp4.mcore.model import graphs
from megatron_fp4.recipe import GEMMS, Recipe
from megatron_fp4.recipes import get_recipe, list_recipes

UPSTREAM_RECIPES = ("nvfp4", "custom")
LAYERS_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_OFF = ("off", "bf16")  # values of --fp4-recipe that mean none

# Megatron's flags that this version cannot honour together with a recipe, and what to do instead.
# Each is refused, so that nothing runs in another precision than the user asked for.
_REFUSED = {
    "--context-parallel-size": "use tensor, sequence or pipeline parallelism",
    "--use-megatron-fsdp": "use --use-distributed-optimizer",
    "--use-torch-fsdp2": "use --use-distributed-optimizer",
    "--moe-grouped-gemm": "leave it out, the experts run one after the other",
    "--use-grouped-gemm-for-dense-mlp": "leave it out, fc1 and fc2 are two linears",
    "--use-grouped-gemm-for-shared-expert": "leave it out, shared experts run before the others",
    "--moe-token-dispatcher-type": "use alltoall or allgather",
    "--moe-latent-size": "leave it out, experts take the hidden size",
    "--moe-shared-expert-overlap": "leave it out, shared experts run before the others",
    "--moe-router-padding-for-quantization": "leave it out, zeros fill an expert's last block",
    "--moe-router-padding-for-fp8": "leave it out, zeros fill an expert's last block",
    "--hybrid-layer-pattern": "train a GPT model",
    "--multi-latent-attention": "use grouped-query attention",
    graphs.FLAG: f"use {graphs.FLAG} local",
    "--cuda-graph-modules": "leave it out, whole layers are captured",
    "--cuda-graph-scope": "leave it out, whole layers are captured",
    "--optimizer-cuda-graph": "leave it out, the optimizer runs without one",
    "--enable-cuda-graph": f"use {graphs.FLAG} local",
    "--external-cuda-graph": f"use {graphs.FLAG} local",
    "--delay-wgrad-compute": "leave it out, dW is computed while the sum of dX travels",
    "--tensor-parallel-num-weight-shards": "use --tensor-model-parallel-size",
    "--expert-tensor-parallel-num-weight-shards": "use --expert-tensor-parallel-size",
    "--overlap-moe-expert-parallel-comm": "leave it out, tokens travel between the layers",
    "--cpu-offloading-num-layers": "use --recompute-granularity",
    "--tp-comm-overlap": "leave it out, codes travel while GEMMs run",
    "--fp8-format": "choose FP8 or a recipe",
    "--te-precision-config-file": "use a recipe file",
    "--fp4-quantizer-factory": "use a recipe file",
    "--spec": "leave it out, the layers are this package's",
    "--heterogeneous-layers-config-path": "leave it out",
    "--heterogeneous-layers-config-encoded-json": "leave it out",
    "--linear-attention-freq": "use grouped-query attention",
    "--use-kitchen-attention": "leave it out, attention stays in high precision",
    "--use-transformer-engine-op-fuser": "leave it out, the linears are this package's",
    "--fused-residual-rmsnorm": "leave it out, sums and norms are two",
    "--mlp-chunks-for-training": "leave it out, an MLP takes all tokens of a microbatch at once",
    "--init-model-with-meta-device": "leave it out",
    "--freeze-all-layers": "leave out the recipe",
    "--non-persistent-ckpt-type": "use global, the only type that is judged before it is loaded",
    "--yaml-cfg": "give the flags on the command line",
}
_NO_GRAPHS = "leave it out, or use --fp4-recipe without --fp4-format"
# The same for this package's recipes in Transformer Engine's linears.
_NOT_IN_TE = {
    "--add-bias-linear": "--disable-bias-linear, or --fp4-recipe without --fp4-format",
    "--add-qkv-bias": "use --fp4-recipe without --fp4-format",
    "--tp-comm-overlap": "leave it out",
    "--moe-grouped-gemm": "leave it out, the experts run one after the other",
    "--delay-wgrad-compute": "leave it out",
    "--enable-cuda-graph": _NO_GRAPHS,
    "--external-cuda-graph": _NO_GRAPHS,
    "--fp4-param-gather": "leave it out, weights are gathered in BF16",
}
# Values of them that ask for nothing, where that is not a value that is false.
_HARMLESS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "--context-parallel-size": lambda args: args.context_parallel_size == 1,
    "--non-persistent-ckpt-type": lambda args: args.non_persistent_ckpt_type in (None, "global"),
    graphs.FLAG: lambda args: args.cuda_graph_impl in ("none", "local"),
    "--mlp-chunks-for-training": lambda args: args.mlp_chunks_for_training == 1,
    "--moe-token-dispatcher-type": lambda args: args.moe_token_dispatcher_type != "flex",
    # Megatron fills it in with the tensor-parallel size.
    "--tensor-parallel-num-weight-shards": lambda args: (
        (args.tensor_parallel_num_weight_shards or 1) <= args.tensor_model_parallel_size
    ),
    "--expert-tensor-parallel-num-weight-shards": lambda args: (
        (args.expert_tensor_parallel_num_weight_shards or 1)
        <= (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    ),
}
# Where argparse puts what is named otherwise.
_DESTINATIONS = {"--fp8-format": "fp8", "--cuda-graph-scope": "cuda_graph_scope_deprecated"}


def settle(args: argparse.Namespace) -> None:
    """Gives parsed arguments their final FP4 values. Raises ConfigError for contradictions."""
    if args.fp4_recipe in _OFF:
        args.fp4_recipe = None
    if args.fp4 is not None:
        # Upstream's FP4, through Transformer Engine: not this package's affair.
        args.fp4_recipe = args.fp4_recipe or "nvfp4"
        if args.fp4_recipe not in UPSTREAM_RECIPES:
            raise ConfigError(
                f"--fp4-recipe {args.fp4_recipe} does its own quantization: leave out --fp4-format"
            )
        _check_upstreams(args)
    elif args.fp4_recipe in UPSTREAM_RECIPES:
        raise ConfigError(
            f"--fp4-recipe {args.fp4_recipe} is Transformer Engine's and does nothing without "
            f"--fp4-format e2m1; add it, or choose one of {', '.join(list_recipes())}"
        )
    recipe = recipe_of(args)
    if recipe is None:
        if args.fp8 is not None:
            _needs_te(args, "--fp8-format")
        _refuse_orphans(args)
    # Megatron writes its arguments into every checkpoint, and so the recipe, its options, the seed
    # and these; compare_numerics.py compares them on loading.
    args.fp4_plugin_version = megatron_fp4.__version__
    args.fp4_numerics_version = NUMERICS_VERSION
    args.fp4_recipe_content = recipe and _content(recipe)
    modules = [] if recipe is None else module_recipes(args)
    args.fp4_module_contents = [(glob, own and _content(own)) for glob, own in modules]
    if args.fp4_weight_cache is None:
        args.fp4_weight_cache = "off" if graphs.wanted(args) else "packed"
    if args.fp4_seed is None:
        args.fp4_seed = args.seed
    if not 0 <= args.fp4_seed < 2**64:
        raise ConfigError(f"--fp4-seed is an integer from 0 to 2**64 - 1, not {args.fp4_seed}")


def settle_layers_in_bf16(args: argparse.Namespace) -> None:
    """Sets each of LAYERS_IN_BF16 that the command line leaves out (None) to Megatron's default, 1.
    Raises ConfigError for one that is given without --first-last-layers-bf16, which it needs."""
    for name in LAYERS_IN_BF16:
        given = getattr(args, name)
        if given is None:
            setattr(args, name, 1)  # Megatron's default
        elif not args.first_last_layers_bf16:
            raise ConfigError(f"{flag_of(name)} {given} needs --first-last-layers-bf16: add it")


def _check_upstreams(args: argparse.Namespace) -> None:
    """Raises ConfigError where upstream's FP4 would do nothing, or this package's quantizers would
    not do all in Transformer Engine's linears."""
    _needs_te(args, "--fp4-format")
    module, _, name = (args.fp4_quantizer_factory or "").rpartition(".")
    if args.fp4_recipe != "custom" or module != te.__name__:
        return
    try:
        getattr(te, name)
    except AttributeError as error:
        raise ConfigError(f"--fp4-quantizer-factory: {error}") from error
    for flag, remedy in _NOT_IN_TE.items():
        if _is_set(args, flag):
            raise ConfigError(f"{module} does not support {flag}: {remedy}")
    if args.cuda_graph_impl != "none":
        raise ConfigError(f"{module} does not support {graphs.FLAG}: {_NO_GRAPHS}")


def _needs_te(args: argparse.Namespace, flag: str) -> None:
    if args.transformer_impl != "transformer_engine":
        raise ConfigError(
            f"{flag} acts in Transformer Engine's linears: add --transformer-impl "
            f"transformer_engine, or choose --fp4-recipe {', '.join(list_recipes())} without it"
        )


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """The recipe that the arguments ask for, None if none. Raises ConfigError if it is wrong, or
    if another flag (a checkpoint may bring some) cannot be honoured with it."""
    if args.fp4_recipe is None or args.fp4 is not None:
        return None
    recipe = _scheduled(get_recipe(args.fp4_recipe, **_options(args.fp4_recipe_option)), args)
    if args.fp4_bf16_gemms is not None and recipe.bf16_after is None:
        raise ConfigError("--fp4-bf16-gemms needs --fp4-bf16-after")
    if not any(recipe.at(0.0).gemm(gemm).quantized for gemm in GEMMS):
        raise ConfigError(
            f"recipe {args.fp4_recipe} quantizes nothing: give fprop, dgrad or wgrad a quantizer "
            "and a share of training in FP4, or leave the recipe out"
        )
    for flag, remedy in _REFUSED.items():
        if _is_set(args, flag):
            raise ConfigError(f"recipe {args.fp4_recipe} does not support {flag}: {remedy}")
    if graphs.wanted(args):
        graphs.check(args, [recipe, *(own for _, own in module_recipes(args) if own is not None)])
    return recipe


def module_recipes(args: argparse.Namespace) -> list[tuple[str, Recipe | None]]:
    """(glob on global module names, its recipe or None for BF16) of --fp4-module-recipe."""
    found: list[tuple[str, Recipe | None]] = []
    for given in args.fp4_module_recipe:
        glob, equals, recipe = given.partition("=")
        name, *pairs = recipe.split(",")
        if not (glob and equals and name):
            raise ConfigError(f"--fp4-module-recipe takes GLOB=RECIPE or GLOB=bf16, not {given!r}")
        if name == "bf16" and pairs:
            raise ConfigError(f"--fp4-module-recipe {given}: bf16 takes no options")
        chosen = None if name == "bf16" else get_recipe(name, **_options(pairs))
        found.append((glob, chosen and _scheduled(chosen, args)))
    return found


def _scheduled(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """`recipe` with the schedule that the flags give to every one."""
    if args.fp4_bf16_after is not None:
        recipe = replace(recipe, bf16_after=args.fp4_bf16_after)
    if args.fp4_bf16_gemms is not None and recipe.bf16_after is not None:
        recipe = replace(recipe, bf16_gemms=tuple(args.fp4_bf16_gemms))
    return recipe


def _content(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe), default=repr)


def _options(pairs: list[str]) -> dict[str, str]:
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"an option of a recipe is KEY=VALUE, not {pair!r}")
        options[key.replace("-", "_")] = value
    return options


def _refuse_orphans(args: argparse.Namespace) -> None:
    """A flag that only a recipe gives a meaning to is no use without one."""
    defaults: dict[str, object] = {
        "fp4_recipe_option": [],
        "fp4_seed": None,
        "fp4_bf16_after": None,
        "fp4_bf16_gemms": None,
        "fp4_eval_forward": "fp4",
        "fp4_module_recipe": [],
        "fp4_weight_cache": None,
        "fp4_saved_x": "packed",
    }
    for name, default in defaults.items():
        if getattr(args, name) != default:
            flag = flag_of(name)
            raise ConfigError(f"{flag} needs a recipe: add --fp4-recipe, or leave it out")


def _is_set(args: argparse.Namespace, flag: str) -> bool:
    if flag in _HARMLESS:
        return not _HARMLESS[flag](args)
    name = _DESTINATIONS.get(flag, flag[2:].replace("-", "_"))
    return bool(getattr(args, name, None))  # Megatron deletes deprecated ones once it has read them
