"""Gives the modules of a built model the functions of fused kernels, and says which of them run."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
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
from megatron_fp4.mcore.runtime.ranks import of_all

ROTARY, SWIGLU, NORMS, LOSS = "rotary embedding", "SwiGLU", "norms", "cross-entropy"
_OPERATIONS = (ROTARY, SWIGLU, NORMS, LOSS)
_LONGEST = 65536  # elements of a row that one of Liger's kernels takes at once


def attach(args: Namespace, model: list[MegatronModule]) -> str:
    """Sets the functions of fused kernels in `model`; returns the line for the start table, without
    an indent.

    args: Megatron's. Every rank calls this with its model chunks, before they are wrapped. The line
    is "" where there is nothing to say, as on a CPU. With --fp4-fused-kernels liger raises
    ConfigError, on all ranks, for an operation of the model that the kernels do not take.
    """
    words = []
    if args.fp4_rotates:
        words.append(_set(args, model, "one kernel of this package", _rotations))
    if args.fp4_liger is None:
        words.append(_without_liger(args))
    else:
        whose = f"kernels of Liger-Kernel {args.fp4_liger}"
        words.append(_set(args, model, whose, _ligers) or f"nothing in {whose}")
    if args.fp4_fused_adamw:
        words.append("AdamW in torch's fused kernel")
    return "; ".join(filter(None, words))


def _without_liger(args: Namespace) -> str:
    if not torch.cuda.is_available() or args.transformer_impl != "local":
        return ""
    why = f"Liger-Kernel fuses their kernels: {fused_kernels.INSTALL}"
    if args.fp4_fused_kernels == "off":
        why = "--fp4-fused-kernels off"
    elsewhere = {ROTARY: args.fp4_rotates, SWIGLU: args.fp4_joins_swiglu}
    operations = [name for name in _OPERATIONS if not elsewhere.get(name)]
    if args.fp4_joins_norms:
        operations[operations.index(NORMS)] = "other norms"
    return f"{', '.join(operations)} in torch's kernels ({why})"


class _Function(NamedTuple):
    """A function that replaces `operation` in a module, and the attribute that takes it.

    is_told: whether the start table names it.
    """

    operation: str
    module: Any
    attribute: str
    value: Any
    is_told: bool = True


def _set(
    args: Namespace,
    model: list[MegatronModule],
    whose: str,
    functions: Callable[[MegatronModule], Iterator[_Function]],
) -> str:
    """Sets `functions` of each model chunk, but for those that are refused; a line that names them.

    The line is "" if no rank has such an operation. Raises as `attach`.
    """
    refused = _refused(model[0].config)
    given = [function for chunk in model for function in functions(chunk)]
    for function in given:
        if function.operation not in refused:
            setattr(function.module, function.attribute, function.value)
    set_here = {function.operation for function in given if function.is_told}
    found = set().union(*of_all(set_here))
    ours = [name for name in _OPERATIONS if name in found and name not in refused]
    others = {name: why for name, why in refused.items() if name in found}
    if others and args.fp4_fused_kernels == "liger":
        name, why = next(iter(others.items()))
        raise ConfigError(
            f"--fp4-fused-kernels liger: there is no fused kernel for this model's {name} "
            f"({why}); leave it out"
        )
    rest = "".join(f"; not {name} ({why})" for name, why in others.items())
    return f"{', '.join(ours) or 'nothing'} in {whose}{rest}" if found else ""


def _refused(config: TransformerConfig) -> dict[str, str]:
    """The operations of a model for which there is no fused kernel, each with the reason: the flag
    or the size that the kernels do not support."""
    found = {}
    if config.rotary_interleaved:
        found[ROTARY] = "--rotary-interleaved"
    if config.apply_rope_fusion:
        found[ROTARY] = "Transformer Engine's, without --no-rope-fusion"
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


def _rotations(chunk: MegatronModule) -> Iterator[_Function]:
    """One Rotation for all attention modules of a model chunk that it can rotate for."""
    from megatron_fp4.mcore.model.rotary import Rotation  # needs Triton

    rotation = Rotation()
    for module in chunk.modules():
        if isinstance(module, RotatingSelfAttention) and _rotates(chunk, module):
            yield _Function(ROTARY, module, "rotation", rotation)


def _ligers(chunk: MegatronModule) -> Iterator[_Function]:
    """Liger-Kernel's functions for the modules of a model chunk.

    The start table does not name the SwiGLU of an MLP whose linears compute it (`is_told`). There
    Liger's kernel runs only where the linears are in BF16, as in some evaluations.
    """
    from megatron_fp4.mcore.model import liger  # needs the package liger_kernel

    for module in chunk.modules():
        if isinstance(module, GatedMLP) and has_swiglu(module.config):
            is_told = not module.is_joined
            yield _Function(SWIGLU, module, "activation", liger.swiglu, is_told)
        elif isinstance(module, Norm):
            yield _Function(NORMS, module, "fused", liger.rms_norm)
    if isinstance(chunk, LanguageModule) and _computes_megatrons_loss(chunk):
        loss = partial(liger.cross_entropy, chunk.tp_group)
        yield _Function(LOSS, chunk, "compute_language_model_loss", loss)


def _rotates(chunk: MegatronModule, module: RotatingSelfAttention) -> bool:
    # Packed sequences begin anew at the first angle. These two refuse them.
    is_alone = isinstance(module.core_attention, SdpaAttention | DotProductAttention)
    # The halves of these angles are equal, which those of other classes need not be.
    angles = type(getattr(chunk, "rotary_pos_emb", None))
    return is_alone and angles in (RotaryEmbedding, YarnRotaryEmbedding)


def _computes_megatrons_loss(chunk: LanguageModule) -> bool:
    own = type(chunk).compute_language_model_loss
    return own is LanguageModule.compute_language_model_loss and bool(chunk.post_process)
