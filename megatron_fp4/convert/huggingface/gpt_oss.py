"""FP4 weights of experts in the layout of gpt-oss: the experts of a layer are one tensor.

gate_up_proj_blocks   uint8 [experts, 2 * ffn, hidden / 32, 16]: E2M1 codes of blocks of 32, element
                      2i in the low nibble of byte i; rows of gate and up alternate
gate_up_proj_scales   uint8 [experts, 2 * ffn, hidden / 32], E8M0
down_proj_blocks      uint8 [experts, hidden, ffn / 32, 16]
down_proj_scales      uint8 [experts, hidden, ffn / 32]

`transformers` and vLLM read this layout into gpt-oss's own expert class, whose activation function
has constants and biases of its own. It is for programs that read the files themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.convert.huggingface import compressed_tensors
from megatron_fp4.convert.huggingface.fp4 import QuantizedWeights, is_expert
from megatron_fp4.convert.huggingface.layouts import Entry
from megatron_fp4.convert.safetensors_files import Named
from megatron_fp4.convert.torch_dist import Checkpoint, TensorInfo
from megatron_fp4.errors import ConfigError

_PROJECTIONS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
_LENGTH = 32  # elements of a block
_METHOD = "mxfp4"  # quant_method in gpt-oss's own config.json


def problem(quantizer: Quantizer) -> str:
    """What this layout cannot hold of a quantizer; "" if it holds its codes and scales."""
    found = compressed_tensors.problem(quantizer)
    return found or ("" if quantizer.scale == "e8m0" else f"{quantizer.scale} scales")


def pack(codes: Tensor, scales: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(blocks, scales) of one expert's matrix, in the order of this layout.

    codes: [rows, k / 2]. scales: [rows, k / 32]. parts: 2 where the rows are those of gate and then
    those of up, else 1.
    """
    blocks = codes.unflatten(-1, (-1, _LENGTH // 2))
    return _alternated(blocks, parts), _alternated(scales, parts)


def _alternated(rows: Tensor, parts: int) -> Tensor:
    return torch.stack(rows.chunk(parts), dim=1).flatten(0, 1)


class GptOssExperts:
    """A model whose experts have FP4 weights in the layout of gpt-oss; other weights are as stored.

    entries: of the model. quantize_as: see `QuantizedWeights`. Raises ConfigError if the model has
    no experts, and if the layout cannot hold their codes.
    """

    def __init__(
        self, checkpoint: Checkpoint, entries: Sequence[Entry], quantize_as: Quantizer | None
    ) -> None:
        experts = [entry for entry in entries if is_expert(entry)]
        if not experts:
            raise ConfigError("the model has no experts: use --format compressed-tensors")
        self._weights = QuantizedWeights(
            checkpoint, experts, problem, "gpt-oss-experts", quantize_as
        )
        self._layers: dict[tuple[str, tuple[int, ...]], list[Entry]] = {}
        for entry in experts:
            self._layers.setdefault((entry.key, entry.index[:-1]), []).append(entry)
        for layer in self._layers.values():
            if len({entry in self._weights.choices for entry in layer}) > 1:
                raise ConfigError(f"{layer[0].linear}: some experts of its layer are in BF16")
        self._latest: tuple[Entry, dict[str, Tensor]] | None = None

    def holds(self, entry: Entry) -> bool:
        """Whether this entry is quantized."""
        return entry in self._weights.choices

    def tensors(self, entry: Entry) -> Iterator[Named]:
        """The tensors of all experts of a layer, with the entry of the first; else none."""
        if entry.index[-1] != 0:
            return
        out, k = self._weights.shape(entry)
        shape = (entry.axes[-1], out, k // _LENGTH)
        stem = re.sub(r"\.\d+\.[a-z0-9_]+\.weight$", "", entry.names[0])
        projection = _PROJECTIONS[entry.key.split(".")[-2]]
        for word, its_shape in (("blocks", (*shape, _LENGTH // 2)), ("scales", shape)):
            info = TensorInfo(its_shape, torch.uint8)
            yield Named(f"{stem}.{projection}_{word}", info, partial(self._load, entry, word))

    def _load(self, first: Entry, word: str) -> Tensor:
        """Blocks or scales of all experts of a layer. The latest layer is kept."""
        if self._latest is None or self._latest[0] != first:
            packed = []
            for entry in self._layers[first.key, first.index[:-1]]:
                made = compressed_tensors.pack(self._weights.quantized(entry))
                codes, scales = made["weight_packed"], made["weight_scale"]
                packed.append(pack(codes, scales, len(entry.names)))
            blocks, scales = (torch.stack(parts) for parts in zip(*packed, strict=True))
            self._latest = first, {"blocks": blocks, "scales": scales}
        return self._latest[1][word]

    def config(self) -> dict[str, Any]:
        """The fields that config.json has beside those of the model."""
        not_experts = ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]
        return {
            "quantization_config": {
                "quant_method": _METHOD,
                "modules_to_not_convert": not_experts,
            }
        }

    def summary(self) -> list[str]:
        """Lines that tell what is exported."""
        return [
            *(f"gpt-oss-experts, {line}" for line in self._weights.summary()),
            "transformers and vLLM read these tensors for gpt-oss models alone; "
            "--format compressed-tensors makes a model that they load",
        ]
