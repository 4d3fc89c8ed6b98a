"""Known mistakes in the kernels, by comparison and name; the comparison must notice each."""

from __future__ import annotations

from testing.kernels.mistakes.in_averages import AVERAGES
from testing.kernels.mistakes.in_carriers import CARRIERS
from testing.kernels.mistakes.in_dge_occ import DGE_FACTOR, OUTLIER_CLAMP
from testing.kernels.mistakes.in_low_bit_adamw import LOW_BIT_ADAMW
from testing.kernels.mistakes.in_messages import MESSAGES
from testing.kernels.mistakes.in_mxfp4 import MXFP4
from testing.kernels.mistakes.in_ramping import RAMPING
from testing.kernels.mistakes.in_rms_norm import RMS_NORM
from testing.kernels.mistakes.in_scaled_product import SCALED_PRODUCT
from testing.kernels.mistakes.in_scales import BLOCK_SCALES, QUOTIENTS, ROW_SCALES
from testing.kernels.mistakes.in_swiglu import SWIGLU
from testing.kernels.mistakes.injection import Mistake, bind

MISTAKES: dict[str, dict[str, Mistake]] = {
    "mxfp4": MXFP4,
    "carriers": CARRIERS,
    "row_scales": ROW_SCALES,
    "block_scales": BLOCK_SCALES,
    "dge_factor": DGE_FACTOR,
    "outlier_clamp": OUTLIER_CLAMP,
    "averages": AVERAGES,
    "ramping": RAMPING,
    "low_bit_adamw": LOW_BIT_ADAMW,
    "swiglu": SWIGLU,
    "rms_norm": RMS_NORM,
    "messages": MESSAGES,
    "scaled_product": SCALED_PRODUCT,
    "quotients": QUOTIENTS,
}
NONE = "none"


def inject(comparison: str, name: str) -> None:
    """Injects the comparison's mistake of this name, until the process ends.

    NONE: replaces every helper that has a mistake by a function that only calls it, which must
    change nothing. Raises KeyError where the comparison has no such mistake.
    """
    mistakes = MISTAKES[comparison]
    if name == NONE:
        for helper in {mistake.helper for mistake in mistakes.values()}:
            bind(helper, lambda right, *given: right(*given))
    else:
        bind(mistakes[name].helper, mistakes[name].wrong)
