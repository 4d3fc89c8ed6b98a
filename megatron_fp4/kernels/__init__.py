"""Triton kernels, which backends alone use."""
