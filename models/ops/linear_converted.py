"""The product of several rows with a weight of 8-bit integers, which become floats in registers.

Rows stay as they are, and bfloat16 holds every integer exactly. Features lie on the side of a
matrix product that is 64 wide, rows on the one that may be narrow; a program takes one tile of
features.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.sizes import cdiv

PADDED_ROWS = (16, 32, 64, 128)
"""Numbers of rows that kernels are compiled for."""


class Tile(NamedTuple):
    """What a program takes: features, and inputs a stage; ``num_stages`` are in flight."""

    features: int
    columns: int
    num_warps: int = 4
    num_stages: int = 3


TILES = {32: Tile(128, 128), 128: Tile(128, 128, num_warps=8)}
"""The best on an H200, by the number of rows up to which they are taken."""


def multiply_converted(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T * scale + bias``, (num_rows, num_features).

    x is (num_rows, num_inputs), the weight (num_features, num_inputs) int8; scale, float32, and
    bias have an element for each feature. Sums are float32 and rounded once. The weight is read
    once for as many rows as there are tiles for.
    """
    assert x.stride(1) == weight.stride(1) == 1, "elements of a row must be contiguous"
    out, most = x.new_empty((len(x), len(weight))), max(TILES)
    for rows, target in zip(x.split(most), out.split(most), strict=True):
        tile = next(tile for num_rows, tile in TILES.items() if len(rows) <= num_rows)
        _converted_kernel[(cdiv(len(weight), tile.features),)](
            rows,
            weight,
            scale,
            bias,
            target,
            len(rows),
            len(weight),
            rows.stride(0),
            weight.stride(0),
            NUM_INPUTS=weight.shape[1],
            ROWS=next(size for size in PADDED_ROWS if len(rows) <= size),
            FEATURES=tile.features,
            COLUMNS=tile.columns,
            INPUT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _converted_kernel(
    x_ptr,  # (num_rows, NUM_INPUTS)
    weight_ptr,  # (num_features, NUM_INPUTS)
    scale_ptr,  # (num_features,)
    bias_ptr,  # (num_features,), or None
    out_ptr,  # (num_rows, num_features)
    num_rows,
    num_features,
    stride_x,
    stride_weight,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    exists = feature < num_features
    # Behind the last feature it is repeated: these loads need no mask.
    place = tl.minimum(feature, num_features - 1).to(tl.int64)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    weights = weight_ptr + place[:, None] * stride_weight
    xs = x_ptr + row[:, None] * stride_x
    in_rows = (row < num_rows)[:, None]
    scale = tl.load(scale_ptr + place)
    acc = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in tl.range(0, NUM_INPUTS, COLUMNS):
        column = start + k[None, :]
        if NUM_INPUTS % COLUMNS == 0:
            weight = tl.load(weights + column)
            x = tl.load(xs + column, mask=in_rows, other=0.0)
        else:
            weight = tl.load(weights + column, mask=column < NUM_INPUTS, other=0)
            x = tl.load(xs + column, mask=in_rows & (column < NUM_INPUTS), other=0.0)
        # Not summed up by tl.dot: Triton 3.6 would let it run on while the next stage's weights are
        # written to the registers that it reads.
        acc += tl.dot(weight.to(x.dtype), x.T, input_precision=INPUT_PRECISION) * scale[:, None]
    y = acc.T
    if bias_ptr is not None:
        y += tl.load(bias_ptr + place).to(tl.float32)[None, :]
    target = row[:, None] * num_features + feature[None, :]
    tl.store(out_ptr + target, y, mask=in_rows & exists[None, :])
