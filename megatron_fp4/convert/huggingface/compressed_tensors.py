"""FP4 weights in the formats of the library compressed-tensors.

`transformers` loads them with that library, and vLLM itself. For each linear of the model:

weight_packed         uint8 [out, in / 2]: E2M1 codes, element 2i in the low nibble of byte i
weight_scale          mxfp4-pack-quantized: uint8 [out, in / 32], E8M0
                      nvfp4-pack-quantized: float8_e4m3fn [out, in / 16]
weight_global_scale   nvfp4-pack-quantized: float32 [1], which divides the block scales

config.json names the format and the linears that have it (`quantization_config`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.convert.huggingface.fp4 import QuantizedWeights, is_expert
from megatron_fp4.convert.huggingface.layouts import Entry, Transposed
from megatron_fp4.convert.safetensors_files import Named
from megatron_fp4.convert.torch_dist import Checkpoint, TensorInfo
from megatron_fp4.errors import ConfigError

_METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Format:
    """One of the library's formats for FP4 weights.

    name: in quantization_config. scale: the format of block scales, as a Quantizer names it.
    length: elements of a block. dtype: of the stored block scales. strategy: the library's name for
    what shares a scale.
    """

    name: str
    scale: str
    length: int
    dtype: torch.dtype
    strategy: str

    @property
    def has_tensor_scale(self) -> bool:
        return self.strategy == "tensor_group"

    def infos(self, shape: torch.Size) -> dict[str, TensorInfo]:
        """The tensors that stand for a weight [out, in], by the last part of their names."""
        out, k = shape
        found = {
            "weight_packed": TensorInfo((out, k // 2), torch.uint8),
            "weight_scale": TensorInfo((out, k // self.length), self.dtype),
        }
        if self.has_tensor_scale:
            found["weight_global_scale"] = TensorInfo((1,), torch.float32)
        return found

    def arguments(self, *, dynamic: bool) -> dict[str, Any]:
        """The library's QuantizationArgs. dynamic: of activations, which have no stored scales."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": self.length,
            "scale_dtype": str(self.dtype),
            "dynamic": dynamic,
        }


MXFP4 = Format("mxfp4-pack-quantized", "e8m0", 32, torch.uint8, "group")
NVFP4 = Format("nvfp4-pack-quantized", "e4m3", 16, torch.float8_e4m3fn, "tensor_group")


def format_of(quantizer: Quantizer) -> Format | None:
    """The format that holds the codes and scales of `quantizer`; None if `problem` names one."""
    if problem(quantizer):
        return None
    return MXFP4 if quantizer.scale == MXFP4.scale else NVFP4


def problem(quantizer: Quantizer) -> str:
    """What these formats cannot hold of a quantizer; "" if they hold its codes and scales.

    A block that is larger than the format's is held as several blocks with the same scale.
    """
    if quantizer.element != "e2m1":
        return f"{quantizer.element} elements"
    if quantizer.row_max:
        return "row scales beside block scales"
    if quantizer.prescale != 1.0:
        return f"a prescale of {quantizer.prescale:g}"
    if not quantizer.block[1]:
        span = "whole rows" if quantizer.block[0] else "whole tensors"
        return f"{quantizer.scale} scales for {span}"
    for form in (MXFP4, NVFP4):
        if quantizer.scale == form.scale:
            fits = not quantizer.block[1] % form.length
            return "" if fits else f"blocks of {quantizer.block[1]} under {form.scale} scales"
    return f"{quantizer.scale} scales"


