"""The last launch of sampling: one program a row turns what the splits found into a token id.

The threshold of a filter is searched in a *source*, the lists of a row's splits or else the whole
row: a tuple (logits_ptr, edited_ptr, is_edited, ids_ptr, starts, offsets, ends, step, num_steps,
shift). A lane reads the places offset, offset + step, ... of a list that starts at ``start`` and
has ``end`` entries; ids_ptr is None where a place is an id. *Limits* are (top_k, top_p, maximum,
scale).
"""

import triton
import triton.language as tl

from octavo.executor.ops.bracket import BRACKET_WORDS, HIGH, IS_FLOOR, KEEP_FROM, LOW, TOTAL
from octavo.executor.ops.logits import (
    COUNT_ABOVE,
    LENGTH,
    LOG2_E,
    MASS_ABOVE,
    MAX_INT,
    MAX_SPLITS,
    MAXIMUM,
    PARTIAL_WORDS,
    SCORE,
    SCORE_ID,
    load_logits,
    sort_key,
    take_best,
)
from octavo.executor.ops.noise import draw_words, gumbel, load_seed, select_word
from octavo.executor.ops.row_parameters import load_filter

# Faults.
NON_FINITE = tl.constexpr(1)
EXHAUSTED = tl.constexpr(2)

# Mass is summed as integers: how a row is cut into lists depends on the batch, its sum must not. A
# unit is 2**-40 of the most likely token's mass; 2**23 tokens fit into 63 bits.
MASS_UNIT = tl.constexpr(2.0**40)


