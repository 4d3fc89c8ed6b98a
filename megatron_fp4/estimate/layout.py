"""Layout: how a model is spread over GPUs, and how a step is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_fp4.arithmetic.messages import ELEMENTS, kind_of
from megatron_fp4.arithmetic.moments import FLOAT32, Moments
from megatron_fp4.estimate.model import (
    Model,
    Parameters,
    embedding_parameters,
    layer_parameters,
    linear_parameters,
    norm_parameters,
    position_parameters,
)
from megatron_fp4.setting import KeepsW


@dataclass(frozen=True)
class Layout:
    """How a model is spread over GPUs.

    gpus, node: GPUs in all, and of one host. tp, pp, ep: tensor, pipeline and expert parallelism.
    sp: sequence parallelism. vpp: model chunks of a pipeline rank (virtual stages).
    micro_batch, batch: sequences of a microbatch, and of a step over all ranks.
    recompute: whether each layer is computed again in backward, from its input.
    sharded: whether the optimizer is distributed over the data-parallel ranks.
    graphs: whether layers are captured as CUDA graphs.
    fused_dw: whether BF16 linears add dW to main_grad in the GEMM, which needs Apex or
        Transformer Engine. Linears of a recipe always do.
    fused_kernels: whether fused kernels run outside the linears, and linears of a recipe compute
        SwiGLU and RMSNorm (--fp4-fused-kernels). Without them torch's kernels run.
    moments: how Adam's moments are stored (--fp4-optimizer-state). Estimates of memory depend on
        it, and those of time are for float32.
    keeps_w: what is held of quantized weights over a step, without CUDA graphs; see
        `setting.Setting`.
    gradients: the elements in which data-parallel ranks send gradients, a key of
        `arithmetic.messages.FORMS` (--fp4-grad-comm); None: as they are, by Megatron's collectives.
    bf16_gradients: whether gradients are added up, and sent but for `gradients`, in BF16 and not
        in float32 (--grad-reduce-in-bf16).
    gathers_codes: whether a distributed optimizer gathers the weights of quantized linears as codes
        (--fp4-param-gather).
    """

    gpus: int
    node: int = 8
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    micro_batch: int = 1
    batch: int = 1
    recompute: bool = False
    sharded: bool = False
    graphs: bool = False
    fused_dw: bool = True
    fused_kernels: bool = True
    moments: Moments = FLOAT32
    keeps_w: KeepsW | None = "packed"
    gradients: str | None = None
    bf16_gradients: bool = False
    gathers_codes: bool = False

    @property
    def sent_w(self) -> bool:
        """Whether linears get W as codes; see `setting.Setting`."""
        return self.gathers_codes and self.sharded

    @property
    def main_grad(self) -> torch.dtype:
        """The dtype in which gradients are added up."""
        return torch.bfloat16 if self.bf16_gradients else torch.float32

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.pp * self.ep)

    @property
    def microbatches(self) -> int:
        """Microbatches of a data-parallel rank in a step."""
        return self.batch // (self.dp * self.micro_batch)

    def flags(self, experts: bool) -> list[str]:
        """Megatron's flags. experts: whether the model has any."""
        flags = [f"--tensor-model-parallel-size {self.tp}"]
        flags += ["--sequence-parallel"] if self.sp else []
        flags.append(f"--pipeline-model-parallel-size {self.pp}")
        if self.vpp > 1:
            flags.append(f"--num-virtual-stages-per-pipeline-rank {self.vpp}")
        if experts:
            flags += [f"--expert-model-parallel-size {self.ep}", "--expert-tensor-parallel-size 1"]
            flags.append("--moe-token-dispatcher-type alltoall")
        flags += [f"--micro-batch-size {self.micro_batch}", f"--global-batch-size {self.batch}"]
        if self.recompute:
            flags.append("--recompute-granularity full --recompute-method uniform")
            flags.append("--recompute-num-layers 1")
        if self.sharded:
            flags.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
        if self.sent_w:
            flags.append("--fp4-param-gather")
        if self.graphs:
            flags.append("--cuda-graph-impl local")
        if not self.fused_dw:
            flags.append("--no-gradient-accumulation-fusion")
        if not self.fused_kernels:
            flags.append("--fp4-fused-kernels off")
        if self.gradients is not None:
            kind = kind_of(self.gradients)
            flags.append(f"--fp4-grad-comm {kind}")
            if self.gradients != ELEMENTS[kind][0]:
                flags.append(f"--fp4-grad-comm-element {self.gradients}")
        if self.bf16_gradients:
            flags.append("--grad-reduce-in-bf16")
        if self.moments != FLOAT32:
            flags.append(f"--fp4-optimizer-state {self.moments}")
        return flags


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank has of a model.

    rank: its place in the pipeline, from 0. layers: for each of its layers, whether it has experts.
    first, last: whether it has the embedding, and the head.
    """

    rank: int
    layers: tuple[bool, ...]
    first: bool
    last: bool


def stages(model: Model, layout: Layout) -> list[Stage]:
    """The stages of all pipeline ranks. The number of layers must be a multiple of the chunks."""
    pp, chunks = layout.pp, layout.pp * layout.vpp
    length = model.layers // chunks
    found = []
    for rank in range(pp):
        starts = [chunk * length for chunk in range(rank, chunks, pp)]
        numbers = [start + i for start in starts for i in range(length)]
        kinds = tuple(model.has_experts(number) for number in numbers)
        found.append(Stage(rank, kinds, rank == 0, rank == pp - 1))
    return found


def linears(model: Model, layout: Layout, stage: Stage) -> Parameters:
    """The weights of the layers' linears on a rank of a stage, without biases."""
    each = [linear_parameters(model, kind, layout.tp, layout.ep) for kind in stage.layers]
    return Parameters(sum(one.dense for one in each), sum(one.experts for one in each))


def parameters(model: Model, layout: Layout, stage: Stage) -> Parameters:
    """The parameters on a rank of a stage."""
    tp, ep = layout.tp, layout.ep
    each = [layer_parameters(model, kind, tp, ep) for kind in stage.layers]
    dense = sum(layer.dense for layer in each)
    if stage.first:
        dense += embedding_parameters(model, tp) + position_parameters(model)
    if stage.last:
        dense += norm_parameters(model)
        # A tied head shares the embedding's weight, of which another stage needs a copy.
        dense += 0 if model.tied and stage.first else embedding_parameters(model, tp)
    return Parameters(dense, sum(layer.experts for layer in each))
