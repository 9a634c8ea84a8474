"""Where the threshold of a row's filter may lie: two logits around it, from a sample of the row.

How many logits lie above a value is guessed from the sample (top-k), and how much mass below it
(top-p). Mass is counted from below because there no single logit weighs much; above, one token that
the sample missed may hold it all. So top-p needs the exact maximum m and the sum Z of
exp((x - m) / T), one pass over the row; top-k needs neither.

    count(x >= v)          ~ count in sample / fraction       top-k wants k
    sum of exp below v     ~ sum in sample / fraction         top-p wants at most (1 - p) Z

The values taken are MARGIN standard deviations and GUARD logits off on either side, so that a guess
fails about once in 10^5 rows; ``choose`` finds out and works without.
"""

import triton
import triton.language as tl

from octavo.executor.ops.logits import (
    LOG2_E,
    LOWEST,
    MAX_SPLITS,
    PARTIAL_WORDS,
    load_logits,
)
from octavo.executor.ops.noise import LOWEST_NOISE
from octavo.executor.ops.row_parameters import load_filter

# A bracket's record.
BRACKET_WORDS = tl.constexpr(7)
LOW = tl.constexpr(0)
HIGH = tl.constexpr(1)  # inf where few logits are above LOW
KEEP_FROM = tl.constexpr(2)  # the lowest logit that min-p keeps
TOTAL = tl.constexpr(3)  # Z
MAXIMUM = tl.constexpr(4)  # m; the sample's in rows that need no Z
IS_FLOOR = tl.constexpr(5)  # nothing below ``low`` can be sampled, whatever the filter
START = tl.constexpr(6)  # the best score of what is kept is above, except in one row of 10**10

SAMPLE_CHUNK = tl.constexpr(32)  # neighbours read together: a sector or two of memory
LOW_BISECTIONS = tl.constexpr(10)
HIGH_BISECTIONS = tl.constexpr(8)
MARGIN = tl.constexpr(4.0)
GUARD = tl.constexpr(4.0)
ROUNDING = tl.constexpr(2.0**-20)
# In powers of two below the maximum. Noise spans less than 26 nats, 37.6 powers of two, over all
# words, so a logit below the floor is never sampled and weighs less than 2**-46 of the maximum.
FLOOR = tl.constexpr(-46.0)


@triton.jit
def summarise_kernel(
    logits_ptr,  # (batch, vocab_size)
    edited_ptr,  # like logits, float32, or None
    rows_ptr,
    parameters_ptr,
    partials_ptr,
    vocab_size,
    stride_logits,
    stride_edited,
    TILE: tl.constexpr,
):
    """Write maximum and sum of exponentials of each split of the rows that need Z or m."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature, top_k, _, min_p, is_filtered, is_edited = load_filter(
        parameters_ptr, row, vocab_size
    )
    if not (is_filtered & _needs_total(top_k, min_p)):
        return
    scale = LOG2_E / temperature
    logits_ptr += index * stride_logits
    if edited_ptr is not None:
        edited_ptr += index * stride_edited
    WIDTH: tl.constexpr = TILE // 8
    maxima = tl.full([WIDTH], -float("inf"), tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)  # each in units of its lane's maximum
    for tile in range(split, tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        first_ids = (tile * WIDTH + tl.arange(0, WIDTH)) * 8
        ids = first_ids[:, None] + tl.arange(0, 8)[None, :]
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        larger = tl.maximum(maxima, tl.max(x, axis=1))
        origins = _replace_masked(larger)
        weights = tl.exp2((x - origins[:, None]) * scale)
        sums = sums * tl.exp2((maxima - origins) * scale) + tl.sum(weights, axis=1)
        maxima = larger
    maximum = tl.max(maxima)
    sums *= tl.exp2((maxima - _replace_masked(maximum)) * scale)
    partial_ptr = partials_ptr + (index * MAX_SPLITS + split) * PARTIAL_WORDS
    tl.store(partial_ptr, maximum)
    tl.store(partial_ptr + 1, tl.sum(sums))


@triton.jit
def _replace_masked(maxima):
    """Return an origin for differences: where all logits were masked, -inf, the sum shall be 0."""
    return tl.where(maxima == -float("inf"), 0.0, maxima)


@triton.jit
def _needs_total(top_k, min_p):
    return (top_k == 0) | (min_p > 0.0)


@triton.jit(do_not_specialize=["num_summaries"])
def bracket_kernel(
    logits_ptr,
    edited_ptr,
    rows_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,  # (batch, BRACKET_WORDS)
    vocab_size,
    stride_logits,
    stride_edited,
    num_summaries,
    SAMPLE: tl.constexpr,
    MAX_LISTED: tl.constexpr,
):
    """Write the bracket of each row with a filter; aim at less than MAX_LISTED logits in it."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature, top_k, top_p, min_p, is_filtered, is_edited = load_filter(
        parameters_ptr, row, vocab_size
    )
    if not is_filtered:
        return
    scale = LOG2_E / temperature
    logits_ptr += index * stride_logits
    if edited_ptr is not None:
        edited_ptr += index * stride_edited
    ids = _spread_sample(vocab_size, SAMPLE)
    x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
    maximum, total = tl.max(x), 0.0  # without Z any origin near the maximum will do
    is_blind = maximum == -float("inf")  # all of the sample is masked, so any logit may be kept
    maximum = tl.where(is_blind, 0.0, maximum)
    keep_from = -float("inf")
    if _needs_total(top_k, min_p):
        maximum, total = _merge_summaries(partials_ptr, index, num_summaries, scale)
        keep_from = maximum + temperature * tl.log(min_p)
    by_rank = top_k > 0
    powers = (x - maximum) * scale
    sample = (powers, tl.where(by_rank, 1.0, tl.exp2(powers)))
    fraction = tl.minimum(vocab_size, SAMPLE).to(tl.float32) / vocab_size
    rank = top_k * fraction
    tail = (1.0 - top_p) * total * fraction
    has_threshold = by_rank | (top_p < 1.0)
    low_power = (keep_from - maximum) * scale
    if has_threshold:
        low_power = _find_low(sample, rank, tail, by_rank)
    high_power = float("inf")
    num_listed = SAMPLE - tl.sum((powers < low_power).to(tl.float32))
    if num_listed > MAX_LISTED * fraction:
        if not has_threshold:
            high_power = low_power  # all that min-p keeps is above
        elif by_rank != (top_p < 1.0):
            # With both, the mass that top-p divides is known only once top-k's threshold is.
            high_power = _find_high(sample, rank, tail, by_rank, low_power)
    low = tl.where(is_blind, LOWEST, tl.maximum(maximum + low_power / scale, LOWEST))
    high = maximum + high_power / scale
    is_floor = (low_power == FLOOR) | ~has_threshold
    if high < float("inf"):
        is_floor = is_floor | (low <= keep_from)
        low, high = tl.maximum(low, keep_from), tl.maximum(high, keep_from)
    # The likeliest token alone weighs 1. The best of a mass of 1 is Gumbel-distributed: below
    # LOWEST_NOISE once in 10**10.
    kept = tl.where(by_rank | (min_p > 0.0), 1.0, tl.maximum(top_p * total, 1.0))
    likeliest = maximum / temperature
    start = likeliest - tl.abs(likeliest) * ROUNDING + tl.log(kept) + LOWEST_NOISE
    bracket_ptr = brackets_ptr + index * BRACKET_WORDS
    tl.store(bracket_ptr + LOW, low)
    tl.store(bracket_ptr + HIGH, high)
    tl.store(bracket_ptr + KEEP_FROM, keep_from)
    tl.store(bracket_ptr + TOTAL, total)
    tl.store(bracket_ptr + MAXIMUM, maximum)
    tl.store(bracket_ptr + IS_FLOOR, is_floor.to(tl.float32))
    tl.store(bracket_ptr + START, start)


