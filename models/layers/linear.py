"""Matrix products whose weight is split over the ranks, by output rows or by input columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from octavo.models.layers.parallel import Shard
from octavo.models.layers.weights import CheckpointTensor, empty_parameter


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of one checkpoint matrix that this rank computes."""

    name: str
    """Name of the matrix beside its siblings: q_proj, up_proj, ..."""
    total: int
    start: int
    length: int

    @classmethod
    def even(cls, name: str, total: int, shard: Shard) -> "OutputRows":
        """Give every rank the same number of rows."""
        length = shard.split(total, what=f"rows of {name}")
        return cls(name, total, start=shard.rank * length, length=length)


class ColumnParallelLinear(nn.Module):
    """Product with one or several matrices of the same input, stacked into one.

    Each rank computes some outputs of every matrix, from a whole input, without communication.
    """

    def __init__(self, in_features: int, outputs: Sequence[OutputRows], *, bias: bool) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        out_features = sum(rows.length for rows in outputs)
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (num_tokens, in_features) to this rank's outputs, in the order of the matrices."""
        return functional.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, parent: str) -> Iterator[CheckpointTensor]:
        """Name the matrices below ``parent`` and their place in the stack."""
        offset = 0
        for rows in self.outputs:
            place = slice(offset, offset + rows.length)
            offset += rows.length
            yield CheckpointTensor(
                f"{parent}.{rows.name}.weight",
                (rows.total, self.weight.shape[1]),
                self.weight[place],
                start=rows.start,
            )
            if self.bias is not None:
                yield CheckpointTensor(
                    f"{parent}.{rows.name}.bias", (rows.total,), self.bias[place], start=rows.start
                )


class RowParallelLinear(nn.Module):
    """Product whose input is split over the ranks; their partial outputs are summed."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.in_features = in_features
        num_columns = shard.split(in_features, what="inputs of a row-parallel layer")
        self.weight = empty_parameter(out_features, num_columns)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's (num_tokens, in_features / size) to the whole output on every rank."""
        y = self.shard.collective.all_reduce(functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def checkpoint_tensors(self, name: str) -> Iterator[CheckpointTensor]:
        """Name the matrix and this rank's columns of it."""
        out_features, num_columns = self.weight.shape
        yield CheckpointTensor(
            f"{name}.weight",
            (out_features, self.in_features),
            self.weight,
            dim=1,
            start=self.shard.rank * num_columns,
        )
        if self.bias is not None:
            yield CheckpointTensor(f"{name}.bias", (out_features,), self.bias)
