"""The product of a weight with several rows, by the matrix units, at the speed of reading weights.

It is taken for 2 to 32 rows, and up to 256 where the weight is of integers.

Features lie on the side of a matrix product that is 64 wide, rows on the one that may be narrow. A
program takes one tile of features and one part of the inputs::

              inputs: part 0     part 1
    features  | program 0     | program 3     |  tile 0
              | program 1     | program 4     |  tile 1      the last part of a tile to arrive adds
              | program 2     | program 5     |  tile 2      up all parts of it, in their order

so that there are about as many programs as run side by side, and results do not depend on time.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.dependent_launch import (
    can_start_early,
    prefetch_lines,
    wait_for_inputs,
)
from octavo.models.ops.norm import Norm, Normed, Product, take_apart

PADDED_ROWS = (16, 32, 64, 128, 256)
"""Numbers of rows that kernels are compiled for."""
MAX_ROWS = 32
"""With more, cuBLAS multiplies weights of 16 bits as fast."""
TUNED_FOR = ("H200",)
NUM_MULTIPROCESSORS = 132
LINE_BYTES = 128
NUM_LINES = tl.constexpr(4)
"""Cache lines of each feature that a program asks for before it waits."""
MAX_TILES = 8192
"""Tiles of one product whose parts may be counted: 524,288 features."""


class Tile(NamedTuple):
    """What a program takes: features, inputs a stage, stages in flight, parts of the inputs."""

    features: int
    columns: int
    num_stages: int
    num_parts: int
    num_warps: int = 4


def multiply_few_rows(
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
    """Return ``x @ weight.T * scale + bias``, (num_rows, num_outputs), of x (num_rows, num_inputs).

    The weight may be of 8 bits; scale and bias have an element a row of the weight. Sums are
    float32 and rounded once; their order depends on the tile alone. ``is_gated``: the product is
    gate | up, and the output silu(gate) * up. ``residual`` is added at the end; the output is the
    stream that ``norm`` prepares for the next product. Given ``out``, it is not allocated. Without
    ``tile`` one is chosen for 16 bits.
    """
    values, square_sums, eps = take_apart(x)
    num_rows, num_inputs = values.shape
    num_features = len(weight)
    num_outputs = num_features // (1 + is_gated)
    assert weight.shape[1] == num_inputs, f"x is {tuple(values.shape)}, weight {weight.shape}"
    assert values.stride(1) == weight.stride(1) == 1, "elements of a row must be contiguous"
    assert 1 <= num_rows <= PADDED_ROWS[-1], f"{num_rows} rows, at most {PADDED_ROWS[-1]}"
    padded_rows = next(size for size in PADDED_ROWS if num_rows <= size)
    tile = tile or choose_tile(num_features, num_inputs)
    num_tiles = triton.cdiv(num_features, tile.features)
    assert num_tiles <= MAX_TILES, f"{num_tiles} tiles, at most {MAX_TILES}"
    out = values.new_empty((num_rows, num_outputs)) if out is None else out
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    product = Product.allocate(out, norm, num_parts=num_tiles)
    partial = None
    if tile.num_parts > 1:
        shape = (tile.num_parts, num_rows, num_tiles * tile.features)
        partial = out.new_empty(shape, dtype=torch.float32)
    starts_early = can_start_early(values)
    part = triton.cdiv(triton.cdiv(num_inputs, tile.columns), tile.num_parts) * tile.columns
    _few_rows_kernel[(num_tiles, tile.num_parts)](
        values,
        weight,
        scale,
        bias,
        square_sums,
        residual,
        norm.weight if norm is not None else None,
        out,
        product.values,
        product.square_sums,
        partial,
        get_arrivals(values.device) if partial is not None else None,
        eps,
        num_rows,
        num_outputs,
        values.stride(0),
        weight.stride(0),
        residual.stride(0) if residual is not None else 0,
        len(square_sums) if square_sums is not None else 0,
        NUM_INPUTS=num_inputs,
        PART=part,
        ROWS=padded_rows,
        FEATURES=tile.features,
        COLUMNS=tile.columns,
        NUM_PARTS=tile.num_parts,
        SQUARES=triton.next_power_of_2(len(square_sums)) if square_sums is not None else 0,
        IS_GATED=is_gated,
        LINE=LINE_BYTES // weight.element_size(),
        INPUT_PRECISION="ieee" if values.dtype == torch.float32 else "tf32",
        PDL=starts_early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=starts_early,
    )
    return product


def choose_tile(num_features: int, num_inputs: int) -> Tile:
    """Choose tiles of 64 features, and as many parts as give one program a multiprocessor."""
    num_tiles = triton.cdiv(num_features, 64)
    num_steps = triton.cdiv(num_inputs, 128)
    steps_of_part = triton.cdiv(num_steps, max(1, NUM_MULTIPROCESSORS // num_tiles))
    return Tile(64, 128, 6, triton.cdiv(num_steps, steps_of_part))


@cache
def is_tuned_for(device: torch.device) -> bool:
    """Return whether the tiles were chosen on such a device; on others cuBLAS multiplies."""
    return any(name in torch.cuda.get_device_name(device) for name in TUNED_FOR)


def get_arrivals(device: torch.device) -> Tensor:
    """Return counters that are zero between launches: whoever finishes a tile resets its own.

    Launches of different streams may run at once, so each stream has its own.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _create_arrivals(device, stream)


