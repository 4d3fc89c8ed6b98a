"""Runs in a torchrun world of one layout, and compares its training steps, for every recipe.

The first step is compared with that of one process, and with the same step with recomputed
activations. A step after a checkpoint is compared with the step of the run that saved it.

    torchrun --nproc-per-node 2 -m testing.layouts.worker FOLDER tp2-sp

A sample's tokens are a function of its index, so every layout trains on the same batch. The layout
"one" writes its steps to FOLDER; the others read them there. Rank 0 writes FOLDER/LAYOUT.json: a
row of figures for each model, recipe and mode.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fp4.mcore.runtime import cpu

cpu.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)

from megatron_fp4.mcore.loop import compat  # noqa: E402
from megatron_fp4.recipe import Recipe  # noqa: E402
from testing.layouts import mistakes, recorder  # noqa: E402
from testing.layouts.matrix import (  # noqa: E402
    LAYOUTS,
    ONE,
    RECIPES,
    ComparedLayout,
    Row,
    local_parts,
    recipes_of,
)
from testing.layouts.model import RECOMPUTE, shard  # noqa: E402
from testing.layouts.quantiles import quantiles_of_parts  # noqa: E402
from testing.layouts.teacher import teacher  # noqa: E402
from testing.layouts.training import (  # noqa: E402
    GLOBAL_BATCH,
    MICRO_BATCH,
    Step,
    Training,
    recipe_called,
)

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--models", nargs="+", help="default: the layout's")
    parser.add_argument("--recipes", nargs="+", help="default: the model's")
    args = parser.parse_args()
    layout = LAYOUTS[args.layout]
    start_world(layout)
    rows: list[Row] = []
    for model in args.models or layout.models:
        for recipe in recipes_of(model):
            if recipe in (args.recipes or [recipe]):
                train = Trainer(layout, model, recipe, args.folder)
                named = {"layout": args.layout, "model": model, "recipe": recipe}
                modes = train.write() if args.layout == ONE else train.modes()
                rows += [named | {"mode": mode, "figures": found} for mode, found in modes.items()]
    if args.layout != ONE:
        models, chosen = args.models or layout.models, args.recipes or RECIPES
        rows += controls(args.layout, args.folder, models, chosen)
    if torch.distributed.get_rank() == 0:
        (args.folder / f"{args.layout}.json").write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def start_world(layout: ComparedLayout) -> None:
    if torch.cuda.is_available():
        take_gpu(int(os.environ["LOCAL_RANK"]))
        # Only sums by atomics would differ in a rerun.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mpu.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    compat.install()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    rank, dp = torch.distributed.get_rank(), mpu.get_data_parallel_world_size()
    init_num_microbatches_calculator(rank, None, GLOBAL_BATCH, MICRO_BATCH, dp)


def take_gpu(rank: int) -> None:
    """Selects a GPU for this rank of the host; ranks share GPUs if there are more ranks than GPUs.

    NCCL refuses that two ranks of one host share a GPU. Each rank is therefore declared to be a
    host of its own, and NCCL communicates through sockets.
    """
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        alone = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ.update(alone)


class Trainer:
    """Trains one model with one recipe in one layout, in every mode.

    folder: where one process writes its steps (`write`) and other layouts read them.
    """

    def __init__(self, layout: ComparedLayout, model: str, recipe: str, folder: Path) -> None:
        self.layout, self.model, self.name, self.folder = layout, model, recipe, folder
        self.recipe = recipe_called(recipe)

    def path(self, parts: tuple[int, int]) -> Path:
        return self.folder / f"{self.model} {self.name} {parts}.pt"

    def train(self, dtype: torch.dtype = torch.float32, recompute: str | None = None) -> Training:
        return Training(self.layout, self.model, self.recipe, dtype, recompute)

    def write(self) -> dict[str, Figures]:
        """Saves the first step, in float64 and in float32, for comparisons with other layouts."""
        dtypes = torch.float64, torch.float32
        others = [layout for layout in LAYOUTS.values() if self.model in layout.models]
        for parts in {local_parts(layout, self.name) for layout in others}:
            with quantiles_of_parts(*parts):
                steps = {dtype: self.train(dtype).step() for dtype in dtypes}
            plain = {dtype: vars(step) | {"parameters": None} for dtype, step in steps.items()}
            torch.save(plain, self.path(parts))
        return {}

    def modes(self) -> dict[str, Figures]:
        kept = self.train()
        first = kept.step()
        found = {"fresh": self.fresh(first), "recompute": {"codes": recorder.total(first.codes)}}
        for which in RECOMPUTE:
            again = self.train(recompute=which).step()
            changed = changes(first, again, self.sums_alike(which))
            found["recompute"] |= {f"{which}: {name}": value for name, value in changed.items()}
        found["resumed"] = self.resumed(kept)
        return found

    def sums_alike(self, recompute: str) -> Callable[[str], bool]:
        """(name of a parameter) -> whether recomputation leaves the order of its gradient's sum.

        A repeated layer's norms, and the embedding that it reads, are used several times. Autograd
        sums the gradients of these uses in another order with recomputation. The linears' dW is
        added to main_grad call by call, in the same order.
        """
        if recompute == "full" and self.model == "mtp-repeated":
            return lambda name: "norm" not in name and "embedding" not in name
        return lambda name: True

    def mistaken(self) -> Figures:
        """The differences of a step in float64 from one process's, for operands that both have."""
        one, many = self._read((1, 1))[torch.float64], self.train(torch.float64).step()
        differing = recorder.differing_codes(
            one.records, many.records, torch.float64, lambda label: True, strict=False
        )
        return {
            "differing codes": differing,
            "gradients": gradient_error(one, many, lambda name: True),
        }

    def fresh(self, in_float32: Step) -> Figures:
        one = self._read(local_parts(self.layout, self.name))
        compared = Compared(self.recipe, self.model)
        in_float64 = self.train(torch.float64).step()
        knows = teacher(one[torch.float32].records, compared.in_place, compared.as_tokens)
        steps = (
            (torch.float64, in_float64, ""),
            (torch.float32, in_float32, "float32 "),
            (torch.float32, self.train().step(knows), "same inputs "),
        )
        figures: Figures = {
            "codes": recorder.total(in_float64.codes),
            "shared noise rows": recorder.shared_noise_rows(in_float64.records),
        }
        for dtype, step, prefix in steps:
            found = against_one(one[dtype], step, dtype, compared)
            figures |= {prefix + name: value for name, value in found.items()}
        return figures

    def _read(self, parts: tuple[int, int]) -> dict[torch.dtype, Step]:
        steps = torch.load(self.path(parts), weights_only=False, mmap=True)
        return {dtype: Step(**step) for dtype, step in steps.items()}

    def resumed(self, kept: Training) -> Figures:
        """Compares the step after an update by `kept` with that by a Training that loads its state.

        kept: a Training that has run its first step.
        """
        kept.update()
        saved = kept.save()
        second = kept.step()
        again = self.train()
        again.load(saved)
        return {"codes": recorder.total(second.codes)} | changes(second, again.step())


