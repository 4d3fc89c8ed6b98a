"""Parses and checks the command line of a launch, before Megatron builds the model."""
