"""The definition of every bit in plain PyTorch: formats, scales, quantizers, random bits,
Hadamard transforms, outliers and gradient estimators.

docs/numerics.md is the specification. All kernels are compared with this code.
"""
