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
from octavo.attention.ops.sizes import cdiv, next_power_of_2
from octavo.models.ops.norm import Norm, Normed, Product

MAX_NORMED = 2048
"""Size of a stream that every program of the product behind it reads to find its root mean square;
a launch of its own normalises larger ones sooner."""


class Tile(NamedTuple):
    """The weights that a program holds at a time: so many outputs and so many of their inputs."""

    rows: int
    columns: int
    num_warps: int


def gemv(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    is_gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Product:
    """Return ``x @ weight.T * scale + bias``, (1, num_outputs), of x (1, num_inputs).

    The weight's type need not be that of x; scale and bias have an element a row of the weight.
    Sums are float32 and rounded once; their order depends on the tile alone. ``is_gated``: the
    product is gate | up, and the output silu(gate) * up. ``residual`` is added at the end; the
    output is the stream that ``norm`` prepares for the next product. Given ``out``, it is
    not allocated. ``tile`` is for measurements.
    """
    if isinstance(x, Normed):
        values, stream, eps = x.values, x.stream, x.norm.eps
    else:
        values, stream, eps = x, None, 0.0
    num_features, num_inputs = weight.shape
    num_outputs = num_features // (1 + is_gated)
    assert values.shape == (1, num_inputs), f"x is {tuple(values.shape)}, weight {weight.shape}"
    assert values.stride(1) == weight.stride(1) == 1, "elements of a row must be contiguous"
    out = values.new_empty((1, num_outputs)) if out is None else out
    scaled = torch.empty_like(out) if norm is not None else None
    tile = tile or choose_tile(num_inputs, weight.itemsize, is_gated=is_gated)
    starts_early = can_start_early(values)
    _gemv_kernel[(cdiv(num_features, tile.rows),)](
        values,
        stream,
        weight,
        scale,
        bias,
        out,
        residual,
        norm.weight if norm is not None else None,
        scaled,
        eps,
        num_outputs,
        weight.stride(0),
        NUM_INPUTS=num_inputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        IS_GATED=is_gated,
        PDL=starts_early,
        num_warps=tile.num_warps,
        launch_pdl=starts_early,
    )
    return Product(out, scaled)


def choose_tile(num_inputs: int, itemsize: int, *, is_gated: bool = False) -> Tile:
    """Choose small programs, for what they hold while they wait; but whole rows of gate and up.

    On an H200 these are within 2 % of the best for each layer of Qwen3-0.6B and Qwen3-8B, in a
    whole step. Alone, other tiles are faster: what counts is what the kernel in front leaves room
    for. Weights of 8 bits are converted: a program reads and converts its inputs once for all its
    outputs. docs/benchmarks.md has the times.
    """
    if itemsize == 1:
        if num_inputs == 4096:  # a row, read whole before the wait
            return Tile(4, 4096, 4)
        columns = min(1024, next_power_of_2(num_inputs))
        return Tile(4096 // columns, columns, 2)
    if is_gated and num_inputs % 2048 == 0:
        return Tile(2, 4096 if num_inputs % 4096 == 0 else 2048, 8)
    if num_inputs > 4096 and num_inputs % 2048 == 0:
        return Tile(1, 2048, 4)
    if num_inputs <= 1024 and num_inputs % 512 == 0:
        return Tile(2, 512, 2)
    columns = min(1024, next_power_of_2(num_inputs))
    return Tile(2048 // columns, columns, 4)


@triton.jit
def _gemv_kernel(
    x_ptr,  # (NUM_INPUTS,)
    stream_ptr,  # (NUM_INPUTS,), whose rms divides x; or None
    weight_ptr,  # (num_outputs, NUM_INPUTS), gated (2 * num_outputs, NUM_INPUTS)
    scale_ptr,  # as many as rows of the weight, or None
    bias_ptr,  # as many as rows of the weight, or None
    out_ptr,  # (num_outputs,)
    residual_ptr,  # (num_outputs,), or None
    norm_ptr,  # (num_outputs,), or None
    values_ptr,  # (num_outputs,), or None
    eps,
    num_outputs,
    stride_weight,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    OUTPUTS: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    r = tl.arange(0, ROWS)
    # Rows behind the last one repeat it: their loads need no mask. Gates come before ups.
    weight_row = tl.minimum(tl.program_id(0) * OUTPUTS + r % OUTPUTS, num_outputs - 1)
    weight_row = (weight_row + r // OUTPUTS * num_outputs).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    weights = weight_ptr + weight_row[:, None] * stride_weight
    weight = _load_inputs(weights, column[None, :], NUM_INPUTS, COLUMNS)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + weight_row)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + output, mask=exists, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = _load_inputs(x_ptr, column, NUM_INPUTS, COLUMNS)
    acc = _to_float(weight) * x.to(tl.float32)[None, :]
    if stream_ptr is not None:
        h = _load_inputs(stream_ptr, column, NUM_INPUTS, COLUMNS).to(tl.float32)
        squares = h * h
    for start in range(COLUMNS, NUM_INPUTS, COLUMNS):
        weight = _load_inputs(weights, start + column[None, :], NUM_INPUTS, COLUMNS)
        x = _load_inputs(x_ptr, start + column, NUM_INPUTS, COLUMNS)
        acc += _to_float(weight) * x.to(tl.float32)[None, :]
        if stream_ptr is not None:
            h = _load_inputs(stream_ptr, start + column, NUM_INPUTS, COLUMNS).to(tl.float32)
            squares += h * h
    if stream_ptr is None:
        y = tl.sum(acc, axis=1)
    else:
        squares = tl.broadcast_to(squares[None, :], acc.shape)
        y, square_sum = tl.reduce((acc, squares), 1, _add_pairs)
        y *= tl.rsqrt(square_sum / NUM_INPUTS + eps)
    if scale_ptr is not None:
        y *= scale
    if bias_ptr is not None:
        y += bias
    if IS_GATED:
        gate, up = tl.split(y.reshape((2, OUTPUTS)).T)
        y = gate * tl.sigmoid(gate) * up
    if residual_ptr is not None:
        y += tl.load(residual_ptr + output, mask=exists, other=0.0).to(tl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + output, rounded, mask=exists)
    if norm_ptr is not None:
        tl.store(values_ptr + output, rounded.to(tl.float32) * norm, mask=exists)


@triton.jit
def _to_float(weight):
    """Convert to float32; integers by two sums, for their conversion has an eighth of the speed."""
    if weight.dtype == tl.int8:
        bits = weight.to(tl.int32) + 0x4B400000  # of the float32 1.5 * 2**23 + weight
        floats = bits.to(tl.float32, bitcast=True) - 12582912.0
    else:
        floats = weight.to(tl.float32)
    return floats


@triton.jit
def _add_pairs(a, b, c, d):
    """Add pairs: two sums for the barriers of one."""
    return a + c, b + d


@triton.jit
def _load_inputs(row_ptr, k, NUM_INPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load elements of rows of NUM_INPUTS; a mask where tiles do not cut them without a rest."""
    if NUM_INPUTS % COLUMNS == 0:
        values = tl.load(row_ptr + k)
    else:
        values = tl.load(row_ptr + k, mask=k < NUM_INPUTS, other=0.0)
    return values
