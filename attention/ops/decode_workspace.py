"""What the programs of a decode launch share, allocated once for the steps of one stream."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.ops.sizes import next_power_of_2

MAX_GROUP = 16
"""Query heads of one KV head are padded to the least number of rows that tl.dot takes."""
PREFIX_QUERY_ELEMENTS = 4096
"""Of the queries that read a prefix together: 64 registers a thread for their outputs."""
DECODE_TILE_BYTES = 8192
"""Bytes of K in a tile: 32 tokens x 128 elements of 16 bit."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What the programs of one decode launch share.

    Allocated once, used by all layers and steps of one stream. ``arrivals`` is zero between
    launches: whoever merges a segment resets its counter.
    """

    tile_tokens: int
    rows: "Pieces"
    prefixes: "Pieces"

    @classmethod
    def create(
        cls, head_dim: int, dtype: torch.dtype, *, num_programs: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """Allocate for heads of ``head_dim`` elements in the pool's ``dtype`` and a fixed grid."""
        head_pad = next_power_of_2(head_dim)
        return cls(
            max(DECODE_TILE_BYTES // (head_pad * dtype.itemsize), 16),
            Pieces.create((num_programs, MAX_GROUP, head_dim), device),
            Pieces.create(
                (num_programs, max(PREFIX_QUERY_ELEMENTS // head_pad, MAX_GROUP), head_dim), device
            ),
        )

    @property
    def num_programs(self) -> int:
        """Size of the grid."""
        return self.rows.arrivals.shape[0]

    @property
    def prefix_queries(self) -> int:
        """Queries that read a prefix together."""
        return self.prefixes.lse.shape[2]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Results of the first and last piece of each program, until their segments are merged."""

    out: Tensor  # (num_programs, 2, num_queries, head_dim) float32
    lse: Tensor  # (num_programs, 2, num_queries) float32, base 2
    arrivals: Tensor  # (num_programs,) int32; counts at the program in which the segment begins

    @classmethod
    def create(cls, shape: tuple[int, int, int], device: torch.device | str) -> "Pieces":
        """Allocate for (num_programs, num_queries, head_dim)."""
        num_programs, num_queries, head_dim = shape
        return cls(
            torch.empty((num_programs, 2, num_queries, head_dim), device=device),
            torch.empty((num_programs, 2, num_queries), device=device),
            torch.zeros(num_programs, dtype=torch.int32, device=device),
        )
