"""One layer of a decoder: attention, then feed-forward, each behind a norm."""

from collections.abc import Iterator

from torch import Tensor, nn

from octavo.attention.backend import Attention
from octavo.models.config import ModelConfig
from octavo.models.layers.attention import SelfAttention
from octavo.models.layers.mlp import GatedMLP
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.weights import CheckpointTensor


class DecoderLayer(nn.Module):
    """Passes on a pair: the output of its last block, and the residual stream without it.

    The sum of the two is left to the next norm, which can fuse it.
    """

    def __init__(self, config: ModelConfig, *, attention: SelfAttention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = mlp

    def forward(
        self, x: Tensor, residual: Tensor | None, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Map (num_tokens, hidden_size) and the residual, None before the first layer."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, attention)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the tensors of the four parts."""
        yield from self.input_layernorm.checkpoint_tensors(f"{name}.input_layernorm")
        yield from self.self_attn.checkpoint_tensors(f"{name}.self_attn")
        yield from self.post_attention_layernorm.checkpoint_tensors(
            f"{name}.post_attention_layernorm"
        )
        yield from self.mlp.checkpoint_tensors(f"{name}.mlp")
