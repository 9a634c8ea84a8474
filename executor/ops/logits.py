"""What the sampling kernels share: reading a row of logits, and keeping the best of it.

A row's logits are what the model computed, in its type, or, for a row with edits, a float32 copy
that ``edit_logits`` made. A kernel reads either through one masked pair of loads; the masked-off
one moves nothing.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_INT = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-2e38)  # below every logit that is not masked; finite in powers of two, too

# Each split of a row leaves one record. ``summarise`` writes the first two words as maximum and sum
# of exponentials, for ``bracket`` alone; ``scan`` then writes all of them, for ``choose``.
MAX_SPLITS = tl.constexpr(256)
PARTIAL_WORDS = tl.constexpr(5)
SCORE = tl.constexpr(0)
SCORE_ID = tl.constexpr(1)
ABOVE_LOW = tl.constexpr(2)  # how much lies above the bracket's ends: a count for top-k, else mass
ABOVE_HIGH = tl.constexpr(3)
LENGTH = tl.constexpr(4)


@triton.jit
def load_logits(logits_ptr, edited_ptr, is_edited, places, size):
    """Return float32 logits of a row, -inf from ``size`` on; ``edited_ptr`` may be None."""
    if edited_ptr is None:
        x = tl.load(logits_ptr + places, mask=places < size, other=-float("inf")).to(tl.float32)
    else:
        is_plain = places < tl.where(is_edited, 0, size)
        is_edited = places < tl.where(is_edited, size, 0)
        plain = tl.load(logits_ptr + places, mask=is_plain, other=-float("inf")).to(tl.float32)
        edited = tl.load(edited_ptr + places, mask=is_edited, other=-float("inf"))
        x = tl.where(is_edited, edited, plain)
    return x


@triton.jit
def take_best(values, ids, best, best_id):
    """Return the larger of ``best`` and the maximum of ``values``, and its id.

    Of equal values the lowest id wins, but never over ``best``. A NaN anywhere makes the best NaN,
    for good.
    """
    maximum = tl.max(values)
    first = tl.min(tl.where(values == maximum, ids, MAX_INT))
    is_better = maximum > best
    best_id = tl.where(is_better, first, best_id)
    best = tl.where(is_better, maximum, best)
    has_nan = tl.max((values != values).to(tl.int32)) > 0
    return tl.where(has_nan, float("nan"), best), best_id


@triton.jit
def sort_key(x):
    """Return int32 that orders as float32 does; -0.0 equals 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_sort_key(key):
    """Return the float whose ``sort_key`` is ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def find_lowest(marks):
    """Return the place of the lowest bit that is set in each of ``marks``, from 0 to 23."""
    lowest = (marks & -marks).to(tl.float32)
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127
