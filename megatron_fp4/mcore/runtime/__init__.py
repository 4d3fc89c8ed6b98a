"""The process and its ranks: Megatron on a CPU, gloo's process groups, work that ranks share,
functions that are replaced."""
