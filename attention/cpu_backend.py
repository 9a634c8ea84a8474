"""Paged attention on a CPU: a few of torch's own operators a layer, whatever the number of rows.

Rows that compute one token attend together; heads that share keys take the place of queries, for
torch would read keys once a head. A prompt that begins in a step is read where its projections left
it. What layers share is worked out once a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec
from octavo.attention.tiles import Prompt, Tile, find_tiles

MAX_TILE_BYTES = 2**23
"""Keys and values that several rows gather together: they fit in the cache that cores share."""
MAX_SUMMED_TOKENS = 1_000
"""So many tokens a single row attends to by sums; more are faster gathered."""


@dataclass(slots=True)
class AttentionOps:
    """The functions of ``small_ops``, compiled, by the type of q, k and v."""

    turn_and_store: dict[torch.dtype, Callable[..., Tensor]] = field(default_factory=dict)
    attend_tile: dict[torch.dtype, Callable[..., Tensor]] = field(default_factory=dict)
    attend_row: dict[torch.dtype, Callable[..., Tensor]] = field(default_factory=dict)


class CpuBackend:
    """Owns the KV pool, (num_blocks, num_layers, block_size, 2, num_kv_heads, head_dim).

    K and V of one token in one layer lie side by side, a line: one copy stores it, one gathers it.
    The pool is not initialised: what was never stored may be anything, NaN included.
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
        shape = (num_blocks, spec.num_layers, spec.block_size, 2, *head_shape)
        self.kv_pool = torch.empty(shape, dtype=dtype, device=device)
        lines = self.kv_pool.view(-1, 2 * spec.num_kv_heads * spec.head_dim)
        self._lines = [lines[layer * spec.block_size :] for layer in range(spec.num_layers)]
        self.ops = AttentionOps()
        """Called where there are any; they may be added between two steps."""

    def bind(self, inputs: AttentionInputs) -> "CpuAttention":
        """Return the attention of one step."""
        return CpuAttention(self._lines, self.kv_pool.shape[2], inputs, self.ops)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of all layers of one block."""
        self.kv_pool[target].copy_(self.kv_pool[source])


class CpuAttention:
    """Attention of one step.

    Lines are counted from the layer's first one, so that a slot has the same line in every layer;
    ``lines`` are those of each layer, (num_lines, 2 * num_kv_heads * head_dim).
    """

    def __init__(
        self,
        lines: Sequence[Tensor],
        block_size: int,
        inputs: AttentionInputs,
        ops: AttentionOps,
    ) -> None:
        self._lines, self._block_size = lines, block_size
        self._lines_per_block = len(lines) * block_size
        self._inputs = inputs
        slots = inputs.slot_mapping.numpy()
        is_stored = slots >= 0  # numpy's small operations take a fraction of torch's
        self._stored = None if is_stored.all() else torch.from_numpy(np.flatnonzero(is_stored))
        self._targets = self._find_lines(slots[is_stored])
        self._work: dict[int | None, list[_PromptWork | _TileWork]] = {}
        self._rotations: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables: dict[int, Tensor] = {}
        self._ops = ops

    def __call__(self, layer: AttentionLayer, qkv: Tensor, *, last_only: bool = False) -> Tensor:
        """Store k and v of all tokens, then attend."""
        turn_and_store = self._ops.turn_and_store.get(qkv.dtype)
        if turn_and_store is not None and self.stores_all:
            return self.attend(layer, turn_and_store(qkv, *self.find_place(layer)))
        num_tokens, size = qkv.shape
        heads = qkv.view(num_tokens, -1, layer.head_dim)
        q_size = layer.num_heads * layer.head_dim
        self._turn(layer, heads.narrow(1, 0, layer.num_heads + layer.num_kv_heads))
        self._store(self._lines[layer.index], qkv.narrow(1, q_size, size - q_size))
        return self.attend(layer, heads)

    @property
    def stores_all(self) -> bool:
        """Whether every token has a slot."""
        return self._stored is None

    def find_place(self, layer: AttentionLayer) -> tuple[Tensor, ...]:
        """Return what ``turn_and_store`` wants beside q, k and v, where every token has a slot."""
        norms = () if layer.q_norm is None else (layer.q_norm, layer.k_norm)
        return self._find_table(layer), self._lines[layer.index], self._targets, *norms

    def attend(self, layer: AttentionLayer, heads: Tensor) -> Tensor:
        """Attend from all tokens' turned heads of q, k and v, of which k and v are stored.

        ``heads`` is (num_tokens, num_heads + 2 * num_kv_heads, head_dim).
        """
        lines, num_tokens = self._lines[layer.index], heads.shape[0]
        work = self._find_work(layer.sliding_window)
        if len(work) == 1 and work[0].num_tokens == num_tokens:
            return work[0].attend(layer, heads, lines)
        output = heads.new_zeros(num_tokens, layer.num_heads * layer.head_dim)
        for part in work:
            output[part.tokens] = part.attend(layer, heads[part.tokens], lines).to(output.dtype)
        return output

    def _turn(self, layer: AttentionLayer, qk: Tensor) -> None:
        """Normalise and rotate the heads of q and k in place, rounding once."""
        x = qk.float()
        if layer.q_norm is not None or layer.k_norm is not None:
            _normalise(layer, x)
        cos, sin = self._find_rotation(layer)
        half = cos.shape[-1]
        pairs = x.narrow(2, 0, 2 * half).view(*x.shape[:2], 2, half)
        swapped = pairs.flip(-2)
        pairs.mul_(cos).addcmul_(swapped, sin)
        if x.dtype != qk.dtype:
            qk.copy_(x)

    def _find_rotation(self, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Return cos, (num_tokens, 1, 1, half), and -sin and sin, (num_tokens, 1, 2, half)."""
        key = id(layer.rotary)  # layers share their tables; the model keeps them alive
        if key not in self._rotations:
            cos, sin = self._find_table(layer)[:, None, None].chunk(2, dim=-1)
            self._rotations[key] = cos, torch.cat((-sin, sin), dim=2)
        return self._rotations[key]

    def _find_table(self, layer: AttentionLayer) -> Tensor:
        """Return cos | sin of each token, (num_tokens, rotary_dim)."""
        key = id(layer.rotary)
        if key not in self._tables:
            self._tables[key] = layer.rotary.index_select(0, self._inputs.positions)
        return self._tables[key]

    def _find_lines(self, slots: NDArray[np.int64]) -> Tensor:
        blocks, offsets = np.divmod(slots, self._block_size)
        return torch.from_numpy(blocks * self._lines_per_block + offsets)

    def _store(self, lines: Tensor, kv: Tensor) -> None:
        if self._stored is not None:
            kv = kv.index_select(0, self._stored)
        lines.index_copy_(0, self._targets, kv.to(lines.dtype))

    def _find_work(self, window: int | None) -> "list[_PromptWork | _TileWork]":
        if window not in self._work:
            first = self._lines[0]
            tiles = find_tiles(
                self._inputs,
                window=window,
                block_size=self._block_size,
                max_slots=MAX_TILE_BYTES // (first.shape[1] * first.itemsize),
            )
            self._work[window] = [
                _PromptWork(tile.tokens, tile.num_tokens)
                if isinstance(tile, Prompt)
                else self._create_tile_work(tile)
                for tile in tiles
            ]
        return self._work[window]

    def _create_tile_work(self, tile: Tile) -> "_TileWork":
        bias, num_rows = tile.bias, tile.num_rows
        ops = self._ops.attend_tile if len(tile.tokens) == num_rows else {}
        if len(tile.tokens) == 1:
            ops = self._ops.attend_row if len(tile.slots) <= MAX_SUMMED_TOKENS else {}
        elif bias is None and ops:  # compiled code adds one in any case
            bias = torch.zeros(num_rows, 1, 1, len(tile.slots) // num_rows)
        return _TileWork(
            ops,
            tile.tokens,
            len(tile.tokens),
            num_rows,
            self._find_lines(tile.slots.numpy()),
            None if bias is None else bias.to(self._lines[0].dtype),
        )


@dataclass(frozen=True, slots=True)
class _PromptWork:
    """A prompt that begins in this step: nothing of it is read from the pool."""

    tokens: slice
    num_tokens: int

    def attend(self, layer: AttentionLayer, heads: Tensor, lines: Tensor) -> Tensor:
        """Map its tokens' heads of q, k and v to (num_tokens, num_heads * head_dim)."""
        q, k, v = heads.transpose(0, 1).split_with_sizes(
            [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        )
        return _attend_in_groups(layer, q, k, v, is_causal=True)


@dataclass(frozen=True, slots=True)
class _TileWork:
    """A tile that gathers what it sees from the pool."""

    ops: dict[torch.dtype, Callable[..., Tensor]]
    """Compiled forms of ``attend``, by the type of heads; a single row has no bias."""
    tokens: Tensor
    num_tokens: int
    num_rows: int
    lines: Tensor
    bias: Tensor | None

    def attend(self, layer: AttentionLayer, heads: Tensor, lines: Tensor) -> Tensor:
        """Map its tokens' heads of q, k and v to (num_tokens, num_heads * head_dim)."""
        if (attend := self.ops.get(heads.dtype)) is not None:
            bias = () if self.bias is None else (self.bias,)
            return attend(heads, lines, self.lines, *bias)
        q = heads.narrow(1, 0, layer.num_heads).to(lines.dtype)
        shape = (self.num_rows, -1, 2, layer.num_kv_heads, layer.head_dim)
        k, v = lines.index_select(0, self.lines).view(shape).transpose(1, 3).unbind(2)
        if q.shape[0] > self.num_rows:
            return _attend_in_groups(layer, q.transpose(0, 1), k[0], v[0], bias=self.bias)
        q = q.view(self.num_rows, layer.num_kv_heads, -1, layer.head_dim)
        out = F.scaled_dot_product_attention(q, k, v, self.bias, scale=layer.scale)
        return out.flatten(1)


def _normalise(layer: AttentionLayer, x: Tensor) -> None:
    """Normalise heads of q and k, float32, in place."""
    for heads, weight in (
        (x[:, : layer.num_heads], layer.q_norm),
        (x[:, layer.num_heads :], layer.k_norm),
    ):
        if weight is not None:
            heads.copy_(F.rms_norm(heads, weight.shape, weight.float(), layer.norm_eps))


def _attend_in_groups(
    layer: AttentionLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attend from many queries, (num_heads, num_queries, head_dim), of one row."""
    q = q.view(layer.num_kv_heads, -1, *q.shape[1:])
    k, v = (kv.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for kv in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal, scale=layer.scale)
    return out.flatten(0, 1).transpose(0, 1).flatten(1)