@cache
def _create_arrivals(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows", "num_squares"])
def _few_rows_kernel(
    x_ptr,  # (num_rows, NUM_INPUTS)
    weight_ptr,  # (num_features, NUM_INPUTS)
    scale_ptr,  # (num_features,), or None
    bias_ptr,  # (num_features,), or None
    squares_ptr,  # (num_squares, num_rows) float32, or None
    residual_ptr,  # (num_rows, num_outputs), or None
    next_norm_ptr,  # (num_outputs,), or None
    out_ptr,  # (num_rows, num_outputs)
    scaled_ptr,  # like out, or None
    next_squares_ptr,  # (num_tiles, num_rows) float32, or None
    partial_ptr,  # (NUM_PARTS, num_rows, num_tiles * FEATURES) float32, or None
    arrivals_ptr,  # (num_tiles,), or None
    eps,
    num_rows,
    num_outputs,
    stride_x,
    stride_weight,
    stride_residual,
    num_squares,
    NUM_INPUTS: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SQUARES: tl.constexpr,
    IS_GATED: tl.constexpr,
    LINE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    OUTPUTS: tl.constexpr = FEATURES // 2 if IS_GATED else FEATURES
    tile = tl.program_id(0)
    part = tl.program_id(1)
    f = tl.arange(0, FEATURES)
    # Behind the last output it is repeated: these loads need no mask. Gates come before ups.
    feature = tl.minimum(tile * OUTPUTS + f % OUTPUTS, num_outputs - 1)
    feature += f // OUTPUTS * num_outputs
    weights = weight_ptr + feature.to(tl.int64)[:, None] * stride_weight
    row = tl.arange(0, ROWS)
    k = tl.arange(0, COLUMNS)
    start = part * PART
    if PDL:
        ahead = tl.minimum(start + tl.arange(0, NUM_LINES) * LINE, NUM_INPUTS - 1)
        prefetch_lines((weights + ahead[None, :]).to(tl.int64))
    wait_for_inputs(PDL)
    if squares_ptr is not None:
        s = tl.arange(0, SQUARES)
        is_square = (s < num_squares)[:, None] & (row < num_rows)[None, :]
        square = squares_ptr + s[:, None] * num_rows + row[None, :]
        squares = tl.load(square, mask=is_square, other=0.0)
    xs = x_ptr + row[:, None] * stride_x
    in_rows = (row < num_rows)[:, None]
    acc = tl.zeros([FEATURES, ROWS], tl.float32)
    for i in tl.range(0, PART, COLUMNS):
        column = start + i + k[None, :]
        if NUM_INPUTS % (PART * NUM_PARTS) == 0:
            weight = tl.load(weights + column)
            x = tl.load(xs + column, mask=in_rows, other=0.0)
        else:
            weight = tl.load(weights + column, mask=column < NUM_INPUTS, other=0.0)
            x = tl.load(xs + column, mask=in_rows & (column < NUM_INPUTS), other=0.0)
        acc = tl.dot(weight.to(x.dtype), x.T, acc, input_precision=INPUT_PRECISION)
    y = acc.T
    if squares_ptr is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / NUM_INPUTS + eps)
    else:
        inverse_rms = None
    is_last = True
    if NUM_PARTS > 1:
        width = tl.num_programs(0) * FEATURES
        partial = partial_ptr + row[:, None] * width + (tile * FEATURES + f)[None, :]
        tl.store(partial + part * num_rows * width, y, mask=in_rows)
        tl.debug_barrier()  # all threads have written before one of them tells so
        is_last = tl.atomic_add(arrivals_ptr + tile, 1) == NUM_PARTS - 1
    if is_last:
        if NUM_PARTS > 1:
            tl.store(arrivals_ptr + tile, 0)
            y = tl.zeros([ROWS, FEATURES], tl.float32)
            for index in tl.static_range(NUM_PARTS):
                # Not through L1: other multiprocessors wrote these.
                source = partial + index * num_rows * width
                y += tl.load(source, mask=in_rows, other=0.0, cache_modifier=".cg")
        _finish(
            y,
            inverse_rms,
            scale_ptr,
            bias_ptr,
            residual_ptr,
            next_norm_ptr,
            out_ptr,
            scaled_ptr,
            next_squares_ptr,
            num_rows,
            num_outputs,
            stride_residual,
            OUTPUTS,
            IS_GATED,
        )


@triton.jit
def _finish(
    y,  # (ROWS, FEATURES)
    inverse_rms,  # (ROWS,), or None
    scale_ptr,
    bias_ptr,
    residual_ptr,
    next_norm_ptr,
    out_ptr,
    scaled_ptr,
    next_squares_ptr,
    num_rows,
    num_outputs,
    stride_residual,
    OUTPUTS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Do all that comes after the sums of one tile, and store its outputs."""
    tile = tl.program_id(0)
    row = tl.arange(0, y.shape[0])
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    in_out = (row < num_rows)[:, None] & exists[None, :]
    if inverse_rms is not None:
        y = y * inverse_rms[:, None]
    if IS_GATED:
        gate, up = tl.split(y.reshape((y.shape[0], 2, OUTPUTS)).permute((0, 2, 1)))
        gate = _scale_and_shift(gate, scale_ptr, bias_ptr, output, exists)
        up = _scale_and_shift(up, scale_ptr, bias_ptr, num_outputs + output, exists)
        z = gate * tl.sigmoid(gate) * up
    else:
        z = _scale_and_shift(y, scale_ptr, bias_ptr, output, exists)
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + row[:, None] * stride_residual + output[None, :], mask=in_out, other=0.0
        )
        z += residual.to(tl.float32)
    rounded = z.to(out_ptr.dtype.element_ty)
    target = row[:, None] * num_outputs + output[None, :]
    tl.store(out_ptr + target, rounded, mask=in_out)
    if next_norm_ptr is not None:
        z = tl.where(exists[None, :], rounded.to(tl.float32), 0.0)
        tl.store(scaled_ptr + target, z * _load_vector(next_norm_ptr + output, exists), mask=in_out)
        squares = tl.sum(z * z, axis=1)
        tl.store(next_squares_ptr + tile * num_rows + row, squares, mask=row < num_rows)


@triton.jit
def _scale_and_shift(y, scale_ptr, bias_ptr, feature, exists):
    """Apply scale and bias, where there are any, of features to columns of y."""
    if scale_ptr is not None:
        y *= _load_vector(scale_ptr + feature, exists)
    if bias_ptr is not None:
        y += _load_vector(bias_ptr + feature, exists)
    return y


@triton.jit
def _load_vector(pointers, exists):
    """Return elements of a vector as a row in float32."""
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)[None, :]
