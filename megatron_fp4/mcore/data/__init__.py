"""Preparation of Megatron's datasets from text, and what a launch reads of those datasets."""
