"""How one network is split over devices: every layer is told its shard when it is built."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from octavo.errors import ConfigError


class Collective(Protocol):
    """Communication between the ranks that share a network. All ranks make the same calls."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; may overwrite ``tensor``."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors joined along the last dimension, in rank order."""


class SingleRank:
    """The collective of a network that is not split."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One rank's contiguous part of ``total`` equal things: heads, rows, columns."""

    start: int
    length: int
    total: int

    def scaled(self, factor: int) -> "Span":
        """Return the span in parts of which ``factor`` make one thing."""
        return Span(self.start * factor, self.length * factor, self.total * factor)


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's place among the ``size`` ranks that share a network."""

    rank: int = 0
    size: int = 1
    collective: Collective = field(default_factory=SingleRank)

    def span(self, total: int) -> Span:
        """Return this rank's part; parts differ by at most one where ranks do not divide."""
        start, end = (total * rank // self.size for rank in (self.rank, self.rank + 1))
        return Span(start, end - start, total)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The query heads of one rank and the KV heads that they read."""

    heads: Span
    kv_heads: Span


def split_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> HeadSplit:
    """Give each rank equally many query heads; KV heads are copied where ranks outnumber them.

    Raises:
        ConfigError: the heads cannot be dealt out evenly.
    """
    if num_heads % shard.size:
        raise ConfigError(
            f"the model's {num_heads} attention heads cannot be split over tensor_parallel_size"
            f" {shard.size}; choose a size that divides {num_heads}"
        )
    copies = max(1, shard.size // num_kv_heads)  # ranks that hold the same KV head
    if num_kv_heads * copies % shard.size:
        raise ConfigError(
            f"the model's {num_kv_heads} KV heads cannot be split over tensor_parallel_size"
            f" {shard.size}; choose a divisor or a multiple of {num_kv_heads}"
        )
    kv_owner = Shard(shard.rank // copies, shard.size // copies)
    return HeadSplit(heads=shard.span(num_heads), kv_heads=kv_owner.span(num_kv_heads))
