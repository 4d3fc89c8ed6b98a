"""Gives the modules of a built model Liger-Kernel's functions, and says which of them run."""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import fused_kernels
from megatron_fp4.mcore.model.attention import SdpaAttention
from megatron_fp4.mcore.model.mlp import GatedMLP, changes_swiglu, has_swiglu
from megatron_fp4.mcore.model.norm import Norm
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention
from megatron_fp4.mcore.runtime.ranks import on_all

ROTARY, SWIGLU, NORMS, LOSS = "rotary embedding", "SwiGLU", "norms", "cross-entropy"
_OPERATIONS = (ROTARY, SWIGLU, NORMS, LOSS)
_LONGEST = 65536  # elements of a row that one of Liger's kernels takes at once


def attach(args: Namespace, model: list[MegatronModule]) -> str:
    """Sets Liger's functions in `model`; returns the line for the start table, without an indent.

    args: Megatron's. Every rank calls this with its model chunks, before they are wrapped. The line
    is "" where there is nothing to say, as on a CPU. With --fp4-fused-kernels liger raises
    ConfigError, on all ranks, for an operation of the model that Liger's kernels do not take.
    """
    words = [_without_liger(args) if args.fp4_liger is None else _with_liger(args, model)]
    if args.fp4_fused_adamw:
        words.append("AdamW in torch's fused kernel")
    return "; ".join(filter(None, words))


def _without_liger(args: Namespace) -> str:
    if not torch.cuda.is_available() or args.transformer_impl != "local":
        return ""
    why = f"Liger-Kernel fuses their kernels: {fused_kernels.INSTALL}"
    if args.fp4_fused_kernels == "off":
        why = "--fp4-fused-kernels off"
    return f"{', '.join(_OPERATIONS)} in torch's kernels ({why})"


def _with_liger(args: Namespace, model: list[MegatronModule]) -> str:
    refused = _refused(model[0].config)
    set_here = {name for chunk in model for name in _set(chunk, refused)}
    found = set().union(*on_all(lambda: set_here))
    ours = [name for name in _OPERATIONS if name in found and name not in refused]
    others = {name: why for name, why in refused.items() if name in found}
    if others and args.fp4_fused_kernels == "liger":
        name, why = next(iter(others.items()))
        raise ConfigError(
            f"--fp4-fused-kernels liger: Liger-Kernel has no kernel for this model's {name} "
            f"({why}); leave it out"
        )
    rest = "".join(f"; not {name} ({why})" for name, why in others.items())
    return f"{', '.join(ours) or 'nothing'} in kernels of Liger-Kernel {args.fp4_liger}{rest}"


def _refused(config: TransformerConfig) -> dict[str, str]:
    """By operation, why Liger's kernels do not take it, for those that they do not take."""
    found = {}
    if config.rotary_interleaved:
        found[ROTARY] = "--rotary-interleaved"
    if config.apply_rope_fusion:
        found[ROTARY] = "Transformer Engine's, by --apply-rope-fusion"
    if config.add_bias_linear:
        found[SWIGLU] = "fc1 has a bias"
    elif config.num_moe_experts is not None:
        found[SWIGLU] = "experts weight it"
    elif changes_swiglu(config):
        found[SWIGLU] = "it is clamped or shifted"
    elif config.activation_func_fp8_input_store:
        found[SWIGLU] = "it is stored in FP8"
    elif (config.ffn_hidden_size or 0) > _LONGEST * config.tensor_model_parallel_size:
        found[SWIGLU] = f"more than {_LONGEST} elements in a row"
    if config.normalization != "RMSNorm":
        found[NORMS] = config.normalization
    elif config.fp32_residual_connection:
        found[NORMS] = "--fp32-residual-connection"
    elif config.hidden_size > _LONGEST:
        found[NORMS] = f"more than {_LONGEST} elements in a row"
    if config.cross_entropy_loss_fusion:
        found[LOSS] = "Megatron's, by --cross-entropy-loss-fusion"
    return found


def _set(chunk: MegatronModule, refused: dict[str, str]) -> set[str]:
    """Sets the functions in one model chunk, but for those that are refused.

    Returns the operations of the chunk for which Liger has kernels, the refused ones too. A SwiGLU
    that linears compute is not among them: Liger's kernel runs only where they are in BF16, as in
    some evaluations.
    """
    from megatron_fp4.mcore.model import liger  # needs the package liger_kernel

    modules: list[tuple[str, Any, str, Any]] = []  # operation, module, attribute, its value
    for module in chunk.modules():
        if isinstance(module, RotatingSelfAttention) and _rotates(chunk, module):
            modules.append((ROTARY, module, "rotate", liger.rotate))
        elif isinstance(module, GatedMLP) and has_swiglu(module.config):
            modules.append((SWIGLU, module, "activation", liger.swiglu))
        elif isinstance(module, Norm):
            modules.append((NORMS, module, "fused", liger.rms_norm))
    if isinstance(chunk, LanguageModule) and _computes_megatrons_loss(chunk):
        loss = partial(liger.cross_entropy, chunk.tp_group)
        modules.append((LOSS, chunk, "compute_language_model_loss", loss))
    for operation, module, attribute, value in modules:
        if operation not in refused:
            setattr(module, attribute, value)
    return {
        operation
        for operation, module, *_ in modules
        if not (isinstance(module, GatedMLP) and module.is_joined)
    }


def _rotates(chunk: MegatronModule, module: RotatingSelfAttention) -> bool:
    # Packed sequences begin anew at the first angle. These two refuse them.
    is_alone = isinstance(module.core_attention, SdpaAttention | DotProductAttention)
    return is_alone and getattr(chunk, "position_embedding_type", None) in ("rope", "yarn")


def _computes_megatrons_loss(chunk: LanguageModule) -> bool:
    own = type(chunk).compute_language_model_loss
    return own is LanguageModule.compute_language_model_loss and bool(chunk.post_process)
