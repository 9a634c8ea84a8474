"""How the queries of one step are put together: which of them attend at once, and to what.

Few large operations beat many small ones, as long as what one of them reads fits in a cache and
rows are not filled up by much.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.backend import AttentionInputs

MAX_TILE_QUERIES = 256
"""Queries of one row that attend together: bounds the mask and skips most of its upper triangle."""
FILL_TOKENS = 128
"""A row shorter by so many tokens is filled up; one shorter than half by more is not."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """All tokens of a row, none of them computed before: each sees itself and those in front."""

    tokens: slice
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries that attend together: one each of several rows, or several of one row."""

    tokens: Tensor  # (num_rows * num_queries,) indices into the flat batch
    num_rows: int
    slots: Tensor  # (num_rows * width,) of the tokens that are seen, int64
    bias: Tensor | None  # (num_rows, 1, num_queries, width) 0 or -inf; None sees everything


def find_tiles(
    inputs: AttentionInputs, *, window: int | None, block_size: int, max_slots: int
) -> Iterator[Prompt | Tile]:
    """Yield work that covers each token of each row once; a tile has ``max_slots`` at most.

    Tiles of a single row may have more. Every row but those of no tokens is in it.
    """
    starts, lengths = inputs.query_start.tolist(), inputs.context_lengths.tolist()
    single: list[int] = []
    for row, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop - start == 1:
            single.append(row)
        elif stop - start == lengths[row] and (window is None or lengths[row] <= window):
            yield Prompt(slice(start, stop), stop - start)
        else:
            for first in range(start, stop, MAX_TILE_QUERIES):
                tokens = np.arange(first, min(first + MAX_TILE_QUERIES, stop))
                yield _make_tile(inputs, [row], tokens[None], window, block_size)
    seen = {row: min(lengths[row], window or lengths[row]) for row in single}
    for rows in _group(seen, max_slots):
        tokens = np.array([[starts[row]] for row in rows])
        yield _make_tile(inputs, rows, tokens, window, block_size)


def _group(lengths: dict[int, int], max_slots: int) -> Iterator[list[int]]:
    """Yield rows of similar lengths, in the order of the batch if one group holds all."""
    group: list[int] = []
    longest = 0
    for row in sorted(lengths, key=lambda row: -lengths[row]):
        is_similar = lengths[row] >= min(longest // 2, longest - FILL_TOKENS)
        if group and not (is_similar and (len(group) + 1) * longest <= max_slots):
            yield sorted(group)
            group = []
        longest = longest if group else lengths[row]
        group.append(row)
    if group:
        yield sorted(group)


def _make_tile(
    inputs: AttentionInputs,
    rows: list[int],
    tokens: NDArray[np.int64],
    window: int | None,
    block_size: int,
) -> Tile:
    """Find what the queries ``tokens``, (num_rows, num_queries), may see.

    In numpy, whose small operations take a fraction of torch's.
    """
    queries = inputs.positions.numpy()[tokens]
    first, last = queries[:, :1], queries[:, -1:]
    begin = (first + 1 - window).clip(min=0) if window is not None else np.zeros_like(first)
    width = int((last - begin).max()) + 1
    seen = begin + np.arange(width, dtype=np.int32)  # (num_rows, width)
    mask = seen[:, None] <= queries[:, :, None]
    if window is not None:
        mask &= seen[:, None] > queries[:, :, None] - window
    # Shorter rows are filled up with their last token, masked: whatever lies in slots that are not
    # theirs must not even be multiplied by zero.
    blocks, offsets = np.divmod(np.minimum(seen, last), block_size)
    tables = inputs.block_tables.numpy()[rows]
    slots = np.take_along_axis(tables, blocks, axis=1).astype(np.int64) * block_size + offsets
    bias = None
    if not mask.all():
        bias = torch.from_numpy(np.where(mask, np.float32(0), -np.float32(np.inf))[:, None])
    flat_tokens, flat_slots = torch.from_numpy(tokens.ravel()), torch.from_numpy(slots.ravel())
    return Tile(flat_tokens, len(rows), flat_slots, bias)
