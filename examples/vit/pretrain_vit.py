"""Trains a small Vision Transformer on scikit-learn's digits, or on a folder of images.

    torchrun --nproc-per-node N -m megatron_fp4.run examples/vit/pretrain_vit.py --bf16 \
        --fp4-recipe tetrajet-ema --fold 0 --folds 5

The script is Megatron's alone: it imports nothing of this package, which puts its linears into the
model when it runs the script. The size of the model is a default of Megatron's own flags.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from torch import Tensor
from torch.nn import functional as F
from vit_data import Digits, Folder, HeldOutImages, Images, TrainingImages, batches, divide, refusal
from vit_model import ViTClassifier

# Megatron's flags, of which it has no defaults or others. A patch is a token, and has no word.
DEFAULTS = {
    "img_h": 32,
    "img_w": 32,
    "patch_dim": 4,
    "seq_length": 64,
    "max_position_embeddings": 4096,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 128,
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "micro_batch_size": 16,
    "train_iters": 300,
    "lr": 2e-3,
    "min_lr": 1e-5,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.1,
    "init_method_std": 0.1,
    "weight_decay": 0.05,
    "eval_interval": 1000,
    "log_interval": 20,
}


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("ViT")
    group.add_argument(
        "--image-folder",
        type=Path,
        metavar="PATH",
        help="a folder with a folder of images for each class (default: scikit-learn's digits)",
    )
    group.add_argument("--folds", type=int, default=5, help="the folds the images are divided into")
    group.add_argument("--fold", type=int, default=0, help="the fold that is held out, from 0")
    parser.set_defaults(**DEFAULTS)
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises SystemExit for sizes, folds or layouts that this model cannot have."""
    if min(args.img_h, args.img_w, args.patch_dim) < 1:
        raise refusal("--img-h, --img-w and --patch-dim are 1 or more")
    down, across = args.img_h // args.patch_dim, args.img_w // args.patch_dim
    if (down * args.patch_dim, across * args.patch_dim) != (args.img_h, args.img_w):
        raise refusal("--img-h and --img-w are multiples of --patch-dim")
    if args.seq_length != down * across:
        raise refusal(f"an image has {down * across} patches: give --seq-length {down * across}")
    if not 0 <= args.fold < args.folds or args.folds < 2:
        raise refusal("--fold is from 0 to --folds - 1, and --folds at least 2")
    if args.pipeline_model_parallel_size > 1 or args.sequence_parallel:
        raise refusal(
            "Megatron's vision model has neither pipeline nor sequence "
            "parallelism: leave out --pipeline-model-parallel-size and --sequence-parallel"
        )


def model_provider(
    images: Images,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> ViTClassifier:
    args = get_args()
    return ViTClassifier(
        config or core_transformer_config_from_args(args),
        classes=images.classes,
        size=(args.img_h, args.img_w),
        patch=args.patch_dim,
        uses_te=args.transformer_impl == "transformer_engine",
        pg_collection=pg_collection,
    )


class Datasets:
    """Megatron's provider of datasets: the training images, the held-out fold, no test set."""

    is_distributed = True  # every rank reads the images itself

    def __init__(self, images: Images, args: argparse.Namespace) -> None:
        self._images, self._args = images, args
        self.training, self.held_out = divide(len(images), args.folds, args.fold)

    def __call__(
        self, samples: list[int], vp_stage: int | None = None
    ) -> tuple[TrainingImages, HeldOutImages, None]:
        batch = self._args.eval_global_batch_size
        return (
            TrainingImages(self._images, self.training, samples[0], self._args.seed),
            HeldOutImages(self._images, self.held_out, samples[1], batch),
            None,
        )


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    return model(batch["image"]), partial(losses_of, batch["label"], batch["weight"])


def losses_of(
    labels: Tensor, weights: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(the sum of the losses, the number of images, what Megatron logs: sums and their numbers)."""
    logits, weights = logits.float(), weights.float()
    loss = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    images = weights.sum().detach()
    right = ((logits.argmax(dim=-1) == labels) * weights).sum()
    logged = {
        "loss": torch.stack([loss.detach(), images]),
        "accuracy": torch.stack([right, images]),
    }
    return loss, images.to(torch.int), logged


def main(
    step: Callable[..., Any] = forward_step, add_flags: Callable[..., Any] = add_flags
) -> None:
    """Trains as the command line says. step: Megatron's forward step. add_flags: adds the flags."""
    args = parse_and_validate_args(add_flags)
    check(args)
    folder = args.image_folder
    images: Images = (
        Folder(folder, args.img_h, args.img_w) if folder else Digits(args.img_h, args.img_w)
    )
    if len(images) < args.folds:
        raise refusal(f"--folds {args.folds} of {len(images)} images: give a smaller number")
    datasets = Datasets(images, args)
    # An evaluation takes each image of the fold once.
    args.eval_iters = batches(len(datasets.held_out), args.eval_global_batch_size)
    config = pretrain_cfg_container_from_args(args)
    provider = partial(model_provider, images)
    pretrain(config, datasets, ModelType.encoder_or_decoder, step, provider)


if __name__ == "__main__":
    main()
