"""Attention of rows with one token each: flash-decoding over equal shares of all K/V of the step.

The K/V that a step reads is cut into tiles of ``TILE`` tokens of one row and KV head, laid out on
one line::

    row 0 head 0    row 0 head 1    row 1 head 0          row 1 head 1
    | t0 t1 t2 t3 | t0 t1 t2 t3 | t0 t1 t2 t3 t4 t5 t6 | t0 t1 t2 ...
    |--- program 0 ---|--- program 1 ---|--- program 2 ---|--- ...    equal shares, any lengths

The grid is fixed: a program walks its share, keeping a running softmax for the piece of a segment
(row, head) that it holds. A segment inside one share is written out at once. Of a segment cut by
shares every program writes a partial result (at most two a program: its first and its last piece);
the last to arrive merges them. Where the shares begin is computed on the device, once a step, by
``plan_decode``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionLayer
from octavo.attention.ops.dependent_launch import can_start_early, wait_for_inputs
from octavo.attention.ops.paged_kv import PagedKV, match_cache
from octavo.attention.ops.plan_decode import MAX_GROUP, SHARE_FIELDS, DecodePlan, first_visible

LOG2_E = 1.4426950408889634
NUM_WARPS = 2
"""Four need larger tiles and wait longer at the ends of segments, one is slower at batch 1."""
NUM_STAGES = 3
"""Two tiles in flight; with three, fewer programs fit beside each other."""
MERGED_ELEMENTS = 4096
"""Floats of partial results that a merge reads at a time: 32 registers a thread."""


def decode(
    layer: AttentionLayer, q: Tensor, *, cache: PagedKV, plan: DecodePlan, out: Tensor
) -> None:
    """Write the outputs of the rows with one token into ``out``, leaving the other rows alone.

    q and out are (num_tokens, num_heads, head_dim), contiguous.
    """
    assert q.is_contiguous(), f"q has strides {q.stride()}"
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    group = layer.num_heads // layer.num_kv_heads
    assert group <= MAX_GROUP, f"{group} query heads share a KV head, at most {MAX_GROUP} can"
    group_pad = triton.next_power_of_2(group)
    head_pad = triton.next_power_of_2(layer.head_dim)
    inputs, workspace = plan.inputs, plan.workspace
    starts_early = can_start_early(q)
    _decode_kernel[(workspace.num_programs,)](
        out,
        q,
        cache.k,
        cache.v,
        inputs.block_tables,
        plan.rows,
        plan.shares,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.arrivals,
        layer.scale * LOG2_E,
        inputs.block_tables.stride(0),
        *cache.strides,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        MAX_GROUP=MAX_GROUP,
        HEAD_DIM=layer.head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=cache.block_size,
        TILE=workspace.tile_tokens,
        MERGED_PIECES=max(MERGED_ELEMENTS // (group_pad * head_pad), 1),
        WINDOW=layer.sliding_window or 0,
        INPUT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=starts_early,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        launch_pdl=starts_early,
    )


@triton.jit(do_not_specialize=["stride_table"])
def _decode_kernel(
    out_ptr,  # (num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM)
    q_ptr,  # like out
    k_ptr,
    v_ptr,
    block_tables_ptr,
    rows_ptr,
    shares_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    arrivals_ptr,
    scale,  # times log2(e): the softmax is computed in base 2
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    MAX_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MERGED_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Walk one share.

    A unit is one tile, [start, stop) a segment and [unit, piece_stop) this program's piece of it.
    """
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    plan_ptr = shares_ptr + program * SHARE_FIELDS
    row_start, tiles, row, token, context = _load_row(plan_ptr)
    planned = tl.load(plan_ptr + 5)
    share = tl.load(plan_ptr + 6)
    share_stop = tl.load(plan_ptr + 7)
    unit = program * share
    g = tl.arange(0, MAX_GROUP)
    d = tl.arange(0, HEAD_PAD)
    in_head = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    slot = 0
    while unit < share_stop:
        head = (unit - row_start) // tiles
        start = row_start + head * tiles
        stop = start + tiles
        piece_stop = tl.minimum(stop, share_stop)

        heads = (token * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM)
        heads = heads + g[:, None] * HEAD_DIM + d[None, :]
        first_tile = first_visible(context, WINDOW) // TILE - start
        acc, sum_p, max_s = _attend(
            match_cache(tl.load(q_ptr + heads, mask=in_head, other=0.0), k_ptr),
            k_ptr + head * stride_head,
            v_ptr + head * stride_head,
            block_tables_ptr + row * stride_table,
            (first_tile + unit) * TILE,
            (first_tile + piece_stop) * TILE,
            context,
            scale,
            stride_block,
            stride_token,
            HEAD_DIM,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            INPUT_PRECISION,
        )
        result = acc / sum_p[:, None]
        if (unit == start) & (piece_stop == stop):
            tl.store(out_ptr + heads, result, mask=in_head)
        else:
            partial = (program * 2 + slot) * MAX_GROUP + g
            partial_out = partial[:, None] * HEAD_DIM + d[None, :]
            tl.store(partial_out_ptr + partial_out, result, mask=in_head)
            tl.store(partial_lse_ptr + partial, max_s + tl.log2(sum_p), mask=g < GROUP)
            first = start // share
            last = (stop - 1) // share
            tl.debug_barrier()  # all threads have written before one of them tells so
            if tl.atomic_add(arrivals_ptr + first, 1) == last - first:
                tl.store(arrivals_ptr + first, 0)
                _merge(
                    out_ptr + (token * NUM_KV_HEADS + head) * (GROUP * HEAD_DIM),
                    partial_out_ptr,
                    partial_lse_ptr,
                    first,
                    last,
                    (first * share != start).to(tl.int32),
                    GROUP,
                    GROUP_PAD,
                    MAX_GROUP,
                    HEAD_DIM,
                    HEAD_PAD,
                    MERGED_PIECES,
                )
        unit = piece_stop
        slot = 1
        if (unit == row_start + tiles * NUM_KV_HEADS) & (unit < share_stop):
            planned += 1
            row_start, tiles, row, token, context = _load_row(rows_ptr + planned * SHARE_FIELDS)


