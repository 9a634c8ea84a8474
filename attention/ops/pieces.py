"""Attention over a piece of K/V, adding up the results of pieces, and where outputs go."""

import triton
import triton.language as tl

from octavo.attention.ops.paged_kv import split_pairs
from octavo.attention.ops.rows import first_visible


@triton.jit
def attend(
    q,  # (num_queries, HEAD_PAD)
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
    # The output's even and odd elements are summed apart where V has 8 bits.
    IN_PAIRS: tl.constexpr = v_ptr.dtype.element_ty.primitive_bitwidth == 8
    WIDTH: tl.constexpr = q.shape[1] // 2 if IN_PAIRS else q.shape[1]
    d = tl.arange(0, q.shape[1])
    pair = tl.arange(0, WIDTH)
    acc = tl.zeros([q.shape[0], WIDTH], tl.float32)
    acc_odd = tl.zeros([q.shape[0], WIDTH], tl.float32)
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
        k = tl.load(k_ptr + offset[:, None] + d[None, :], mask=in_tile, other=0.0)
        if IN_PAIRS:
            pairs_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
            in_pairs = visible[:, None] & (pair < HEAD_DIM // 2)[None, :]
            pairs = pairs_ptr + (offset // 2)[:, None] + pair[None, :]
            v, v_odd = split_pairs(tl.load(pairs, mask=in_pairs, other=0), q.dtype)
        else:
            v = tl.load(v_ptr + offset[:, None] + d[None, :], mask=in_tile, other=0.0)
        s = tl.dot(q, k.to(q.dtype).T, input_precision=INPUT_PRECISION) * scale
        s = tl.where(visible[None, :], s, float("-inf"))
        # Every tile of a segment has a visible token: the maximum is finite from the first one on.
        new_max = tl.maximum(max_s, tl.max(s, axis=1))
        decay = tl.exp2(max_s - new_max)
        p = tl.exp2(s - new_max[:, None])
        p_rounded = p.to(v.dtype)
        acc = tl.dot(p_rounded, v, acc * decay[:, None], input_precision=INPUT_PRECISION)
        if IN_PAIRS:
            acc_odd = acc_odd * decay[:, None]
            acc_odd = tl.dot(p_rounded, v_odd, acc_odd, input_precision=INPUT_PRECISION)
        sum_p = sum_p * decay + tl.sum(p, axis=1)
        max_s = new_max
    if IN_PAIRS:
        acc = tl.join(acc, acc_odd).reshape(q.shape[0], q.shape[1])
    return acc, sum_p, max_s


@triton.jit
def merge(
    pieces_out_ptr,
    pieces_lse_ptr,
    first,
    last,
    first_slot,
    num_queries,
    QUERIES_PAD: tl.constexpr,
    STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Return result and log-sum-exp of a segment of whose pieces each has ``STRIDE`` queries.

    Program ``first`` has its piece in ``first_slot``, the others up to ``last`` in slot 0.
    """
    m = tl.arange(0, QUERIES_PAD)
    d = tl.arange(0, HEAD_PAD)
    acc = tl.zeros([QUERIES_PAD, HEAD_PAD], tl.float32)
    sum_w = tl.zeros([QUERIES_PAD], tl.float32)
    max_lse = tl.full([QUERIES_PAD], -1.0e30, tl.float32)
    for begin in tl.range(first, last + 1, PIECES, num_stages=3):
        program = begin + tl.arange(0, PIECES)
        piece = program * 2 + tl.where(program == first, first_slot, 0)
        piece = piece[:, None] * STRIDE + m[None, :]
        exists = (program <= last)[:, None] & (m < num_queries)[None, :]
        # Not through L1: other multiprocessors wrote these.
        lse = tl.load(pieces_lse_ptr + piece, mask=exists, other=-1.0e30, cache_modifier=".cg")
        result = tl.load(
            pieces_out_ptr + piece[:, :, None] * HEAD_DIM + d[None, None, :],
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
    return acc * (1.0 / sum_w)[:, None], max_lse + tl.log2(sum_w)


@triton.jit
def meet(result, lse, half, exists, halves, heads: tl.constexpr, IS_PREFIX: tl.constexpr):
    """Leave halves for those that come second; return the sums of those that are, and which are."""
    arrivals_ptr = halves[2]
    write_piece(result, lse, half * 2 + IS_PREFIX, exists, halves, heads)
    tl.debug_barrier()  # all threads have written before one of them tells so
    is_second = exists & (tl.atomic_add(arrivals_ptr + half, 1, mask=exists) == 1)
    tl.debug_barrier()  # and nobody reads before it is told
    tl.store(arrivals_ptr + half, 0, mask=is_second)
    other, other_lse = read_piece(half * 2 + 1 - IS_PREFIX, is_second, halves, heads)
    total, _ = add_piece(result, lse, other, other_lse, not IS_PREFIX)
    return total, is_second


@triton.jit
def write_piece(result, lse, place, exists, pieces, heads: tl.constexpr):
    """Leave result and log-sum-exp for another program."""
    offset, in_head = find_elements(place, exists, heads)
    tl.store(pieces[0] + offset, result, mask=in_head)
    tl.store(pieces[1] + place, lse, mask=exists)


@triton.jit
def read_piece(place, exists, pieces, heads: tl.constexpr):
    """Return what a program has left; not through L1, for another multiprocessor wrote it."""
    offset, in_head = find_elements(place, exists, heads)
    result = tl.load(pieces[0] + offset, mask=in_head, other=0.0, cache_modifier=".cg")
    return result, tl.load(pieces[1] + place, mask=exists, other=0.0, cache_modifier=".cg")


@triton.jit
def add_piece(result, lse, other, other_lse, is_first):
    """Return result and log-sum-exp of two pieces: the same bits, whichever calls this."""
    left = tl.where(is_first, result, other)
    right = tl.where(is_first, other, result)
    left_lse = tl.where(is_first, lse, other_lse)
    right_lse = tl.where(is_first, other_lse, lse)
    max_lse = tl.maximum(left_lse, right_lse)
    w = tl.exp2(left_lse - max_lse)
    right_w = tl.exp2(right_lse - max_lse)
    sum_w = w + right_w
    share = w / sum_w
    total = left * share[:, None] + right * (1.0 - share)[:, None]
    return total, max_lse + tl.log2(sum_w)


@triton.jit
def find_queries(where, heads: tl.constexpr, QUERIES: tl.constexpr, IS_PREFIX: tl.constexpr):
    """Return the numbers of a segment's queries in q, in the halves, and which of them exist."""
    row, second, third, head, part, readers_ptr = where
    GROUP: tl.constexpr = heads[1]
    m = tl.arange(0, QUERIES)
    g = m % GROUP
    token = second
    exists = m < GROUP
    if IS_PREFIX:
        reader = part * (QUERIES // GROUP) + m // GROUP
        exists = (reader < third) & (m < QUERIES // GROUP * GROUP)
        reader_ptr = readers_ptr + (second + reader) * 2
        row = tl.load(reader_ptr, mask=exists, other=0).to(tl.int64)
        token = tl.load(reader_ptr + 1, mask=exists, other=0).to(tl.int64)
    query = (token * heads[0] + head) * GROUP + g
    half = (row * heads[0] + head) * GROUP + g
    return query, half, exists


@triton.jit
def write_outputs(
    result,
    lse,
    where,
    is_half,
    out_ptr,
    halves,
    heads: tl.constexpr,
    QUERIES: tl.constexpr,
    IS_PREFIX: tl.constexpr,
):
    """Write the outputs of a segment; of halves, those whose other half is there."""
    query, half, exists = find_queries(where, heads, QUERIES, IS_PREFIX)
    if is_half:
        result, exists = meet(result, lse, half, exists, halves, heads, IS_PREFIX)
    offset, in_head = find_elements(query, exists, heads)
    tl.store(out_ptr + offset, result, mask=in_head)


@triton.jit
def find_elements(query, exists, heads: tl.constexpr):
    """Return where the elements of queries lie and which of them exist."""
    d = tl.arange(0, heads[3])
    offset = query.to(tl.int64)[:, None] * heads[2] + d[None, :]
    return offset, exists[:, None] & (d < heads[2])[None, :]
