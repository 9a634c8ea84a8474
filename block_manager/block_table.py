"""The blocks of one running request, and the one formula for how many it takes."""

from dataclasses import dataclass, field

from octavo.block_manager.block import Block


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """How K/V is cut into blocks."""

    block_size: int


def blocks_needed(spec: BlockSpec, num_tokens: int) -> int:
    """Return how many blocks the K/V of a request with ``num_tokens`` tokens takes."""
    return -(-num_tokens // spec.block_size)


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks in token order. The first ``num_sealed`` had their turn to be keyed; the rest has no
    key.
    """

    blocks: list[Block] = field(default_factory=list)
    num_sealed: int = 0
    num_announced: int = 0
    """Keys of the blocks ``num_sealed : num_announced`` are announced as coming (see deferral)."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Ids in token order."""
        return tuple(block.block_id for block in self.blocks)
