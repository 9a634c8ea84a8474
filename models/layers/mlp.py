"""The gated feed-forward block."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from octavo.models.config import ModelConfig
from octavo.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor
from octavo.models.ops.activation import silu_mul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up computed as one product."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        inner = shard.span(config.intermediate_size)
        is_quantized = config.quantization is not None
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            is_quantized=is_quantized,
        )
        self.down_proj = RowParallelLinear(
            inner,
            config.hidden_size,
            bias=config.mlp_bias,
            shard=shard,
            is_quantized=is_quantized,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (num_tokens, hidden_size) to the same shape."""
        gate_up = self.gate_up_proj(x)
        if gate_up.is_cuda:
            gated = silu_mul(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            # In place: fresh memory for a long prompt costs more than the arithmetic.
            gated = functional.silu(gate, inplace=True).mul_(up)
        y: Tensor = self.down_proj(gated)
        return y

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the three matrices."""
        yield from self.gate_up_proj.checkpoint_tensors(name)
        yield from self.down_proj.checkpoint_tensors(f"{name}.down_proj")
