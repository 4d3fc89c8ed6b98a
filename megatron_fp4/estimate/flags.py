"""Megatron's flags that describe a model and a layout, as the command line takes them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_fp4.arithmetic.messages import ELEMENTS, element_of
from megatron_fp4.arithmetic.moments import FLOAT32, Moments
from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.gpus import GPUS, find
from megatron_fp4.estimate.huggingface import read
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.estimate.search import Fixed, Job
from megatron_fp4.plan.owned_codes import refusal
from megatron_fp4.recipes import read_options
from megatron_fp4.recipes.ramping import moments_refusal
from megatron_fp4.setting import WEIGHT_CACHE, keeps_w_of

# Flags of a launch that no estimate depends on. With several data-parallel ranks the optimizer is
# distributed and its communication overlapped in any case.
_WITH_A_VALUE = (
    "norm-epsilon", "rotary-base", "lr", "min-lr", "lr-decay-style", "lr-warmup-iters",
    "weight-decay", "adam-beta2", "clip-grad",
)  # fmt: skip
_ALONE = ("bf16", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather")
# Numbers that may be 0; all others count something that is there.
_MAY_BE_0 = ("num_experts", "moe_shared_expert_intermediate_size")
# Flags beside --hf-config that do not contradict it.
_BESIDE_A_CONFIG = (
    "hf_config", "seq_length", "make_vocab_size_divisible_by", "activation_func_fp8_input_store"
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. Those of the model, of fixed choices and of a launch are Megatron's."""
    job = parser.add_argument_group("what is trained, and on what")
    job.add_argument("--gpu", required=True, help=f"one of {', '.join(GPUS)}")
    job.add_argument("--gpus", type=int, required=True, help="in all")
    job.add_argument("--gpus-per-node", type=int, default=8)
    job.add_argument("--recipe", default="bf16", help="as --fp4-recipe takes it, or bf16")
    job.add_argument("--recipe-option", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    job.add_argument("--global-batch-size", type=int, required=True)
    job.add_argument(
        "--fp4-weight-cache",
        choices=WEIGHT_CACHE,
        default="packed",
    )
    job.add_argument("--fp4-param-gather", action="store_true", help="gather weights as codes")
    job.add_argument(
        "--no-gradient-accumulation-fusion",
        action="store_true",
        help="BF16 linears add dW to main_grad after the GEMM, as Megatron does without Apex",
    )
    job.add_argument("--fp4-fused-kernels", choices=["auto", "liger", "off"], default="auto")
    job.add_argument("--fp4-grad-comm", choices=ELEMENTS)
    job.add_argument("--fp4-grad-comm-element", choices=ELEMENTS["fp8"])
    job.add_argument("--grad-reduce-in-bf16", action="store_true")
    job.add_argument("--fp4-optimizer-state", metavar="m=FORMAT,v=FORMAT")
    add_model(parser.add_argument_group("the model, by Megatron's flags or a config.json"))
    fixed = parser.add_argument_group("fixed choices; what is left out is chosen")
    fixed.add_argument("--micro-batch-size", type=int)
    for kind in ("tensor-model", "pipeline-model", "expert-model"):
        fixed.add_argument(f"--{kind}-parallel-size", type=int)
    fixed.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    fixed.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction)
    fixed.add_argument("--recompute-granularity", choices=["none", "full"])
    fixed.add_argument("--cuda-graph-impl", choices=["none", "local"])
    _add_launch(parser.add_argument_group("flags of a launch; they change no estimate"))


def add_model(model: argparse._ActionsContainer) -> None:
    """Adds the flags that describe a model."""
    model.add_argument("--hf-config", type=Path, help="a Hugging Face config.json")
    model.add_argument("--seq-length", type=int, required=True)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "vocab-size"):
        model.add_argument(f"--{name}", type=int)
    for name in ("ffn-hidden-size", "num-query-groups", "kv-channels", "max-position-embeddings"):
        model.add_argument(f"--{name}", type=int)
    model.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    model.add_argument("--group-query-attention", action="store_true")
    model.add_argument("--swiglu", action="store_true")
    model.add_argument("--activation-func-fp8-input-store", action="store_true")
    model.add_argument("--disable-bias-linear", action="store_true")
    model.add_argument("--add-qkv-bias", action="store_true")
    model.add_argument("--qk-layernorm", action="store_true")
    model.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    model.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    positions = ["learned_absolute", "rope"]
    model.add_argument("--position-embedding-type", choices=positions, default=positions[0])
    model.add_argument("--num-experts", type=int, default=0)
    model.add_argument("--moe-router-topk", type=int, default=2)
    model.add_argument("--moe-ffn-hidden-size", type=int)
    model.add_argument("--moe-shared-expert-intermediate-size", type=int, default=0)
    model.add_argument("--moe-layer-freq", type=int, default=1)


def _add_launch(launch: argparse._ArgumentGroup) -> None:
    """Flags that are taken so that a launch's own can be pasted."""
    for name in _WITH_A_VALUE:
        launch.add_argument(f"--{name}", metavar="VALUE")
    for name in _ALONE:
        launch.add_argument(f"--{name}", action="store_true")
    for name in ("attention-dropout", "hidden-dropout"):
        launch.add_argument(f"--{name}", type=float, choices=[0.0])


