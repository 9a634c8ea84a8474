"""Gumbel noise that belongs to (seed, position, token id) and to nothing else.

Kernels reproduce it, up to the rounding of the logarithms. Philox-4x32-10 with key = (low, high
word of the seed) and counter = (token_id // 4, position, 0, 0) gives the words of four neighbouring
ids; word ``token_id % 4`` is this id's. Position is the index of the sampled token in its request.
With u = (word + 1/2) / 2**32 the noise is -log(-log(u)).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.step import Int32Array

UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]

MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
LOW_WORD, WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)
NUM_ROUNDS = 10
WORDS_PER_COUNTER = 4
MAX_WORDS = 2**16
"""Words that are made together, so that they stay in a core's cache."""
LARGEST_REST = 1 - 2**-24
"""The last float32 before 1, whose noise would be -inf instead of about -3."""


def add_gumbel_noise(scores: Tensor, seeds: UInt64Array, positions: Int32Array) -> None:
    """Add its noise to every finite score of (num_rows, vocab_size), in place.

    Rows of which few tokens are left draw noise for those alone.
    """
    vocab_size = scores.shape[1]
    is_kept = scores > -torch.inf
    is_sparse = is_kept.sum(dim=1).numpy() * WORDS_PER_COUNTER < vocab_size
    dense, sparse = np.flatnonzero(~is_sparse), np.flatnonzero(is_sparse)
    num_together = max(1, MAX_WORDS // vocab_size)
    for first in range(0, len(dense), num_together):
        rows = dense[first : first + num_together]
        scores[rows] += _draw_rows(vocab_size, seeds[rows], positions[rows])
    if len(sparse):
        which, ids = is_kept[sparse].nonzero(as_tuple=True)
        rows = sparse[which.numpy()]
        noise = _draw_tokens(ids.numpy(), seeds[rows], positions[rows])
        scores[torch.from_numpy(rows), ids] += noise


def philox(
    counters: UInt32Array, positions: Int32Array, seeds: UInt64Array
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """Return the output words of the counters (c, position, 0, 0); the arguments broadcast."""
    c0, c1 = counters, positions.astype(np.uint32)
    c2 = c3 = np.zeros_like(counters)
    key0, key1 = (seeds & LOW_WORD).astype(np.uint32), (seeds >> WORD_BITS).astype(np.uint32)
    for _ in range(NUM_ROUNDS):
        low0, high0 = _multiply(c0, MULTIPLIERS[0])
        low1, high1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ (c1 ^ key0), low1, high0 ^ (c3 ^ key1), low0
        key0, key1 = key0 + KEY_STEPS[0], key1 + KEY_STEPS[1]
    return c0, c1, c2, c3


def _multiply(words: UInt32Array, factor: np.uint64) -> tuple[UInt32Array, UInt32Array]:
    """Return the low and the high half of 64-bit products (views; hosts are little-endian)."""
    halves = np.multiply(words, factor, dtype=np.uint64).view(np.uint32)
    return halves[..., 0::2], halves[..., 1::2]


def _draw_rows(vocab_size: int, seeds: UInt64Array, positions: Int32Array) -> Tensor:
    """Return the noise of all tokens, (len(seeds), vocab_size)."""
    counters = np.arange(-(-vocab_size // WORDS_PER_COUNTER), dtype=np.uint32)
    words = np.stack(philox(counters, positions[:, None], seeds[:, None]), axis=-1)
    return _find_gumbel(words.reshape(len(seeds), -1)[:, :vocab_size])


def _draw_tokens(token_ids: NDArray[np.int64], seeds: UInt64Array, positions: Int32Array) -> Tensor:
    """Return the noise of one token each, (len(token_ids),)."""
    counters = (token_ids // WORDS_PER_COUNTER).astype(np.uint32)
    words = philox(counters, positions, seeds)
    return _find_gumbel(np.choose(token_ids % WORDS_PER_COUNTER, words))


def _find_gumbel(words: UInt32Array) -> Tensor:
    """Work with 1 - u: where the winners are, u near 1, float32 has only steps of 2**-24."""
    rest = torch.from_numpy((~words).astype(np.float32)).add_(0.5).mul_(2.0**-32)
    rest.clamp_(max=LARGEST_REST)
    return rest.neg_().log1p_().neg_().log_().neg_()
