"""Model: the sizes of a GPT or LLaMA model, its linears and its numbers of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_fp4.vocabulary import padded_size


class LayerLinear(NamedTuple):
    """One linear of a layer, over all ranks.

    name: the end of its name in Megatron. inputs, outputs: W is [outputs, inputs].
    parallel: how tensor parallelism shards it. expert: whether it belongs to an expert; a layer
    then has one for each expert, and tensor parallelism does not shard it
    (--expert-tensor-parallel-size 1).
    """

    name: str
    inputs: int
    outputs: int
    parallel: Literal["column", "row"]
    expert: bool = False

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Model:
    """The sizes of a model. The names in brackets are Megatron's flags.

    layers, hidden, ffn, heads, sequence: [num-layers, hidden-size, ffn-hidden-size,
        num-attention-heads, seq-length].
    groups: key and value heads [num-query-groups]. channels: of one head [kv-channels].
    vocabulary: without padding [vocab-size]. vocabulary_multiple: [make-vocab-size-divisible-by].
    gated: whether fc1 has a gate [swiglu]. rope: whether queries and keys are rotated; without it
        positions are learned [position-embedding-type].
    tied: whether the head uses the embedding's weight [untie-embeddings-and-output-weights].
    norm_vectors: parameter vectors of a norm: 1 for RMSNorm, 2 for LayerNorm.
    biases: whether linears have one [disable-bias-linear]. qkv_bias: whether linear_qkv has one
        though the others have none [add-qkv-bias]. qk_norm: [qk-layernorm].
    experts, top_k, expert_ffn: [num-experts, moe-router-topk, moe-ffn-hidden-size]; 0 experts in a
        dense model. shared_ffn: [moe-shared-expert-intermediate-size], 0 for no shared expert.
    moe_every: every such layer has experts, from the first on [moe-layer-freq].
    fp8_input: whether SwiGLU's input is kept in FP8 [activation-func-fp8-input-store].
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    vocabulary: int
    sequence: int
    vocabulary_multiple: int = 128
    gated: bool = True
    rope: bool = True
    tied: bool = False
    norm_vectors: int = 1
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    moe_every: int = 1
    fp8_input: bool = False

    @property
    def attention_width(self) -> int:
        """The features of queries, and of attention's output."""
        return self.heads * self.channels

    @property
    def key_width(self) -> int:
        """The features of keys, and of values."""
        return self.groups * self.channels

    @property
    def has_plain_swiglu(self) -> bool:
        """Whether the activation of MLPs is a SwiGLU of an fc1 without a bias."""
        return self.gated and not self.biases

    @property
    def has_rms_norm(self) -> bool:
        """Whether norms are RMSNorms."""
        return self.norm_vectors == 1

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.experts > 0 and layer % self.moe_every == 0

    def linears(self, has_experts: bool) -> tuple[LayerLinear, ...]:
        """The linears of one layer. Of the experts' linears there are `experts` each."""
        hidden, width = self.hidden, self.attention_width
        attention = (
            LayerLinear("linear_qkv", hidden, width + 2 * self.key_width, "column"),
            LayerLinear("linear_proj", width, hidden, "row"),
        )
        if not has_experts:
            return attention + self._mlp("mlp", self.ffn)
        shared = self._mlp("mlp.shared_experts", self.shared_ffn) if self.shared_ffn else ()
        experts = self._mlp("mlp.experts.local_experts", self.expert_ffn, expert=True)
        return attention + shared + experts

    def _mlp(self, name: str, ffn: int, expert: bool = False) -> tuple[LayerLinear, LayerLinear]:
        gates = 2 if self.gated else 1
        return (
            LayerLinear(f"{name}.linear_fc1", self.hidden, gates * ffn, "column", expert),
            LayerLinear(f"{name}.linear_fc2", ffn, self.hidden, "row", expert),
        )

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """The rows of the embedding over all ranks."""
        return padded_size(self.vocabulary, self.vocabulary_multiple, tensor_parallel)


class Parameters(NamedTuple):
    """Numbers of parameters on a rank.

    dense: all but the experts'. experts: of the experts on this rank.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def layer_parameters(model: Model, has_experts: bool, tp: int, ep: int) -> Parameters:
    """The parameters of one layer on a rank. tp, ep: tensor and expert parallelism."""
    dense = 2 * norm_parameters(model) + (2 * model.channels if model.qk_norm else 0)
    dense += model.experts * model.hidden if has_experts else 0  # the router, which is replicated
    experts = 0
    for linear in model.linears(has_experts):
        bias = model.biases or (model.qkv_bias and linear.name == "linear_qkv")
        if linear.expert:
            each = linear.parameters + (linear.outputs if bias else 0)
            experts += each * model.experts // ep
            continue
        dense += linear.parameters // tp
        if bias:  # that of a row-parallel linear is on every rank
            dense += linear.outputs // (tp if linear.parallel == "column" else 1)
    return Parameters(dense, experts)


def linear_parameters(model: Model, has_experts: bool, tp: int, ep: int) -> Parameters:
    """The weights of one layer's linears on a rank, without biases."""
    dense = experts = 0
    for linear in model.linears(has_experts):
        if linear.expert:
            experts += linear.parameters * model.experts // ep
        else:
            dense += linear.parameters // tp
    return Parameters(dense, experts)


def norm_parameters(model: Model) -> int:
    """The parameters of one norm over the hidden size."""
    return model.norm_vectors * model.hidden


def embedding_parameters(model: Model, tp: int) -> int:
    """The parameters of the token embedding on a rank, which are also those of the head."""
    return model.padded_vocabulary(tp) // tp * model.hidden


def position_parameters(model: Model) -> int:
    """The parameters of learned positions, which are on every rank of the first stage."""
    return 0 if model.rope else model.sequence * model.hidden
