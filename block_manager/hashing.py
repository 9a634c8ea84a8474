"""Block keys: names of K/V contents, equal in every process.

key(block) = SHA-256(parent key || token ids as little-endian int32 || extra keys), cut to 128 bits.
The parent of a first block is the root: a hash of the namespace, which names everything else that
K/V values depend on. A chain of keys is a path in a radix tree whose edges are one block long.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16
_EMPTY = hashlib.sha256()


def root_key(namespace: bytes, *, private: int | None = None) -> bytes:
    """Return the parent of first blocks; ``private`` separates requests that must not share with
    others.
    """
    parts = [b"namespace", namespace]
    if private is not None:
        parts += [b"private", struct.pack("<q", private)]
    return _digest(_encode(parts))


class KeyChain:
    """Keys of the full blocks of one request's known tokens. Append-only: tokens become known and
    never change.
    """

    __slots__ = ("_first_block_extra", "block_size", "keys")

    def __init__(self, root: bytes, block_size: int, *, cache_salt: str | None = None) -> None:
        self.keys: list[bytes] = [root]  # keys[i + 1] belongs to block i
        self.block_size = block_size
        self._first_block_extra = (
            b"" if cache_salt is None else _encode([b"cache_salt", cache_salt.encode()])
        )

    @property
    def num_blocks(self) -> int:
        """Full blocks that have a key."""
        return len(self.keys) - 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the keys of blocks that have become full; ``token_ids`` are all known tokens."""
        size = self.block_size
        start = self.num_blocks
        end = len(token_ids) // size
        if start == end:
            return
        data = _pack(token_ids[start * size : end * size])
        parent, num_bytes = self.keys[-1], 4 * size
        extra = self._first_block_extra if start == 0 else b""
        for place in range(0, len(data), num_bytes):  # once for each block of every prompt
            digest = _EMPTY.copy()  # in two thirds of the time of a new one
            digest.update(parent + data[place : place + num_bytes] + extra)
            parent = digest.digest()[:KEY_BYTES]
            self.keys.append(parent)
            extra = b""


class RecentChains:
    """The chains of the newest prompts: one that begins as another did copies its keys.

    A key costs a microsecond, and prompts with a common beginning come together.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._chains: dict[bytes, tuple[KeyChain, Sequence[int]]] = {}
        """By the key of the first block; with all tokens of the request."""

    def extend(self, chain: KeyChain, token_ids: Sequence[int]) -> None:
        """Do as ``chain.extend`` does for a chain without keys."""
        chain.extend(token_ids[: chain.block_size])
        if chain.num_blocks == 0:
            return
        first = chain.keys[1]
        if (found := self._chains.pop(first, None)) is not None:
            other, other_ids = found
            num_blocks = count_equal(token_ids, other_ids) // chain.block_size
            chain.keys += other.keys[2 : num_blocks + 1]
        chain.extend(token_ids)
        self._chains[first] = chain, token_ids
        if len(self._chains) > self._capacity:
            del self._chains[next(iter(self._chains))]


def count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two lists begin with in common."""
    length = min(len(first), len(second))
    different = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(different.argmax()) if different.any() else length


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:KEY_BYTES]


def _pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids as little-endian int32."""
    words = array("i", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _encode(parts: list[bytes]) -> bytes:
    """Join byte strings unambiguously: each one behind its length."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)
