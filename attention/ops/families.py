"""Which rows of a step begin with the same blocks: found on the device, from the block tables.

Rows that have the same block at the same place of their tables are a *family*, led by its first
row. Tables are compared at the places 0, 1, 3, 7, ...; a row joins the family that saves most, by
``(place + 1) * (members - 1)`` blocks, and counts how many leading blocks it has in common with the
leader, one by one: only what is the same block is ever called the same. ::

    row 0   a b c d e f      place 0: a of rows 0 to 3     saves 1 * 3
    row 1   a b c d g        place 1: b of rows 0 to 2     saves 2 * 2
    row 2   a b c d h i      place 3: d of rows 0 to 2     saves 4 * 2: the family of rows 0, 1, 2
    row 3   a j k            nothing below place 0         no company there: reads alone

A row is in one family. What its members have in common is what the least of them has in common with
the leader: for rows that part between two places, at least half of what they could share.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer
from octavo.attention.ops.rows import LOOKED_UP, first_visible, load_decodes, pad_rows
from octavo.attention.ops.sizes import cdiv

PLACES = tl.constexpr(32)
"""More places than any table has: a family's number is ``leader * PLACES + log2(place + 1)``."""
MEMBER_FIELDS = tl.constexpr(5)
MOST_TILES = tl.constexpr(2**31 - 1)
COMPARED_BLOCKS = 128
"""Blocks of two rows that are compared at a time."""