class Compared:
    """Which results of a first step must be equal in all layouts, except for the order of sums.

    The order of an expert's tokens, and the calls that get them, depend on the layout. The random
    bits depend on that order, and wgrad's blocks and scales lie along it. So results that depend on
    an expert's random bits or on its wgrad operands differ between layouts, and are left out.
    """

    def __init__(self, recipe: Recipe, model: str) -> None:
        def noisy(gemm: str) -> bool:
            quantizer = recipe.gemm(gemm).a
            return quantizer is not None and quantizer.draws

        dense = model != "moe"
        self.forward = dense or not noisy("fprop")
        self.backward = dense or (self.forward and not noisy("dgrad"))

    def in_place(self, label: str) -> bool:
        """Whether an operand's codes are equal at their places in the unsharded tensor."""
        gemm, operand = label.rsplit(":", 2)[1:]
        if operand == "w":
            return True
        return recorder.EXPERT not in label and (self.forward if gemm == "fprop" else self.backward)

    def as_tokens(self, label: str) -> bool:
        """Whether the rows of an expert's operand are equal, in some order."""
        gemm, operand = label.rsplit(":", 2)[1:]
        if recorder.EXPERT not in label or operand == "w" or gemm == "wgrad":
            return False
        return self.forward if gemm == "fprop" else self.backward

    def gradient(self, name: str) -> bool:
        return self.backward and recorder.EXPERT not in name


