"""The product of a weight with 2 to 128 rows on Hopper, bound by the reading of the weight.

Features lie on the side of a matrix product that is 64 wide, rows on the other. A program has one
partition that copies, and up to three that multiply a tile of 64 features each::

    producer    1 warp    64 inputs of all features and rows into shared memory, stages ahead
    consumer 0  4 warps   features  0 ..  63 of the program times all rows
    consumer 1  4 warps   features 64 .. 127

All stages are filled with weights before the kernel in front has ended; only copies of rows wait
for it. The inputs may be cut into parts, one a program, so that enough multiprocessors read. The
programs of a tile leave their sums in memory, and the last to arrive adds up all parts, in their
order: nobody waits, and results do not depend on time.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.attention.ops.dependent_launch import can_start_early
from octavo.attention.ops.descriptors import describe
from octavo.attention.ops.sizes import cdiv, next_power_of_2
from octavo.models.ops.hopper_tiles import (
    NUM_COLUMNS,
    NUM_FEATURES,
    PRODUCER_REGISTERS,
    Tile,
    choose_tile,
    is_tuned_for,
)
from octavo.models.ops.norm import Norm, Normed, Product, take_apart

PADDED_ROWS = (16, 32, 64, 128)
"""Numbers of rows that kernels are compiled for."""
MAX_ROWS = PADDED_ROWS[-1]
MAX_TILES = 8192
"""Tiles of one product whose parts may be counted: 524,288 features."""
FEATURES = gl.constexpr(NUM_FEATURES)
COLUMNS = gl.constexpr(NUM_COLUMNS)


def can_multiply_on_hopper(x: Tensor, weight: Tensor) -> bool:
    """Tell whether ``multiply_on_hopper`` takes these, on a device that tiles were chosen for."""
    return (
        1 <= len(x) <= MAX_ROWS
        and x.dtype == weight.dtype == torch.bfloat16
        and is_tuned_for(x.device)
        and all(_can_describe(matrix) for matrix in (x, weight))
    )


def _can_describe(matrix: Tensor) -> bool:
    """Rows begin at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0


