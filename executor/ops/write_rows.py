"""Uploads into rows: ranges of many lengths that arrived in one buffer, each to its place."""

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
NUM_SPLITS = 4


def write_rows(target: Tensor, ranges: Tensor, values: Tensor) -> None:
    """Copy ``values[start : start + length]`` to ``target[row, column : column + length]``.

    ``ranges``, (num_ranges, 4) int32, holds row, column, start, length. Token ids of admitted
    requests, blocks of grown tables and records of parameters all go this way: one upload, one
    launch for each kind.
    """
    num_ranges = ranges.shape[0]
    if num_ranges:
        _write_kernel[(num_ranges, NUM_SPLITS)](
            target, ranges, values, target.stride(0), TILE=TILE, num_warps=4
        )


@triton.jit(do_not_specialize=["stride_target"])
def _write_kernel(target_ptr, ranges_ptr, values_ptr, stride_target, TILE: tl.constexpr):
    range_ptr = ranges_ptr + tl.program_id(0) * 4
    row = tl.load(range_ptr).to(tl.int64)
    column = tl.load(range_ptr + 1)
    start = tl.load(range_ptr + 2).to(tl.int64)
    length = tl.load(range_ptr + 3)
    target_ptr += row * stride_target + column
    for first in range(tl.program_id(1) * TILE, length, TILE * tl.num_programs(1)):
        places = first + tl.arange(0, TILE)
        values = tl.load(values_ptr + start + places, mask=places < length, other=0)
        tl.store(target_ptr + places, values, mask=places < length)
