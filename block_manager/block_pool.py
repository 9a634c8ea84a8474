"""All KV blocks of a device: which are free, cached or used, and which key each holds."""

from collections import OrderedDict, deque

from octavo.block_manager.block import Block


class KeyWatch:
    """Tells whether one of the keys that somebody watches has appeared in the pool or vanished."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.has_changed = False

    def note(self, key: bytes) -> None:
        """Remember that a key has appeared or vanished."""
        if key in self.keys:
            self.has_changed = True

    def reset(self) -> None:
        """Watch nothing, as if nothing had changed."""
        self.keys.clear()
        self.has_changed = False


class BlockPool:
    """Owns references and keys of every block.

    Invariants: each block is in exactly one of free, cached and used, and the three add up to the
    pool; a key belongs to at most one block. New blocks come from the free ones, then from the
    cached block released longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.watch = KeyWatch()
        self._free = deque(self.blocks)
        self._cached: OrderedDict[int, Block] = OrderedDict()  # least recently released first
        self._block_of_key: dict[bytes, Block] = {}
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # ghost list: keys, oldest first

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.blocks)

    @property
    def num_cached(self) -> int:
        """Blocks that hold a key and that nobody uses."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``take`` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return len(self.blocks) - self.num_available

    def find(self, key: bytes) -> Block | None:
        """Return the block that holds this key."""
        return self._block_of_key.get(key)

    def has_key(self, key: bytes) -> bool:
        """True when a block holds this key."""
        return key in self._block_of_key

    def was_evicted(self, key: bytes) -> bool:
        """True when the key was evicted not long ago (as many keys are remembered as there are
        blocks).
        """
        return key in self._evicted

    def take(self) -> Block:
        """Hand out a block without a key and with one reference; evicts if nothing is free."""
        block = self._free.popleft() if self._free else self._evict()
        block.num_references = 1
        return block

    def share(self, block: Block) -> None:
        """Add a reference to a block that has a key."""
        if block.num_references == 0:
            del self._cached[block.block_id]
        block.num_references += 1

    def release(self, block: Block) -> None:
        """Give back one reference; after the last one the block is cached if keyed, else free."""
        assert block.num_references > 0, f"block {block.block_id} released without a reference"
        block.num_references -= 1
        if block.num_references > 0:
            return
        if block.key is None:
            self._free.appendleft(block)
        else:
            self._cached[block.block_id] = block

    def assign_key(self, block: Block, key: bytes) -> bool:
        """Give a used block its key; False, and no key, when another block already holds it."""
        assert block.num_references > 0, f"block {block.block_id} keyed without a reference"
        assert block.key is None, f"block {block.block_id} already has a key"
        if key in self._block_of_key:
            return False
        block.key = key
        self._block_of_key[key] = block
        self._evicted.pop(key, None)
        self.watch.note(key)
        return True

    def withdraw_key(self, block: Block) -> None:
        """Take the key of a used block away: its contents were never written."""
        assert block.num_references > 0, f"key of unused block {block.block_id} withdrawn"
        if block.key is not None:
            del self._block_of_key[block.key]
            self.watch.note(block.key)
            block.key = None

    def drop_cached(self) -> int:
        """Forget every key that no request uses; returns how many."""
        num_dropped = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        self._evicted.clear()
        return num_dropped

    def check_invariants(self) -> None:
        """Assert that every block is in exactly one state and that keys and blocks agree."""
        free = {block.block_id for block in self._free}
        cached = set(self._cached)
        used = {block.block_id for block in self.blocks if block.num_references > 0}
        total = len(self._free) + len(cached) + len(used)
        assert total == len(self.blocks) == len(free | cached | used), (
            f"{len(self._free)} free + {len(cached)} cached + {len(used)} used "
            f"are not {len(self.blocks)} blocks"
        )
        for block_id in free:
            assert self.blocks[block_id].key is None, f"free block {block_id} has a key"
        keyed = {block.key: block for block in self.blocks if block.key is not None}
        assert keyed == self._block_of_key, "keys and blocks disagree"
        for block_id in cached:
            assert self.blocks[block_id].key is not None, f"cached block {block_id} has no key"

    def _evict(self) -> Block:
        assert self._cached, f"none of {self.num_blocks} blocks is free or cached"
        _, block = self._cached.popitem(last=False)
        assert block.key is not None
        del self._block_of_key[block.key]
        self.watch.note(block.key)
        self._evicted[block.key] = None
        if len(self._evicted) > len(self.blocks):
            self._evicted.popitem(last=False)
        block.key = None
        return block
