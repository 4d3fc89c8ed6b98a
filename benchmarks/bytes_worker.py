"""Counts the bytes that each linear of a LLaMA layer sends and keeps, in one torchrun world.

    torchrun --nproc-per-node 2 -m benchmarks.bytes_worker OUT

TP2, with sequence parallelism and without; Megatron's own linears in BF16, then each recipe. A step
runs all microbatches forward and then all of them backward. Rank 0 writes to OUT, as JSON, a record
for each case, layout and linear.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.bytes import CASES, LINEARS, RANKS, Case, Shape
from benchmarks.traffic import Traffic
from megatron_fp4.mcore.runtime import cpu

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)

from megatron_fp4 import recipes  # noqa: E402
from megatron_fp4.execution import backward, forward  # noqa: E402
from megatron_fp4.mcore.model import attach as attaching  # noqa: E402
from megatron_fp4.mcore.model.run import Run  # noqa: E402
from testing.builders import small_gpt  # noqa: E402
from testing.builders.launch_arguments import launch_arguments  # noqa: E402
from testing.patching import patched  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", type=json.loads, default={})
    shape = Shape(**parser.parse_args().shape)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mpu.initialize_model_parallel(RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    rank = torch.distributed.get_rank()
    batch = shape.micro_batch * shape.microbatches
    init_num_microbatches_calculator(rank, None, batch, shape.micro_batch, 1)
    records = [record for case in CASES for record in measure(case, shape)]
    if rank == 0:
        parser.parse_args().out.write_text(json.dumps(records))
    torch.distributed.destroy_process_group()


# --- what is measured -----------------------------------------------------------------------------


def measure(case: Case, shape: Shape) -> list[dict[str, Any]]:
    """A record for each linear of the layer: the case, the linear's name, and `one_step`."""
    chunk = build(case, shape)
    run = None
    if case.recipe != "bf16":
        run = Run(recipes.get_recipe(case.recipe), arguments(case, shape))
        attaching.attach(run, [chunk])
    layer = chunk.decoder.layers[0]
    return [
        asdict(case) | {"linear": name} | one_step(layer.get_submodule(path), run, chunk, shape)
        for name, path in LINEARS.items()
    ]


def one_step(linear: Any, run: Run | None, chunk: Any, shape: Shape) -> dict[str, Any]:
    """What the last microbatch of a step sends and keeps, and what W adds once in the step."""
    x_shape, generator = input_shape(linear, shape), torch.Generator().manual_seed(1)
    forward, backward, outputs = [], [], []
    hooked: list[list[Tensor]] = []
    ours: list[list[Tensor]] = []
    with count_weights() as prepared:
        for _ in range(shape.microbatches):
            x = torch.randn(x_shape, generator=generator).bfloat16()
            x = x.to(torch.cuda.current_device()).requires_grad_()
            hooked.append([])
            with Traffic() as traffic, saved_tensors_hooks(partial(collect, hooked[-1]), itself):
                outputs.append(forward_pass(linear, x, run, chunk))
            forward.append(traffic.sent)
            ours.append(beside(outputs[-1]))
        for y in outputs:
            with Traffic() as traffic:
                y.backward(torch.randn_like(y))
            backward.append(traffic.sent)
    weights = kept_weights(linear)
    common = [w for w in [*chunk.parameters(), *weights] if isinstance(w, Tensor)]
    return {
        "forward": forward[-1],
        "backward": backward[-1],
        "sent once a step": sum(more(forward).values()) + sum(more(backward).values()),
        "saved": own_bytes(hooked, common),
        "beside": own_bytes(ours, [*common, *hooked[-1]]),
        "W": linear.weight.numel() * linear.weight.element_size(),
        "kept of W": sum(storages(weights).values()),
        "W quantized": len(prepared),
        "W operands": len(set(prepared)),
    }


