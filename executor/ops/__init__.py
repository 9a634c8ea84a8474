"""Triton kernels of input preparation and sampling."""
