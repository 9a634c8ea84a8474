"""What Hopper's bulk copies are told of a matrix: where it is, and how much they copy at once."""

from collections.abc import Sequence

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of 16-bit elements in shared memory, as products of matrices read them."""


def describe(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int]
) -> TensorDescriptor:
    """Describe a matrix that begins where ``base`` does.

    It must begin, as must all its rows, at a multiple of 16 bytes, and elements of a row must be
    contiguous. Triton's own constructor checks that, and a layout is made anew, at each launch.
    """
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.layout = base, LAYOUT
    descriptor.shape, descriptor.strides = list(shape), list(strides)
    descriptor.block_shape = list(block_shape)
    return descriptor
