"""A kernel to compile in tests, for a card that need not be there."""

from triton import JITFunction
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def _double(values, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(values + offsets, 2 * tl.load(values + offsets))


double = JITFunction(_double)
double.__name__ = "double"


def make_source(size):
    return ASTSource(double, {"values": "*fp32", "SIZE": "constexpr"}, {"SIZE": size})
