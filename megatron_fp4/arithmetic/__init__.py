"""The definition of every bit in plain PyTorch: formats, scales, quantizers, random bits,
Hadamard transforms, outliers, gradient estimators, state beside weights, optimizer steps.

docs/numerics.md is the specification. All kernels are compared with this code.
"""
