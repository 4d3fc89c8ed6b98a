"""Known mistakes in the kernels, by comparison and name; the comparison must notice each."""

from __future__ import annotations

from testing.kernels.mistakes.in_carriers import CARRIERS
from testing.kernels.mistakes.in_dge_occ import DGE_FACTOR, OUTLIER_CLAMP
from testing.kernels.mistakes.in_mxfp4 import MXFP4
from testing.kernels.mistakes.in_scales import BLOCK_SCALES, ROW_SCALES
from testing.kernels.mistakes.injection import Mistake

MISTAKES: dict[str, dict[str, Mistake]] = {
    "mxfp4": MXFP4,
    "carriers": CARRIERS,
    "row_scales": ROW_SCALES,
    "block_scales": BLOCK_SCALES,
    "dge_factor": DGE_FACTOR,
    "outlier_clamp": OUTLIER_CLAMP,
}
NONE = "none"


def inject(comparison: str, name: str) -> None:
    """Injects one of the comparison's mistakes. NONE: binds a function that calls the right helper
    for each of the helpers that they replace, by which nothing may change."""
    if name == NONE:
        of_helpers = {mistake.helper: mistake for mistake in MISTAKES[comparison].values()}
        for mistake in of_helpers.values():
            mistake.inject(lambda right, *given: right(*given))
    else:
        mistake = MISTAKES[comparison][name]
        mistake.inject(mistake.wrong)
