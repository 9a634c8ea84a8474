"""Log-probabilities under the raw logits: of one token a row, its rank, and of the likeliest.

1. summarise  (rows x tiles)  maximum, sum of exponentials, logits above the token's, and the
                              num_top likeliest of the tile, by repeated maximum
2. merge      (rows)          the same of the whole row

Launched only for rows that ask. One pass over their logits: floor 2 bytes a logit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.sizes import cdiv, next_power_of_2
from octavo.executor.ops.logits import LOG2_E, MAX_INT

TILE = 1024  # 32 logits a thread of one warp: repeated maxima without barriers
MAX_TOP = 32
"""More are sorted by torch: repeated maxima cost time in proportion to their number."""
VARIED_TOPS = (1, 8, MAX_TOP)
"""Numbers of likeliest tokens that need different variants of a kernel; any other shares one."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Column 0 is the token that is there, the others are the likeliest, best first."""

    ids: Tensor  # (num_rows, 1 + num_top) int32
    logprobs: Tensor  # (num_rows, 1 + num_top) float32
    ranks: Tensor  # (num_rows,) int32, of column 0, from 1; equal logits share the best rank


def compute_logprobs(logits: Tensor, token_ids: Tensor, *, num_top: int) -> TokenLogprobs:
    """Return log-softmax of ``logits``, (num_rows, vocab_size), where ``token_ids`` point.

    Of equal logits the lowest id comes first. Works without the host's seeing the ids.
    """
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    if num_top > MAX_TOP:
        return _sort(logits, token_ids, num_top)
    assert logits.stride(1) == 1, f"logits of a row are {logits.stride(1)} apart"
    num_tiles = cdiv(vocab_size, TILE)
    device = logits.device
    summaries = torch.empty((num_rows, num_tiles, 3), dtype=torch.float32, device=device)
    best = torch.empty((num_rows, num_tiles, num_top), dtype=torch.float32, device=device)
    best_ids = torch.empty_like(best, dtype=torch.int32)
    ids = torch.empty((num_rows, 1 + num_top), dtype=torch.int32, device=device)
    found = TokenLogprobs(
        ids=ids,
        logprobs=torch.empty_like(ids, dtype=torch.float32),
        ranks=torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if num_rows:
        _summarise_kernel[(num_rows, num_tiles)](
            logits,
            token_ids,
            summaries,
            best,
            best_ids,
            vocab_size,
            logits.stride(0),
            num_top,
            TILE=TILE,
            num_warps=1,
        )
        _merge_kernel[(num_rows,)](
            logits,
            token_ids,
            summaries,
            best,
            best_ids,
            found.ids,
            found.logprobs,
            found.ranks,
            logits.stride(0),
            num_tiles,
            num_top,
            TILES_PAD=next_power_of_2(num_tiles),
            BEST_PAD=next_power_of_2(num_tiles * next(n for n in VARIED_TOPS if num_top <= n)),
            num_warps=8,
        )
    return found


def _sort(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    values = logits.float().log_softmax(dim=1)
    targets = token_ids.long().unsqueeze(1)
    chosen = values.gather(1, targets)
    order = values.sort(dim=1, descending=True, stable=True)
    return TokenLogprobs(
        ids=torch.cat((targets, order.indices[:, :num_top]), dim=1).int(),
        logprobs=torch.cat((chosen, order.values[:, :num_top]), dim=1),
        ranks=((values > chosen).sum(dim=1) + 1).int(),
    )


# Tokens of a prompt begin anywhere in a row: one kernel serves all.
@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["token_ids_ptr"])
def _summarise_kernel(
    logits_ptr,  # (num_rows, vocab_size)
    token_ids_ptr,
    summaries_ptr,  # (num_rows, num_tiles, 3)
    best_ptr,  # (num_rows, num_tiles, num_top)
    best_ids_ptr,
    vocab_size,
    stride_logits,
    num_top,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    place = row * tl.num_programs(1) + tile
    logits_ptr += row * stride_logits
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    token = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    maximum = tl.max(x)
    origin = tl.where(maximum == -float("inf"), 0.0, maximum)
    tl.store(summaries_ptr + place * 3, maximum)
    tl.store(summaries_ptr + place * 3 + 1, tl.sum(tl.exp2((x - origin) * LOG2_E)))
    tl.store(summaries_ptr + place * 3 + 2, tl.sum((x > token).to(tl.float32)))
    for rank in range(num_top):
        value, first, x, ids = _take_first(x, ids)
        tl.store(best_ptr + place * num_top + rank, value)
        tl.store(best_ids_ptr + place * num_top + rank, first)


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["token_ids_ptr"])
def _merge_kernel(
    logits_ptr,
    token_ids_ptr,
    summaries_ptr,
    best_ptr,
    best_ids_ptr,
    ids_ptr,  # (num_rows, 1 + num_top)
    logprobs_ptr,
    ranks_ptr,
    stride_logits,
    num_tiles,
    num_top,
    TILES_PAD: tl.constexpr,
    BEST_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES_PAD)
    is_tile = tiles < num_tiles
    summary_ptr = summaries_ptr + (row * num_tiles + tiles) * 3
    maxima = tl.load(summary_ptr, mask=is_tile, other=-float("inf"))
    sums = tl.load(summary_ptr + 1, mask=is_tile, other=0.0)
    above = tl.load(summary_ptr + 2, mask=is_tile, other=0.0)
    maximum = tl.max(maxima)
    log_total = maximum + tl.log(tl.sum(sums * tl.exp2((maxima - maximum) * LOG2_E)))
    token_id = tl.load(token_ids_ptr + row)
    token = tl.load(logits_ptr + row * stride_logits + token_id).to(tl.float32)
    ids_ptr += row * (1 + num_top)
    logprobs_ptr += row * (1 + num_top)
    tl.store(ranks_ptr + row, 1 + tl.sum(above).to(tl.int32))
    tl.store(ids_ptr, token_id)
    tl.store(logprobs_ptr, token - log_total)
    places = tl.arange(0, BEST_PAD)
    is_best = places < num_tiles * num_top
    source = row * num_tiles * num_top + places
    x = tl.load(best_ptr + source, mask=is_best, other=-float("inf"))
    ids = tl.load(best_ids_ptr + source, mask=is_best, other=MAX_INT)
    for rank in range(num_top):
        value, first, x, ids = _take_first(x, ids)
        tl.store(ids_ptr + 1 + rank, first)
        tl.store(logprobs_ptr + 1 + rank, value - log_total)


@triton.jit
def _take_first(x, ids):
    """Return the maximum, its lowest id, and both blocks without it."""
    value = tl.max(x)
    first = tl.min(tl.where(x == value, ids, MAX_INT))
    is_taken = ids == first
    return value, first, tl.where(is_taken, -float("inf"), x), tl.where(is_taken, MAX_INT, ids)
