"""Known mistakes in the kernels, by comparison and name; each must be noticed."""

from __future__ import annotations

from testing.kernels.mistakes.in_dge_occ import DGE_FACTOR, OUTLIER_CLAMP
from testing.kernels.mistakes.in_scales import BLOCK_SCALES, ROW_SCALES

MISTAKES = {
    "row_scales": ROW_SCALES,
    "block_scales": BLOCK_SCALES,
    "dge_factor": DGE_FACTOR,
    "outlier_clamp": OUTLIER_CLAMP,
}
