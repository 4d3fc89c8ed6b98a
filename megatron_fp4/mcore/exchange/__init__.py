"""How data-parallel ranks exchange gradients in FP8."""