@triton.jit
def choose_kernel(
    logits_ptr,  # (batch, vocab_size)
    edited_ptr,  # like logits, float32, or None
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,
    list_values_ptr,  # (batch, num_splits, list_capacity)
    list_ids_ptr,
    token_ids_ptr,
    faults_ptr,
    history_ptr,  # (num_rows, history_length) or None
    vocab_size,
    stride_logits,
    stride_edited,
    num_splits,
    list_capacity,
    history_length,
    KEY_SHIFT: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write token and fault of each row, and append the token to the row's history."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    position = tl.load(positions_ptr + index)
    partials_ptr += index * MAX_SPLITS * PARTIAL_WORDS
    best, best_id = _merge_scores(partials_ptr, num_splits, SPLITS_PAD)
    temperature, top_k, top_p, _, is_filtered, is_edited = load_filter(
        parameters_ptr, row, vocab_size
    )
    if is_filtered:
        brackets_ptr += index * BRACKET_WORDS
        low, high = tl.load(brackets_ptr + LOW), tl.load(brackets_ptr + HIGH)
        if low < high:
            maximum, count_above, mass_above, longest = _merge_lists(
                partials_ptr, num_splits, SPLITS_PAD
            )
            if maximum - maximum != 0.0:
                best = maximum
            else:
                scale = LOG2_E / temperature
                limits = (top_k, top_p, maximum, scale)
                keep_from = tl.load(brackets_ptr + KEEP_FROM)
                draw = (load_seed(parameters_ptr, row), position, 1.0 / temperature, keep_from)
                # The keys of sixteen-bit logits differ in their upper bits alone.
                shift = tl.where(is_edited, 0, KEY_SHIFT)
                lanes = tl.arange(0, TILE)
                WIDTH: tl.constexpr = TILE // SPLITS_PAD
                lengths_ptr = partials_ptr.to(tl.pointer_type(tl.int32)) + LENGTH
                is_split = lanes // WIDTH < num_splits
                lengths = tl.load(
                    lengths_ptr + lanes // WIDTH * PARTIAL_WORDS, mask=is_split, other=0
                )
                start = index * num_splits * list_capacity
                listed = (
                    list_values_ptr + start,
                    None,
                    False,
                    list_ids_ptr + start,
                    lanes // WIDTH * list_capacity,
                    lanes % WIDTH,
                    lengths,
                    WIDTH,
                    tl.cdiv(longest, WIDTH),
                    shift,
                )
                # Is the threshold in the bracket, and all of the bracket in the lists?
                total = tl.load(brackets_ptr + TOTAL)
                wanted = top_k.to(tl.int64)
                above = count_above.to(tl.int64)
                if top_k == 0:
                    wanted = (top_p * total * MASS_UNIT).to(tl.int64)
                    above = (mass_above * MASS_UNIT).to(tl.int64)
                is_complete = longest <= list_capacity
                if is_complete & (tl.load(brackets_ptr + IS_FLOOR) == 0.0):
                    amount = _measure(listed, sort_key(low) >> shift, top_k > 0, limits)
                    is_complete = above + amount >= wanted
                if is_complete & (above < wanted):
                    top = tl.minimum(high, maximum)
                    threshold = _find_threshold(listed, low, top, wanted - above, limits)
                    best, best_id = _draw_kept(listed, threshold, draw, best, best_id)
                else:
                    if edited_ptr is None:
                        edited_row_ptr: tl.constexpr = None
                    else:
                        edited_row_ptr = edited_ptr + index * stride_edited
                    whole = (
                        logits_ptr + index * stride_logits,
                        edited_row_ptr,
                        is_edited,
                        None,
                        lanes * 0,
                        lanes,
                        lanes * 0 + vocab_size,
                        TILE,
                        tl.cdiv(vocab_size, TILE),
                        shift,
                    )
                    lowest = maximum - float("inf")
                    threshold = _find_threshold(whole, lowest, maximum, wanted, limits)
                    best, best_id = _draw_kept(whole, threshold, draw, lowest, best_id)
    is_fault = best - best != 0.0  # infinite or NaN
    tl.store(token_ids_ptr + index, tl.where(is_fault, 0, best_id))
    is_exhausted = is_edited & (best == -float("inf"))
    tl.store(
        faults_ptr + index, tl.where(is_exhausted, EXHAUSTED, tl.where(is_fault, NON_FINITE, 0))
    )
    if history_ptr is not None:
        target_ptr = history_ptr + row * history_length + position
        tl.store(target_ptr, tl.where(is_fault, 0, best_id), mask=position < history_length)


@triton.jit
def _merge_scores(partials_ptr, num_splits, SPLITS_PAD: tl.constexpr):
    """Return the best score of all splits, and its id."""
    split = tl.arange(0, SPLITS_PAD)
    record_ptr = partials_ptr + split * PARTIAL_WORDS
    is_split = split < num_splits
    scores = tl.load(record_ptr + SCORE, mask=is_split, other=-float("inf"))
    ids = tl.load(record_ptr.to(tl.pointer_type(tl.int32)) + SCORE_ID, mask=is_split, other=MAX_INT)
    return take_best(scores, ids, -float("inf"), 0)


@triton.jit
def _merge_lists(partials_ptr, num_splits, SPLITS_PAD: tl.constexpr):
    """Return the row's maximum, count and mass above the bracket, and the longest list's length."""
    split = tl.arange(0, SPLITS_PAD)
    record_ptr = partials_ptr + split * PARTIAL_WORDS
    words_ptr = record_ptr.to(tl.pointer_type(tl.int32))
    is_split = split < num_splits
    maxima = tl.load(record_ptr + MAXIMUM, mask=is_split, other=-float("inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32)) > 0
    maximum = tl.where(has_nan, float("nan"), tl.max(maxima))
    counts = tl.load(words_ptr + COUNT_ABOVE, mask=is_split, other=0)
    masses = tl.load(record_ptr + MASS_ABOVE, mask=is_split, other=0.0)
    lengths = tl.load(words_ptr + LENGTH, mask=is_split, other=0)
    return maximum, tl.sum(counts), tl.sum(masses), tl.max(lengths)


@triton.jit
def _find_threshold(source, low, top, wanted, limits):
    """Return the key from which on the source is kept; it lies from ``low`` to ``top``."""
    top_k, top_p, _, _ = limits
    shift = source[9]
    threshold = sort_key(low) >> shift
    end_key = (sort_key(top) >> shift) + 1
    if (top_k > 0) | (top_p < 1.0):
        threshold = _bisect(source, threshold, end_key, wanted, top_k > 0, limits)
    if (top_k > 0) & (top_p < 1.0):
        mass = _measure(source, threshold, False, limits)
        wanted = (mass.to(tl.float32) * top_p).to(tl.int64)
        threshold = _bisect(source, threshold, end_key, wanted, False, limits)
    return threshold


@triton.jit
def _bisect(source, low_key, end_key, wanted, by_rank, limits):
    """Return the highest key with at least ``wanted`` at or above it, else ``low_key``."""
    while low_key + 1 < end_key:
        middle = (low_key >> 1) + (end_key >> 1) + (low_key & end_key & 1)
        is_reached = _measure(source, middle, by_rank, limits) >= wanted
        low_key = tl.where(is_reached, middle, low_key)
        end_key = tl.where(is_reached, end_key, middle)
    return low_key


@triton.jit
def _measure(source, key, by_rank, limits):
    """Return how much of the source has keys from ``key`` on: a count, or mass in MASS_UNIT."""
    _, _, maximum, scale = limits
    logits_ptr, edited_ptr, is_edited, _, starts, offsets, ends, step, num_steps, shift = source
    amounts = tl.zeros(starts.shape, tl.int64)
    for number in range(num_steps):
        places = _locate(starts, offsets + number * step, ends)
        x = load_logits(logits_ptr, edited_ptr, is_edited, places, MAX_INT)
        is_kept = (places < MAX_INT) & ((sort_key(x) >> shift) >= key)
        mass = (tl.exp2((x - maximum) * scale) * MASS_UNIT).to(tl.int64)
        amounts += tl.where(is_kept, tl.where(by_rank, 1, mass), 0)
    return tl.sum(amounts)


@triton.jit
def _draw_kept(source, threshold, draw, best, best_id):
    """Return the better of ``best`` and the best score of what the source keeps, and its id."""
    logits_ptr, edited_ptr, is_edited, ids_ptr, starts, offsets, ends, step, num_steps, shift = (
        source
    )
    seed, position, inverse_temperature, keep_from = draw
    for number in range(num_steps):
        places = _locate(starts, offsets + number * step, ends)
        x = load_logits(logits_ptr, edited_ptr, is_edited, places, MAX_INT)
        ids = places
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + places, mask=places < MAX_INT, other=0)
        w0, w1, w2, w3 = draw_words(seed, position, ids // 4)
        noise = gumbel(select_word(w0, w1, w2, w3, ids % 4))
        is_kept = (places < MAX_INT) & ((sort_key(x) >> shift) >= threshold) & (x >= keep_from)
        scores = tl.where(is_kept, x * inverse_temperature + noise, -float("inf"))
        best, best_id = take_best(scores, ids, best, best_id)
    return best, best_id


@triton.jit
def _locate(starts, places, ends):
    """Return places of a source as offsets from its pointers, MAX_INT beyond the end."""
    return tl.where(places < ends, starts + places, MAX_INT)
