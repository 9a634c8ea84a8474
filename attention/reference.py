"""Paged attention in plain torch, one row after the other: the oracle of every kernel.

Keys and values are gathered slot by slot, so nothing but the slots of a row's own context is ever
read. Arithmetic is float32 whatever the pool's type; what an 8-bit one cannot hold is cut to its
largest value.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.backend import AttentionInputs, AttentionLayer, KVCacheSpec


class ReferenceBackend:
    """Owns the KV pool, of the spec's shape.

    It is not initialised: what was never stored may be anything, NaN included.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.kv_pool = torch.empty(spec.pool_shape(num_blocks), dtype=dtype, device=device)

    def bind(self, inputs: AttentionInputs) -> "ReferenceAttention":
        """Return the attention of one step."""
        return ReferenceAttention(self.kv_pool, inputs)

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of all layers of one block."""
        self.kv_pool[target].copy_(self.kv_pool[source])


class ReferenceAttention:
    """Attention of one step."""

    def __init__(self, kv_pool: Tensor, inputs: AttentionInputs) -> None:
        self._kv_pool = kv_pool
        self._block_size = kv_pool.shape[3]
        self._inputs = inputs

    def __call__(self, layer: AttentionLayer, qkv: Tensor, *, last_only: bool = False) -> Tensor:
        """Store k and v of all tokens, then attend."""
        heads = qkv.view(len(qkv), -1, layer.head_dim).float()
        q, k, v = heads.split_with_sizes(
            [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1
        )
        q = self._rotate(layer, _normalise(q, layer.q_norm, layer.norm_eps))
        k = self._rotate(layer, _normalise(k, layer.k_norm, layer.norm_eps))
        keys, values = self._kv_pool[:, layer.index].unbind(1)  # (num_blocks, block_size, ...)
        self._store(keys, k)
        self._store(values, v)
        output = torch.zeros_like(q)
        starts, lengths = self._inputs.query_start.tolist(), self._inputs.context_lengths.tolist()
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            positions = torch.arange(lengths[row])
            blocks = self._inputs.block_tables[row][positions // self._block_size].long()
            place = blocks, positions % self._block_size
            output[start:stop] = _attend(layer, q[start:stop], keys[place], values[place])
        return output.flatten(1).to(qkv.dtype)

    def _rotate(self, layer: AttentionLayer, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + half) of the first elements of each head; the others pass."""
        table = layer.rotary.index_select(0, self._inputs.positions)
        cos, sin = table.unsqueeze(1).chunk(2, dim=-1)  # (num_tokens, 1, half)
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    def _store(self, pool: Tensor, new: Tensor) -> None:
        is_stored = self._inputs.slot_mapping >= 0
        slots = self._inputs.slot_mapping[is_stored]
        place = slots // self._block_size, slots % self._block_size
        new = _round(new[is_stored], pool.dtype)
        if pool.itemsize == 1:  # torch copies no 8-bit floats by index
            pool, new = pool.view(torch.uint8), new.view(torch.uint8)
        pool[place] = new


def _round(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to the pool's type; no finite value becomes infinite or NaN in 8 bits."""
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def _normalise(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS-normalise heads, (num_tokens, num_heads, head_dim), where the layer does so."""
    return x if weight is None else F.rms_norm(x, weight.shape, weight.float(), eps)


def _attend(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from the last tokens of a context, (num_queries, num_heads, head_dim), to all of it.

    ``k`` and ``v`` are (num_tokens, num_kv_heads, head_dim) of any type.
    """
    seen = torch.arange(len(k))
    queries = seen[len(k) - len(q) :, None]
    mask = seen <= queries
    if layer.sliding_window is not None:
        mask &= seen > queries - layer.sliding_window
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask, scale=layer.scale)
    return out.transpose(0, 1)
