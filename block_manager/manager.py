"""Who may use which KV block: prefix matching, allocation, growth, sealing and release.

The block manager reads key chains and writes block tables; it never sees a request, tokens or text.
See docs/block_manager.md for a worked example with block ids.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.block_manager.block import Block
from octavo.block_manager.block_pool import BlockPool
from octavo.block_manager.block_table import BlockSpec, BlockTable, blocks_needed
from octavo.block_manager.hashing import KeyChain


class MissReason(StrEnum):
    """Why a prompt token was computed and not read from the cache."""

    COLD = "cold"
    """Never seen under this salt and adapter, or forgotten long ago."""
    EVICTED = "evicted"
    """Its block was evicted not long ago."""
    TAIL = "tail"
    """It lies in the last, partly filled block, or is the last token, which is always computed."""
    RECOMPUTE = "recompute"
    """The request asked not to read the cache (prompt_logprobs)."""
    DISABLED = "disabled"
    """Prefix caching is off."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens since start, counted once per request at its first admission."""

    num_queries: int = 0
    num_hits: int = 0
    num_misses: Counter[MissReason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a request whose K/V exists; valid until the next change of the pool."""

    blocks: tuple[Block, ...]
    num_tokens: int

    @property
    def num_cached_blocks(self) -> int:
        """Matched blocks that nobody uses: they can no longer be evicted once they are taken."""
        return sum(block.num_references == 0 for block in self.blocks)


NO_MATCH = Match((), 0)


@dataclass(frozen=True, slots=True)
class Coming:
    """A running request will compute blocks that another one could share."""

    number: int
    num_tokens: int


class BlockManager:
    """Owns the pool, the block tables of running requests and the key chains of all requests.

    Every allocation is a transaction: it is done whole, statistics included, or nothing changes.
    Invariants: a block's references equal the number of tables that hold it; a sealed block of a
    table is keyed unless its key belonged to another block.
    """

    def __init__(self, num_blocks: int, spec: BlockSpec) -> None:
        self.spec = spec
        self.pool = BlockPool(num_blocks)
        self.stats = PrefixCacheStats()
        self._chains: dict[int, KeyChain] = {}
        self._tables: dict[int, BlockTable] = {}
        self._coming: dict[
            bytes, int
        ] = {}  # key -> number of the running request that will compute it
        self._born: list[Block] = []  # keyed since begin_plan

    def register(self, number: int, chain: KeyChain) -> None:
        """Get to know a request; it holds no blocks yet."""
        assert number not in self._chains, f"request {number} registered twice"
        self._chains[number] = chain

    def forget(self, number: int) -> None:
        """Drop what is known of a request that holds no blocks."""
        assert number not in self._tables, f"request {number} forgotten with its blocks"
        del self._chains[number]

    def chain(self, number: int) -> KeyChain:
        """Return the keys of a request's known tokens."""
        return self._chains[number]

    def block_ids(self, number: int) -> tuple[int, ...]:
        """Return a running request's block ids in token order."""
        return self._tables[number].block_ids

    def match(self, number: int, num_tokens: int) -> Match:
        """Find the longest cached prefix of a request of ``num_tokens`` tokens; changes nothing.

        The last token is never matched: its logits must be computed.
        """
        size = self.spec.block_size
        blocks: list[Block] = []
        for key in self._chains[number].keys[1 : (num_tokens - 1) // size + 1]:
            block = self.pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return Match(tuple(blocks), len(blocks) * size)

    def coming(self, number: int, num_tokens: int) -> Coming | None:
        """Say which running request will compute the first blocks of a request that the cache
        lacks, and how many tokens of them it will compute.
        """
        size = self.spec.block_size
        keys = self._chains[number].keys
        end = (num_tokens - 1) // size + 1
        start = 1
        while start < end and self.pool.find(keys[start]) is not None:
            start += 1
        owner = self._coming.get(keys[start]) if start < end else None
        if owner is None or owner == number:
            return None
        stop = start
        while stop < end and self._coming.get(keys[stop]) == owner:
            stop += 1
        return Coming(owner, (stop - start) * size)

    def num_blocks_taken(self, match: Match, num_tokens: int) -> int:
        """Return how many available blocks ``allocate`` would use up."""
        num_new = blocks_needed(self.spec, num_tokens) - len(match.blocks)
        return num_new + match.num_cached_blocks

    def allocate(self, number: int, match: Match, num_tokens: int) -> None:
        """Give a request the matched blocks and new ones for the rest of its tokens; they must be
        available.
        """
        assert number not in self._tables, f"request {number} allocated twice"
        assert self.num_blocks_taken(match, num_tokens) <= self.pool.num_available
        table = BlockTable(num_sealed=len(match.blocks))
        self._tables[number] = table
        for block in match.blocks:
            self.pool.share(block)
        table.blocks.extend(match.blocks)
        self._append(table, blocks_needed(self.spec, num_tokens) - len(match.blocks))
        self._announce(number, table)

    def grow(self, number: int, num_tokens: int) -> tuple[int, ...] | None:
        """Extend a table to ``num_tokens`` tokens; returns the new ids, or None (nothing changed)
        if too few blocks are available.
        """
        table = self._tables[number]
        num_new = blocks_needed(self.spec, num_tokens) - len(table.blocks)
        if num_new <= 0:
            return ()
        if num_new > self.pool.num_available:
            return None
        return self._append(table, num_new)

    def seal(self, number: int, num_tokens: int) -> None:
        """Key every full block of the first ``num_tokens`` tokens, whose ids are known and whose
        K/V a launched step stores. A block whose key exists elsewhere keeps none.
        """
        table = self._tables[number]
        end = num_tokens // self.spec.block_size
        if end <= table.num_sealed:
            return
        keys = self._chains[number].keys
        for index in range(table.num_sealed, end):
            key = keys[index + 1]
            if self.pool.assign_key(table.blocks[index], key):
                self._born.append(table.blocks[index])
            if self._coming.get(key) == number:
                del self._coming[key]
        table.num_sealed = end

    def release(self, number: int) -> None:
        """Give back all blocks of a request, tail first, so that a prefix outlives what builds on
        it.
        """
        table = self._tables.pop(number)
        keys = self._chains[number].keys
        for index in range(table.num_sealed, table.num_announced):
            if self._coming.get(keys[index + 1]) == number:
                del self._coming[keys[index + 1]]
        for block in reversed(table.blocks):
            self.pool.release(block)

    def distrust(self, number: int) -> None:
        """Take the keys of a request's blocks away: their K/V may be what made it fail."""
        for block in self._tables[number].blocks:
            self.pool.withdraw_key(block)

    def begin_plan(self) -> None:
        """Start to remember which keys are born."""
        self._born.clear()

    def withdraw_born(self) -> None:
        """Take back the keys born since ``begin_plan``: the step that stores their K/V was not
        launched.
        """
        for block in self._born:
            self.pool.withdraw_key(block)
        self._born.clear()

    def count_lookup(
        self, number: int, match: Match, *, num_tokens: int, not_read: MissReason | None
    ) -> None:
        """Count a prompt's hits and misses; ``not_read`` is the reason if the cache was not to be
        read.
        """
        self.stats.num_queries += num_tokens
        self.stats.num_hits += match.num_tokens
        if not_read is not None:
            self.stats.num_misses[not_read] += num_tokens - match.num_tokens
            return
        size = self.spec.block_size
        num_matchable = (num_tokens - 1) // size
        self.stats.num_misses[MissReason.TAIL] += num_tokens - num_matchable * size
        for key in self._chains[number].keys[len(match.blocks) + 1 : num_matchable + 1]:
            evicted = self.pool.was_evicted(key)
            self.stats.num_misses[MissReason.EVICTED if evicted else MissReason.COLD] += size

    def check_invariants(self) -> None:
        """Assert that references, tables and announcements agree."""
        self.pool.check_invariants()
        references = Counter(
            block.block_id for table in self._tables.values() for block in table.blocks
        )
        for block in self.pool.blocks:
            assert block.num_references == references[block.block_id], (
                f"block {block.block_id} counts {block.num_references} references, "
                f"{references[block.block_id]} tables hold it"
            )
        for number, table in self._tables.items():
            assert len(set(table.block_ids)) == len(table.blocks), f"request {number}: block twice"
            assert all(block.key is None for block in table.blocks[table.num_sealed :])
        for key, number in self._coming.items():
            assert number in self._tables, (
                f"request {number} announces {key.hex()} and holds nothing"
            )

    def _append(self, table: BlockTable, num_new: int) -> tuple[int, ...]:
        blocks = [self.pool.take() for _ in range(num_new)]
        table.blocks.extend(blocks)
        return tuple([block.block_id for block in blocks])

    def _announce(self, number: int, table: BlockTable) -> None:
        keys = self._chains[number].keys
        table.num_announced = len(keys) - 1
        for key in keys[table.num_sealed + 1 :]:
            if self.pool.find(key) is None:
                self._coming.setdefault(key, number)