def job_of(args: argparse.Namespace) -> Job:
    """What the flags ask for. Raises ConfigError for values that do not make sense."""
    model = checked_model(args)
    if not model.experts and (args.expert_model_parallel_size or 1) > 1:
        raise ConfigError(
            "--expert-model-parallel-size needs a model with experts: give --num-experts, or leave "
            "it out"
        )
    recipe = recipe_named(args.recipe, **read_options(args.recipe_option))
    gathers = args.fp4_param_gather
    if gathers and (why := refusal(recipe.followed, "--fp4-param-gather")) is not None:
        raise ConfigError(why)
    moments = FLOAT32
    if args.fp4_optimizer_state is not None:
        moments = Moments.read(args.fp4_optimizer_state)
        if not any(each.ever_quantized for each in recipe.followed):
            raise ConfigError("--fp4-optimizer-state needs a recipe: add --recipe, or leave it out")
        if (why := moments_refusal(recipe.followed, "--fp4-optimizer-state")) is not None:
            raise ConfigError(why)
    fused = not args.no_gradient_accumulation_fusion
    node = min(args.gpus, args.gpus_per_node)
    return Job(
        model, recipe, find(args.gpu), args.gpus, node, args.global_batch_size, fused,
        fused_kernels=args.fp4_fused_kernels != "off",
        moments=moments,
        keeps_w=keeps_w_of(args.fp4_weight_cache),
        gradients=element_of(args.fp4_grad_comm, args.fp4_grad_comm_element),
        bf16_gradients=args.grad_reduce_in_bf16,
        gathers_codes=args.fp4_param_gather,
        given=" ".join([args.recipe, *(f"--fp4-recipe-option {o}" for o in args.recipe_option)]),
    )  # fmt: skip


def checked_model(args: argparse.Namespace) -> Model:
    """The model that the flags or a config.json describe. Raises ConfigError for senseless values.

    args: with the flags of `add_model`; the values of all others are checked too, if they are
    numbers.
    """
    _check_numbers(args)
    if args.hf_config is None:
        model = model_of(args)
    else:
        model, _ = read(args.hf_config, args.seq_length)
        _check_flags_beside_a_config(args)
        model = replace(model, vocabulary_multiple=args.make_vocab_size_divisible_by)
    if model.experts and model.top_k > model.experts:
        raise ConfigError(
            f"a token goes to {model.top_k} of {model.experts} experts: lower --moe-router-topk, "
            "or raise --num-experts"
        )
    if args.activation_func_fp8_input_store:
        if not model.gated:
            raise ConfigError(
                "--activation-func-fp8-input-store needs --swiglu: add it, or leave this out"
            )
        model = replace(model, fp8_input=True)
    return model


def _check_numbers(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        least = 0 if name in _MAY_BE_0 else 1
        if type(value) is int and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give {least} or more")


def _check_flags_beside_a_config(args: argparse.Namespace) -> None:
    """Raises ConfigError if flags such as --num-layers are given together with --hf-config, whose
    config.json has these values already."""
    parser = argparse.ArgumentParser()
    add_model(parser)
    for name, default in vars(parser.parse_args(["--seq-length", "1"])).items():
        if name not in _BESIDE_A_CONFIG and getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} and --hf-config both describe the model: leave out "
                "one of them"
            )


def model_of(args: argparse.Namespace) -> Model:
    """The model that Megatron's flags describe, with Megatron's defaults."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is missing: give it, or --hf-config")
    heads, hidden = args.num_attention_heads, args.hidden_size
    if args.kv_channels is None and hidden % heads:
        raise ConfigError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: change "
            "one of them, or give --kv-channels"
        )
    groups = (args.group_query_attention and args.num_query_groups) or heads
    if heads % groups:
        raise ConfigError(
            f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}: "
            "change one of them"
        )
    _check_positions(args)
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    return Model(
        args.num_layers, hidden, ffn, heads, groups,
        args.kv_channels or hidden // heads, args.vocab_size, args.seq_length,
        args.make_vocab_size_divisible_by,
        gated=args.swiglu,
        rope=args.position_embedding_type == "rope",
        tied=not args.untie_embeddings_and_output_weights,
        norm_vectors=1 if args.normalization == "RMSNorm" else 2,
        biases=not args.disable_bias_linear,
        qkv_bias=args.add_qkv_bias,
        qk_norm=args.qk_layernorm,
        experts=args.num_experts,
        top_k=args.moe_router_topk,
        expert_ffn=args.moe_ffn_hidden_size or ffn,
        shared_ffn=args.moe_shared_expert_intermediate_size,
        moe_every=args.moe_layer_freq,
    )  # fmt: skip


def _check_positions(args: argparse.Namespace) -> None:
    positions = args.max_position_embeddings or args.seq_length
    if positions < args.seq_length:
        raise ConfigError(
            f"--seq-length {args.seq_length} is above --max-position-embeddings {positions}: "
            "change one of them"
        )
    if positions != args.seq_length and args.position_embedding_type == "learned_absolute":
        raise ConfigError(
            f"--max-position-embeddings {positions} is not --seq-length {args.seq_length}: learned "
            "positions are estimated for equal numbers only; give the same, or leave it out"
        )


def fixed_of(args: argparse.Namespace) -> Fixed:
    """The choices that the flags fix."""
    recompute, graphs = args.recompute_granularity, args.cuda_graph_impl
    return Fixed(
        args.tensor_model_parallel_size,
        args.sequence_parallel,
        args.pipeline_model_parallel_size,
        args.num_virtual_stages_per_pipeline_rank,
        args.expert_model_parallel_size,
        args.micro_batch_size,
        None if recompute is None else recompute == "full",
        None if graphs is None else graphs == "local",
    )
