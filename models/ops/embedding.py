"""Rows of an embedding that is kept in 8 bits with a scale a row, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.sizes import next_power_of_2


def look_up(ids: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight[ids] * scale[ids]``, (num_ids, size), of a float type.

    ids (num_ids,) are below the number of rows; weight is (num_rows, size), scale (num_rows,).
    """
    size = weight.shape[1]
    out = torch.empty((len(ids), size), dtype=dtype, device=ids.device)
    block = next_power_of_2(size)
    _look_up_kernel[(len(ids),)](ids, weight, scale, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _look_up_kernel(
    ids_ptr,  # (num_ids,)
    weight_ptr,  # (num_rows, SIZE) e4m3 or int8
    scale_ptr,  # (num_rows,)
    out_ptr,  # (num_ids, SIZE)
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + place).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(weight_ptr + row * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + place * SIZE + k, values * tl.load(scale_ptr + row), mask=k < SIZE)
