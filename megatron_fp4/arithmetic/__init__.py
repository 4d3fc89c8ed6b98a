"""What every bit is: formats, scales, quantizers, random bits, transforms, in plain PyTorch.

The oracle of everything else in the package; docs/numerics.md is its specification.
"""