@triton.jit
def _load_row(plan_ptr):
    """Load first unit, tiles a head, row, token and context length."""
    row = tl.load(plan_ptr + 2).to(tl.int64)
    token = tl.load(plan_ptr + 3).to(tl.int64)
    return tl.load(plan_ptr), tl.load(plan_ptr + 1), row, token, tl.load(plan_ptr + 4)


@triton.jit
def _attend(
    q,  # (MAX_GROUP, HEAD_PAD)
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    stop,
    context,
    scale,
    stride_block,
    stride_token,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Return sum(p v), sum(p) and max(s) of q over the tokens [start, stop) of one segment."""
    d = tl.arange(0, q.shape[1])
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    sum_p = tl.zeros([q.shape[0]], tl.float32)
    max_s = tl.full([q.shape[0]], float("-inf"), tl.float32)
    # Block ids are read one tile ahead: K and V are prefetched two deep only if their addresses do
    # not wait for a load of the same iteration.
    n = start + tl.arange(0, TILE)
    visible = (n < context) & (n >= first_visible(context, WINDOW))
    block = tl.load(table_ptr + n // BLOCK_SIZE, mask=visible, other=0)
    for first in tl.range(start, stop, TILE):
        n = first + tl.arange(0, TILE)
        visible = (n < context) & (n >= first_visible(context, WINDOW))
        in_tile = visible[:, None] & (d < HEAD_DIM)[None, :]
        offset = block.to(tl.int64) * stride_block + n % BLOCK_SIZE * stride_token
        block = tl.load(table_ptr + (n + TILE) // BLOCK_SIZE, mask=n + TILE < context, other=0)
        offset = offset[:, None] + d[None, :]
        k = tl.load(k_ptr + offset, mask=in_tile, other=0.0)
        v = tl.load(v_ptr + offset, mask=in_tile, other=0.0).to(q.dtype)
        s = tl.dot(q, k.to(q.dtype).T, input_precision=INPUT_PRECISION) * scale
        s = tl.where(visible[None, :], s, float("-inf"))
        # Every tile of a segment has a visible token: the maximum is finite from the first one on.
        new_max = tl.maximum(max_s, tl.max(s, axis=1))
        decay = tl.exp2(max_s - new_max)
        p = tl.exp2(s - new_max[:, None])
        acc = acc * decay[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
        sum_p = sum_p * decay + tl.sum(p, axis=1)
        max_s = new_max
    return acc, sum_p, max_s


@triton.jit
def _merge(
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    first,
    last,
    first_slot,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    MAX_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Merge the pieces of one segment.

    Program ``first`` has its piece in ``first_slot``, the others up to ``last`` in slot 0.
    """
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    sum_w = tl.zeros([GROUP_PAD], tl.float32)
    max_lse = tl.full([GROUP_PAD], -1.0e30, tl.float32)
    for begin in tl.range(first, last + 1, PIECES, num_stages=3):
        program = begin + tl.arange(0, PIECES)
        piece = program * 2 + tl.where(program == first, first_slot, 0)
        piece = piece[:, None] * MAX_GROUP + g[None, :]
        exists = (program <= last)[:, None] & (g < GROUP)[None, :]
        # Not through L1: other multiprocessors wrote these.
        lse = tl.load(partial_lse_ptr + piece, mask=exists, other=-1.0e30, cache_modifier=".cg")
        result = tl.load(
            partial_out_ptr + piece[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=exists[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(max_lse, tl.max(lse, axis=0))
        decay = tl.exp2(max_lse - new_max)
        w = tl.exp2(lse - new_max[None, :])
        acc = acc * decay[:, None] + tl.sum(w[:, :, None] * result, axis=0)
        sum_w = sum_w * decay + tl.sum(w, axis=0)
        max_lse = new_max
    tl.store(
        out_ptr + g[:, None] * HEAD_DIM + d[None, :],
        acc / sum_w[:, None],
        mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :],
    )
