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
KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint32)
NUM_ROUNDS = 10
WORDS_PER_COUNTER = 4
LARGEST_REST = 1 - 2**-24
"""The last float32 before 1, whose noise would be -inf instead of about -3."""


def add_gumbel_noise(scores: Tensor, seeds: UInt64Array, positions: Int32Array) -> None:
    """Add its noise to every finite score of (num_rows, vocab_size), in place.

    Rows of which few tokens are left draw noise for those alone.
    """
    is_kept = scores > -torch.inf
    is_sparse = is_kept.sum(dim=1).numpy() * WORDS_PER_COUNTER < scores.shape[1]
    for row in np.flatnonzero(~is_sparse):
        scores[row] += _draw_row(scores.shape[1], seeds[row : row + 1], positions[row : row + 1])
    sparse = np.flatnonzero(is_sparse)
    if len(sparse):
        which, ids = is_kept[torch.from_numpy(sparse)].nonzero(as_tuple=True)
        rows, token_ids = sparse[which.numpy()], ids.numpy()
        noise = _draw_tokens(token_ids, seeds[rows], positions[rows])
        scores[torch.from_numpy(rows), ids] += noise


def philox(
    counters: UInt32Array, positions: Int32Array, seeds: UInt64Array
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """Return the output words of the counters (c, position, 0, 0), each (n,).

    Arguments are (n,) or (1,).
    """
    c0, c1 = counters, positions.astype(np.uint32)
    c2 = c3 = np.zeros_like(counters)
    keys = seeds.view(np.uint32).reshape(-1, 2).T.copy()  # (2, n): low word, high word
    for _ in range(NUM_ROUNDS):
        low0, high0 = _multiply(c0, MULTIPLIERS[0])
        low1, high1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ (c1 ^ keys[0]), low1, high0 ^ (c3 ^ keys[1]), low0
        keys += KEY_STEPS
    return c0, c1, c2, c3


def _multiply(words: UInt32Array, factor: np.uint64) -> tuple[UInt32Array, UInt32Array]:
    """Return the low and the high half of 64-bit products (views; hosts are little-endian)."""
    halves = np.multiply(words, factor, dtype=np.uint64).view(np.uint32)
    return halves[0::2], halves[1::2]


def _draw_row(vocab_size: int, seed: UInt64Array, position: Int32Array) -> Tensor:
    counters = np.arange(-(-vocab_size // WORDS_PER_COUNTER), dtype=np.uint32)
    words = np.stack(philox(counters, position, seed), axis=-1)
    return _find_gumbel(words.reshape(-1)[:vocab_size])


def _draw_tokens(token_ids: NDArray[np.int64], seeds: UInt64Array, positions: Int32Array) -> Tensor:
    counters = (token_ids // WORDS_PER_COUNTER).astype(np.uint32)
    words = philox(counters, positions, seeds)
    return _find_gumbel(np.choose(token_ids % WORDS_PER_COUNTER, words))


def _find_gumbel(words: UInt32Array) -> Tensor:
    """Work with 1 - u: where the winners are, u near 1, float32 has only steps of 2**-24."""
    rest = torch.from_numpy((~words).astype(np.float32)).add_(0.5).mul_(2.0**-32)
    rest.clamp_(max=LARGEST_REST)
    return rest.neg_().log1p_().neg_().log_().neg_()
