"""Who works on what of the rows with one token: planned on the device, once a step for all layers.

The plan is made from the lengths. It is an array of records that a program of the attention kernel
reads with independent loads when it starts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer

MAX_GROUP = 16
"""Query heads of one KV head are padded to the least number of rows that tl.dot takes."""
DECODE_TILE_BYTES = 8192
"""Bytes of K in a tile: 32 tokens x 128 elements of 16 bit."""
MERGED_PER_TILE = 5
"""Pieces that a merge adds in the time of one tile. A segment of n tiles in shares of s takes about
s + n / s / MERGED_PER_TILE tiles' time: least for s = sqrt(n / MERGED_PER_TILE)."""
LOOKED_UP = 16
"""Records that one program of a plan kernel makes: rows x 16 comparisons stay in registers."""
SHARE_FIELDS = tl.constexpr(8)
"""int32 words of a planned row: first unit, tiles a head, row, token, context length. A share has
those of the row in which it begins, the number of that row among the planned, units a share and the
unit at which this one ends. Eight words are one 32-byte sector of memory."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What the programs of one decode launch share.

    Allocated once, used by all layers and steps of one stream. ``arrivals`` is zero between
    launches: whoever merges a segment resets its counter.
    """

    tile_tokens: int
    partial_out: Tensor  # (num_programs, 2, MAX_GROUP, head_dim) float32
    partial_lse: Tensor  # (num_programs, 2, MAX_GROUP) float32, base 2
    arrivals: Tensor  # (num_programs,) int32; counts at the program in which the segment begins

    @classmethod
    def create(
        cls, head_dim: int, dtype: torch.dtype, *, num_programs: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """Allocate for heads of ``head_dim`` elements in the pool's ``dtype`` and a fixed grid."""
        head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return cls(
            max(DECODE_TILE_BYTES // head_bytes, 16),
            torch.empty((num_programs, 2, MAX_GROUP, head_dim), device=device),
            torch.empty((num_programs, 2, MAX_GROUP), device=device),
            torch.zeros(num_programs, dtype=torch.int32, device=device),
        )

    @property
    def num_programs(self) -> int:
        """Size of the grid."""
        return self.arrivals.shape[0]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Shares of one step; valid for all layers with the planned number of KV heads and window."""

    inputs: AttentionInputs
    workspace: DecodeWorkspace
    rows: Tensor  # (num_rows, SHARE_FIELDS) int32, the rows that decode, in order
    shares: Tensor  # (num_programs, SHARE_FIELDS) int32


def plan_decode(
    layer: AttentionLayer, inputs: AttentionInputs, *, workspace: DecodeWorkspace
) -> DecodePlan:
    """Cut the K/V of all rows that have one token and a context into equal shares."""
    num_rows = inputs.context_lengths.shape[0]
    device = inputs.context_lengths.device
    num_programs = workspace.num_programs
    plan = DecodePlan(
        inputs,
        workspace,
        torch.empty((num_rows, SHARE_FIELDS.value), dtype=torch.int32, device=device),
        torch.empty((num_programs, SHARE_FIELDS.value), dtype=torch.int32, device=device),
    )
    _plan_decode_kernel[(triton.cdiv(num_programs, LOOKED_UP),)](
        plan.rows,
        plan.shares,
        inputs.query_start,
        inputs.context_lengths,
        num_rows,
        num_programs,
        NUM_KV_HEADS=layer.num_kv_heads,
        TILE=workspace.tile_tokens,
        MERGED_PER_TILE=MERGED_PER_TILE,
        WINDOW=layer.sliding_window or 0,
        ROWS_PAD=pad_rows(num_rows),
        PROGRAMS=LOOKED_UP,
        num_warps=8,
    )
    return plan


def pad_rows(num_rows: int) -> int:
    """Round the number of rows so that few variants of a plan kernel are compiled."""
    return 128 if num_rows <= 128 else max(1024, triton.next_power_of_2(num_rows))


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _plan_decode_kernel(
    rows_ptr,
    shares_ptr,
    query_start_ptr,
    context_lengths_ptr,
    num_rows,
    num_programs,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    MERGED_PER_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Plan all rows in each program; the first one writes them, each looks up its shares."""
    row = tl.arange(0, ROWS_PAD)
    exists = row < num_rows
    token = tl.load(query_start_ptr + row, mask=exists, other=0)
    next_token = tl.load(query_start_ptr + row + 1, mask=exists, other=0)
    context = tl.load(context_lengths_ptr + row, mask=exists, other=0)
    decodes = (next_token - token == 1) & (context > 0)
    tiles = tl.cdiv(context, TILE) - first_visible(context, WINDOW) // TILE
    units = tl.where(decodes, tiles * NUM_KV_HEADS, 0)
    stop = tl.cumsum(units, axis=0)
    start = stop - units
    total = tl.sum(units, axis=0)
    longest = tl.max(tl.where(decodes, tiles, 0), axis=0).to(tl.float32)
    least_share = tl.maximum(tl.sqrt(longest / MERGED_PER_TILE).to(tl.int32), 1)
    share = tl.maximum(tl.cdiv(total, num_programs), least_share)

    if tl.program_id(0) == 0:
        planned = rows_ptr + (tl.cumsum(decodes.to(tl.int32), axis=0) - 1) * SHARE_FIELDS
        tl.store(planned, start, mask=decodes)
        tl.store(planned + 1, tiles, mask=decodes)
        tl.store(planned + 2, row, mask=decodes)
        tl.store(planned + 3, token, mask=decodes)
        tl.store(planned + 4, context, mask=decodes)

    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    unit = (program * share)[None, :]
    begins = (start[:, None] <= unit) & (unit < stop[:, None])
    ended = decodes[:, None] & (stop[:, None] <= unit)
    exists = program < num_programs
    planned = shares_ptr + program * SHARE_FIELDS
    tl.store(planned, _pick(start, begins), mask=exists)
    tl.store(planned + 1, _pick(tiles, begins), mask=exists)
    tl.store(planned + 2, _pick(row, begins), mask=exists)
    tl.store(planned + 3, _pick(token, begins), mask=exists)
    tl.store(planned + 4, _pick(context, begins), mask=exists)
    tl.store(planned + 5, tl.sum(ended.to(tl.int32), axis=0), mask=exists)
    tl.store(planned + 6, share + program * 0, mask=exists)
    tl.store(planned + 7, tl.minimum((program + 1) * share, total), mask=exists)


@triton.jit
def _pick(values, chosen):
    """Return for each column of ``chosen`` the value of the one row that is set."""
    return tl.sum(tl.where(chosen, values[:, None], 0), axis=0)


@triton.jit
def first_visible(context, WINDOW: tl.constexpr):
    """First of ``context`` tokens that the last one sees."""
    return context * 0 if WINDOW == 0 else tl.maximum(context - WINDOW, 0)