def find_families(
    layer: AttentionLayer, inputs: AttentionInputs, *, block_size: int, tile_tokens: int
) -> Tensor:
    """Group the rows with one token that see their whole context.

    Return (MEMBER_FIELDS, num_rows) int32: of each row the leader of its family, how many members
    that has, the row's rank among them, its place among the members of all families, and the
    leading tiles that they have in common: none for a row without company.
    """
    num_rows, device = inputs.context_lengths.shape[0], inputs.context_lengths.device
    families = torch.empty((2, num_rows), dtype=torch.int32, device=device)
    members = torch.empty((MEMBER_FIELDS.value, num_rows), dtype=torch.int32, device=device)
    grid = (cdiv(num_rows, LOOKED_UP),)
    rows_pad = pad_rows(num_rows)
    _find_families_kernel[grid](
        families,
        inputs.query_start,
        inputs.context_lengths,
        inputs.block_tables,
        num_rows,
        inputs.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        TILE=tile_tokens,
        WINDOW=layer.sliding_window or 0,
        ROWS_PAD=rows_pad,
        ROWS=LOOKED_UP,
        COMPARED_BLOCKS=COMPARED_BLOCKS,
        num_warps=8,
    )
    _rank_members_kernel[grid](
        members, families, num_rows, ROWS_PAD=rows_pad, ROWS=LOOKED_UP, num_warps=8
    )
    return members


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def _find_families_kernel(
    families_ptr,  # (2, num_rows): number of the family, negative without one; tiles in common
    query_start_ptr,
    context_lengths_ptr,
    block_tables_ptr,
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COMPARED_BLOCKS: tl.constexpr,
):
    """Find the families of ``ROWS`` rows among all rows."""
    row = tl.arange(0, ROWS_PAD)
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inputs = (query_start_ptr, context_lengths_ptr, num_rows)
    stop = _count_shareable(row, inputs, BLOCK_SIZE, WINDOW)
    my_stop = _count_shareable(mine, inputs, BLOCK_SIZE, WINDOW)
    table_ptr = block_tables_ptr + row.to(tl.int64) * stride_table
    my_table_ptr = block_tables_ptr + mine.to(tl.int64) * stride_table

    family = tl.full([ROWS], -1, tl.int32)
    most_saved = tl.zeros([ROWS], tl.int32)
    last = tl.max(my_stop, axis=0)
    place = 0
    turn = 0
    while place < last:
        block = tl.load(table_ptr + place, mask=place < stop, other=-1)
        my_block = tl.load(my_table_ptr + place, mask=place < my_stop, other=-2)
        same = block[:, None] == my_block[None, :]
        leader = tl.min(tl.where(same, row[:, None], ROWS_PAD), axis=0)
        saved = (place + 1) * (tl.sum(same.to(tl.int32), axis=0) - 1)
        family = tl.where(saved > most_saved, leader * PLACES + turn, family)
        most_saved = tl.maximum(most_saved, saved)
        last = tl.where(tl.max(saved, axis=0) > 0, last, 0)  # who parted does not meet again
        place = place * 2 + 1
        turn += 1

    leader = family // PLACES
    is_member = family >= 0
    leader_stop = _count_shareable(
        tl.where(is_member, leader, num_rows), inputs, BLOCK_SIZE, WINDOW
    )
    leader_table_ptr = block_tables_ptr + leader.to(tl.int64) * stride_table
    both = tl.minimum(my_stop, leader_stop)
    common = tl.zeros([ROWS], tl.int32)
    is_equal = is_member
    first = 0
    while tl.max(is_equal.to(tl.int32), axis=0) > 0:
        offset = tl.arange(0, COMPARED_BLOCKS)[None, :]
        exists = is_equal[:, None] & (first + offset < both[:, None])
        block = tl.load(my_table_ptr[:, None] + first + offset, mask=exists, other=-1)
        leading = tl.load(leader_table_ptr[:, None] + first + offset, mask=exists, other=-2)
        num_equal = tl.min(tl.where(block == leading, COMPARED_BLOCKS, offset), axis=1)
        common += tl.where(is_equal, num_equal, 0)
        is_equal = is_equal & (num_equal == COMPARED_BLOCKS)
        first += COMPARED_BLOCKS

    # Blocks of one content may be two before a common one: a copy that was made at the same time.
    is_member = is_member & (common >= 1 << (family % PLACES))
    tl.store(families_ptr + mine, tl.where(is_member, family, -1), mask=mine < num_rows)
    tl.store(families_ptr + num_rows + mine, common * BLOCK_SIZE // TILE, mask=mine < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _rank_members_kernel(
    members_ptr, families_ptr, num_rows, ROWS_PAD: tl.constexpr, ROWS: tl.constexpr
):
    """Count the members of the families of ``ROWS`` rows, and those before each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    family = tl.load(families_ptr + row, mask=row < num_rows, other=-1)
    members = family * 0
    rank = family * 0
    place = family * 0
    tiles = family * 0
    if tl.max(family, axis=0) >= 0:
        other = tl.arange(0, ROWS_PAD)
        exists = other < num_rows
        other_family = tl.load(families_ptr + other, mask=exists, other=-1)[:, None]
        other_tiles = tl.load(families_ptr + num_rows + other, mask=exists, other=0)[:, None]
        is_same = (other_family == family[None, :]) & (other_family >= 0)
        is_before = is_same & (other[:, None] < row[None, :])
        is_lower = (other_family >= 0) & (other_family < family[None, :])
        members = tl.sum(is_same.to(tl.int32), axis=0)
        rank = tl.sum(is_before.to(tl.int32), axis=0)
        place = tl.sum((is_before | is_lower).to(tl.int32), axis=0)
        least = tl.min(tl.where(is_same, other_tiles, MOST_TILES), axis=0)
        tiles = tl.where(members > 1, least, 0)
    exists = row < num_rows
    tl.store(members_ptr + row, family // PLACES, mask=exists)
    tl.store(members_ptr + num_rows + row, members, mask=exists)
    tl.store(members_ptr + 2 * num_rows + row, rank, mask=exists)
    tl.store(members_ptr + 3 * num_rows + row, place, mask=exists)
    tl.store(members_ptr + 4 * num_rows + row, tiles, mask=exists)


@triton.jit
def _count_shareable(row, inputs, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Count the blocks before that of a row's token; none where it does not see them all."""
    query_start_ptr, context_lengths_ptr, num_rows = inputs
    _, context = load_decodes(row, query_start_ptr, context_lengths_ptr, num_rows)
    return tl.where(
        first_visible(context, WINDOW) == 0, tl.maximum(context - 1, 0) // BLOCK_SIZE, 0
    )
