"""The contract between models, attention backends and the model runner.

A model calls ``attention(layer, qkv)`` once per layer. The backend normalises and rotates q and k,
stores k and v of *all* tokens of the step, and only then attends; so rows of one step may read
blocks that the same step writes.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the K/V that one token has in all layers on this rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim).

        One block holds K and V of all layers contiguously, so it moves with one copy.
        """
        heads = self.num_kv_heads, self.head_dim
        return num_blocks, self.num_layers, 2, self.block_size, *heads

    def num_block_elements(self) -> int:
        """Elements of one block: K and V of all layers."""
        return math.prod(self.pool_shape(1))


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one attention layer does with its q, k and v; constant for the life of the model.

    ``rotary`` holds cos | sin for every position, float32, (max_positions, rotary_dim); the first
    ``rotary_dim`` elements of a head are rotated in the half-split ("neox") pairing: element i with
    i + rotary_dim / 2.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: Tensor
    q_norm: Tensor | None = None  # (head_dim,)
    k_norm: Tensor | None = None  # (head_dim,)
    norm_eps: float = 1e-6
    sliding_window: int | None = None
    """A token sees itself and the ``sliding_window - 1`` tokens before it; None sees all."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of one step stand; the same for all layers. int32 unless noted.

    Row r owns the tokens ``query_start[r] : query_start[r + 1]`` of the flat batch; they are the
    last ones of its ``context_lengths[r]`` tokens. Token t goes to slot ``slot_mapping[t] =
    block_id * block_size + offset``; a negative slot is skipped by every kernel. Padding rows have
    no context, padding tokens a negative slot. In a step with no more tokens than rows, padding
    included, no row has more than one.
    """

    query_start: Tensor  # (num_rows + 1,)
    context_lengths: Tensor  # (num_rows,) including the tokens of this step
    block_tables: Tensor  # (num_rows, max_num_blocks)
    positions: Tensor  # (num_tokens,)
    slot_mapping: Tensor  # (num_tokens,) int64


class Attention(Protocol):
    """Attention bound to one step, as the models see it."""

    def __call__(self, layer: AttentionLayer, qkv: Tensor, *, last_only: bool = False) -> Tensor:
        """Map q | k | v of the flat batch to the heads' outputs; may overwrite ``qkv``.

        (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) in,
        (num_tokens, num_heads * head_dim) out. If ``last_only`` the outputs of the rows' last
        tokens alone are read, and the others may be anything; k and v of all are stored.
        """


class AttentionBackend(Protocol):
    """One way to keep and read paged K/V on a device. Owns the KV pool."""

    def bind(self, inputs: AttentionInputs) -> Attention:
        """Return the attention of one step."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy the K/V of all layers of one block."""
