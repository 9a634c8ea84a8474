"""Prefill attention with Hopper's own instructions: bulk tensor copies, asynchronous products.

The query tiles of ``plan_prefill``, 128 rows each, in one persistent program a multiprocessor with
three partitions::

    producer    1 warp    pages of K and V into shared memory, two tiles ahead, one copy a page
    consumer 0  4 warps   rows  0 ..  63 of each query tile
    consumer 1  4 warps   rows 64 .. 127

A consumer's matrix products run while it computes the softmax of the newer tile::

    products    | q k0 |           | q k1  p0 v0 |           | q k2  p1 v1 |
    softmax             | of q k0 |         | of q k1 |              | of q k2 |

``prefill`` is the fallback and the oracle.
"""

import functools

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

from octavo.attention.backend import AttentionLayer
from octavo.attention.ops.decode import LOG2_E
from octavo.attention.ops.descriptors import describe
from octavo.attention.ops.paged_kv import PagedKV
from octavo.attention.ops.plan_prefill import BLOCK_M, TILE_FIELDS, PrefillPlan

ROWS = gl.constexpr(BLOCK_M // 2)
"""Rows of one consumer: what one warpgroup multiplies at once."""
BLOCK_N = gl.constexpr(128)
"""Tokens of a K/V tile: scores and outputs of a consumer take 64 registers of a thread each."""
STAGES = gl.constexpr(2)
"""K/V tiles in shared memory: 64 KiB each with heads of 128 elements, beside 32 KiB of queries."""
CHUNK = gl.constexpr(16)
"""Tokens of V that are cleared at a time behind the end of the context."""
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
"""Of a thread. With 240 and 24 the producer spills."""
MAX_REGISTERS = 168
"""Of a thread before they are shared out: 64 Ki over three warpgroups."""


def can_prefill_on_hopper(layer: AttentionLayer, cache: PagedKV) -> bool:
    """Tell whether the device, the heads and the layout of the pool fit ``prefill_on_hopper``."""
    k = cache.k
    stride_block, stride_token, stride_head = cache.strides
    return (
        k.is_cuda
        and _find_capability(k.device)[0] == 9
        and k.dtype.itemsize == 2
        and layer.head_dim in (64, 128)
        and cache.block_size >= CHUNK.value
        and stride_head == layer.head_dim
        and stride_token == layer.head_dim * layer.num_kv_heads
        and stride_block % stride_token == 0
    )


@functools.cache
def _find_capability(device: torch.device) -> tuple[int, int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor, properties.multi_processor_count


def prefill_on_hopper(
    layer: AttentionLayer, q: Tensor, *, cache: PagedKV, plan: PrefillPlan, out: Tensor
) -> None:
    """Write the outputs of the rows with several tokens into ``out``, leaving the other rows alone.

    q and out are (num_tokens, num_heads, head_dim), contiguous.
    """
    page = min(cache.block_size, BLOCK_N.value)
    line = layer.num_kv_heads * layer.head_dim
    lines_per_block = cache.strides[0] // line
    v_line = (cache.v.data_ptr() - cache.k.data_ptr()) // (line * q.dtype.itemsize)
    num_lines = (cache.k.shape[0] - 1) * lines_per_block + cache.block_size + v_line
    assert v_line > 0, f"V begins {-v_line} lines before K"
    assert num_lines < 2**31, f"{num_lines} lines"
    lines = describe(cache.k, (num_lines, line), (line, 1), (page, layer.head_dim))
    num_items = plan.tiles.shape[0] * layer.num_kv_heads
    _prefill_kernel[(min(_find_capability(q.device)[2], num_items),)](
        out,
        q,
        lines,
        plan.inputs.block_tables,
        plan.tiles,
        layer.scale * LOG2_E,
        plan.inputs.block_tables.stride(0),
        num_items,
        v_line,
        lines_per_block,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        HEAD_DIM=layer.head_dim,
        BLOCK_SIZE=cache.block_size,
        PAGE=page,
        WINDOW=layer.sliding_window or 0,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )


@gluon.jit(do_not_specialize=["stride_table", "num_items", "v_line", "lines_per_block"])
def _prefill_kernel(
    out_ptr,  # (num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM)
    q_ptr,  # like out
    lines,  # the pool from K of the layer on: a line is K or V of one token, all heads
    block_tables_ptr,
    tiles_ptr,
    scale,  # times log2(e): the softmax is computed in base 2
    stride_table,
    num_items,
    v_line,
    lines_per_block,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOW: gl.constexpr,
):
    tile_shape: gl.constexpr = [STAGES, BLOCK_N, HEAD_DIM]
    k_tiles = gl.allocate_shared_memory(lines.dtype, tile_shape, lines.layout)
    v_tiles = gl.allocate_shared_memory(lines.dtype, tile_shape, lines.layout)
    q_tiles = gl.allocate_shared_memory(lines.dtype, [2, ROWS, HEAD_DIM], lines.layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    buffers = (k_tiles, v_tiles, k_full, v_full, k_empty, v_empty)
    heads: gl.constexpr = (NUM_KV_HEADS, GROUP, HEAD_DIM, WINDOW)
    where = (tiles_ptr, num_items)
    rows = (out_ptr, q_ptr, q_tiles, scale)
    pages = (lines, block_tables_ptr, stride_table, v_line, lines_per_block)
    gl.warp_specialize(
        [
            (_consume, (where, buffers, rows, heads, 0)),
            (_consume, (where, buffers, rows, heads, 1)),
            (_produce, (where, buffers, pages, heads, BLOCK_SIZE, PAGE)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _load_item(where, turn, heads: gl.constexpr):
    """Return number of queries, row, first token, first position and KV head of a program's item.

    Items are query tiles times KV heads, longest context first; those behind the last have no
    queries. Programs take turns in alternating order, so that none gets the longest every time.
    """
    tiles_ptr, num_items = where
    NUM_KV_HEADS: gl.constexpr = heads[0]
    TILE_TOKENS: gl.constexpr = 2 * ROWS // heads[1]
    step = gl.num_programs(0)
    place = gl.program_id(0)
    place = turn * step + gl.where(turn % 2 == 0, place, step - 1 - place)
    planned = tiles_ptr + place // NUM_KV_HEADS * TILE_FIELDS
    exists = place < num_items
    num_queries = gl.minimum(gl.load(planned, mask=exists, other=0), TILE_TOKENS)
    row = gl.load(planned + 1, mask=exists, other=0).to(gl.int64)
    first_token = gl.load(planned + 2, mask=exists, other=0).to(gl.int64)
    first_position = gl.load(planned + 3, mask=exists, other=0)
    return num_queries, row, first_token, first_position, place % NUM_KV_HEADS


@gluon.jit
def _find_start(first_position, WINDOW: gl.constexpr):
    """First token of the first K/V tile that a query tile sees."""
    start = first_position * 0
    if WINDOW > 0:
        start = gl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return start


@gluon.jit
def _produce(
    where, buffers, pages, heads: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr
):
    """Copy the K/V tiles of all items of the program, each when its place is empty."""
    k_tiles, v_tiles, k_full, v_full, k_empty, v_empty = buffers
    lines, block_tables_ptr, stride_table, v_line, lines_per_block = pages
    HEAD_DIM: gl.constexpr = heads[2]
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    turn = 0
    count = 0
    num_queries, row, _, first_position, head = _load_item(where, turn, heads)
    while num_queries > 0:
        table_ptr = block_tables_ptr + row * stride_table
        stop = first_position + num_queries
        # Past the end of the context its last page is copied again: consumers mask and clear.
        last_page = (stop - 1) // PAGE * PAGE
        for first in range(_find_start(first_position, heads[3]), stop, BLOCK_N):
            stage = count % STAGES
            phase = (count // STAGES + 1) & 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), TILE_BYTES)
            for i in gl.static_range(BLOCK_N // PAGE):
                n = gl.minimum(first + i * PAGE, last_page)
                line = gl.load(table_ptr + n // BLOCK_SIZE) * lines_per_block + n % BLOCK_SIZE
                target = k_tiles.index(stage).slice(i * PAGE, PAGE)
                tma.async_copy_global_to_shared(
                    lines, [line, head * HEAD_DIM], k_full.index(stage), target
                )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), TILE_BYTES)
            for i in gl.static_range(BLOCK_N // PAGE):
                n = gl.minimum(first + i * PAGE, last_page)
                line = gl.load(table_ptr + n // BLOCK_SIZE) * lines_per_block + n % BLOCK_SIZE
                target = v_tiles.index(stage).slice(i * PAGE, PAGE)
                tma.async_copy_global_to_shared(
                    lines, [line + v_line, head * HEAD_DIM], v_full.index(stage), target
                )
            count += 1
        turn += 1
        num_queries, row, _, first_position, head = _load_item(where, turn, heads)


@gluon.jit
def _consume(where, buffers, rows, heads: gl.constexpr, HALF: gl.constexpr):
    """Attend from one half of the rows of all items of the program."""
    k_tiles, v_tiles, k_full, v_full, k_empty, v_empty = buffers
    out_ptr, q_ptr, q_tiles, scale = rows
    GROUP: gl.constexpr = heads[1]
    HEAD_DIM: gl.constexpr = heads[2]
    WINDOW: gl.constexpr = heads[3]
    dtype: gl.constexpr = q_tiles.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    MEMORY: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    s_query = (HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    q_tile = q_tiles.index(HALF)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    turn = 0
    count = 0
    num_queries, _, first_token, first_position, head = _load_item(where, turn, heads)
    offset, in_tile = _find_rows(num_queries, first_token, head, heads, HALF, MEMORY)
    q = gl.load(q_ptr + offset, mask=in_tile, other=0.0)
    while num_queries > 0:
        q_tile.store(q)
        fence_async_shared()
        turn += 1
        next_queries, _, next_token, next_position, next_head = _load_item(where, turn, heads)
        start = _find_start(first_position, WINDOW)
        stop = first_position + num_queries
        edges = (first_position, stop, first_position + s_query)

        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
        sum_p = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        # Finite: in a window's first tiles some rows see nothing yet.
        max_s = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, S))
        stage = count % STAGES
        phase = count // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        k = k_tiles.index(stage).permute((1, 0))
        s = warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        p, max_s, sum_p, decay = _update(s, max_s, sum_p, start, edges, scale, WINDOW)
        p = gl.convert_layout(p.to(dtype), P)
        for first in range(start + BLOCK_N, stop, BLOCK_N):
            v_stage = stage
            v_phase = phase
            count += 1
            stage = count % STAGES
            phase = count // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            k = k_tiles.index(stage).permute((1, 0))
            s = warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            new_p, max_s, sum_p, decay = _update(s, max_s, sum_p, first, edges, scale, WINDOW)
            # A wait that is over already, for its branch: without one the assembler moves the next
            # wait up to where the product begins, and nothing overlaps.
            mbarrier.wait(v_full.index(v_stage), v_phase)
            # p is named because the product reads its registers until here.
            acc, p = warpgroup_mma_wait(0, [acc, p])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
            p = gl.convert_layout(new_p.to(dtype), P)
        mbarrier.wait(v_full.index(stage), phase)
        next_offset, in_next = _find_rows(next_queries, next_token, next_head, heads, HALF, MEMORY)
        q = gl.load(q_ptr + next_offset, mask=in_next, other=0.0)
        v_tile = v_tiles.index(stage)
        _clear_behind(v_tile, start + (stop - 1 - start) // BLOCK_N * BLOCK_N, stop, MEMORY)
        acc = warpgroup_mma(p, v_tile, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, [acc, p])
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
        inverse = gl.convert_layout(1.0 / sum_p, gl.SliceLayout(1, OUT))
        result = gl.convert_layout((acc * inverse[:, None]).to(dtype), MEMORY)
        gl.store(out_ptr + offset, result, mask=in_tile)
        offset = next_offset
        in_tile = in_next
        num_queries = next_queries
        first_position = next_position


@gluon.jit
def _find_rows(
    num_queries,
    first_token,
    head,
    heads: gl.constexpr,
    HALF: gl.constexpr,
    MEMORY: gl.constexpr,
):
    """Return where one consumer's rows of an item lie in q and out, and which of them exist."""
    NUM_KV_HEADS: gl.constexpr = heads[0]
    GROUP: gl.constexpr = heads[1]
    HEAD_DIM: gl.constexpr = heads[2]
    m = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, MEMORY))
    query = m // GROUP
    row = ((first_token + query) * NUM_KV_HEADS + head) * GROUP + m % GROUP
    exists = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    return row[:, None] * HEAD_DIM + d[None, :], exists


@gluon.jit
def _update(s, max_s, sum_p, first, edges, scale, WINDOW: gl.constexpr):
    """Return p of one tile, the running softmax with it and by how much earlier results decay."""
    first_position, stop, position = edges
    is_edge = first + BLOCK_N > first_position + 1
    if WINDOW > 0:
        is_edge = is_edge | (first < stop - WINDOW)
    if is_edge:
        n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        visible = n[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        s = gl.where(visible, s, float("-inf"))
    new_max = gl.maximum(max_s, gl.max(s, axis=1) * scale)
    p = gl.exp2(s * scale - new_max[:, None])
    decay = gl.exp2(max_s - new_max)
    return p, new_max, sum_p * decay + gl.sum(p, axis=1), decay


@gluon.jit
def _clear_behind(v_tile, first, stop, MEMORY: gl.constexpr):
    """Clear what lies behind the context in its last tile: it may be NaN, and 0 * NaN is NaN."""
    for i in gl.static_range(BLOCK_N // CHUNK):
        chunk_first = first + i * CHUNK
        if chunk_first + CHUNK > stop:
            chunk = v_tile.slice(i * CHUNK, CHUNK)
            v = chunk.load(MEMORY)
            n = chunk_first + gl.arange(0, CHUNK, gl.SliceLayout(1, MEMORY))
            chunk.store(gl.where((n < stop)[:, None], v, gl.zeros_like(v)))
    fence_async_shared()
