"""The part of the package that depends on Megatron: layers, launch, checkpoints, training loop."""
