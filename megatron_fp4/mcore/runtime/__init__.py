"""The process and its ranks: Megatron on a machine without a GPU, process groups, common work."""