def multiply_on_hopper(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    is_gated: bool = False,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    tile: Tile | None = None,
) -> Product:
    """Return ``x @ weight.T * scale + bias``, (num_rows, num_outputs), of x (num_rows, num_inputs).

    Scale and bias have an element a row of the weight. Sums are float32 and rounded once; their
    order depends on the tile alone. ``is_gated``: the product is gate | up, and the output
    silu(gate) * up. ``residual`` is added at the end; the output is the stream that ``norm``
    prepares for the next product. ``tile`` is for measurements.
    """
    values, square_sums, eps = take_apart(x)
    num_rows, num_inputs = values.shape
    num_features = len(weight)
    num_outputs = num_features // (1 + is_gated)
    assert weight.shape[1] == num_inputs, f"x is {tuple(values.shape)}, weight {weight.shape}"
    assert 1 <= num_rows <= MAX_ROWS, f"{num_rows} rows, at most {MAX_ROWS}"
    rows = next(size for size in PADDED_ROWS if num_rows <= size)
    tile = tile or choose_tile(num_features, num_inputs)
    num_programs = tile.count_programs(num_features)
    num_tiles = num_programs // tile.num_parts * tile.num_consumers
    assert num_tiles <= MAX_TILES, f"{num_tiles} tiles, at most {MAX_TILES}"
    out = values.new_empty((num_rows, num_outputs))
    product = Product.allocate(out, norm, num_parts=num_tiles)
    num_steps = cdiv(cdiv(num_inputs, COLUMNS.value), tile.num_parts)
    partial = None
    if tile.num_parts > 1:
        shape = (num_tiles, tile.num_parts, num_rows, FEATURES.value)
        partial = out.new_empty(shape, dtype=torch.float32)
    else:
        num_steps = max(num_steps, rows // 32)  # sums are put where stages were
    starts_early = can_start_early(values, max_rows=MAX_ROWS)
    registers, consumer_registers = tile.share_registers()
    _linear_kernel[(num_programs,)](
        _describe(weight, FEATURES.value // (1 + is_gated)),
        _describe(values, rows),
        scale,
        bias,
        square_sums,
        residual,
        norm.weight if norm is not None else None,
        out,
        product.values,
        product.square_sums,
        partial,
        _get_arrivals(values.device) if partial is not None else None,
        eps,
        num_rows,
        num_outputs,
        residual.stride(0) if residual is not None else 0,
        len(square_sums) if square_sums is not None else 0,
        NUM_INPUTS=num_inputs,
        ROWS=rows,
        NUM_CONSUMERS=tile.num_consumers,
        NUM_PARTS=tile.num_parts,
        NUM_STEPS=num_steps,
        STAGES=min(tile.count_stages(rows), num_steps),
        SQUARES=next_power_of_2(len(square_sums)) if square_sums is not None else 0,
        IS_GATED=is_gated,
        PDL=starts_early,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=registers,
        launch_pdl=starts_early,
    )
    return product


def _get_arrivals(device: torch.device) -> Tensor:
    """Return counters that are zero between launches: whoever finishes a tile resets its own.

    Launches of different streams may run at once, so each stream has its own.
    """
    return _create_arrivals(device, torch.cuda.current_stream(device).cuda_stream)


@cache
def _create_arrivals(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def _describe(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Describe a matrix to copies of so many rows and a stage's columns."""
    return describe(matrix, matrix.shape, matrix.stride(), (rows, NUM_COLUMNS))


@gluon.jit(do_not_specialize=["num_rows", "num_squares"])
def _linear_kernel(
    weight,  # (num_features, NUM_INPUTS)
    x,  # (num_rows, NUM_INPUTS)
    scale_ptr,  # (num_features,), or None
    bias_ptr,  # (num_features,), or None
    squares_ptr,  # (num_squares, num_rows) float32, or None
    residual_ptr,  # (num_rows, num_outputs), or None
    next_norm_ptr,  # (num_outputs,), or None
    out_ptr,  # (num_rows, num_outputs)
    scaled_ptr,  # like out, or None
    next_squares_ptr,  # (num_tiles, num_rows) float32, or None
    partial_ptr,  # (num_tiles, NUM_PARTS, num_rows, FEATURES) float32, or None
    arrivals_ptr,  # (num_tiles,), or None
    eps,
    num_rows,
    num_outputs,
    stride_residual,
    num_squares,
    NUM_INPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    NUM_PARTS: gl.constexpr,
    NUM_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    SQUARES: gl.constexpr,
    IS_GATED: gl.constexpr,
    PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    weights = gl.allocate_shared_memory(
        weight.dtype, [NUM_CONSUMERS * STAGES, FEATURES, COLUMNS], weight.layout
    )
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, COLUMNS], x.layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=NUM_CONSUMERS)
    fence_async_shared()
    shape: gl.constexpr = (
        NUM_INPUTS,
        NUM_CONSUMERS,
        NUM_PARTS,
        NUM_STEPS,
        SQUARES,
        IS_GATED,
        PDL,
    )
    buffers = (weights, xs, full, empty)
    copied = (buffers, weight, x, num_outputs, shape)
    sources = (scale_ptr, bias_ptr, squares_ptr, residual_ptr, next_norm_ptr)
    targets = (out_ptr, scaled_ptr, next_squares_ptr, partial_ptr, arrivals_ptr)
    sizes = (eps, num_rows, num_outputs, stride_residual, num_squares)
    if NUM_CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (buffers, sources, targets, sizes, shape, 0)),
                (_produce, copied),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif NUM_CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (buffers, sources, targets, sizes, shape, 0)),
                (_consume, (buffers, sources, targets, sizes, shape, 1)),
                (_produce, copied),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, sources, targets, sizes, shape, 0)),
                (_consume, (buffers, sources, targets, sizes, shape, 1)),
                (_consume, (buffers, sources, targets, sizes, shape, 2)),
                (_produce, copied),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(buffers, weight, x, num_outputs, shape: gl.constexpr):
    """Copy the program's part of weight and rows, stage by stage."""
    _, xs, full, empty = buffers
    NUM_CONSUMERS: gl.constexpr = shape[1]
    NUM_PARTS: gl.constexpr = shape[2]
    NUM_STEPS: gl.constexpr = shape[3]
    STAGES: gl.constexpr = xs.shape[0]
    BYTES: gl.constexpr = 2 * COLUMNS * (FEATURES * NUM_CONSUMERS + xs.shape[1])
    tile = gl.program_id(0) // NUM_PARTS * NUM_CONSUMERS
    start = gl.program_id(0) % NUM_PARTS * NUM_STEPS * COLUMNS
    for step in gl.static_range(STAGES):
        mbarrier.expect(full.index(step), BYTES)
        _copy_weights(buffers, step, weight, tile, start + step * COLUMNS, num_outputs, shape)
    if shape[6]:
        gdc_wait()
    for step in gl.static_range(STAGES):
        column = start + step * COLUMNS
        tma.async_copy_global_to_shared(x, [0, column], full.index(step), xs.index(step))
    for i in range(STAGES, NUM_STEPS):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        place = start + i * COLUMNS
        _copy_weights(buffers, stage, weight, tile, place, num_outputs, shape)
        tma.async_copy_global_to_shared(x, [0, place], full.index(stage), xs.index(stage))