def pack(made: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors that stand for a matrix [out, in] that was quantized along `in`.

    The names are those of `Format.infos`. Rows of the first two belong to rows of the matrix.
    """
    form = format_of(made.quantizer)
    assert form is not None
    across, along = made.quantizer.block
    scales = made.scales.repeat_interleave(across, 0).repeat_interleave(along // form.length, 1)
    found = {"weight_packed": made.codes, "weight_scale": scales.view(form.dtype)}
    if form.has_tensor_scale:
        scale = made.tensor_scale
        found["weight_global_scale"] = torch.ones(1) if scale is None else 1 / scale.view(1)
    return found


class CompressedTensors:
    """A model with FP4 weights in the format of compressed-tensors.

    entries: of the model. quantize_as: see `QuantizedWeights`. activations: "training" for X as
    training's forward pass had it, where the format expresses that; "bf16" for X in BF16.
    Raises ConfigError if the linears do not have one such format.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry],
        quantize_as: Quantizer | None,
        activations: str,
    ) -> None:
        if any(isinstance(entry.layout, Transposed) for entry in entries):
            raise ConfigError(
                "GPT-2 in transformers has Conv1D, and compressed-tensors takes Linear alone: use "
                "--format plain"
            )
        self._entries, self._checkpoint = entries, checkpoint
        self._weights = QuantizedWeights(checkpoint, entries, problem, _METHOD, quantize_as)
        forms = {format_of(choice.w) for choice in self._weights.choices.values()}
        if len(forms) > 1:
            raise ConfigError(
                "some linears are in MXFP4 and others in NVFP4: an export has one of them; use "
                "--format plain"
            )
        [form] = forms
        assert form is not None
        self._form = form
        self._keeps_x = "asked for" if activations == "bf16" else self._obstacle_to_x()

    def _obstacle_to_x(self) -> str:
        """Why the format cannot quantize X as training did; "" if it can."""
        for entry, choice in self._weights.choices.items():
            if choice.recipe is None:
                return "training did not quantize it with these weights"
            x = choice.recipe.fprop.a
            if x is None:
                return "as in training"
            if choice.recipe.outliers is not None:
                return f"{entry.linear} splits outliers off X"
            if not x.mxfp4 or x.rounding != "nearest" or x.prescale != 1.0:
                return "only MXFP4 with nearest rounding can be asked for without calibration"
        return "" if self._form == MXFP4 else "the weights are in NVFP4"

    def holds(self, entry: Entry) -> bool:
        """Whether this entry is quantized."""
        return entry in self._weights.choices

    def tensors(self, entry: Entry) -> Iterator[Named]:
        """The tensors that stand for a quantized entry."""
        empty = torch.empty(self._weights.shape(entry), device="meta")
        for i, part in enumerate(entry.layout.split(empty)):
            for word, info in self._form.infos(part.shape).items():
                name = entry.names[i].removesuffix("weight") + word
                yield Named(name, info, partial(self._load, entry, i, word))

    def _load(self, entry: Entry, number: int, word: str) -> Tensor:
        whole = pack(self._weights.quantized(entry))[word]
        return whole if whole.dim() == 1 else entry.layout.split(whole)[number].contiguous()

    def config(self) -> dict[str, Any]:
        """The fields that config.json has beside those of the model."""
        group = {
            "targets": ["Linear"],
            "format": self._form.name,
            "weights": self._form.arguments(dynamic=False),
            "input_activations": None if self._keeps_x else MXFP4.arguments(dynamic=True),
            "output_activations": None,
        }
        return {
            "quantization_config": {
                "quant_method": _METHOD,
                "format": self._form.name,
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": self._ignored(),
            }
        }

    def _ignored(self) -> list[str]:
        """The modules with a matrix that is not quantized: the head, routers, linears in BF16."""
        found = [
            name.removesuffix(".weight")
            for entry in self._entries
            if not self.holds(entry)
            and len(self._checkpoint.tensors[entry.key].shape) - len(entry.index) == 2
            and not entry.key.startswith("embedding.")
            for name in entry.names
        ]
        return list(dict.fromkeys([*found, "lm_head"]))  # a tied head has no tensor of its own

    def summary(self) -> list[str]:
        """Lines that tell what is exported."""
        lines = [f"{self._form.name}, {line}" for line in self._weights.summary()]
        if self._keeps_x:
            lines.append(f"activations: not quantized ({self._keeps_x})")
        else:
            lines.append(
                "activations: MXFP4, as in training, but with block scales by the rule of the "
                "program that runs the model"
            )
        return [*lines, *self._limits_of_transformers()]

    def _limits_of_transformers(self) -> list[str]:
        """What transformers cannot do with this model, as of version 5.23."""
        lines = []
        experts = [entry for entry in self._weights.linears if is_expert(entry)]
        if self._form == NVFP4 and any(map(self.holds, experts)):
            lines.append(
                "WARNING: transformers 5.23 ignores weight_global_scale of experts, so its results "
                "are wrong; vLLM reads it"
            )
        elif not all(map(self.holds, experts)):
            lines.append(
                "WARNING: transformers 5.23 refuses a model with experts in high precision beside "
                "FP4 linears; vLLM loads it"
            )
        dtypes = {self._checkpoint.tensors[entry.key].dtype for entry in self._weights.choices}
        for dtype in dtypes - {torch.bfloat16}:
            lines.append(
                "WARNING: transformers 5.23 unpacks weights to BF16 and cannot multiply them by "
                f"activations in {str(dtype).removeprefix('torch.')}: load the model with "
                "dtype=torch.bfloat16, or with CompressedTensorsConfig(dequantize=True)"
            )
        return lines
