"""One KV block."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Block:
    """Room for the K/V of ``block_size`` tokens in all layers.

    It is free (no key, no reference), cached (key, no reference) or used (references > 0).
    """

    block_id: int
    num_references: int = 0
    key: bytes | None = None
