"""The gated feed-forward block."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from octavo.models.config import ModelConfig
from octavo.models.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up computed as one product."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            [OutputRows.even(name, size, shard) for name in ("gate_proj", "up_proj")],
            bias=bias,
        )
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias=bias, shard=shard)

    def forward(self, x: Tensor) -> Tensor:
        """Map (num_tokens, hidden_size) to the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(functional.silu(gate) * up)
        return y

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the three matrices."""
        yield from self.gate_up_proj.checkpoint_tensors(name)
        yield from self.down_proj.checkpoint_tensors(f"{name}.down_proj")
