"""Refuses what pretrain_gpt.py, this package's own training script, does not have.

A user's own script brings its layers, datasets and tasks, so these checks do not apply to it.
"""

from argparse import Namespace
from collections.abc import Iterator

from megatron.core.transformer.enums import AttnBackend

from megatron_fp4.mcore.arguments.flag_names import flag_of


def layers(args: Namespace) -> Iterator[str]:
    """Refuses layers other than those of model/spec.py."""
    if args.attention_backend == AttnBackend.local:
        yield (
            "--attention-backend local is not supported; leave it out: without Transformer Engine "
            "attention runs in torch's scaled_dot_product_attention"
        )
    if args.spec and args.fp4_recipe is not None:
        yield (
            f"recipe {args.fp4_recipe} does not support --spec: leave it out, the layers are this "
            "package's (torchrun -m megatron_fp4.run SCRIPT follows those of a script of your own)"
        )


def tasks(args: Namespace) -> Iterator[str]:
    """Refuses finetuning, and other losses and uses of data than plain pretraining.

    Megatron leaves the loss of distillation (--logits-load-dir) to the training script.
    """
    others = ("sft", "fim_data", "dataloader_inter_document_masking")
    for option in (*others, "perform_rl_step", "logits_load_dir"):
        if getattr(args, option):
            yield f"{flag_of(option)} is not supported: pretraining only"
    if args.dataloader_type == "external":
        yield (
            "--dataloader-type external is not supported: use single or cyclic, the data are "
            "Megatron's datasets"
        )
    for option in ("full_validation", "multiple_validation_sets"):
        if getattr(args, option):
            yield f"{flag_of(option)} is not supported: leave it out, and give --eval-iters N"
