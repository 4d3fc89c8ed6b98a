"""Refuses layers, batches, experts and recomputation that do not run, or not without an option.

Whether they run may depend on installed packages and on the backend of torch.distributed. T stands
for megatron/training.
"""

from argparse import Namespace
from collections.abc import Iterator

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_fp4.mcore.launch.refusals.packages import TRANSFORMER_ENGINE


def layers(args: Namespace) -> Iterator[str]:
    """Refuses features of layers and batches that would fail or have no effect.

    They need a collective that gloo does not have, or Megatron-core 0.19 accepts the flag and
    cannot run it.
    """
    if args.rampup_batch_size is not None:  # T/global_vars.py ignores it
        yield "Megatron-core 0.19 drops --rampup-batch-size: use --step-batch-size-schedule"
    if args.apply_residual_connection_post_layernorm:  # none of Megatron's layers reads it
        yield "Megatron-core 0.19 drops --apply-residual-connection-post-layernorm: leave it out"
    if args.init_method_xavier_uniform:  # T/argument_utils.py gives the model an unknown setting
        yield "Megatron-core 0.19 builds no model with --init-method-xavier-uniform: leave it out"
    if args.openai_gelu:  # nothing reads it, and the activation would be torch's GELU
        yield "Megatron-core 0.19 drops --openai-gelu: leave it out"
    if args.moe_use_upcycling:  # T/training.py passes load_checkpoint an unknown argument
        yield (
            "Megatron-core 0.19 cannot load the dense model of --moe-use-upcycling: leave it out"
        )
    if args.save_tokens_per_expert_interval and not args.moe_grouped_gemm:
        # T/activation_logging.py saves what Transformer Engine's grouped linears take.
        yield (
            "--save-tokens-per-expert-interval saves nothing without experts in grouped GEMMs, "
            "which are not supported: leave it out"
        )
    alltoall = args.num_experts and args.moe_token_dispatcher_type == "alltoall"
    if alltoall and args.expert_model_parallel_size > 1 and args.distributed_backend == "gloo":
        yield (
            "gloo cannot send as Megatron's all-to-all of tokens does: use "
            "--moe-token-dispatcher-type allgather"
        )
    spread = args.tensor_model_parallel_size > 1 and not args.sequence_parallel
    if args.num_experts and spread and not args.skip_train:  # else each rank fails in step 1
        yield "experts under tensor parallelism need --sequence-parallel: add it"
    yield from _fp8_input(args)
    mlp = args.recompute_granularity == "selective" and "mlp" in (args.recompute_modules or [])
    if mlp and args.add_bias_linear:
        # The recomputed MLP returns its bias as an output of the checkpoint. Backward through that
        # output enters the same checkpoint again.
        yield (
            "Megatron-core 0.19 recomputes an MLP with biases without end: recompute other modules "
            "than mlp, or add --disable-bias-linear"
        )


def _fp8_input(args: Namespace) -> Iterator[str]:
    """Refuses --activation-func-fp8-input-store where Megatron would raise, or ignore it."""
    flag = "--activation-func-fp8-input-store"
    if not args.activation_func_fp8_input_store:
        return
    if not args.swiglu:
        yield f"{flag} keeps the input of SwiGLU: add --swiglu, or leave it out"
    if not (args.bias_swiglu_fusion or args.fp4_joins_swiglu):
        yield (
            f"{flag} needs a SwiGLU that is fused: by Megatron on a GPU, without "
            "--no-bias-swiglu-fusion, or in linears that follow recipes, without "
            "--fp4-fused-kernels off, --save-activations-interval and --save-dgrads-interval"
        )


# --- checks that run when a layer is built -------------------------------------------------------


def architecture(config: TransformerConfig) -> Iterator[str]:
    """Refuses kinds of attention for which model/spec.py has no layer specification."""
    if config.multi_latent_attention or config.experimental_attention_variant is not None:
        yield (
            "multi-latent and experimental attention are not supported: leave out "
            "--multi-latent-attention and --experimental-attention-variant"
        )


def layers_of_experts(config: TransformerConfig) -> Iterator[str]:
    """Refuses a --moe-layer-freq list whose length is not the number of layers."""
    layers = config.moe_layer_freq
    if not isinstance(layers, int) and len(layers) != config.num_layers:
        yield (
            f"--moe-layer-freq lists {len(layers)} layers and --num-layers is {config.num_layers}: "
            f"list {config.num_layers}"
        )


def experts(moe_use_grouped_gemm: bool) -> Iterator[str]:
    """Refuses grouped GEMMs for experts."""
    if moe_use_grouped_gemm:
        yield "--moe-grouped-gemm is not supported; leave it out"


def norm(config: TransformerConfig) -> Iterator[str]:
    """Refuses norms that model/norm.py does not compute."""
    if config.normalization not in ("RMSNorm", "LayerNorm"):
        yield (
            f"--normalization {config.normalization} is not supported without Transformer "
            "Engine; use RMSNorm or LayerNorm"
        )


def attention(config: TransformerConfig, layer_number: int) -> Iterator[str]:
    """Refuses features of a layer's attention that model/attention.py does not have.

    layer_number: counted from 1.
    """
    if config.context_parallel_size > 1:
        yield without_te("context parallelism")
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        yield without_te("sliding-window attention (--window-size)")
    if config.softmax_type != "vanilla":
        yield without_te(f"--softmax-type {config.softmax_type}")


def without_te(what: str) -> str:
    """The refusal of a feature that attention has only in Transformer Engine. what: its name."""
    return (
        f"{what} is not supported without {TRANSFORMER_ENGINE}, and use "
        "--transformer-impl transformer_engine"
    )
