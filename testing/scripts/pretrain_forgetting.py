"""pretrain_gpt.py whose calibrations of Q-Ramping forget one thing: most do not bring it back.

    torchrun ... pretrain_forgetting.py NAME FLAGS ...

NAME is one of FORGETS, or "nothing".
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def nothing(*_: Any, **__: Any) -> None:
    pass


def data() -> None:
    from megatron_fp4.mcore.loop.rewinding import RewindingIterator

    RewindingIterator.rewind = nothing  # type: ignore[method-assign]


def random_state() -> None:
    from megatron_fp4.mcore.loop import loop_state

    loop_state._set_random_state = nothing


def weights_and_moments() -> None:
    from megatron_fp4.mcore.loop.loop_state import Snapshot

    Snapshot.restore = nothing  # type: ignore[method-assign]


def moments() -> None:
    from megatron_fp4.arithmetic import ramping_adamw

    ramping_adamw._restore = nothing


def rate() -> None:
    keep(lambda state: state._scheduler, ("num_steps",))


def loss_scale() -> None:
    keep(lambda state: state._parts[0].grad_scaler, ("_scale", "_growth_tracker"))


def buffers() -> None:
    from megatron_fp4.mcore.loop.loop_state import LoopState

    original = LoopState.restore

    def restore(self: Any) -> None:
        self._buffers = []
        original(self)

    LoopState.restore = restore  # type: ignore[method-assign]


def gather() -> None:
    """The weights that each step of a calibration multiplies are those before it."""
    from megatron_fp4.mcore.loop import ramping

    ramping.gather_weights = nothing


def calibrates() -> None:
    """The steps of a calibration are Q-Ramping's, and change sums and counts."""
    from megatron_fp4.arithmetic.ramping_adamw import RampingAdamW

    RampingAdamW._is_ramped = lambda self, weight: weight in self._ramped  # type: ignore[method-assign]


def epoch() -> None:
    """The steps of a calibration multiply the weights that were quantized before it."""
    from megatron_fp4.mcore.model.run import Run

    right = Run.calibrate

    def calibrate(self: Any, number: int | None) -> None:
        before = self.epoch
        right(self, number)
        self.epoch = before

    Run.calibrate = calibrate  # type: ignore[method-assign]


def place() -> None:
    """Where in the weight the rank's part begins."""
    from megatron_fp4.mcore.loop import ramping

    right = ramping._moved

    def moved(kept: Any) -> Any:
        return right(replace(kept, start=0, end=kept.end - kept.start))

    ramping._moved = moved


def keep(owner: Callable[[Any], Any], names: tuple[str, ...]) -> None:
    """What restoring changes of these attributes is changed back."""
    from megatron_fp4.mcore.loop.loop_state import LoopState

    original = LoopState.restore

    def restore(self: Any) -> None:
        calibrated = {name: getattr(owner(self), name) for name in names}
        original(self)
        vars(owner(self)).update(calibrated)
        self._scheduler.step(0)

    LoopState.restore = restore  # type: ignore[method-assign]


FORGETS: dict[str, Callable[[], None]] = {
    forget.__name__: forget
    for forget in (
        data, random_state, weights_and_moments, moments, rate, loss_scale, buffers, gather,
        calibrates, epoch, place,
    )
}  # fmt: skip


def main() -> None:
    cpu.install()
    name = sys.argv.pop(1)
    if name != "nothing":
        FORGETS[name]()
    pretrain.main()


if __name__ == "__main__":
    main()
