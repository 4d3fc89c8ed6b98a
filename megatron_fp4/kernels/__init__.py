"""The Triton kernels, and the GEMMs of libraries, that makers and multipliers launch."""
