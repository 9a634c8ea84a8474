"""Paged attention in plain torch: the CPU's backend, and the oracle of every kernel.

Keys and values are gathered slot by slot, so nothing but the slots of a row's own context is ever
read. Arithmetic is float32 whatever the pool's type; what an 8-bit one cannot hold is cut to its
largest value.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec

MAX_TILE_QUERIES = 256
"""Queries of one row that attend together: bounds the mask and skips most of its upper triangle."""
MAX_TILE_BYTES = 2**20
"""Keys that several rows gather together: with the values they fit in a core's cache."""


class ReferenceBackend:
    """Owns the KV pool, (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim).

    One block holds K and V of all layers contiguously, so a block moves with one copy. The pool is
    not initialised: what was never stored may be anything, NaN included.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        head_shape = (spec.num_kv_heads, spec.head_dim)
        shape = (num_blocks, spec.num_layers, 2, spec.block_size, *head_shape)
        self.kv_pool = torch.empty(shape, dtype=dtype, device=device)

    def bind(self, inputs: AttentionInputs) -> "ReferenceAttention":
        """Return the attention of one step."""
        return ReferenceAttention(self.kv_pool, inputs)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of all layers of one block."""
        self.kv_pool[target].copy_(self.kv_pool[source])


class ReferenceAttention:
    """Attention of one step; what its layers share is worked out once, on first use.

    The pool is seen as lines, one for K or V of one token in one layer. Lines are counted from the
    layer's first one, so that a slot has the same line number in every layer, for K and for V.
    """

    def __init__(self, kv_pool: Tensor, inputs: AttentionInputs) -> None:
        num_layers, self._block_size = kv_pool.shape[1], kv_pool.shape[3]
        self._lines_per_block = num_layers * 2 * self._block_size
        self._lines = kv_pool.view(-1, kv_pool.shape[4] * kv_pool.shape[5])
        self._inputs = inputs
        self._stored = (inputs.slot_mapping >= 0).nonzero().flatten()
        slots = inputs.slot_mapping[self._stored]
        self._targets = self._find_lines(slots // self._block_size, slots % self._block_size)
        self._tiles: dict[int | None, list[_Tile]] = {}
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: AttentionLayer, qkv: Tensor) -> Tensor:
        """Store k and v of all tokens, then attend."""
        heads = qkv.view(len(qkv), -1, layer.head_dim).float()
        num_rotated = layer.num_heads + layer.num_kv_heads
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        qk = _rotate(_normalise(layer, qk), *self._find_rotation(layer))
        q, k = qk[:, : layer.num_heads], qk[:, layer.num_heads :]
        keys, values = self._find_layer(layer.index)
        self._store(keys, k)
        self._store(values, v)
        output = torch.zeros_like(q)
        for tile in self._find_tiles(layer.sliding_window):
            tile_q = q.index_select(0, tile.tokens)
            output.index_copy_(0, tile.tokens, _attend(layer, tile, tile_q, keys, values))
        return output.flatten(1).to(qkv.dtype)

    def _find_rotation(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the tokens' positions, (num_tokens, 1, rotary_dim / 2)."""
        key = id(layer.rotary)  # layers share their tables; the model keeps them alive
        if key not in self._rotations:
            table = layer.rotary.index_select(0, self._inputs.positions)
            cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
            self._rotations[key] = cos, sin
        return self._rotations[key]

    def _find_layer(self, index: int) -> tuple[Tensor, Tensor]:
        first = 2 * index * self._block_size
        return self._lines[first:], self._lines[first + self._block_size :]

    def _find_lines(self, block_ids: Tensor, offsets: Tensor) -> Tensor:
        return block_ids.long() * self._lines_per_block + offsets

    def _store(self, lines: Tensor, new: Tensor) -> None:
        if len(self._stored) < len(new):
            new = new.index_select(0, self._stored)
        rounded = _round(new.flatten(1), lines.dtype)
        if lines.itemsize == 1:  # torch copies no 8-bit floats by index
            lines, rounded = lines.view(torch.uint8), rounded.view(torch.uint8)
        lines.index_copy_(0, self._targets, rounded)

    def _find_tiles(self, window: int | None) -> "list[_Tile]":
        if window not in self._tiles:
            max_context = MAX_TILE_BYTES // (self._lines.shape[1] * self._lines.itemsize)
            cuts = _cut_into_tiles(self._inputs, max_context=max_context)
            self._tiles[window] = [self._make_tile(rows, tokens, window) for rows, tokens in cuts]
        return self._tiles[window]

    def _make_tile(self, rows: Tensor, tokens: Tensor, window: int | None) -> "_Tile":
        """Find what the queries ``tokens``, (num_rows, num_queries), may see."""
        queries = self._inputs.positions[tokens]
        first, last = queries[:, :1], queries[:, -1:]
        begin = (first + 1 - window).clamp(min=0) if window is not None else torch.zeros_like(first)
        width = int((last - begin).max()) + 1
        seen = begin + torch.arange(width, device=begin.device)  # (num_rows, width)
        mask = seen.unsqueeze(1) <= queries.unsqueeze(2)
        if window is not None:
            mask &= seen.unsqueeze(1) > queries.unsqueeze(2) - window
        # Shorter rows are filled up with their last token, masked: whatever lies in slots that
        # are not theirs must not even be multiplied by zero.
        seen = seen.minimum(last)
        blocks = self._inputs.block_tables[rows].gather(1, seen.long() // self._block_size)
        context = self._find_lines(blocks, seen % self._block_size).flatten()
        is_needed = not bool(mask.all())
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
        return _Tile(tokens.flatten(), len(rows), context, bias.unsqueeze(1) if is_needed else None)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that attend together: one each of several rows, or several of one row."""

    tokens: Tensor  # (num_rows * num_queries,) indices into the flat batch
    num_rows: int
    context: Tensor  # (num_rows * width,) lines of the pool
    bias: Tensor | None  # (num_rows, 1, num_queries, width) 0 or -inf; None sees everything


def _cut_into_tiles(
    inputs: AttentionInputs, *, max_context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, tokens) of each tile: some queries of one row, or one query each of many rows.

    Many rows share a tile if their lengths have the same power of two, so that filling is less
    than half of it, and no more than ``max_context`` tokens are read.
    """
    device = inputs.query_start.device
    starts, lengths = inputs.query_start.tolist(), inputs.context_lengths.tolist()
    alike: dict[int, list[int]] = defaultdict(list)
    for row, (start, stop) in enumerate(itertools.pairwise(starts)):
        if stop - start == 1:
            alike[lengths[row].bit_length()].append(row)
            continue
        for first in range(start, stop, MAX_TILE_QUERIES):
            last = min(first + MAX_TILE_QUERIES, stop)
            yield torch.tensor([row], device=device), torch.arange(first, last, device=device)[None]
    for rows in alike.values():
        size = max(1, max_context // max(lengths[row] for row in rows))
        for some in (rows[first : first + size] for first in range(0, len(rows), size)):
            tokens = [[starts[row]] for row in some]
            yield torch.tensor(some, device=device), torch.tensor(tokens, device=device)


def _round(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to the pool's type; no finite value becomes infinite or NaN in 8 bits."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def _normalise(layer: AttentionLayer, qk: Tensor) -> Tensor:
    """RMS-normalise the heads of q and of k, (num_tokens, num_heads + num_kv_heads, head_dim)."""
    if layer.q_norm is None and layer.k_norm is None:
        return qk
    q, k = qk[:, : layer.num_heads], qk[:, layer.num_heads :]
    parts = [
        x if weight is None else F.rms_norm(x, (layer.head_dim,), weight.float(), layer.norm_eps)
        for x, weight in ((q, layer.q_norm), (k, layer.k_norm))
    ]
    return torch.cat(parts, dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of the first elements of each head; the others pass."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    first = (a * cos).addcmul_(b, sin, value=-1)
    second = (b * cos).addcmul_(a, sin)
    return torch.cat((first, second, rest), dim=-1)


def _attend(layer: AttentionLayer, tile: _Tile, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from the tile's queries, (num_rows * num_queries, num_heads, head_dim)."""
    shape = (tile.num_rows, -1, layer.num_kv_heads, layer.head_dim)
    k = keys.index_select(0, tile.context).float().view(shape).transpose(1, 2)
    v = values.index_select(0, tile.context).float().view(shape).transpose(1, 2)
    q = q.view(len(q), layer.num_kv_heads, -1, layer.head_dim)
    if len(q) == tile.num_rows:
        # The heads of a group take the place of queries: torch would read k and v once a head.
        out = F.scaled_dot_product_attention(q, k, v, tile.bias, scale=layer.scale)
        return out.flatten(1, 2)
    q = q.permute(1, 2, 0, 3)  # (num_kv_heads, group, num_queries, head_dim)
    k, v = (kv.transpose(0, 1).expand(-1, q.shape[1], -1, -1) for kv in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, tile.bias, scale=layer.scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)
