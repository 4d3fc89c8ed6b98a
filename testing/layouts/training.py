"""Steps of training in one layout: schedule, gradients, optimizer, and what is saved of them."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_fp4 import recipes
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.recipe import GemmRecipe, Recipe
from testing.builders.launch_arguments import launch_arguments
from testing.layouts.matrix import ComparedLayout
from testing.layouts.model import SEQUENCE, VOCABULARY, build, named_parameters
from testing.layouts.recorder import Record, Recorder, Teacher

MICRO_BATCH, GLOBAL_BATCH = 2, 8
FIRST_STEP, LAST_STEP = 2, 10


def recipe_called(name: str) -> Recipe:
    """The recipe of a name in matrix.RECIPES.

    "mxfp4-rht-sr", "ue5m3" and "quartet-2" have Hadamard groups of 32, since 64 does not divide
    these models' shards. "dge" is dge-occ without the outlier clamp, whose quantiles depend on the
    tensor-parallel size. "row-scales" has a scale for each row beside its block scales.
    "estimators" is dge with estimators of both operands that go through the maximum of a row.
    "hot-channels" is tetrajet with hot channels of X, and "x-mean" tetrajet that subtracts the mean
    of X. "uniform" has E1M2 elements.
    """
    if name in ("mxfp4-rht-sr", "ue5m3", "quartet-2"):
        return recipes.get_recipe(name, hadamard=32)
    if name == "dge":
        return recipes.get_recipe("dge-occ", occ=False)
    if name == "row-scales":
        e4m3 = Quantizer(scale="e4m3", block=(1, 16), rule="nearest", row_max=448.0)
        forward = Quantizer(rule="mse", row_max=1.0)
        noisy = Quantizer(rule="ceil", rounding="stochastic", row_max=1.0)
        backward = GemmRecipe(noisy, noisy)
        return Recipe(name, "", GemmRecipe(forward, e4m3), backward, backward, backward="forward")
    if name == "stochastic":  # in the forward pass too, where a recomputation must repeat it
        noisy = get_quantizer("mxfp4-ceil-sr")
        return replace(recipes.get_recipe("tetrajet"), fprop=GemmRecipe(noisy, noisy))
    if name == "uniform":
        return _uniform(name)
    if name == "hot-channels":
        return replace(recipes.get_recipe("tetrajet"), outliers=HotChannels(16, 1))
    if name == "x-mean":
        return replace(recipes.get_recipe("tetrajet"), x_mean="subtracted")
    if name == "estimators":  # in rows, which ranks share, and of both operands
        through = Estimator(form="sigmoid", maximum="vjp")
        rows = replace(recipes.get_recipe("dge-occ", occ=False), estimator=through)
        return replace(rows, x_estimator=through)
    return recipes.get_recipe(name)


def _uniform(name: str) -> Recipe:
    nearest = Quantizer(element="e1m2", rule="ceil")
    e4m3 = Quantizer(element="e1m2", scale="e4m3", block=(1, 16), rule="nearest", row_max=448.0)
    noisy = replace(e4m3, rounding="stochastic")
    backward = GemmRecipe(noisy, noisy)
    return Recipe(name, "", GemmRecipe(nearest, nearest), backward, backward, backward="forward")


@dataclass
class Step:
    """The results of a training step on one rank.

    loss: of the whole batch. gradients: this rank's shards of the gradients of the whole batch, by
    global name. records: of the operands. parameters: by the same names; None in a step that was
    read from a file.
    """

    loss: float
    gradients: dict[str, Tensor]
    records: list[Record]
    parameters: Any = None

    @property
    def codes(self) -> int:
        return sum(record.codes.numel() for record in self.records)


class Training:
    """A freshly built model with its optimizer and its Run."""

    def __init__(
        self,
        layout: ComparedLayout,
        model: str,
        recipe: Recipe,
        dtype: torch.dtype,
        recompute: str | None = None,
    ) -> None:
        self.dtype = dtype
        self.args = launch_arguments(
            micro_batch_size=MICRO_BATCH,
            seq_length=SEQUENCE,
            iteration=FIRST_STEP,
            curr_iteration=FIRST_STEP,
            train_iters=LAST_STEP,
        )
        self.run = Run(recipe, self.args)
        self.chunks = build(model, layout, dtype, self.run, recompute)
        self.chunks[0].config.finalize_model_grads_func = finalize_model_grads
        parameters = [p for chunk in self.chunks for p in chunk.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step(self, *teacher: Teacher) -> Step:
        """Runs the global batch forward and backward; the optimizer steps only in `update`."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        with Recorder(*teacher) as recorder:
            loss = self._forward_backward()
        named = {
            name: parameter
            for chunk in self.chunks
            for name, parameter in named_parameters(chunk.module)
            if parameter.requires_grad
        }
        gradients = {name: p.main_grad.detach().cpu().clone() for name, p in named.items()}
        return Step(loss, gradients, recorder.records, named)

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.main_grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.args.iteration += 1
        self.args.curr_iteration = self.args.iteration  # as Megatron's loop counts

    def save(self) -> bytes:
        """What a checkpoint holds of this rank."""
        file = io.BytesIO()
        model = [chunk.state_dict() for chunk in self.chunks]
        torch.save((self.args.iteration, model, self.optimizer.state_dict()), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        self.args.iteration, model, optimizer = torch.load(io.BytesIO(saved), weights_only=False)
        self.args.curr_iteration = self.args.iteration
        for chunk, state in zip(self.chunks, model, strict=True):
            chunk.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer)

    def _forward_backward(self) -> float:
        # Not mpu's, which a known mistake changes.
        dp_rank, dp = mpu.get_data_parallel_group().rank(), mpu.get_data_parallel_world_size()
        device = torch.cuda.current_device()
        microbatches = GLOBAL_BATCH // MICRO_BATCH // dp

        def forward(data: Any, model: Any) -> Any:
            first = (next(data) * dp + dp_rank) * MICRO_BATCH
            tokens = torch.stack([_sample(first + b) for b in range(MICRO_BATCH)]).to(device)
            positions = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE).to(device)
            mask = torch.ones(MICRO_BATCH, SEQUENCE, dtype=self.dtype, device=device)
            labels = tokens[:, 1:].contiguous()
            losses = model(tokens[:, :-1], positions, None, labels=labels, loss_mask=mask)
            return losses, _mean

        losses = get_forward_backward_func()(
            forward_step_func=self.run.counting(forward),
            data_iterator=[iter(range(microbatches)) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        mean = sum(float(x["loss"]) for x in losses) / microbatches
        total = torch.tensor([mean], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(total)  # losses is empty but on the last stage
        return total.item() / (mpu.get_tensor_model_parallel_world_size() * dp)


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place


def _sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)
