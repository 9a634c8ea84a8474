"""Matrix products whose weight is split over the ranks, by output rows or by input columns."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from octavo.models.layers.matrix import Matrix
from octavo.models.layers.norm import RMSNorm
from octavo.models.layers.parallel import Shard, Span
from octavo.models.layers.weights import CheckpointTensor, empty_parameter
from octavo.models.ops.norm import Normed


class ColumnParallelLinear(nn.Module):
    """Product with one or several matrices of the same input, stacked into one.

    Each rank computes some outputs of every matrix, from a whole input, without communication.
    ``outputs`` says which rows, by the matrix's name in the checkpoint: q_proj, up_proj, ...
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, Span],
        *,
        bias: bool,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.outputs = dict(outputs)
        out_features = sum(rows.length for rows in outputs.values())
        self.matrix = Matrix(out_features, in_features, rounded_to=rounded_to)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor | Normed) -> Tensor:
        """Map (num_tokens, in_features) to this rank's outputs, in the order of the matrices."""
        y: Tensor = self.matrix(x, self.bias)
        return y

    def silu_mul(self, x: Tensor | Normed) -> Tensor:
        """Map (num_tokens, in_features) to silu(gate) * up of the two matrices, gate and up."""
        return self.matrix.silu_mul(x, self.bias)

    def checkpoint_tensors(self, parent: str) -> Iterator[CheckpointTensor]:
        """Name the matrices below ``parent`` and their place in the stack."""
        in_features, offset = self.matrix.weight.shape[1], 0
        for name, rows in self.outputs.items():
            place = slice(offset, offset + rows.length)
            offset += rows.length
            yield self.matrix.checkpoint_tensor(
                f"{parent}.{name}.weight",
                (rows.total, in_features),
                rows=place,
                start=rows.start,
            )
            if self.bias is not None:
                yield CheckpointTensor(
                    f"{parent}.{name}.bias", (rows.total,), self.bias[place], start=rows.start
                )


class RowParallelLinear(nn.Module):
    """Product whose ``inputs`` are split over the ranks; their partial outputs are summed."""

    def __init__(
        self,
        inputs: Span,
        out_features: int,
        *,
        bias: bool,
        shard: Shard,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.inputs = inputs
        self.matrix = Matrix(out_features, inputs.length, rounded_to=rounded_to)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's (num_tokens, inputs.length) to the whole output on every rank."""
        y = self.shard.collective.all_reduce(self.matrix(x))
        return y if self.bias is None else y + self.bias

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: RMSNorm
    ) -> tuple[Tensor | Normed, Tensor]:
        """Add the output to the residual stream; return the stream normalised, and itself.

        ``residual`` may be overwritten.
        """
        if self.shard.size == 1:
            folded = self.matrix.add_norm(x, self.bias, residual=residual, norm=norm.norm)
            if folded is not None:
                return folded
        normed: tuple[Tensor, Tensor] = norm(self(x), residual)
        return normed

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the matrix and this rank's columns of it."""
        out_features = len(self.matrix.weight)
        yield self.matrix.checkpoint_tensor(
            f"{name}.weight", (out_features, self.inputs.total), dim=1, start=self.inputs.start
        )
        if self.bias is not None:
            yield CheckpointTensor(f"{name}.bias", (out_features,), self.bias)
