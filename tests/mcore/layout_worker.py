"""One torchrun world of one layout: the first training step of a small LLaMA, for every recipe.

    torchrun --nproc-per-node 2 layout_worker.py OUT --tp 2 --sequence-parallel

Parameters are a function of their global names, and a sample's tokens of its index, so every layout
trains the same model on the same batch. Rank 0 writes to OUT, for each recipe and dtype: the loss,
the whole gradient of each parameter, and the codes and scales of each operand of each GEMM at their
places in the unsharded tensor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.formats import unpack
from megatron_fp4.mcore import cpu

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig  # noqa: E402

from megatron_fp4 import recipes  # noqa: E402
from megatron_fp4.backends import reference  # noqa: E402
from megatron_fp4.call import Call  # noqa: E402
from megatron_fp4.mcore import attach as attaching  # noqa: E402
from megatron_fp4.mcore.run import Run  # noqa: E402
from megatron_fp4.mcore.spec import layer_spec  # noqa: E402
from megatron_fp4.philox import stream_id  # noqa: E402

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 2, 64, 128, 4, 2, 96
SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 32, 2, 4
# label -> (recipe, options). Hadamard groups of 64 do not divide this model's shards; token-wise
# outlier quantiles depend on the tensor-parallel size, so there is a case without them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("mxfp4", {}),
    "tetrajet": ("tetrajet", {}),
    "mxfp4-rht-sr": ("mxfp4-rht-sr", {"hadamard": 32}),
    "dge": ("dge-occ", {"occ": False}),
    "dge-occ": ("dge-occ", {}),
}
BROKEN = "tetrajet-broken"  # the known mistakes of `broken`, which the comparison must catch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend)
    mpu.initialize_model_parallel(args.tp, args.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        None,
        GLOBAL_BATCH,
        MICRO_BATCH,
        mpu.get_data_parallel_world_size(),
    )
    results = {
        (case, dtype): first_step(case, dtype, args)
        for dtype in (torch.float64, torch.float32)
        for case in CASES
    }
    with broken():
        results[BROKEN, torch.float64] = first_step("tetrajet", torch.float64, args)
    if torch.distributed.get_rank() == 0:
        torch.save(results, args.out)
    torch.distributed.destroy_process_group()


def first_step(case: str, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Any]:
    recipe_name, options = CASES[case]
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp4_recipe=recipe_name,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        sequence_parallel=args.sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
    )
    model_config = GPTModelConfig(
        transformer=config,
        transformer_layer_spec=layer_spec,
        vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
        position_embedding_type="rope",
        parallel_output=False,
        share_embeddings_and_output_weights=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunk = GPTModelBuilder(model_config).build_model(groups)
    run = Run(
        recipes.get_recipe(recipe_name, **options),
        argparse.Namespace(
            micro_batch_size=MICRO_BATCH,
            seq_length=SEQUENCE,
            iteration=3,
            train_iters=10,
            fp4_seed=2**40 + 7,
            fp4_eval_forward="fp4",
            first_last_layers_bf16=False,
            fp4_weight_cache="packed",
            fp4_saved_x="packed",
            fp4_wgrad_fusion=True,
        ),
    )
    names = global_names(chunk)
    for name, parameter in chunk.named_parameters():
        fill(names[name], parameter)
    chunk = chunk.to(torch.cuda.current_device(), dtype)
    attaching.attach(run, [chunk])
    with Recorder() as recorder:
        loss = train_step(chunk, run)
    return {
        "loss": loss,
        "gradients": whole_gradients(chunk, names),
        "operands": recorder.gathered(),
    }


@contextmanager
def broken() -> Iterator[None]:
    """Noise that ignores the data-parallel rank, the pipeline stage and SwiGLU's two ranges."""
    rank, linears, set_stride = (
        mpu.get_data_parallel_rank,
        attaching._linears,
        attaching.Fp4ColumnParallelLinear.attach,
    )

    def one_range(layer: Any, name: str, run: Run, recipe: Any) -> None:
        ranges, layer.weight.partition_stride = stride(layer.weight), 1
        set_stride(layer, name, run, recipe)
        layer.weight.partition_stride = ranges

    def local_names(chunk: Any) -> Iterator[Any]:
        for name, module in chunk.named_modules():
            if isinstance(module, attaching.Fp4Layer):
                yield name, module, None

    mpu.get_data_parallel_rank = lambda *_, **__: 0
    attaching._linears = local_names
    attaching.Fp4ColumnParallelLinear.attach = one_range  # type: ignore
    try:
        yield
    finally:
        mpu.get_data_parallel_rank, attaching._linears = rank, linears
        attaching.Fp4ColumnParallelLinear.attach = set_stride  # type: ignore