@gluon.jit
def _copy_weights(buffers, stage, weight, tile, column, num_outputs, shape: gl.constexpr):
    """Copy the features of all consumers: of gated ones gates, and as many ups behind them."""
    weights, xs, full, _ = buffers
    STAGES: gl.constexpr = xs.shape[0]
    HALF: gl.constexpr = FEATURES // 2
    for consumer in gl.static_range(shape[1]):
        target = weights.index(consumer * STAGES + stage)
        if shape[5]:
            gate = (tile + consumer) * HALF
            up = num_outputs + gate
            gates = target.slice(0, HALF)
            ups = target.slice(HALF, HALF)
            tma.async_copy_global_to_shared(weight, [gate, column], full.index(stage), gates)
            tma.async_copy_global_to_shared(weight, [up, column], full.index(stage), ups)
        else:
            feature = (tile + consumer) * FEATURES
            tma.async_copy_global_to_shared(weight, [feature, column], full.index(stage), target)


@gluon.jit
def _consume(buffers, sources, targets, sizes, shape: gl.constexpr, CONSUMER: gl.constexpr):
    """Multiply one tile over one part of the inputs; finish it if all other parts are there."""
    weights, xs, _, _ = buffers
    _, _, squares_ptr, _, _ = sources
    _, _, _, partial_ptr, arrivals_ptr = targets
    _, num_rows, _, _, num_squares = sizes
    NUM_PARTS: gl.constexpr = shape[2]
    SQUARES: gl.constexpr = shape[4]
    ROWS: gl.constexpr = xs.shape[1]
    KINDS: gl.constexpr = 2 if shape[5] else 1
    OUTPUTS: gl.constexpr = FEATURES // KINDS
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // OUTPUTS, OUTPUTS // 4], [4, 1], [1, 0])
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    tile = gl.program_id(0) // NUM_PARTS * shape[1] + CONSUMER
    if shape[6]:
        gdc_wait()
        gdc_launch_dependents()
    squares = None
    if squares_ptr is not None:
        s = gl.arange(0, SQUARES, gl.SliceLayout(1, SUMS))
        r = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
        is_square = (s < num_squares)[:, None] & (r < num_rows)[None, :]
        square = squares_ptr + s[:, None] * num_rows + r[None, :]
        squares = gl.load(square, mask=is_square, other=0.0)

    acc = _multiply(buffers, shape, CONSUMER)
    up = None
    if NUM_PARTS == 1:
        # All of the consumer's stages are read: they hold its sums now, to be turned.
        size: gl.constexpr = [KINDS, OUTPUTS, ROWS]
        STORED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 2, 0])
        LOADED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [0, 1])
        stages = weights.index(CONSUMER * xs.shape[0])
        stages._reinterpret(gl.float32, size, STORED).store(acc.reshape(size))
        sums = stages._reinterpret(gl.float32, size, LOADED)
        y = sums.index(0).permute((1, 0)).load(OUT)
        if KINDS == 2:
            up = sums.index(1).permute((1, 0)).load(OUT)
        _finish(y, up, squares, tile, sources, targets, sizes, shape)
    else:
        partial = partial_ptr + tile * NUM_PARTS * num_rows * FEATURES
        if _leave(acc, partial, arrivals_ptr + tile, num_rows, NUM_PARTS):
            row = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
            f = gl.arange(0, OUTPUTS, gl.SliceLayout(0, OUT))
            sums_of_parts = partial + row[:, None] * FEATURES + f[None, :]
            z = _add_parts(sums_of_parts, num_rows, row < num_rows, NUM_PARTS)
            z_up = None
            if KINDS == 2:
                z_up = _add_parts(sums_of_parts + OUTPUTS, num_rows, row < num_rows, NUM_PARTS)
            _finish(z, z_up, squares, tile, sources, targets, sizes, shape)


