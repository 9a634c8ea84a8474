"""One layer of a decoder: attention, then feed-forward, each behind a norm."""

from collections.abc import Iterator

from torch import Tensor, nn

from octavo.attention.backend import Attention
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import SelfAttention
from octavo.models.layers.mlp import GatedMLP
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.weights import CheckpointTensor
from octavo.models.ops.norm import Normed


class DecoderLayer(nn.Module):
    """Adds attention, then feed-forward, to the residual stream, each behind a norm.

    A block takes the stream normalised and normalises what it makes for the block behind it: so its
    last product can do both. The first norm belongs to whoever is in front of the layer.
    """

    def __init__(self, config: ModelConfig, *, attention: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor | Normed,
        residual: Tensor,
        attention: Attention,
        next_norm: RMSNorm,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | Normed, Tensor]:
        """Map the normalised stream and the stream, (num_tokens, hidden_size), to the same.

        Of ``wanted``, (n,) indices of rows' last tokens, they are (n, hidden_size).
        """
        x, residual = self.self_attn(x, residual, attention, self.post_attention_layernorm, wanted)
        next_pair: tuple[Tensor | Normed, Tensor] = self.mlp(x, residual, next_norm)
        return next_pair

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the tensors of the four parts."""
        yield from self.input_layernorm.checkpoint_tensors(f"{name}.input_layernorm")
        yield from self.self_attn.checkpoint_tensors(f"{name}.self_attn")
        yield from self.post_attention_layernorm.checkpoint_tensors(
            f"{name}.post_attention_layernorm"
        )
        yield from self.mlp.checkpoint_tensors(f"{name}.mlp")