def train_step(chunk: Any, run: Run) -> float:
    dp_rank, dp = (
        torch.distributed.get_rank(mpu.get_data_parallel_group()),
        (mpu.get_data_parallel_world_size()),
    )
    device = torch.cuda.current_device()
    microbatches = GLOBAL_BATCH // MICRO_BATCH // dp

    def forward(data: Any, model: Any) -> Any:
        first = (next(data) * dp + dp_rank) * MICRO_BATCH
        tokens = torch.stack([sample(first + b) for b in range(MICRO_BATCH)])
        positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
        logits = model(tokens[:, :-1].to(device), positions.to(device), None)
        return logits, partial(loss_function, tokens[:, 1:].to(device))

    chunk.vp_stage = None
    losses = get_forward_backward_func()(
        forward_step_func=run.counting(forward),
        data_iterator=iter(range(microbatches)),
        model=[chunk],
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    mean = sum(float(x["loss"]) for x in losses) / microbatches
    total = torch.tensor([mean], dtype=torch.float64, device=device)
    if not mpu.is_pipeline_last_stage():
        total.zero_()
    torch.distributed.all_reduce(total)
    copies = torch.distributed.get_world_size() // mpu.get_pipeline_model_parallel_world_size()
    return total.item() / copies


def loss_function(labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy in the model's own dtype (upstream's rounds logits to float32 first)."""
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place


def sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)


# --- parameters by their global names ----------------------------------------------------------


def global_names(chunk: Any) -> dict[str, str]:
    """Local parameter name -> name with the layer's number in the whole model."""
    offset = {
        prefix: f"decoder.layers.{layer.layer_number - 1}"
        for prefix, layer in chunk.named_modules()
        if isinstance(layer, attaching.TransformerLayer)
    }
    names = {}
    for name, _ in chunk.named_parameters():
        prefix = next((p for p in offset if name.startswith(f"{p}.")), "")
        names[name] = offset.get(prefix, "") + name.removeprefix(prefix)
    return names


def fill(name: str, parameter: Any) -> None:
    """The shard of a tensor that is drawn from the name."""
    if "layernorm" in name or "norm." in name:
        return
    axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    shape = list(parameter.shape)
    if axis is not None:
        shape[axis] *= mpu.get_tensor_model_parallel_world_size()
    generator = torch.Generator().manual_seed(stream_id(name))
    whole = torch.randn(shape, generator=generator) * 0.05
    with torch.no_grad():
        parameter.copy_(whole if axis is None else shard(whole, axis, stride(parameter)))


def stride(parameter: Any) -> int:
    return getattr(parameter, "partition_stride", 1)


def shard(whole: Tensor, axis: int, ranges: int) -> Tensor:
    """This rank's part: with `ranges` 2, its part of each half (SwiGLU's gate and up)."""
    ranks, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    parts = [part.chunk(ranks, axis)[rank] for part in whole.chunk(ranges, axis)]
    return torch.cat(parts, axis)


def whole_gradients(chunk: Any, names: dict[str, str]) -> dict[str, Tensor]:
    """Every parameter's gradient of the whole batch, unsharded, on every rank."""
    mine = {}
    tp_group, dp_group = mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group()
    for name, parameter in chunk.named_parameters():
        gradient = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=tp_group)
        torch.distributed.all_reduce(gradient, group=dp_group)
        gradient /= dp_group.size()
        if getattr(parameter, "tensor_model_parallel", False):
            gradient = unshard(gradient, parameter.partition_dim, stride(parameter), tp_group)
        mine[names[name]] = gradient.cpu()
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return {name: gradient for part in everyone for name, gradient in part.items()}


def unshard(gradient: Tensor, axis: int, ranges: int, group: Any) -> Tensor:
    shards = [torch.empty_like(gradient) for _ in range(group.size())]
    torch.distributed.all_gather(shards, gradient.contiguous(), group=group)
    parts = [s.chunk(ranges, axis) for s in shards]
    return torch.cat([parts[r][i] for i in range(ranges) for r in range(group.size())], axis)


# --- operands at their global places -----------------------------------------------------------


class Recorder:
    """Keeps each quantized operand: codes at their global rows and columns."""

    def __enter__(self) -> Recorder:
        self.records: list[Any] = []
        self._preparation = Call.preparation
        self._prepare = reference.Reference.prepare
        calls = {}

        def preparation(call: Any, recipe: Any, source: Any) -> Any:
            made = self._preparation(call, recipe, source)
            calls[made.label] = (call, call._placement(source))
            return made

        def prepare(backend: Any, x: Tensor, made: Any) -> Any:
            operand = self._prepare(backend, x, made)
            if made.quantizer is not None:
                self._keep(made, *calls[made.label], operand, x.shape)
            return operand

        Call.preparation = preparation  # type: ignore
        reference.Reference.prepare = prepare  # type: ignore
        return self

    def __exit__(self, *_: Any) -> None:
        Call.preparation = self._preparation  # type: ignore
        reference.Reference.prepare = self._prepare  # type: ignore

    def _keep(self, made: Any, call: Any, placement: Any, operand: Any, shape: Any) -> None:
        codes = unpack(operand.codes) if made.quantizer.element == "e2m1" else operand.codes
        values = operand.dequantize(torch.float64).cpu()
        rows = torch.arange(shape[0]) if placement.rows is None else placement.rows.cpu()
        groups = torch.arange(shape[1] // 8) if placement.groups is None else placement.groups.cpu()
        columns = (groups[:, None] * 8 + torch.arange(8)).flatten()
        # W is the same in every microbatch of a step; tokens tell microbatches apart by their rows.
        weight = made.label.endswith(":w")
        key = (made.label, None if weight else call.microbatch)
        self.records.append((key, rows, columns, codes.cpu().movedim(-1, made.axis), values))

    def gathered(self) -> list[Any]:
        """Every rank's records."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self.records)
        return [record for part in everyone for record in part]


if __name__ == "__main__":
    main()