@gluon.jit
def _finish(y, up, squares, tile, sources, targets, sizes, shape: gl.constexpr):
    """Do all that comes after the sums of one tile, (ROWS, OUTPUTS), and store its outputs."""
    scale_ptr, bias_ptr, _, residual_ptr, next_norm_ptr = sources
    out_ptr, scaled_ptr, next_squares_ptr, _, _ = targets
    eps, num_rows, num_outputs, stride_residual, _ = sizes
    OUT: gl.constexpr = y.type.layout
    OUTPUTS: gl.constexpr = y.shape[1]
    row = gl.arange(0, y.shape[0], gl.SliceLayout(1, OUT))
    in_rows = row < num_rows
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(0, OUT))
    exists = output < num_outputs
    in_out = in_rows[:, None] & exists[None, :]
    if squares is not None:
        square_sum = gl.convert_layout(gl.sum(squares, axis=0), gl.SliceLayout(1, OUT))
        inverse_rms = gl.rsqrt(square_sum / shape[0] + eps)[:, None]
        y = y * inverse_rms
        if up is not None:
            up = up * inverse_rms
    y = _scale_and_shift(y, scale_ptr, bias_ptr, output, exists)
    if up is not None:
        up = _scale_and_shift(up, scale_ptr, bias_ptr, num_outputs + output, exists)
        y = y / (1.0 + gl.exp(-y)) * up
    if residual_ptr is not None:
        residual = residual_ptr + row[:, None] * stride_residual + output[None, :]
        y += gl.load(residual, mask=in_out, other=0.0).to(gl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    target = row[:, None] * num_outputs + output[None, :]
    gl.store(out_ptr + target, rounded, mask=in_out)
    if next_norm_ptr is not None:
        next_norm = gl.load(next_norm_ptr + output, mask=exists, other=0.0).to(gl.float32)
        y = gl.where(exists[None, :], rounded.to(gl.float32), 0.0)
        scaled = (y * next_norm[None, :]).to(scaled_ptr.dtype.element_ty)
        gl.store(scaled_ptr + target, scaled, mask=in_out)
        gl.store(next_squares_ptr + tile * num_rows + row, gl.sum(y * y, axis=1), mask=in_rows)


@gluon.jit
def _multiply(buffers, shape: gl.constexpr, CONSUMER: gl.constexpr):
    """Return the sums of a tile over a part of the inputs, (FEATURES, ROWS)."""
    weights, xs, full, empty = buffers
    NUM_STEPS: gl.constexpr = shape[3]
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros([FEATURES, ROWS], gl.float32, ACC)
    for i in range(NUM_STEPS - STAGES):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        w = weights.index(CONSUMER * STAGES + stage)
        acc = warpgroup_mma(w, xs.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(stage), count=1)
    # Nobody waits for the last stages to be empty: their products follow each other without a gap.
    for step in gl.static_range(NUM_STEPS - STAGES, NUM_STEPS):
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        w_last = weights.index(CONSUMER * STAGES + step % STAGES)
        x_last = xs.index(step % STAGES).permute((1, 0))
        acc = warpgroup_mma(w_last, x_last, acc, is_async=True)
    return warpgroup_mma_wait(0, [acc])


@gluon.jit
def _leave(acc, partial, arrivals_ptr, num_rows, NUM_PARTS: gl.constexpr):
    """Leave the sums of one part; return whether those of all parts of the tile are there."""
    f = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    place = gl.program_id(0) % NUM_PARTS * num_rows + row
    target = partial + place[None, :] * FEATURES + f[:, None]
    gl.store(target, acc, mask=(row < num_rows)[None, :])
    debug_barrier()  # all threads have written before one of them tells so
    is_last = gl.atomic_add(arrivals_ptr, 1) == NUM_PARTS - 1
    if is_last:
        gl.store(arrivals_ptr, 0)
    return is_last


@gluon.jit
def _add_parts(partial, num_rows, in_rows, NUM_PARTS: gl.constexpr):
    """Add up what the programs of a tile made, in their order."""
    # Not through L1: other multiprocessors wrote these.
    y = gl.load(partial, mask=in_rows[:, None], other=0.0, cache_modifier=".cg")
    for part in gl.static_range(1, NUM_PARTS):
        source = partial + part * num_rows * FEATURES
        y += gl.load(source, mask=in_rows[:, None], other=0.0, cache_modifier=".cg")
    return y


@gluon.jit
def _scale_and_shift(y, scale_ptr, bias_ptr, feature, exists):
    """Apply scale and bias, where there are any, of features to columns of y."""
    if scale_ptr is not None:
        y *= gl.load(scale_ptr + feature, mask=exists, other=0.0).to(gl.float32)[None, :]
    if bias_ptr is not None:
        y += gl.load(bias_ptr + feature, mask=exists, other=0.0).to(gl.float32)[None, :]
    return y