def more(sent: list[dict[str, int]]) -> dict[str, int]:
    """By how many bytes the first microbatch sends more than the last, by collective.

    sent: the bytes of each microbatch, by collective.
    """
    return {kind: size - sent[-1].get(kind, 0) for kind, size in sent[0].items()}


def forward_pass(linear: Any, x: Tensor, run: Run | None, chunk: Any) -> Tensor:
    if run is None:
        return linear(x)[0]
    chunk.vp_stage = None
    return run.counting(lambda data, model: linear(data)[0])(x, chunk)


def input_shape(linear: Any, shape: Shape) -> tuple[int, int, int]:
    """The shape [sequence, batch, in] of a linear's input on this rank."""
    by_rows = isinstance(linear, tensor_parallel.RowParallelLinear)
    scattered = linear.sequence_parallel and not by_rows
    sequence = shape.sequence // RANKS if scattered else shape.sequence
    return sequence, shape.micro_batch, linear.weight.shape[1]


# --- how ------------------------------------------------------------------------------------------


def collect(into: list[Tensor], tensor: Tensor) -> Tensor:
    into.append(tensor)
    return tensor


def itself(tensor: Tensor) -> Tensor:
    return tensor


def beside(y: Tensor) -> list[Tensor]:
    """The tensors that the autograd functions behind y hold as attributes, which hooks on saved
    tensors do not see."""
    found: list[Tensor] = []
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += tensors_in(getattr(node, "__dict__", {}))
            nodes += [following for following, _ in node.next_functions]
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """{address: bytes} of each storage that the tensors use; shared storages count once."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def own_bytes(kept: list[list[Tensor]], common: list[Tensor]) -> int:
    """The bytes of the last microbatch's tensors whose storage is neither in `common` nor shared by
    all microbatches."""
    seen = [storages(tensors) for tensors in kept]
    shared = storages(common).keys() | set.intersection(*(set(places) for places in seen))
    return sum(size for place, size in seen[-1].items() if place not in shared)


def kept_weights(linear: Any) -> list[Tensor]:
    """The tensors of W's operands that the step's microbatches share, without W itself."""
    state = getattr(linear, "fp4", None)
    own = linear.weight.data_ptr()
    kept = [] if state is None else tensors_in(state.cache._held)
    return [tensor for tensor in kept if tensor.data_ptr() != own]


@contextmanager
def count_weights() -> Iterator[list[str]]:
    """A context that gives a list, to which the name of the GEMM is added when a W is quantized."""
    labels: list[str] = []

    def counting(make: Any) -> Any:
        def counted(makings: Any, *given: Any) -> Any:
            operands = [operand for making in makings for operand in making.operands]
            labels.extend(o.gemm for o in operands if o.letter == "w" and o.quantizer is not None)
            return make(makings, *given)

        return counted

    with (
        patched(forward, "make_operands", counting(forward.make_operands)),
        patched(backward, "make_operands", counting(backward.make_operands)),
    ):
        yield labels


# --- the layer ------------------------------------------------------------------------------------


def build(case: Case, shape: Shape) -> Any:
    """A LLaMA of one layer in BF16, whose linears follow the recipe of the case."""
    config = small_gpt.config(
        num_layers=1,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        bf16=True,
        params_dtype=torch.bfloat16,
        fp4_recipe=None if case.recipe == "bf16" else case.recipe,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=case.sequence_parallel,
    )
    chunk = small_gpt.build(config, 64, shape.sequence)
    return chunk.to(torch.cuda.current_device(), torch.bfloat16)


def arguments(case: Case, shape: Shape) -> argparse.Namespace:
    """The arguments of Megatron that a Run reads."""
    return launch_arguments(
        micro_batch_size=shape.micro_batch,
        seq_length=shape.sequence,
        fp4_seed=1,
        fp4_weight_cache=case.weight_cache,
        fp4_saved_x=case.saved_x,
    )


if __name__ == "__main__":
    main()
