"""Saves and loads checkpoints, and checks that they are complete, unchanged and fit the launch."""
