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
class Shard:
    """This rank's place among the ``size`` ranks that share a network."""

    rank: int = 0
    size: int = 1
    collective: Collective = field(default_factory=SingleRank)

    def split(self, count: int, *, what: str) -> int:
        """Return one rank's share of ``count``.

        Raises:
            ConfigError: the ranks do not divide it.
        """
        if count % self.size:
            raise ConfigError(
                f"the model's {count} {what} cannot be split over tensor_parallel_size"
                f" {self.size}; choose a size that divides {count}"
            )
        return count // self.size


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The query heads of one rank and the KV heads that they read."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


def split_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> HeadSplit:
    """Give each rank equally many query heads; KV heads are copied where ranks outnumber them.

    Raises:
        ConfigError: the heads cannot be dealt out evenly.
    """
    num_mine = shard.split(num_heads, what="attention heads")
    copies = max(1, shard.size // num_kv_heads)  # ranks that hold the same KV head
    if num_kv_heads * copies % shard.size:
        raise ConfigError(
            f"the model's {num_kv_heads} KV heads cannot be split over tensor_parallel_size"
            f" {shard.size}; choose a divisor or a multiple of {num_kv_heads}"
        )
    num_kv_mine = num_kv_heads * copies // shard.size
    return HeadSplit(
        num_heads=num_mine,
        num_kv_heads=num_kv_mine,
        first_head=shard.rank * num_mine,
        first_kv_head=shard.rank // copies * num_kv_mine,
    )