@triton.jit
def _merge_summaries(partials_ptr, index, num_summaries, scale):
    split = tl.arange(0, MAX_SPLITS)
    partial_ptr = partials_ptr + (index * MAX_SPLITS + split) * PARTIAL_WORDS
    is_split = split < num_summaries
    maxima = tl.load(partial_ptr, mask=is_split, other=-float("inf"))
    sums = tl.load(partial_ptr + 1, mask=is_split, other=0.0)
    maximum = tl.max(maxima)
    return maximum, tl.sum(sums * tl.exp2((maxima - maximum) * scale))


@triton.jit
def _spread_sample(vocab_size, SAMPLE: tl.constexpr):
    """Return ids of chunks spread evenly over the vocabulary, the whole of it if it is small."""
    lane = tl.arange(0, SAMPLE)
    spacing = tl.maximum(vocab_size // (SAMPLE // SAMPLE_CHUNK), SAMPLE_CHUNK)
    return lane // SAMPLE_CHUNK * spacing + lane % SAMPLE_CHUNK


@triton.jit
def _find_low(sample, rank, tail, by_rank):
    """Return the highest tried power that keeps more than enough; FLOOR is always allowed."""
    enough = rank + MARGIN * tl.sqrt(rank) + GUARD
    low, high = FLOOR, 0.0
    for _ in range(LOW_BISECTIONS):
        middle = 0.5 * (low + high)
        amount = _measure_sample(sample, middle, by_rank)
        weight = tl.exp2(middle)
        most = amount + MARGIN * tl.sqrt(amount * weight) + GUARD * weight
        fits = tl.where(by_rank, amount >= enough, most <= tail)
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def _find_high(sample, rank, tail, by_rank, low):
    """Return the lowest tried power above which surely everything is kept, inf if there is none."""
    few = rank - MARGIN * tl.sqrt(rank) - GUARD
    high, found = 0.0, float("inf")
    for _ in range(HIGH_BISECTIONS):
        middle = 0.5 * (low + high)
        amount = _measure_sample(sample, middle, by_rank)
        weight = tl.exp2(middle)
        least = amount - MARGIN * tl.sqrt(amount * weight) - GUARD * weight
        fits = tl.where(by_rank, amount <= few, least > tail)
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
        found = tl.where(fits, middle, found)
    return found


@triton.jit
def _measure_sample(sample, value, by_rank):
    """Return how many lie at or above ``value``, or else the mass below it.

    No weight below is larger than 2**value, so the mass's variance is at most mass * 2**value.
    """
    powers, weights = sample
    below = tl.sum((powers < value).to(tl.float32) * weights)
    return tl.where(by_rank, powers.shape[0] - below, below)
