"""Triton kernels of the attention backends."""
