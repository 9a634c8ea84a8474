"""Attention of rows with several tokens each: chunks of prompts, cached prefixes included.

One program takes ``BLOCK_M`` rows of one KV head: consecutive tokens times the query heads that
share the head, so that a K/V tile is loaded once for the whole group. It walks the row's context in
tiles of ``BLOCK_N`` tokens, one loop for all, and masks only those at the edges::

    context      0 ...................... first ... last query token of the program
    K/V tiles    | edge | full | full | full | edge | edge |
                  sliding                     crosses the diagonal
                  window only                 or the end of the context

Which tokens of which row a program takes is looked up in a plan made on the device once a step;
long contexts come first, so that the last wave is short.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionLayer
from octavo.attention.ops.decode import LOG2_E
from octavo.attention.ops.paged_kv import PagedKV, match_cache
from octavo.attention.ops.plan_prefill import TILE_FIELDS, PrefillPlan
from octavo.attention.ops.sizes import next_power_of_2

TILE_BYTES = 16_384
"""Bytes of K in a tile: 64 tokens x 128 elements of 16 bit."""
NUM_WARPS = 8
NUM_STAGES = 3
"""Two cost 10 to 20 %, four gain nothing."""


def prefill(
    layer: AttentionLayer, q: Tensor, *, cache: PagedKV, plan: PrefillPlan, out: Tensor
) -> None:
    """Write the outputs of the rows with several tokens into ``out``, leaving the other rows alone.

    q and out are (num_tokens, num_heads, head_dim), contiguous.
    """
    assert q.is_contiguous(), f"q has strides {q.stride()}"
    assert out.is_contiguous(), f"out has strides {out.stride()}"
    inputs = plan.inputs
    group = layer.num_heads // layer.num_kv_heads
    head_pad = next_power_of_2(layer.head_dim)
    _prefill_kernel[(layer.num_kv_heads, plan.tiles.shape[0])](
        out,
        q,
        cache.k,
        cache.v,
        inputs.block_tables,
        plan.tiles,
        layer.scale * LOG2_E,
        inputs.block_tables.stride(0),
        *cache.strides,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        HEAD_DIM=layer.head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=plan.block_m,
        BLOCK_N=max(TILE_BYTES // (head_pad * q.dtype.itemsize), 16),
        TILE_TOKENS=plan.block_m // group,
        WINDOW=layer.sliding_window or 0,
        INPUT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=NUM_WARPS if q.dtype.itemsize == 2 else 4,
        num_stages=NUM_STAGES,
    )


@triton.jit(do_not_specialize=["stride_table"])
def _prefill_kernel(
    out_ptr,  # (num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM)
    q_ptr,  # like out
    k_ptr,
    v_ptr,
    block_tables_ptr,
    tiles_ptr,
    scale,  # times log2(e): the softmax is computed in base 2
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    planned = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    num_queries = tl.minimum(tl.load(planned), TILE_TOKENS)
    if num_queries == 0:
        return
    row = tl.load(planned + 1).to(tl.int64)
    first_token = tl.load(planned + 2).to(tl.int64)
    first_position = tl.load(planned + 3)
    stop = first_position + num_queries

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PAD)
    query = m // GROUP
    in_tile = (query < num_queries)[:, None] & (d < HEAD_DIM)[None, :]
    heads = ((first_token + query) * NUM_KV_HEADS + head) * GROUP + m % GROUP
    heads = heads[:, None] * HEAD_DIM + d[None, :]
    q = match_cache(tl.load(q_ptr + heads, mask=in_tile, other=0.0), k_ptr)
    position = first_position + query

    # Tiles in [full_start, full_stop) are seen whole by all rows.
    full_stop = (first_position + 1) // BLOCK_N * BLOCK_N
    start = 0
    full_start = 0
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_start = tl.maximum(stop - WINDOW, 0)

    k_ptr += head * stride_head
    v_ptr += head * stride_head
    table_ptr = block_tables_ptr + row * stride_table
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    sum_p = tl.zeros([BLOCK_M], tl.float32)
    # Finite: in a window's first tiles some rows see nothing yet.
    max_s = tl.full([BLOCK_M], -1.0e30, tl.float32)
    # Block ids are read one tile ahead: K and V are prefetched two deep only if their addresses do
    # not wait for a load of the same iteration.
    n = start + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + n // BLOCK_SIZE, mask=n < stop, other=0)
    for first in tl.range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        in_cache = (n < stop)[:, None] & (d < HEAD_DIM)[None, :]
        offset = block.to(tl.int64) * stride_block + n % BLOCK_SIZE * stride_token
        offset = offset[:, None] + d[None, :]
        block = tl.load(table_ptr + (n + BLOCK_N) // BLOCK_SIZE, mask=n + BLOCK_N < stop, other=0)
        k = tl.load(k_ptr + offset, mask=in_cache, other=0.0)
        v = tl.load(v_ptr + offset, mask=in_cache, other=0.0).to(q.dtype)
        s = tl.dot(q, k.to(q.dtype).T, input_precision=INPUT_PRECISION)
        if (first >= full_stop) | (first < full_start):
            visible = n[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (n[None, :] > position[:, None] - WINDOW)
            s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(max_s, tl.max(s, axis=1) * scale)
        p = tl.exp2(s * scale - new_max[:, None])
        decay = tl.exp2(max_s - new_max)
        acc = acc * decay[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
        sum_p = sum_p * decay + tl.sum(p, axis=1)
        max_s = new_max
    tl.store(out_ptr + heads, acc / sum_p[:, None], mask=in_tile)
