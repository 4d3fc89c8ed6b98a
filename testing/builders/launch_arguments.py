"""Megatron's arguments, as far as a `Run` reads them, where no training is launched."""

from argparse import Namespace
from typing import Any


def launch_arguments(**given: Any) -> Namespace:
    """The arguments of a small launch in FP4, with those of `given` in place of its own."""
    own = dict(
        micro_batch_size=2,
        eval_micro_batch_size=None,
        seq_length=32,
        iteration=1,
        train_iters=10,
        first_last_layers_bf16=False,
        cuda_graph_impl="none",
        accumulate_allreduce_grads_in_fp32=True,
        fp4_seed=2**40 + 7,
        fp4_eval_forward="fp4",
        fp4_weight_cache="packed",
        fp4_saved_x="packed",
        fp4_gathers_codes=False,
        fp4_executor="auto",
        fp4_multiplier="auto",
        fp4_wgrad_fusion=True,
        fp4_joins_swiglu=True,
        fp4_joins_norms=True,
    )
    return Namespace(**own | given)
