"""pretrain_gpt.py with a known mistake in the averages of weights: negative controls.

    torchrun ... pretrain_with_wrong_averages.py MISTAKE FLAGS ...

MISTAKE: a name of MISTAKES, or `none`.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_fp4 import quantize
from megatron_fp4.arithmetic import weight_states as arithmetic
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    if (mistake := sys.argv.pop(1)) != "none":
        MISTAKES[mistake]()
    pretrain.main()


def of_other_weights(change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """The update reads `change(weight)` in place of the weight."""

    def install() -> None:
        update = WeightAverage.update

        def wrong(self: Any, state: Tensor, weight: Tensor, *others: Any) -> None:
            update(self, state, change(weight.detach()), *others)

        WeightAverage.update = wrong  # type: ignore[method-assign, assignment]

    return install


def quantized(weight: Tensor) -> Tensor:
    """The weight, or this rank's part of it, as FP4 blocks of 32 hold it."""
    return quantize(weight.view(-1, 32), "mxfp4-ceil").dequantize().view(weight.shape)


def in_bfloat16() -> None:
    """The average is rounded to BF16 after each update."""
    update = WeightAverage.update

    def wrong(self: Any, state: Tensor, *others: Any) -> None:
        update(self, state, *others)
        state.copy_(state.bfloat16())

    WeightAverage.update = wrong  # type: ignore[method-assign, assignment]


def before_the_step() -> None:
    """Updates after the first read the weight of before the optimizer's step."""
    from megatron_fp4.mcore.model.weight_states import WeightStates

    follow = WeightStates.follow

    def wrong(self: Any, optimizer: Any, *others: Any) -> None:
        follow(self, optimizer, *others)
        inner = optimizer.chained_optimizers[0].optimizer
        inner._optimizer_step_post_hooks.clear()
        inner.register_step_pre_hook(lambda *_: self.in_optimizers and self._update(inner) or None)
        inner.register_step_post_hook(lambda *_: self.in_optimizers or self._update(inner))

    WeightStates.follow = wrong  # type: ignore[method-assign, assignment]


def with_one_beta() -> None:
    """The new weight is not weighted with 1 - beta but with beta."""
    arithmetic.WeightAverage.beta_at = lambda self, step: 1 - self.beta  # type: ignore


def every_microbatch() -> None:
    """The average is updated before each forward pass too."""
    from megatron_fp4.mcore.model.run import Run
    from megatron_fp4.mcore.model.weight_states import WeightStates

    follow, counting, updates = WeightStates.follow, Run.counting, []

    def following(self: Any, optimizer: Any, *others: Any) -> None:
        follow(self, optimizer, *others)
        inner = optimizer.chained_optimizers[0].optimizer
        updates.append(lambda: self.in_optimizers and self._update(inner))

    def counted(self: Any, step: Any) -> Any:
        right = counting(self, step)

        def forward_step(*given: Any, **named: Any) -> Any:
            updates[0]()
            return right(*given, **named)

        return forward_step

    WeightStates.follow = following  # type: ignore[method-assign, assignment]
    Run.counting = counted  # type: ignore[method-assign, assignment]


def on_skipped_steps() -> None:
    """The average is updated after steps that the loss scaler skips too."""
    from megatron_fp4.mcore.model.weight_states import WeightStates

    follow = WeightStates.follow

    def wrong(self: Any, optimizer: Any, *others: Any) -> None:
        follow(self, optimizer, *others)
        step, inner = optimizer.step, optimizer.chained_optimizers[0].optimizer

        def stepping() -> Any:
            done = step()
            if not done[0]:
                self._update(inner)
            return done

        optimizer.step = stepping

    WeightStates.follow = wrong  # type: ignore[method-assign, assignment]


def unread() -> None:
    """Forward passes round W towards the average as it was when training began.

    The optimizer goes on updating the average, but the linears never get a newer one.
    """
    from megatron_fp4.mcore.model.weight_states import WeightStates

    gather = WeightStates.gather

    def once(self: Any) -> None:
        if not self.in_optimizers:
            gather(self)

    WeightStates.gather = once  # type: ignore[method-assign, assignment]


def misplaced() -> None:
    """A rank's part of a sharded weight is taken for its beginning."""
    from megatron_fp4.mcore.model.weight_states import WeightStates

    find_owners = WeightStates._find_owners

    def wrong(self: Any, optimizer: Any) -> None:
        find_owners(self, optimizer)
        for kept in self:
            kept.start, kept.end = 0, kept.end - kept.start
            kept.owners = [(rank, 0, end - start) for rank, start, end in kept.owners]

    WeightStates._find_owners = wrong  # type: ignore[method-assign, assignment]


MISTAKES: dict[str, Callable[[], None]] = {
    "of the quantized weight": of_other_weights(quantized),
    "of the weight in BF16": of_other_weights(lambda weight: weight.bfloat16().float()),
    "kept in BF16": in_bfloat16,
    "of the weight before the step": before_the_step,
    "of 1 - beta": with_one_beta,
    "once a microbatch": every_microbatch,
    "on skipped steps": on_skipped_steps,
    "not read": unread,
    "a part in another's place": misplaced,
}

if __name__ == "__main__":
    main()
