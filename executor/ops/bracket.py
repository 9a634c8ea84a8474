"""Where the threshold of a row's filter may lie: two logits around it, from a sample of the row.

Exact from a full pass: the maximum m and the sum Z of exp((x - m) / T). Guessed from the sample:
how many logits lie above a value (top-k), and how much of Z lies below it (top-p). Mass is
counted from below because there no single logit weighs much; above, one token that the sample
missed may hold it all.

    count(x >= v)          ~ count in sample / fraction       top-k wants k
    sum of exp below v     ~ sum in sample / fraction         top-p wants at most (1 - p) Z

The values taken are MARGIN standard deviations and GUARD logits off on either side, so that a guess
fails about once in 10^5 rows; ``choose`` finds out and works without.
"""

import triton
import triton.language as tl

from octavo.executor.ops.logits import LOG2_E, MAX_SPLITS, PARTIAL_WORDS, load_logits
from octavo.executor.ops.row_parameters import load_filter

BRACKET_WORDS = tl.constexpr(4)  # low, high, m, Z
SAMPLE_CHUNK = tl.constexpr(32)  # neighbours read together: a sector or two of memory
BISECTIONS = tl.constexpr(12)
MARGIN = tl.constexpr(4.0)
GUARD = tl.constexpr(4.0)
# In powers of two below the maximum. Noise spans less than 26 nats, 37.6 powers of two, over all
# words, so a logit below the floor is never sampled and weighs less than 2**-46 of the maximum.
FLOOR = tl.constexpr(-46.0)


@triton.jit
def compute_min_p_threshold(temperature, min_p, maximum):
    """Return the lowest logit that min-p keeps, -inf when it is off."""
    return maximum + temperature * tl.log(min_p)


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
    """Write maximum and sum of exponentials of each split of the rows with a filter."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature, _, _, _, is_filtered, is_edited = load_filter(parameters_ptr, row, vocab_size)
    if not is_filtered:
        return
    scale = LOG2_E / temperature
    logits_ptr += index * stride_logits
    if edited_ptr is not None:
        edited_ptr += index * stride_edited
    maximum = -float("inf")
    lanes = tl.zeros([TILE], tl.float32)
    for tile in range(split, tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        larger = tl.maximum(maximum, tl.max(x))
        # A split whose logits are all masked has maximum -inf and sum 0.
        origin = tl.where(larger == -float("inf"), 0.0, larger)
        lanes = lanes * tl.exp2((maximum - origin) * scale) + tl.exp2((x - origin) * scale)
        maximum = larger
    partial_ptr = partials_ptr + (index * MAX_SPLITS + split) * PARTIAL_WORDS
    tl.store(partial_ptr, maximum)
    tl.store(partial_ptr + 1, tl.sum(lanes))


@triton.jit
def bracket_kernel(
    logits_ptr,
    edited_ptr,
    rows_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,  # (batch, BRACKET_WORDS)
    list_counts_ptr,
    vocab_size,
    stride_logits,
    stride_edited,
    num_splits,
    SAMPLE: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
):
    """Write the bracket of each row with a filter, and clear its list."""
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
    maximum, total = _merge_summaries(partials_ptr, index, num_splits, scale)
    by_rank = top_k > 0
    low = compute_min_p_threshold(temperature, min_p, maximum)
    high = low
    if by_rank | (top_p < 1.0):
        logits_ptr += index * stride_logits
        if edited_ptr is not None:
            edited_ptr += index * stride_edited
        ids = _spread_sample(vocab_size, SAMPLE)
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        powers = (x - maximum) * scale
        fraction = tl.minimum(vocab_size, SAMPLE).to(tl.float32) / vocab_size
        rank = top_k * fraction
        tail = (1.0 - top_p) * total * fraction
        low_power = _find_low(powers, rank, tail, by_rank)
        low = maximum + low_power / scale
        high = float("inf")
        expected = tl.sum((powers >= low_power).to(tl.float32)) / fraction
        # With both filters the mass that top-p divides is only known once top-k's threshold is.
        if (expected > LIST_CAPACITY / 2) & (by_rank != (top_p < 1.0)):
            high_power = _find_high(powers, rank, tail, by_rank, low_power)
            high = maximum + high_power / scale
    bracket_ptr = brackets_ptr + index * BRACKET_WORDS
    tl.store(bracket_ptr, low)
    tl.store(bracket_ptr + 1, high)
    tl.store(bracket_ptr + 2, maximum)
    tl.store(bracket_ptr + 3, total)
    tl.store(list_counts_ptr + index, 0)


@triton.jit
def _merge_summaries(partials_ptr, index, num_splits, scale):
    split = tl.arange(0, MAX_SPLITS)
    partial_ptr = partials_ptr + (index * MAX_SPLITS + split) * PARTIAL_WORDS
    is_split = split < num_splits
    maxima = tl.load(partial_ptr, mask=is_split, other=-float("inf"))
    sums = tl.load(partial_ptr + 1, mask=is_split, other=0.0)
    maximum = tl.max(maxima)
    # Without a finite maximum the factors are NaN: so is the total, and the row is reported.
    return maximum, tl.sum(sums * tl.exp2((maxima - maximum) * scale))


@triton.jit
def _spread_sample(vocab_size, SAMPLE: tl.constexpr):
    """Return ids of chunks spread evenly over the vocabulary, the whole of it if it is small."""
    lane = tl.arange(0, SAMPLE)
    spacing = tl.maximum(vocab_size // (SAMPLE // SAMPLE_CHUNK), SAMPLE_CHUNK)
    return lane // SAMPLE_CHUNK * spacing + lane % SAMPLE_CHUNK


@triton.jit
def _find_low(powers, rank, tail, by_rank):
    """Return the highest tried power that keeps more than enough; FLOOR is always allowed."""
    enough = rank + MARGIN * tl.sqrt(rank) + GUARD
    low, high = FLOOR, 0.0
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        count, mass, deviation = _measure_sample(powers, middle)
        fits_mass = mass + MARGIN * deviation + GUARD * tl.exp2(middle) <= tail
        fits = tl.where(by_rank, count >= enough, fits_mass)
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle)
    return low


@triton.jit
def _find_high(powers, rank, tail, by_rank, low):
    """Return the lowest tried power above which surely everything is kept, inf if there is none."""
    few = rank - MARGIN * tl.sqrt(rank) - GUARD
    high, found = 0.0, float("inf")
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        count, mass, deviation = _measure_sample(powers, middle)
        fits_mass = mass - MARGIN * deviation - GUARD * tl.exp2(middle) > tail
        fits = tl.where(by_rank, count <= few, fits_mass)
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
        found = tl.where(fits, middle, found)
    return found


@triton.jit
def _measure_sample(powers, value):
    """Return how many lie at or above ``value``, the mass below it, and the mass's deviation."""
    is_below = powers < value
    weights = tl.where(is_below, tl.exp2(powers), 0.0)
    count = tl.sum((powers >= value).to(tl.float32))
    return count, tl.sum(weights), tl.sqrt(tl.sum(weights * weights))
