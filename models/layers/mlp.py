"""The gated feed-forward block."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from octavo.models.config import ModelConfig
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up computed as one product."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        inner = shard.span(config.intermediate_size)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias
        )
        self.down_proj = RowParallelLinear(
            inner, config.hidden_size, bias=config.mlp_bias, shard=shard
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (num_tokens, hidden_size) to the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(functional.silu(gate) * up)
        return y

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the three matrices."""
        yield from self.gate_up_proj.checkpoint_tensors(name)
        yield from self.down_proj.checkpoint_tensors(f"{name}.down_proj")