def against_one(one: Step, many: Step, dtype: torch.dtype, compared: Compared) -> Figures:
    """The differences of a layout's step, `many`, from one process's step, `one`.

    "differing codes": the number of elements whose code or scale differs, and of experts' tokens
    that differ. "loss": the relative difference. "gradients": the relative difference of the
    gradient shard that differs most.
    """
    differing = recorder.differing_codes(one.records, many.records, dtype, compared.in_place)
    if any(recorder.EXPERT in name for name in one.gradients):
        differing += recorder.differing_tokens(one.records, many.records, compared.as_tokens)
    figures: Figures = {"differing codes": differing}
    if compared.forward:
        figures["loss"] = abs(many.loss / one.loss - 1)
    if compared.backward:
        figures["gradients"] = gradient_error(one, many, compared.gradient)
    return figures


def gradient_error(one: Step, many: Step, compared: Callable[[str], bool]) -> float:
    worst = 0.0
    for name, gradient in many.gradients.items():
        if compared(name):
            whole = shard(one.gradients[name], many.parameters[name])
            worst = max(worst, float((gradient - whole).norm() / whole.norm()))
    everywhere = set().union(*recorder.gathered(set(many.gradients)))
    assert everywhere == one.gradients.keys(), everywhere ^ one.gradients.keys()
    return recorder.largest(worst)


def changes(
    kept: Step, again: Step, compared: Callable[[str], bool] = lambda name: True
) -> Figures:
    """The differences of two steps on one layout: numbers of codes and of elements of gradients.

    "loss" is the absolute difference. compared: which gradients are compared, by name.
    """
    assert kept.gradients.keys() == again.gradients.keys()
    gradients = sum(
        int((again.gradients[name] != gradient).sum())
        for name, gradient in kept.gradients.items()
        if compared(name)
    )
    return {
        "differing codes": recorder.changed_codes(kept.records, again.records),
        "differing gradients": recorder.total(gradients),
        "loss": abs(again.loss - kept.loss),
    }


# --- known mistakes, which the comparisons must notice -------------------------------------------


def controls(name: str, folder: Path, models: Sequence[str], recipes: Sequence[str]) -> list[Row]:
    """Makes each known mistake that this layout can show, and returns a row for it."""
    layout, found = LAYOUTS[name], {}
    train = partial(Trainer, layout, folder=folder)
    if "llama" in models and "dge-occ" in recipes and layout.tp > 1:  # one process's mistake
        found["llama", "quantiles of all ranks"] = train("llama", "dge-occ").mistaken()
    if "stochastic" not in recipes:
        models = ()
    if "llama" in models and layout.vpp is None:
        with mistakes.noise_of_the_rank():
            found["llama", "noise of the rank's own"] = train("llama", "stochastic").mistaken()
    if "llama" in models and layout.pp > 1:
        trainer = train("llama", "stochastic")
        kept = trainer.train().step()
        with mistakes.no_replay():
            again = trainer.train(recompute="full").step()
        differing = recorder.changed_codes(kept.records, again.records)
        found["llama", "recomputed without Replay"] = {"differing codes": differing}
    if "mtp-repeated" in models:
        with mistakes.repeats_share_noise():
            records = train("mtp-repeated", "stochastic").train().step().records
        shared = recorder.shared_noise_rows(records)
        found["mtp-repeated", "repeats share noise"] = {"shared noise rows": shared}
    return [
        {"layout": name, "model": model, "recipe": what, "mode": "control", "figures": figures}
        for (model, what), figures in found.items()
    ]


if __name__ == "__main__":
    main()
