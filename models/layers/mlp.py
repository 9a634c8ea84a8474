"""The gated feed-forward block."""

from collections.abc import Iterator

from torch import Tensor, nn

from octavo.models.config import ModelConfig
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor
from octavo.models.ops.eight_bits import FP8
from octavo.models.ops.norm import Normed


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up computed as one product."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        inner = shard.span(config.intermediate_size)
        rounded_to = None if config.quantization is None else FP8
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            rounded_to=rounded_to,
        )
        self.down_proj = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=config.mlp_bias,
            shard=shard,
            rounded_to=rounded_to,
        )

    def forward(
        self, x: Tensor | Normed, residual: Tensor, norm: RMSNorm
    ) -> tuple[Tensor | Normed, Tensor]:
        """Add to the residual stream, (num_tokens, hidden_size); return it normalised, and it."""
        return self.down_proj.add_norm(self.gate_up_proj.silu_mul(x), residual, norm)

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the three matrices."""
        yield from self.gate_up_proj.checkpoint_tensors(name)
        yield from self.down_proj.checkpoint_tensors(f"{name}.down_proj")
