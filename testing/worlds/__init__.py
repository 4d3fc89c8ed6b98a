"""Trainings and scripts that run in torchrun worlds, and what they leave behind."""
