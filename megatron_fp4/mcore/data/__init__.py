"""Text to what Megatron trains on, and what a launch reads of it: files, splits, vocabulary."""
