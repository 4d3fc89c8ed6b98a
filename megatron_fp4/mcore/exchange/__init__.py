"""How data-parallel ranks exchange gradients in few bits."""
