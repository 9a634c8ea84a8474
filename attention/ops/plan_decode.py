"""Who works on what of the rows with one token: planned on the device, once a step for all layers.

Two lines are laid out, each to be cut into one share a program: *prefixes*, the leading tiles that
the rows of a family have in common, and *rows*, the tiles that a row reads alone. A prefix is read
once for up to PREFIX_ROWS rows, and for more of them again right behind, while it is in L2. Lines
and shares are arrays of records that a program of the attention kernel reads with independent loads
when it starts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer
from octavo.attention.ops.decode_workspace import DecodeWorkspace
from octavo.attention.ops.families import find_families
from octavo.attention.ops.rows import LOOKED_UP, first_visible, load_decodes, pad_rows
from octavo.attention.ops.sizes import cdiv

MERGED_PER_TILE = 3.5
"""Pieces that a merge adds in the time of one tile. A segment of n tiles in shares of s takes about
s + n / s / MERGED_PER_TILE tiles' time: least for s = sqrt(n / MERGED_PER_TILE)."""
MERGED_PREFIXES_PER_TILE = 1
"""The same for prefixes, a piece of which has the bytes of a tile."""
LEAST_SAVED = 8
"""Tiles a program that families must save: a second walk and a merge more cost about as much."""
MOST_ADDED = tl.constexpr(4)
"""Tiles that shares may be longer by so that each of them belongs to one segment: pieces that meet
take about 10 us, a tile more of each share 2."""
SHARE_FIELDS = tl.constexpr(16)
"""int32 words of a line's record: first unit, tiles a segment and, of a row, row, token, context
length; of a prefix, leader, place of its first reader and number of readers; then the units from
one segment to the next. A share has those of the record in which it begins, that record's number in
its line, units a share and the unit at which this one ends. Sixteen words are two 32-byte sectors
of memory."""


@dataclass(frozen=True, slots=True)
class Halves:
    """Where a query's results over its family's prefix and over its own tiles meet.

    The first to arrive leaves its result, the second one adds them and writes the output.
    """

    out: Tensor  # (num_rows, num_heads, 2, head_dim) float32: of own tiles, of the prefix
    lse: Tensor  # (num_rows, num_heads, 2) float32, base 2
    arrivals: Tensor  # (num_rows, num_heads) int32, zero between launches


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Shares of one step; valid for all layers with the planned number of heads and window."""

    inputs: AttentionInputs
    workspace: DecodeWorkspace
    lines: Tensor  # (2, num_rows, SHARE_FIELDS) int32, in the order of their rows
    shares: Tensor  # (2, num_programs, SHARE_FIELDS) int32
    readers: Tensor  # (num_rows, 2) int32: row and token of the readers of all prefixes
    halves: Halves

    @property
    def has_prefixes(self) -> bool:
        """Whether there may be any: not where a single token is all that is computed."""
        return self.inputs.positions.shape[0] > 1


def plan_decode(
    layer: AttentionLayer,
    inputs: AttentionInputs,
    *,
    workspace: DecodeWorkspace,
    block_size: int,
) -> DecodePlan:
    """Cut the K/V of all rows that have one token and a context into equal shares."""
    num_rows = inputs.context_lengths.shape[0]
    num_programs = workspace.num_programs
    plan = _allocate(layer, inputs, workspace)
    members = plan.readers  # not read
    if plan.has_prefixes:
        members = find_families(
            layer, inputs, block_size=block_size, tile_tokens=workspace.tile_tokens
        )
    _plan_decode_kernel[(cdiv(num_programs, LOOKED_UP),)](
        plan.lines,
        plan.shares,
        plan.readers,
        plan.halves.arrivals,
        inputs.query_start,
        inputs.context_lengths,
        members,
        num_rows,
        num_programs,
        NUM_KV_HEADS=layer.num_kv_heads,
        NUM_HEADS=layer.num_heads,
        TILE=workspace.tile_tokens,
        PREFIX_ROWS=workspace.prefix_queries // (layer.num_heads // layer.num_kv_heads),
        HAS_PREFIXES=plan.has_prefixes,
        MERGED_PER_TILE=MERGED_PER_TILE,
        MERGED_PREFIXES_PER_TILE=MERGED_PREFIXES_PER_TILE,
        LEAST_SAVED=LEAST_SAVED,
        WINDOW=layer.sliding_window or 0,
        ROWS_PAD=pad_rows(num_rows),
        PROGRAMS=LOOKED_UP,
        num_warps=8,
    )
    return plan


def _allocate(
    layer: AttentionLayer, inputs: AttentionInputs, workspace: DecodeWorkspace
) -> DecodePlan:
    num_rows, device = inputs.context_lengths.shape[0], inputs.context_lengths.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DecodePlan(
        inputs,
        workspace,
        lines=empty(2, num_rows, SHARE_FIELDS.value),
        shares=empty(2, workspace.num_programs, SHARE_FIELDS.value),
        readers=empty(num_rows, 2),
        halves=Halves(
            empty(num_rows, layer.num_heads, 2, layer.head_dim, dtype=torch.float32),
            empty(num_rows, layer.num_heads, 2, dtype=torch.float32),
            empty(num_rows, layer.num_heads),
        ),
    )


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _plan_decode_kernel(
    lines_ptr,
    shares_ptr,
    readers_ptr,
    met_ptr,
    query_start_ptr,
    context_lengths_ptr,
    members_ptr,
    num_rows,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    HAS_PREFIXES: tl.constexpr,
    MERGED_PER_TILE: tl.constexpr,
    MERGED_PREFIXES_PER_TILE: tl.constexpr,
    LEAST_SAVED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Plan all rows in each program; the first one writes them, each looks up its shares."""
    row = tl.arange(0, ROWS_PAD)
    token, context = load_decodes(row, query_start_ptr, context_lengths_ptr, num_rows)
    tiles = tl.cdiv(context, TILE) - first_visible(context, WINDOW) // TILE
    if HAS_PREFIXES:
        exists = row < num_rows
        leader = tl.load(members_ptr + row, mask=exists, other=0)
        members = tl.load(members_ptr + num_rows + row, mask=exists, other=0)
        rank = tl.load(members_ptr + 2 * num_rows + row, mask=exists, other=0)
        place = tl.load(members_ptr + 3 * num_rows + row, mask=exists, other=0)
        prefix_tiles = tl.load(members_ptr + 4 * num_rows + row, mask=exists, other=0)
        saved = tl.sum(tl.where(rank % PREFIX_ROWS == 0, 0, prefix_tiles), axis=0)
        pays = saved * NUM_KV_HEADS >= LEAST_SAVED * num_programs
        prefix_line_ptr = lines_ptr + num_rows * SHARE_FIELDS
        prefix_shares_ptr = shares_ptr + num_programs * SHARE_FIELDS
        if pays:
            tiles -= prefix_tiles
            _cut(
                prefix_line_ptr,
                prefix_shares_ptr,
                tl.where(rank == 0, prefix_tiles, 0),
                NUM_KV_HEADS * tl.cdiv(members, PREFIX_ROWS),
                leader,
                place,
                members,
                num_programs,
                MERGED_PREFIXES_PER_TILE,
                PROGRAMS,
            )
            if tl.program_id(0) == 0:
                tl.store(readers_ptr + place * 2, row, mask=prefix_tiles > 0)
                tl.store(readers_ptr + place * 2 + 1, token, mask=prefix_tiles > 0)
            _clear(met_ptr, num_rows * NUM_HEADS)
        else:
            program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
            end_ptr = prefix_shares_ptr + program * SHARE_FIELDS + 7
            tl.store(end_ptr, program * 0, mask=program < num_programs)
            tl.store(end_ptr + 1, program * 0, mask=program < num_programs)
    _cut(
        lines_ptr,
        shares_ptr,
        tiles,
        NUM_KV_HEADS,
        row,
        token,
        context,
        num_programs,
        MERGED_PER_TILE,
        PROGRAMS,
    )


