"""Self-attention around the backend, which owns norms, rotation and the K/V of the heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from octavo.attention.backend import Attention, AttentionLayer
from octavo.models.config import ModelConfig
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.parallel import Shard, split_heads
from octavo.models.layers.weights import CheckpointTensor, empty_parameter
from octavo.models.ops.eight_bits import FP8
from octavo.models.ops.norm import Normed


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStyle:
    """What the architectures do differently in their attention layers."""

    qkv_bias: bool = False
    output_bias: bool = False
    has_head_norm: bool = False
    """Every query and key head is RMS-normalised before its rotation."""


class SelfAttention(nn.Module):
    """The projections of one layer; what the backend must know of it is in ``layer``."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        index: int,
        rotary: Tensor,
        style: AttentionStyle,
    ) -> None:
        super().__init__()
        split = split_heads(config.num_heads, config.num_kv_heads, shard)
        dim, rounded_to = config.head_dim, None if config.quantization is None else FP8
        q_rows, kv_rows = split.heads.scaled(dim), split.kv_heads.scaled(dim)
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size,
            {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
            bias=style.qkv_bias,
            rounded_to=rounded_to,
        )
        self.o_proj = RowParallelLinear(
            q_rows,
            config.hidden_size,
            bias=style.output_bias,
            shard=shard,
            rounded_to=rounded_to,
        )
        self.q_norm = empty_parameter(dim) if style.has_head_norm else None
        self.k_norm = empty_parameter(dim) if style.has_head_norm else None
        self.layer = AttentionLayer(
            index=index,
            num_heads=split.heads.length,
            num_kv_heads=split.kv_heads.length,
            head_dim=dim,
            scale=dim**-0.5,
            rotary=rotary,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=config.norm_eps,
            sliding_window=config.sliding_windows[index],
        )

    def forward(
        self,
        x: Tensor | Normed,
        residual: Tensor,
        attention: Attention,
        norm: RMSNorm,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | Normed, Tensor]:
        """Add to the residual stream, (num_tokens, hidden_size); return it normalised, and it.

        Of ``wanted``, (n,) indices of rows' last tokens, both are (n, hidden_size).
        """
        heads = attention(self.layer, self.qkv_proj(x), last_only=wanted is not None)
        if wanted is not None:
            heads, residual = heads.index_select(0, wanted), residual.index_select(0, wanted)
        return self.o_proj.add_norm(heads, residual, norm)

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the four projections and the head norms."""
        yield from self.qkv_proj.checkpoint_tensors(name)
        yield from self.o_proj.checkpoint_tensors(f"{name}.o_proj")
        for norm_name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                yield CheckpointTensor(f"{name}.{norm_name}.weight", tuple(weight.shape), weight)
