"""Sampling noise: a pure function of a request's seed, a position and a token id.

Philox-4x32-10 (Salmon et al., SC 2011) with key = seed as two words and counter = (id // 4,
position, 0, 0) gives the words of four neighbouring ids; word id % 4 is this id's. The Gumbel
noise is -log(-log(u)) with u = (word + 1/2) / 2**32. The argmax of logits / temperature + noise is
a sample of their softmax, whatever else is in the batch and however the vocabulary is cut into
programs.
"""

import triton
import triton.language as tl

from octavo.executor.ops.row_parameters import NUM_WORDS, SEED

REACH = tl.constexpr(0x3FFFFFFE)  # the bits of 2 - 2**-22
LIFT_MARGIN = tl.constexpr(0.0144)  # 1 %
LOWEST_NOISE = tl.constexpr(-3.2)  # -log(-log(2**-33)) is -3.13


@triton.jit
def load_seed(parameters_ptr, row):
    """Return the two words of a row's seed, the low one first."""
    seed_ptr = parameters_ptr + row * NUM_WORDS + SEED
    low = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    high = tl.load(seed_ptr + 1).to(tl.uint32, bitcast=True)
    return low, high


@triton.jit
def draw_words(seed, position, groups):
    """Return four uint32 blocks: word j of groups[i] belongs to token id 4 * groups[i] + j."""
    key0, key1 = seed
    c0 = groups.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = c2
    for _ in tl.static_range(10):
        # One wide product gives both halves: one instruction where umulhi and a product take two.
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def interleave(w0, w1, w2, w3):
    """Return (num_groups, 4) of four blocks (num_groups,): the words in the order of the ids."""
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (w0.shape[0], 4))


@triton.jit
def gumbel(words):
    """Return the Gumbel noise of uint32 words, right to float32 rounding at both ends of u.

    With u <= 1/2 kept as u and u > 1/2 as 1 - u nothing is lost to rounding; close to u = 1, where
    the winners are, -log(u) is the series of -log(1 - near).
    """
    is_upper = words >= 0x80000000
    mirrored = words ^ 0xFFFFFFFF  # not ~: that of a uint32 fails in the interpreter of Triton 3.7
    near = tl.where(is_upper, mirrored, words).to(tl.int32, bitcast=True).to(tl.float32)
    near = near * 2.0**-32 + 2.0**-33  # u or 1 - u, in (0, 1/2]
    series = near * (1.0 + near * (0.5 + near * (0.33333334 + near * 0.25)))
    exact = -tl.log(tl.where(is_upper, 1.0 - near, near))
    return -tl.log(tl.where(is_upper & (near < 1.0 / 64), series, exact))


@triton.jit
def lift(words, weights):
    """Return int32 of at least REACH wherever noise may be above -log(``weights``) or that is NaN.

    noise > -d needs u + exp(d) > 1: no logarithm. The upper 23 bits of a word are the mantissa of
    1 + u, rounded down by less than 2**-23, and REACH is a little below 2. Whoever computes weights
    adds LIFT_MARGIN to their power of two, so that its rounding too errs on the side of "may be".
    Bits of positive floats have their order, and an integer's maximum takes a warp one instruction.
    """
    rounded = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return (rounded + weights).to(tl.int32, bitcast=True)


@triton.jit
def select_word(w0, w1, w2, w3, place):
    """Return block ``place`` of four, element by element."""
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))
