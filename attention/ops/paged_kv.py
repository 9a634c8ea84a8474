"""K and V of one layer as the kernels see them: strided views of the pool, whatever its layout."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedKV:
    """K and V of one layer in all blocks.

    Two views of one pool with equal strides; the elements of a head are contiguous. Any order of
    blocks, layers, tokens and heads in memory can be expressed, and strides may exceed 2**31.
    """

    k: Tensor  # (num_blocks, block_size, num_kv_heads, head_dim)
    v: Tensor  # (num_blocks, block_size, num_kv_heads, head_dim)

    def __post_init__(self) -> None:
        assert self.k.stride() == self.v.stride(), f"{self.k.stride()} != {self.v.stride()}"
        assert self.k.stride(3) == 1, f"head elements are {self.k.stride(3)} apart"
        assert self.block_size & (self.block_size - 1) == 0, f"block size {self.block_size}"

    @property
    def block_size(self) -> int:
        """Tokens in one block; a power of two."""
        return self.k.shape[1]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from one block, token and head to the next."""
        block, token, head, _ = self.k.stride()
        return block, token, head


@triton.jit
def match_cache(q, k_ptr):
    """Return q in the type in which a kernel multiplies with K/V: its own, as a rule.

    For K/V of 8 bits bfloat16 becomes float16: it holds their values, too, and Hopper converts them
    to it at once. To bfloat16 they go through float32, an eighth as fast.
    """
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@triton.jit
def split_pairs(pairs, dtype: tl.constexpr):
    """Return the even and the odd elements of rows of e4m3 that were loaded two at a time.

    What the matrix units read by columns comes out of shared memory in units of 16 bits: single
    bytes would be loaded one by one.
    """
    even = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True)
    odd = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return even.to(dtype), odd.to(dtype)
