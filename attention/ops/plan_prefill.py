"""Who works on what of the rows with several tokens: planned as for decoding (``plan_decode``)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer
from octavo.attention.ops.rows import LOOKED_UP, pad_rows
from octavo.attention.ops.sizes import cdiv

BLOCK_M = 128
"""Rows of a query tile: two warpgroups of 64, the least that wgmma takes."""
BLOCK_M_FLOAT32 = 32
"""IEEE float32 runs without matrix units; more rows would spill."""
TILE_FIELDS = tl.constexpr(4)
"""int32 words of a query tile: tokens from its first to the row's last, row, first token in the
batch, its position."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Query tiles of one step; valid for all layers with the planned group of query heads.

    There are as many as the shapes allow at most; those that the lengths leave over have no tokens.
    """

    inputs: AttentionInputs
    tiles: Tensor  # (max_num_tiles, TILE_FIELDS) int32
    block_m: int


def plan_prefill(
    layer: AttentionLayer, inputs: AttentionInputs, *, dtype: torch.dtype, last_only: bool = False
) -> PrefillPlan:
    """Cut the tokens of all rows that have more than one into query tiles, on the device.

    If ``last_only`` each row has a tile of its last token, and no other.
    """
    num_rows = inputs.context_lengths.shape[0]
    block_m = BLOCK_M if dtype.itemsize == 2 else BLOCK_M_FLOAT32
    tile_tokens = block_m // (layer.num_heads // layer.num_kv_heads)
    max_num_tiles = num_rows + (0 if last_only else inputs.positions.shape[0] // tile_tokens)
    tiles = torch.empty(
        (max_num_tiles, TILE_FIELDS.value),
        dtype=torch.int32,
        device=inputs.context_lengths.device,
    )
    _plan_prefill_kernel[(cdiv(max_num_tiles, LOOKED_UP),)](
        tiles,
        inputs.query_start,
        inputs.context_lengths,
        num_rows,
        max_num_tiles,
        TILE_TOKENS=tile_tokens,
        LAST_ONLY=last_only,
        ROWS_PAD=pad_rows(num_rows),
        TILES=LOOKED_UP,
        num_warps=8,
    )
    return PrefillPlan(inputs, tiles, block_m)


@triton.jit(do_not_specialize=["num_rows", "max_num_tiles"])
def _plan_prefill_kernel(
    tiles_ptr,
    query_start_ptr,
    context_lengths_ptr,
    num_rows,
    max_num_tiles,
    TILE_TOKENS: tl.constexpr,
    LAST_ONLY: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    TILES: tl.constexpr,
):
    """Count the tiles of all rows in each program; each looks up the rows of ``TILES`` tiles."""
    row = tl.arange(0, ROWS_PAD)
    exists = row < num_rows
    first_token = tl.load(query_start_ptr + row, mask=exists, other=0)
    num_tokens = tl.load(query_start_ptr + row + 1, mask=exists, other=0) - first_token
    num_tiles = 1 if LAST_ONLY else tl.cdiv(num_tokens, TILE_TOKENS)
    end = tl.cumsum(tl.where(num_tokens > 1, num_tiles, 0), axis=0)

    # A tile belongs to the row whose number is how many rows end before it, and begins where the
    # last of them ended. The last tiles of a row have the longest context and take the first place.
    place = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tile = tl.max(end, axis=0) - 1 - place
    ended = end[:, None] <= tile[None, :]
    tile_row = tl.sum(ended.to(tl.int32), axis=0)
    row_start = tl.max(tl.where(ended, end[:, None], 0), axis=0)
    exists = tile >= 0
    first_token = tl.load(query_start_ptr + tile_row, mask=exists, other=0)
    num_tokens = tl.load(query_start_ptr + tile_row + 1, mask=exists, other=0) - first_token
    context = tl.load(context_lengths_ptr + tile_row, mask=exists, other=0)
    skipped = num_tokens - 1 if LAST_ONLY else (tile - row_start) * TILE_TOKENS
    planned = tiles_ptr + place * TILE_FIELDS
    in_plan = place < max_num_tiles
    tl.store(planned, tl.where(exists, num_tokens - skipped, 0), mask=in_plan)
    tl.store(planned + 1, tile_row, mask=in_plan)
    tl.store(planned + 2, first_token + skipped, mask=in_plan)
    tl.store(planned + 3, context - num_tokens + skipped, mask=in_plan)
