"""Adam's moments in few bits in Megatron's optimizers (--fp4-optimizer-state)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_fp4.arithmetic.low_bit import Owned, step
from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW, Update
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.exchange.places import place_in, trained_parameters
from megatron_fp4.mcore.model.optimizers import main_part_of, stepping_optimizers
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.runtime.ranks import of_all
from megatron_fp4.streams import check_streams

# Under pipeline parallelism a head that is tied to the embedding is a second copy of it. Both
# copies are updated, and have to stay alike.
_TIED = "embedding.word_embeddings.weight"


def replace_optimizers(
    optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], run: Run
) -> None:
    """Puts a LowBitAdamW, with the same groups of parameters, in the place of each inner AdamW.

    The inner optimizer is torch's, or the FusedAdam of Transformer Engine or apex where one is
    installed. Megatron looks it up at each use. chunks: of the model on this rank. All ranks have
    to call it. Its state is made at once, so that Megatron allocates none in float32.

    Raises ConfigError for Adam without decoupled weight decay, for main weights that are not
    float32, and on all ranks if two random streams collide.
    """
    moments = Moments.read(run.args.fp4_optimizer_state)
    weights = [
        (_name(name, weight), weight)
        for name, weight in trained_parameters(unwrap_model(list(chunks)))
    ]
    everyone = {each for names in of_all([name for name, _ in weights]) for each in names}
    check_streams(run.linears, sorted(everyone))
    for each in stepping_optimizers(optimizer):
        if not each.config.decoupled_weight_decay:
            raise ConfigError(
                "--fp4-optimizer-state stores the moments of AdamW: set decoupled_weight_decay of "
                "the optimizer's configuration, or leave out the flag"
            )
        inner = LowBitAdamW.in_place_of(each.optimizer, moments, run.args.fp4_seed, _update())
        each.optimizer, each.init_state_fn = inner, _init_state
        for name, weight in weights:
            if (own := main_part_of(each, weight)) is not None:
                main, start = own
                inner.place(main, Owned(name, place_in(weight), start))
        _init_state(inner)


def _init_state(optimizer: LowBitAdamW, config: object = None) -> None:
    """Allocates the state, zeros, of every parameter that has none. config: Megatron passes it."""
    for group in optimizer.param_groups:
        for main in group["params"]:
            optimizer.init_state(main)


def _name(name: str, weight: torch.nn.Parameter) -> str:
    return _TIED if getattr(weight, "shared_embedding", False) else name


def _update() -> Update:
    """The update of a parameter, as torch's operations or as a kernel."""
    if not torch.cuda.is_available():
        return step
    from megatron_fp4.kernels import low_bit_adamw  # imports Triton

    return low_bit_adamw.step
