"""Megatron's training loop: the model and its batches in it, its log, fixes for upstream."""
