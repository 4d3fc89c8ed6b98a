"""Programs that the processes of a torchrun world run. Nothing imports them."""
