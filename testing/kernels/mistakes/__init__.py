"""Known mistakes in the kernels, by comparison and name; each must be noticed."""

from __future__ import annotations

from testing.kernels.mistakes.in_dge_occ import DGE_FACTOR, OUTLIER_CLAMP

MISTAKES = {
    "dge_factor": DGE_FACTOR,
    "outlier_clamp": OUTLIER_CLAMP,
}
