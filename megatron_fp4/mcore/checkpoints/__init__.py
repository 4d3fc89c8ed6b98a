"""Saving and loading: whole checkpoints, unchanged files, the same numerics."""
