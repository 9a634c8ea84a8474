"""The product of a weight with one row: what a linear layer is while one request decodes.

Each weight is read once, for two operations: the floor is bytes / bandwidth, and the matrix units
would have nothing to do. What counts is how many loads are in flight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.dependent_launch import can_start_early, wait_for_inputs

WEIGHTS_PER_THREAD = {1: 64, 2: 16, 4: 16}
"""By the bytes of a weight. Two loads of 16 bytes of bfloat16: no layer that was measured gains
from more; from four of 8-bit weights all do."""


class Tile(NamedTuple):
    """The weights that a program holds at a time: so many outputs and so many of their inputs."""

    rows: int
    columns: int
    num_warps: int


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return ``x @ weight.T * scale + bias``, (1, num_outputs), of x (1, num_inputs).

    The weight's type need not be that of x; ``scale`` is (num_outputs,). Sums are float32 and
    rounded once; their order depends on the tile alone. Given ``out``, nothing is allocated.
    ``tile`` is for measurements.
    """
    num_outputs, num_inputs = weight.shape
    assert x.shape == (1, num_inputs), f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    assert x.stride(1) == weight.stride(1) == 1, "elements of a row must be contiguous"
    if out is None:
        out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    tile = tile or choose_tile(num_inputs, weight.itemsize)
    starts_early = can_start_early(x)
    _gemv_kernel[(triton.cdiv(num_outputs, tile.rows),)](
        x,
        weight,
        scale,
        bias,
        out,
        num_outputs,
        weight.stride(0),
        NUM_INPUTS=num_inputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        PDL=starts_early,
        num_warps=tile.num_warps,
        launch_pdl=starts_early,
    )
    return out


def choose_tile(num_inputs: int, itemsize: int) -> Tile:
    """Choose 4,096 or 2,048 inputs if they divide a row: of one output, or of two of 8 bits.

    On an H200 this is within 3 % of the best of 31 to 46 tiles for each layer of Qwen3-0.6B and
    Qwen3-8B in bfloat16, whatever the number of outputs, and within 11 % of 46 for those of
    Qwen3-8B in 8 bits: docs/benchmarks.md has the times.
    """
    num_weights, rows = 2048, 1
    if itemsize == 1:
        num_weights, rows = 4096, 2
    widest = 2048 if itemsize == 1 and num_inputs > 4096 else 4096
    for columns in (widest, 2048):
        if num_inputs % columns == 0:
            return Tile(rows, columns, rows * columns // (32 * WEIGHTS_PER_THREAD[itemsize]))
    columns = min(1024, triton.next_power_of_2(num_inputs))
    num_warps = num_weights // (32 * WEIGHTS_PER_THREAD[itemsize])
    return Tile(num_weights // columns, columns, num_warps)


@triton.jit
def _gemv_kernel(
    x_ptr,  # (NUM_INPUTS,)
    weight_ptr,  # (num_outputs, NUM_INPUTS)
    scale_ptr,  # (num_outputs,), or None
    bias_ptr,  # (num_outputs,), or None
    out_ptr,  # (num_outputs,)
    num_outputs,
    stride_weight,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    # Rows behind the last one repeat it: their loads need no mask.
    weight_row = tl.minimum(row, num_outputs - 1).to(tl.int64)
    weights = weight_ptr + weight_row[:, None] * stride_weight
    weight = _load_inputs(weights, column[None, :], NUM_INPUTS, COLUMNS)
    wait_for_inputs(PDL)
    x = _load_inputs(x_ptr, column, NUM_INPUTS, COLUMNS)
    acc = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    for start in range(COLUMNS, NUM_INPUTS, COLUMNS):
        weight = _load_inputs(weights, start + column[None, :], NUM_INPUTS, COLUMNS)
        x = _load_inputs(x_ptr, start + column, NUM_INPUTS, COLUMNS)
        acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + weight_row)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + weight_row).to(tl.float32)
    tl.store(out_ptr + row, y, mask=row < num_outputs)


@triton.jit
def _load_inputs(row_ptr, k, NUM_INPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load elements of rows of NUM_INPUTS; a mask where tiles do not cut them without a rest."""
    if NUM_INPUTS % COLUMNS == 0:
        values = tl.load(row_ptr + k)
    else:
        values = tl.load(row_ptr + k, mask=k < NUM_INPUTS, other=0.0)
    return values
