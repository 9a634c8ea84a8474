"""The last launch of sampling: one program a row turns what the splits found into a token id.

The threshold of a filter is searched in a *source*, the row's list or the whole row: a tuple
(logits_ptr, edited_ptr, is_edited, ids_ptr, size, shift), where ids_ptr is None if a place is an
id. *Limits* are (by_rank, top_p, maximum, scale).
"""

import triton
import triton.language as tl

from octavo.executor.ops.bracket import BRACKET_WORDS, FLOOR, compute_min_p_threshold
from octavo.executor.ops.logits import (
    LOG2_E,
    MAX_SPLITS,
    PARTIAL_WORDS,
    load_logits,
    sort_key,
    take_best,
)
from octavo.executor.ops.noise import draw_words, gumbel, load_seed, select_word
from octavo.executor.ops.row_parameters import load_filter

# Mass is summed as integers, because the order of a list differs from run to run. A unit is 2**-40
# of the most likely token's mass: 2**23 tokens fit into 63 bits.
MASS_UNIT = tl.constexpr(2.0**40)

# Faults.
NON_FINITE = tl.constexpr(1)
EXHAUSTED = tl.constexpr(2)


@triton.jit
def choose_kernel(
    logits_ptr,  # (batch, vocab_size)
    edited_ptr,  # like logits, float32, or None
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,
    list_counts_ptr,
    list_values_ptr,  # (batch, LIST_CAPACITY)
    list_ids_ptr,
    token_ids_ptr,
    faults_ptr,
    history_ptr,  # (num_rows, history_length) or None
    vocab_size,
    stride_logits,
    stride_edited,
    num_splits,
    history_length,
    KEY_SHIFT: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write token and fault of each row, and append the token to the row's history."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    position = tl.load(positions_ptr + index)
    best, best_id, count_above, mass_above = _merge_splits(partials_ptr, index, num_splits)
    temperature, top_k, top_p, min_p, is_filtered, is_edited = load_filter(
        parameters_ptr, row, vocab_size
    )
    if is_filtered:
        low = tl.load(brackets_ptr + index * BRACKET_WORDS)
        high = tl.load(brackets_ptr + index * BRACKET_WORDS + 1)
        maximum = tl.load(brackets_ptr + index * BRACKET_WORDS + 2)
        total = tl.load(brackets_ptr + index * BRACKET_WORDS + 3)
        if total != total:
            best = total
        elif low < high:
            by_rank = top_k > 0
            scale = LOG2_E / temperature
            limits = (by_rank, top_p, maximum, scale)
            keep_from = compute_min_p_threshold(temperature, min_p, maximum)
            draw = (load_seed(parameters_ptr, row), position, 1.0 / temperature)

            # The keys of sixteen-bit logits differ in their upper bits alone: fewer bisections.
            shift = tl.where(is_edited, 0, KEY_SHIFT)
            length = tl.load(list_counts_ptr + index)
            listed = (
                list_values_ptr + index * LIST_CAPACITY,
                None,
                False,
                list_ids_ptr + index * LIST_CAPACITY,
                tl.minimum(length, LIST_CAPACITY),
                shift,
            )
            wanted = tl.where(by_rank, top_k.to(tl.int64), (top_p * total * MASS_UNIT).to(tl.int64))
            above = tl.where(
                by_rank, count_above.to(tl.int64), (mass_above * MASS_UNIT).to(tl.int64)
            )
            # Is the threshold in the bracket, and all of the bracket in the list?
            listed_amount = _measure(listed, sort_key(low) >> shift, by_rank, limits, TILE)
            reaches = (above + listed_amount >= wanted) | (low <= maximum + (FLOOR + 0.1) / scale)
            if (above < wanted) & reaches & (length <= LIST_CAPACITY):
                top = tl.minimum(high, maximum)
                threshold = _find_threshold(listed, low, top, wanted - above, limits, TILE)
                best, best_id = _draw_kept(listed, threshold, keep_from, draw, best, best_id, TILE)
            else:
                if edited_ptr is None:
                    edited_row_ptr: tl.constexpr = None
                else:
                    edited_row_ptr = edited_ptr + index * stride_edited
                logits_row_ptr = logits_ptr + index * stride_logits
                whole = (logits_row_ptr, edited_row_ptr, is_edited, None, vocab_size, shift)
                lowest = maximum - float("inf")
                threshold = _find_threshold(whole, lowest, maximum, wanted, limits, TILE)
                best, best_id = _draw_kept(whole, threshold, keep_from, draw, lowest, best_id, TILE)
    is_fault = (best - best) != 0.0  # infinite or NaN
    best_id = tl.where(is_fault, 0, best_id)
    tl.store(token_ids_ptr + index, best_id)
    is_exhausted = is_edited & (best == -float("inf"))
    tl.store(
        faults_ptr + index, tl.where(is_exhausted, EXHAUSTED, tl.where(is_fault, NON_FINITE, 0))
    )
    if history_ptr is not None:
        target_ptr = history_ptr + row * history_length + position
        tl.store(target_ptr, best_id, mask=position < history_length)


@triton.jit
def _merge_splits(partials_ptr, index, num_splits):
    """Return the best score of all splits, its id, and count and mass above the bracket."""
    split = tl.arange(0, MAX_SPLITS)
    is_split = split < num_splits
    partial_ptr = partials_ptr + (index * MAX_SPLITS + split) * PARTIAL_WORDS
    scores = tl.load(partial_ptr, mask=is_split, other=-float("inf"))
    ids = tl.load(partial_ptr + 1, mask=is_split, other=0.0).to(tl.int32, bitcast=True)
    counts = tl.load(partial_ptr + 2, mask=is_split, other=0.0).to(tl.int32, bitcast=True)
    masses = tl.load(partial_ptr + 3, mask=is_split, other=0.0)
    best, best_id = take_best(scores, ids, -float("inf"), 0)
    return best, best_id, tl.sum(counts), tl.sum(masses)


@triton.jit
def _find_threshold(source, low, top, wanted, limits, TILE: tl.constexpr):
    """Return the key from which on the source is kept; it lies from ``low`` to ``top``."""
    by_rank, top_p, _, _ = limits
    shift = source[5]
    low_key = sort_key(low) >> shift
    end_key = (sort_key(top) >> shift) + 1
    threshold = _bisect(source, low_key, end_key, wanted, by_rank, limits, TILE)
    if by_rank & (top_p < 1.0):
        mass = _measure(source, threshold, False, limits, TILE)
        wanted = (mass.to(tl.float32) * top_p).to(tl.int64)
        threshold = _bisect(source, threshold, end_key, wanted, False, limits, TILE)
    return threshold


@triton.jit
def _bisect(source, low_key, end_key, wanted, by_rank, limits, TILE: tl.constexpr):
    """Return the highest key with at least ``wanted`` at or above it, else ``low_key``."""
    while low_key + 1 < end_key:
        middle = (low_key >> 1) + (end_key >> 1) + (low_key & end_key & 1)
        is_reached = _measure(source, middle, by_rank, limits, TILE) >= wanted
        low_key = tl.where(is_reached, middle, low_key)
        end_key = tl.where(is_reached, end_key, middle)
    return low_key


@triton.jit
def _measure(source, key, by_rank, limits, TILE: tl.constexpr):
    """Return how much of the source has keys from ``key`` on: a count, or mass in MASS_UNIT."""
    _, _, maximum, scale = limits
    logits_ptr, edited_ptr, is_edited, _, size, shift = source
    amounts = tl.zeros([TILE], tl.int64)
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, is_edited, places, size)
        is_kept = (places < size) & ((sort_key(x) >> shift) >= key)
        mass = (tl.exp2((x - maximum) * scale) * MASS_UNIT).to(tl.int64)
        amounts += tl.where(is_kept, tl.where(by_rank, 1, mass), 0)
    return tl.sum(amounts)


@triton.jit
def _draw_kept(source, threshold, keep_from, draw, best, best_id, TILE: tl.constexpr):
    """Return the better of ``best`` and the best score of what the source keeps, and its id."""
    logits_ptr, edited_ptr, is_edited, ids_ptr, size, shift = source
    seed, position, inverse_temperature = draw
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, is_edited, places, size)
        ids = places
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + places, mask=places < size, other=0)
        is_kept = (places < size) & ((sort_key(x) >> shift) >= threshold) & (x >= keep_from)
        w0, w1, w2, w3 = draw_words(seed, position, ids // 4)
        noise = gumbel(select_word(w0, w1, w2, w3, ids % 4))
        scores = tl.where(is_kept, x * inverse_temperature + noise, -float("inf"))
        best, best_id = take_best(scores, ids, best, best_id)
    return best, best_id
