"""pretrain_gpt.py that writes Adam's moments in few bits at its end; or with a known mistake.

    torchrun ... pretrain_with_wrong_moments.py MISTAKE FOLDER FLAGS ...

MISTAKE: a name of MISTAKES, or `none`. Each rank writes FOLDER/RANK.pt (testing.worlds.moments).
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import Owned, scale_key
from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW
from megatron_fp4.arithmetic.moments import FLOAT32
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu
from testing.worlds.moments import Held, write


def main() -> None:
    cpu.install()
    mistake, folder = sys.argv.pop(1), Path(sys.argv.pop(1))
    if mistake != "none":
        MISTAKES[mistake]()
    made: list[LowBitAdamW] = []
    in_place_of = LowBitAdamW.in_place_of.__func__  # type: ignore[attr-defined]

    def kept(*given: Any, **named: Any) -> LowBitAdamW:
        made.append(in_place_of(*given, **named))
        return made[-1]

    LowBitAdamW.in_place_of = classmethod(kept)  # type: ignore[method-assign, assignment]
    pretrain.main()
    held = [
        Held(owned, weight.detach(), dict(inner.state[weight]))
        for inner in made
        for weight, owned in inner._owned.items()
    ]
    write(folder, int(os.environ["RANK"]), held)


# --- mistakes in loading and saving ---------------------------------------------------------------


def steps_lost() -> None:
    """The count of steps is not loaded, so that random bits and bias corrections begin anew."""
    load_settings, load = LowBitAdamW.load_settings, LowBitAdamW.load_state_dict

    def forgets(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Any, state_dict: Any) -> None:
            upstream(self, state_dict)
            for state in self.state.values():
                state["step"] = torch.tensor(0.0)

        return wrong

    from megatron_fp4.mcore.checkpoints import optimizer_compat

    optimizer_compat._mend_distributed_adam = lambda: None
    LowBitAdamW.load_settings = forgets(load_settings)  # type: ignore[method-assign]
    LowBitAdamW.load_state_dict = forgets(load)  # type: ignore[method-assign]


def float32_after_loading() -> None:
    """What is loaded stays in float32, and so do the moments from then on."""
    set_state = LowBitAdamW.set_state_in_float32

    def wrong(self: Any, weight: Tensor, state: Any) -> None:
        self.moments = FLOAT32
        set_state(self, weight, state)

    LowBitAdamW.set_state_in_float32 = wrong  # type: ignore[method-assign]


def of_scales(change: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """What leaves the optimizer is decoded by other scales."""

    def install() -> None:
        right = LowBitAdamW.state_in_float32

        def wrong(self: Any, weight: Tensor) -> dict[str, Tensor]:
            kept = self.state[weight]
            self.state[weight] = dict(kept)
            change(self.state[weight])
            try:
                return right(self, weight)
            finally:
                self.state[weight] = kept

        LowBitAdamW.state_in_float32 = wrong  # type: ignore[method-assign]

    return install


M, V = map(scale_key, ("exp_avg", "exp_avg_sq"))


def of_the_next_block(state: dict[str, Any]) -> None:
    state[M] = state[M].roll(1)


def of_the_other_moment(state: dict[str, Any]) -> None:
    state[V] = state[M]


def lost(state: dict[str, Any]) -> None:
    state[V] = torch.full_like(state[V], 127)


def codes_cast() -> None:
    """Codes are saved as if they were values, as torch's own state dict has them."""
    right = LowBitAdamW.state_in_float32

    def wrong(self: Any, weight: Tensor) -> dict[str, Tensor]:
        found = right(self, weight)
        return found | {key: self.state[weight][key].float() for key in self.moments.forms}

    LowBitAdamW.state_in_float32 = wrong  # type: ignore[method-assign]


# --- mistakes in placing --------------------------------------------------------------------------


def placed(change: Callable[[Owned], Owned]) -> Callable[[], None]:
    def install() -> None:
        place = LowBitAdamW.place
        LowBitAdamW.place = (  # type: ignore[method-assign]
            lambda self, weight, owned: place(self, weight, change(owned))
        )

    return install


def at_the_range(owned: Owned) -> Owned:
    """Blocks and draws begin at the rank's range."""
    return owned._replace(start=0)


def of_the_rank() -> None:
    """Each rank draws bits of its own."""
    update = LowBitAdamW._update

    def wrong(self: Any, *given: Any) -> None:
        seed = self._seed
        self._seed = seed + 1000 * (1 + torch.distributed.get_rank())
        update(self, *given)
        self._seed = seed

    LowBitAdamW._update = wrong  # type: ignore[method-assign, assignment]


def apart_on_tensor_parallel_ranks() -> None:
    """Ranks that hold a norm alike draw other bits, as for gradients that they sum."""
    from megatron_fp4.mcore.exchange import places
    from megatron_fp4.mcore.loop import optimizer_state

    optimizer_state.place_in = lambda parameter: places._place(places.sharded(parameter, True), 0)


def norms_unsummed() -> None:
    """Under sequence parallelism each rank updates a norm by the gradient of its own tokens."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_non_tensor_model_parallel_grads = (  # type: ignore[attr-defined]
        lambda *given: None
    )


def tied_apart() -> None:
    """The head that is a copy of the embedding has a name of its own."""
    from megatron_fp4.mcore.loop import optimizer_state

    optimizer_state._name = lambda name, weight: name


def local_experts() -> None:
    """Each rank numbers its experts from 0."""
    from megatron_fp4.mcore.model import attach

    attach._with_global_expert = lambda name, config: name


MISTAKES: dict[str, Callable[[], None]] = {
    "steps lost": steps_lost,
    "float32 after loading": float32_after_loading,
    "the next block's scale": of_scales(of_the_next_block),
    "the other moment's scale": of_scales(of_the_other_moment),
    "scales lost": of_scales(lost),
    "codes cast": codes_cast,
    "blocks of the range": placed(at_the_range),
    "bits of the rank": of_the_rank,
    "norms apart": apart_on_tensor_parallel_ranks,
    "norms unsummed": norms_unsummed,
    "tied apart": tied_apart,
    "local experts": local_experts,
}

if __name__ == "__main__":
    main()
