"""Refuses plugin flags that do not fit together, and Megatron's flags that exclude a recipe.

Flags of Megatron that a recipe cannot follow are refused instead of ignored, so that no GEMM runs
in another precision than the user asked for.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator

from megatron_fp4 import te
from megatron_fp4.mcore.arguments.flag_names import flag_of
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.registry import known_names

UPSTREAM_RECIPES = ("nvfp4", "custom")
LAYERS_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")

# Megatron's flags that cannot be combined with a recipe, and what to do instead.
NOT_WITH_A_RECIPE = {
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
    "--cuda-graph-impl": "use --cuda-graph-impl local",
    "--cuda-graph-modules": "leave it out, whole layers are captured",
    "--cuda-graph-scope": "leave it out, whole layers are captured",
    "--optimizer-cuda-graph": "leave it out, the optimizer runs without one",
    "--enable-cuda-graph": "use --cuda-graph-impl local",
    "--external-cuda-graph": "use --cuda-graph-impl local",
    "--delay-wgrad-compute": "leave it out, dW is computed while the sum of dX travels",
    "--tensor-parallel-num-weight-shards": "use --tensor-model-parallel-size",
    "--expert-tensor-parallel-num-weight-shards": "use --expert-tensor-parallel-size",
    "--overlap-moe-expert-parallel-comm": "leave it out, tokens travel between the layers",
    "--cpu-offloading-num-layers": "use --recompute-granularity",
    "--tp-comm-overlap": "leave it out, codes travel while GEMMs run",
    "--fp8-format": "choose FP8 or a recipe",
    "--te-precision-config-file": "use a recipe file",
    "--fp4-quantizer-factory": "use a recipe file",
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
# The same for this package's quantizers in Transformer Engine's linears.
_NOT_IN_TE = {
    "--add-bias-linear": "add --disable-bias-linear, or use --fp4-recipe without --fp4-format",
    "--add-qkv-bias": "use --fp4-recipe without --fp4-format",
    "--tp-comm-overlap": "leave it out",
    "--moe-grouped-gemm": "leave it out, the experts run one after the other",
    "--delay-wgrad-compute": "leave it out",
    "--enable-cuda-graph": _NO_GRAPHS,
    "--external-cuda-graph": _NO_GRAPHS,
    "--fp4-param-gather": "leave it out, weights are gathered in BF16",
}
# For some of these flags: whether their value has no effect, so that it is not refused. The other
# flags have no effect if their value is false.
_HARMLESS: dict[str, Callable[[Namespace], bool]] = {
    "--context-parallel-size": lambda args: args.context_parallel_size == 1,
    "--non-persistent-ckpt-type": lambda args: args.non_persistent_ckpt_type in (None, "global"),
    "--cuda-graph-impl": lambda args: args.cuda_graph_impl in ("none", "local"),
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
# The argument that a flag sets, where it is not the flag's name.
_DESTINATIONS = {"--fp8-format": "fp8", "--cuda-graph-scope": "cuda_graph_scope_deprecated"}
# The plugin's arguments that have no effect without a recipe, and their defaults.
_NEEDS_A_RECIPE: dict[str, object] = {
    "fp4_recipe_option": [],
    "fp4_seed": None,
    "fp4_bf16_after": None,
    "fp4_bf16_gemms": None,
    "fp4_eval_forward": "fp4",
    "fp4_module_recipe": [],
    "fp4_weight_cache": None,
    "fp4_saved_x": "packed",
    "fp4_executor": "auto",
    "fp4_multiplier": "auto",
    "fp4_offload_calibration": False,
    "fp4_optimizer_state": None,
}


def layers_in_bf16(args: Namespace) -> Iterator[str]:
    """Refuses numbers of layers to keep in BF16 without --first-last-layers-bf16."""
    for name in LAYERS_IN_BF16:
        given = getattr(args, name)
        if given is not None and not args.first_last_layers_bf16:
            yield f"{flag_of(name)} {given} needs --first-last-layers-bf16: add it"


def upstreams(args: Namespace) -> Iterator[str]:
    """Refuses upstream's FP4 (--fp4-format) where it has no effect or meets this package's recipes.

    It has no effect without Transformer Engine's linears. With this package's quantizers in those
    linears, also refuses what they cannot do.
    """
    if args.fp4 is None:
        if args.fp4_recipe in UPSTREAM_RECIPES:
            yield (
                f"--fp4-recipe {args.fp4_recipe} is Transformer Engine's and does nothing without "
                f"--fp4-format e2m1; add it, or choose one of {known_names()}"
            )
        return
    if args.fp4_recipe not in UPSTREAM_RECIPES:
        yield f"--fp4-recipe {args.fp4_recipe} does its own quantization: leave out --fp4-format"
    yield from _without_te(args, "--fp4-format")
    module, _, name = (args.fp4_quantizer_factory or "").rpartition(".")
    if args.fp4_recipe == "custom" and module == te.__name__:
        yield from _quantizers(args, name)


def with_recipe(args: Namespace, recipe: Recipe) -> Iterator[str]:
    """Refuses flags that cannot be combined with a recipe, and a recipe that quantizes nothing."""
    if args.fp4_bf16_gemms is not None and args.fp4_bf16_after is None:
        yield "--fp4-bf16-gemms needs --fp4-bf16-after"
    # The first of each may never hold.
    held = [late for each in recipe.followed for late in (each.at(0.0), *each.in_turn[1:])]
    if not any(each.quantized for each in held):
        yield (
            f"recipe {args.fp4_recipe} quantizes nothing: give fprop, dgrad or wgrad a quantizer "
            "and a share of training in FP4, or leave the recipe out"
        )
    if args.first_last_layers_bf16 and any(each.first or each.last for each in recipe.layers):
        yield (
            f"recipe {args.fp4_recipe} has recipes for its first or last layers, which "
            "--first-last-layers-bf16 does not reach: leave out one of them"
        )
    for flag, remedy in NOT_WITH_A_RECIPE.items():
        if _is_set(args, flag):
            yield f"recipe {args.fp4_recipe} does not support {flag}: {remedy}"


def without_recipe(args: Namespace) -> Iterator[str]:
    """Refuses, for a launch without a recipe, flags that would have no effect.

    These are --fp8-format without Transformer Engine's linears, and plugin flags about a recipe.
    """
    if args.fp8 is not None:
        yield from _without_te(args, "--fp8-format")
    for name, default in _NEEDS_A_RECIPE.items():
        if name == "fp4_seed" and args.fp4_grad_comm is not None:
            continue  # gradients are rounded stochastically
        if getattr(args, name) != default:
            wanted = "a recipe: add --fp4-recipe, or leave it out"
            if args.fp4 is not None:  # --fp4-recipe is then one of Transformer Engine
                wanted = "a recipe of this package: leave it out, or leave out --fp4-format"
            yield f"{flag_of(name)} needs {wanted}"
    if args.fp4 is None and args.fp4_param_gather:  # with --fp4-format it is Megatron's own
        yield "--fp4-param-gather needs a recipe: add --fp4-recipe, or leave it out"


def seed(args: Namespace) -> Iterator[str]:
    """Refuses an --fp4-seed that is not an unsigned 64-bit integer."""
    if not 0 <= args.fp4_seed < 2**64:
        yield f"--fp4-seed is an integer from 0 to 2**64 - 1, not {args.fp4_seed}"


def _quantizers(args: Namespace, name: str) -> Iterator[str]:
    """Refuses what this package's quantizers cannot do in Transformer Engine's linears.

    name: the name of the quantizer factory in megatron_fp4.te.
    """
    try:
        getattr(te, name)
    except AttributeError as error:
        yield f"--fp4-quantizer-factory: {error}"
    for flag, remedy in _NOT_IN_TE.items():
        if _is_set(args, flag):
            yield f"{te.__name__} does not support {flag}: {remedy}"
    if args.cuda_graph_impl != "none":
        yield f"{te.__name__} does not support --cuda-graph-impl: {_NO_GRAPHS}"


def _without_te(args: Namespace, flag: str) -> Iterator[str]:
    if args.transformer_impl != "transformer_engine":
        yield (
            f"{flag} acts in Transformer Engine's linears: add --transformer-impl "
            f"transformer_engine, or choose --fp4-recipe {known_names()} without it"
        )


def _is_set(args: Namespace, flag: str) -> bool:
    if flag in _HARMLESS:
        return not _HARMLESS[flag](args)
    name = _DESTINATIONS.get(flag, flag[2:].replace("-", "_"))
    return bool(getattr(args, name, None))  # Megatron deletes deprecated arguments after use
