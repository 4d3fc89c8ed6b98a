"""A small Vision Transformer that classifies images, from Megatron-core's vision models."""

from typing import Any

import torch
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import (
    LNImpl,
    get_vit_layer_with_local_spec,
    get_vit_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class ViTClassifier(CLIPViTModel):
    """Patches, position embeddings, transformer layers, a norm, the mean over patches, a head.

    It is CLIPViTModel in its form without class token ("siglip"). The head is a torch.nn.Linear, in
    the model's dtype under every recipe.

    classes: the number of labels. size: (height, width) of the images, multiples of `patch`. patch:
    the side of a patch. uses_te: build layers and norm of Transformer Engine, else Megatron's own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        classes: int,
        size: tuple[int, int],
        patch: int,
        uses_te: bool,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(
            config,
            _te_layer() if uses_te else get_vit_layer_with_local_spec(),
            ln_post_impl=_te_norm() if uses_te else LNImpl,
            add_class_token=False,
            class_token_len=0,
            patch_dim=patch,
            img_h=size[0],
            img_w=size[1],
            model_subtype="siglip",
            pg_collection=pg_collection,
        )
        # torch's embeddings start with a standard deviation of 1, far above that of the patches.
        config.init_method(self.position_embeddings.weight)
        self.output_layer = torch.nn.Linear(config.hidden_size, classes)

    def forward(self, images: Tensor) -> Tensor:
        """The logits, [batch, classes]. images: [batch, 3, height, width]."""
        return self.output_layer(super().forward(images).mean(dim=1))


def _te_layer() -> Any:
    return get_vit_layer_with_transformer_engine_spec()


def _te_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