@triton.jit
def _cut(
    line_ptr,
    shares_ptr,
    tiles,
    num_segments,
    first_field,
    second_field,
    third_field,
    num_programs,
    MERGED_PER_TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Lay all records that have tiles out on a line and look up the shares of ``PROGRAMS``."""
    exists = tiles > 0
    most_tiles = tl.maximum(tl.max(tiles, axis=0), 1)
    share = tl.maximum(tl.sqrt(most_tiles.to(tl.float32) / MERGED_PER_TILE).to(tl.int32), 1)
    share = tl.maximum(share, tl.cdiv(tl.sum(tiles * num_segments, axis=0), num_programs))
    # Cut anywhere; or, if it is not much longer, each within one segment.
    least_share, pitch = share, tiles
    for shorter in tl.static_range(MOST_ADDED + 1):
        longer = least_share + (MOST_ADDED - shorter)
        pieces = tl.cdiv(tiles, longer)
        fits = tl.sum(pieces * num_segments, axis=0) <= num_programs
        share = tl.where(fits, longer, share)
        pitch = tl.where(fits, pieces * longer, pitch)
    units = pitch * num_segments
    stop = tl.cumsum(units, axis=0)
    start = stop - units
    total = tl.sum(units, axis=0)

    if tl.program_id(0) == 0:
        planned = line_ptr + (tl.cumsum(exists.to(tl.int32), axis=0) - 1) * SHARE_FIELDS
        tl.store(planned, start, mask=exists)
        tl.store(planned + 1, tiles, mask=exists)
        tl.store(planned + 2, first_field, mask=exists)
        tl.store(planned + 3, second_field, mask=exists)
        tl.store(planned + 4, third_field, mask=exists)
        tl.store(planned + 5, pitch, mask=exists)

    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    unit = (program * share)[None, :]
    begins = (start[:, None] <= unit) & (unit < stop[:, None])
    ended = exists[:, None] & (stop[:, None] <= unit)
    is_program = program < num_programs
    planned = shares_ptr + program * SHARE_FIELDS
    tl.store(planned, _pick(start, begins), mask=is_program)
    tl.store(planned + 1, _pick(tiles, begins), mask=is_program)
    tl.store(planned + 2, _pick(first_field, begins), mask=is_program)
    tl.store(planned + 3, _pick(second_field, begins), mask=is_program)
    tl.store(planned + 4, _pick(third_field, begins), mask=is_program)
    tl.store(planned + 5, _pick(pitch, begins), mask=is_program)
    tl.store(planned + 6, tl.sum(ended.to(tl.int32), axis=0), mask=is_program)
    tl.store(planned + 7, share + program * 0, mask=is_program)
    tl.store(planned + 8, tl.minimum((program + 1) * share, total), mask=is_program)


@triton.jit
def _pick(values, chosen):
    """Return for each column of ``chosen`` the value of the one row that is set."""
    return tl.sum(tl.where(chosen, values[:, None], 0), axis=0)


@triton.jit
def _clear(counters_ptr, num_counters):
    """Set counters to zero, all programs together."""
    for first in range(tl.program_id(0) * 1024, num_counters, tl.num_programs(0) * 1024):
        counter = first + tl.arange(0, 1024)
        tl.store(counters_ptr + counter, counter * 0, mask=counter < num_counters)
