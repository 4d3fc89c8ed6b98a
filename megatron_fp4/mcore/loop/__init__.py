"""Megatron's training loop with this package's model: batches, loss, log and fixes for upstream."""
