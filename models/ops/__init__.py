"""Triton kernels of the layers."""
