"""What the numbers of a training run do: statistics of operands, weights and gradients.

Plain torch on any device, without Megatron. Statistics are collected as float64 vectors of counts
and sums, which can be added over shards, ranks and microbatches; then they are turned into metrics.
A metric that would divide by zero is None.
"""
