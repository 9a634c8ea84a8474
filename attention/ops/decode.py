"""Attention of rows with one token each: flash-decoding over equal shares of all K/V of the step.

The K/V that a step reads is cut into tiles of ``TILE`` tokens of one row and KV head, laid out on
one line::

    row 0 head 0    row 0 head 1    row 1 head 0          row 1 head 1
    | t0 t1 t2 t3 | t0 t1 t2 t3 | t0 t1 t2 t3 t4 t5 t6 | t0 t1 t2 ...
    |--- program 0 ---|--- program 1 ---|--- program 2 ---|--- ...    equal shares, any lengths

The grid is fixed: a program walks its share, keeping a running softmax for the piece of a segment
(row, head) that it holds. A segment inside one share is written out at once. Of a segment cut by
shares every program writes a partial result (at most two a program: its first and its last piece);
the last to arrive merges them. Most are cut once: the second piece is the first of its program and
done long before the first one, which is added to it without being written. Where the shares begin
is computed on the device, once a step, by ``plan_decode``: where there are programs enough, each
share belongs to one segment, whose last one may be shorter.

Tiles that rows have in common lie on a line of their own and are read for all their queries
together. A program walks its share of that line first; what it finds meets the rows' own tiles in
``Halves``, and whichever is second writes the output. So nobody waits, and as prefixes are done
when rows end, it is seldom a prefix that has to write many outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from octavo.attention.backend import AttentionLayer
from octavo.attention.ops.decode_workspace import MAX_GROUP
from octavo.attention.ops.dependent_launch import can_start_early, prefetch_lines, wait_for_inputs
from octavo.attention.ops.paged_kv import PagedKV, match_cache
from octavo.attention.ops.pieces import (
    add_piece,
    attend,
    find_elements,
    find_queries,
    merge,
    read_piece,
    write_outputs,
    write_piece,
)
from octavo.attention.ops.plan_decode import SHARE_FIELDS, DecodePlan
from octavo.attention.ops.rows import first_visible
from octavo.attention.ops.sizes import next_power_of_2

LOG2_E = 1.4426950408889634
NUM_WARPS = 2
"""Four need larger tiles and wait longer at the ends of segments, one is slower at batch 1."""
NUM_STAGES = 3
"""Two tiles in flight; with three, fewer programs fit beside each other."""
EARLY_TILES = tl.constexpr(2)
"""Of a share of a single row, asked for before the wait: of short rows shares are no longer."""
MAX_ROWS_BEHIND = 128
"""Up to so many rows the product behind starts early: where the programs of a fixed grid end."""
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
    inputs, workspace, halves = plan.inputs, plan.workspace, plan.halves
    starts_early = can_start_early(q)
    _decode_kernel[(workspace.num_programs,)](
        out,
        q,
        cache.k,
        cache.v,
        inputs.block_tables,
        plan.lines,
        plan.shares,
        plan.readers,
        workspace.rows.out,
        workspace.rows.lse,
        workspace.rows.arrivals,
        workspace.prefixes.out,
        workspace.prefixes.lse,
        workspace.prefixes.arrivals,
        halves.out,
        halves.lse,
        halves.arrivals,
        layer.scale * LOG2_E,
        plan.lines.shape[1],
        inputs.block_tables.stride(0),
        *cache.strides,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        MAX_GROUP=MAX_GROUP,
        PREFIX_QUERIES=workspace.prefix_queries,
        HAS_PREFIXES=plan.has_prefixes,
        HEAD_DIM=layer.head_dim,
        HEAD_PAD=next_power_of_2(layer.head_dim),
        BLOCK_SIZE=cache.block_size,
        TILE=workspace.tile_tokens,
        MERGED_ELEMENTS=MERGED_ELEMENTS,
        WINDOW=layer.sliding_window or 0,
        INPUT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=starts_early,
        LETS_START=can_start_early(q, max_rows=MAX_ROWS_BEHIND),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        launch_pdl=starts_early,
    )


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def _decode_kernel(
    out_ptr,  # (num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM)
    q_ptr,  # like out
    k_ptr,
    v_ptr,
    block_tables_ptr,
    lines_ptr,
    shares_ptr,
    readers_ptr,
    row_out_ptr,
    row_lse_ptr,
    row_arrivals_ptr,
    prefix_out_ptr,
    prefix_lse_ptr,
    prefix_arrivals_ptr,
    half_out_ptr,
    half_lse_ptr,
    half_arrivals_ptr,
    scale,  # times log2(e): the softmax is computed in base 2
    num_rows,
    stride_table,
    stride_block,
    stride_token,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_GROUP: tl.constexpr,
    PREFIX_QUERIES: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MERGED_ELEMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    LETS_START: tl.constexpr,
):
    """Walk one share of each line."""
    heads: tl.constexpr = (NUM_KV_HEADS, GROUP, HEAD_DIM, HEAD_PAD)
    tiling: tl.constexpr = (BLOCK_SIZE, TILE, INPUT_PRECISION, MERGED_ELEMENTS)
    cache = (k_ptr, v_ptr, block_tables_ptr, stride_table, stride_block, stride_token, stride_head)
    # The plan is older than the kernel in front: reading it need not wait.
    row_share = _load_share(shares_ptr + tl.program_id(0) * SHARE_FIELDS)
    if PDL and not HAS_PREFIXES:
        _ask_for_tiles(row_share, cache, heads, tiling)
    wait_for_inputs(PDL)
    if LETS_START and not PDL:
        gdc_launch_dependents()
    io = (out_ptr, q_ptr, scale, readers_ptr)
    halves = (half_out_ptr, half_lse_ptr, half_arrivals_ptr)
    if HAS_PREFIXES:
        place = tl.num_programs(0) + tl.program_id(0)
        share = _load_share(shares_ptr + place * SHARE_FIELDS)
        line_ptr = lines_ptr + num_rows * SHARE_FIELDS
        pieces = (prefix_out_ptr, prefix_lse_ptr, prefix_arrivals_ptr)
        of_prefixes: tl.constexpr = (PREFIX_QUERIES, 0, True, True)
        _walk(line_ptr, share, io, cache, pieces, halves, heads, tiling, of_prefixes)
    pieces = (row_out_ptr, row_lse_ptr, row_arrivals_ptr)
    of_rows: tl.constexpr = (MAX_GROUP, WINDOW, HAS_PREFIXES, False)
    _walk(lines_ptr, row_share, io, cache, pieces, halves, heads, tiling, of_rows)


@triton.jit
def _ask_for_tiles(share, cache, heads: tl.constexpr, tiling: tl.constexpr):
    """Ask for the first K and V of a share to come into L2: all but the new token's are there."""
    record, _, units, share_stop = share
    record_start, tiles, row, _, context, pitch = record
    k_ptr, v_ptr, tables_ptr, stride_table, stride_block, stride_token, stride_head = cache
    TILE: tl.constexpr = tiling[1]
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
    unit = tl.program_id(0) * units
    if unit < share_stop:
        head = (unit - record_start) // pitch
        first_tile = tl.cdiv(context, TILE) - tiles + (unit - record_start) % pitch
        n = first_tile * TILE + tl.arange(0, EARLY_TILES * TILE)
        table = tables_ptr + row * stride_table
        block = tl.load(table + n // tiling[0], mask=n < context, other=0).to(tl.int64)
        token = block * stride_block + n % tiling[0] * stride_token + head * stride_head
        d = tl.minimum(tl.arange(0, max(heads[3] // LINE, 1)) * LINE, heads[2] - 1)
        line = token[:, None] + d[None, :]
        prefetch_lines((k_ptr + line).to(tl.int64))
        prefetch_lines((v_ptr + line).to(tl.int64))


@triton.jit
def _load_record(record_ptr):
    """Load first unit, tiles a segment, three fields of a row or prefix, units a segment."""
    first = tl.load(record_ptr + 2).to(tl.int64)
    second = tl.load(record_ptr + 3).to(tl.int64)
    third, pitch = tl.load(record_ptr + 4), tl.load(record_ptr + 5)
    return tl.load(record_ptr), tl.load(record_ptr + 1), first, second, third, pitch


@triton.jit
def _load_share(share_ptr):
    """Load the record in which a share begins, its number, units a share and this one's end."""
    record = _load_record(share_ptr)
    return record, tl.load(share_ptr + 6), tl.load(share_ptr + 7), tl.load(share_ptr + 8)


@triton.jit
def _walk(
    line_ptr,
    whole_share,
    io,
    cache,
    pieces,
    halves,
    heads: tl.constexpr,
    tiling: tl.constexpr,
    kind: tl.constexpr,
):
    """Walk one share of a line.

    A unit is one tile, [start, stop) a segment and [unit, piece_stop) this program's piece of it.
    """
    record, planned, share, share_stop = whole_share
    record_start, tiles, row, second, third, pitch = record
    out_ptr, q_ptr, scale, readers_ptr = io
    k_ptr, v_ptr, tables_ptr, stride_table, stride_block, stride_token, stride_head = cache
    pieces_out_ptr, pieces_lse_ptr, arrivals_ptr = pieces
    NUM_KV_HEADS: tl.constexpr = heads[0]
    GROUP: tl.constexpr = heads[1]
    HEAD_DIM: tl.constexpr = heads[2]
    HEAD_PAD: tl.constexpr = heads[3]
    TILE: tl.constexpr = tiling[1]
    QUERIES: tl.constexpr = kind[0]
    WINDOW: tl.constexpr = kind[1]
    HAS_PREFIXES: tl.constexpr = kind[2]
    IS_PREFIX: tl.constexpr = kind[3]
    MERGED_QUERIES: tl.constexpr = QUERIES if IS_PREFIX else triton.next_power_of_2(GROUP)
    MERGED_PIECES: tl.constexpr = max(tiling[3] // (MERGED_QUERIES * HEAD_PAD), 1)

    program = tl.program_id(0)
    unit = program * share
    slot = 0
    while unit < share_stop:
        segment = (unit - record_start) // pitch
        start = record_start + segment * pitch
        stop = start + tiles
        piece_stop = tl.minimum(stop, share_stop)
        num_parts = tl.cdiv(third, QUERIES // GROUP) if IS_PREFIX else 1
        head = segment // num_parts
        part = segment % num_parts
        context = tiles * TILE if IS_PREFIX else third
        first_tile = tl.cdiv(context, TILE) - tiles  # those before are unseen, or its prefix
        unseen = first_visible(context, WINDOW) // TILE
        is_half = IS_PREFIX or (HAS_PREFIXES and first_tile > unseen)
        where = (row, second, third, head, part, readers_ptr)
        query, _, exists = find_queries(where, heads, QUERIES, IS_PREFIX)
        first = start // share
        last = (stop - 1) // share
        is_last = first == last
        if (first == program) & (last == program + 1):
            # The other piece is the next program's first: it has been there for long, mostly.
            is_last = tl.atomic_add(arrivals_ptr + first, 0) == 1

        offset, in_head = find_elements(query, exists, heads)
        acc, sum_p, max_s = attend(
            match_cache(tl.load(q_ptr + offset, mask=in_head, other=0.0), k_ptr),
            k_ptr + head * stride_head,
            v_ptr + head * stride_head,
            tables_ptr + row * stride_table,
            (first_tile + unit - start) * TILE,
            (first_tile + piece_stop - start) * TILE,
            context,
            scale,
            stride_block,
            stride_token,
            HEAD_DIM,
            tiling[0],
            TILE,
            WINDOW,
            tiling[2],
        )
        result = acc * (1.0 / sum_p)[:, None]
        lse = max_s + tl.log2(sum_p)
        if not is_last:
            place = (program * 2 + slot) * QUERIES + tl.arange(0, QUERIES)
            write_piece(result, lse, place, exists, pieces, heads)
            tl.debug_barrier()  # all threads have written before one of them tells so
            is_last = tl.atomic_add(arrivals_ptr + first, 1) == last - first
        if is_last:
            first_slot = (first * share != start).to(tl.int32)
            if last > first:
                tl.store(arrivals_ptr + first, 0)
            if last == first + 1:
                is_first = program == first
                other = tl.where(is_first, last * 2, first * 2 + first_slot)
                place = other * QUERIES + tl.arange(0, QUERIES)
                other_result, other_lse = read_piece(place, exists, pieces, heads)
                result, lse = add_piece(result, lse, other_result, other_lse, is_first)
            if last <= first + 1:
                write_outputs(
                    result, lse, where, is_half, out_ptr, halves, heads, QUERIES, IS_PREFIX
                )
            else:
                merged, merged_lse = merge(
                    pieces_out_ptr,
                    pieces_lse_ptr,
                    first,
                    last,
                    first_slot,
                    tl.sum(exists.to(tl.int32), axis=0) if IS_PREFIX else GROUP,
                    MERGED_QUERIES,
                    QUERIES,
                    HEAD_DIM,
                    HEAD_PAD,
                    MERGED_PIECES,
                )
                write_outputs(
                    merged,
                    merged_lse,
                    where,
                    is_half,
                    out_ptr,
                    halves,
                    heads,
                    MERGED_QUERIES,
                    IS_PREFIX,
                )
        unit = tl.where(piece_stop == stop, start + pitch, piece_stop)
        slot = 1
        if (unit == record_start + pitch * NUM_KV_HEADS * num_parts) & (unit < share_stop):
            planned += 1
            record = _load_record(line_ptr + planned * SHARE_FIELDS)
            record_start, tiles, row, second, third, pitch = record
