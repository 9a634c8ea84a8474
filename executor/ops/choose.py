"""The last launch of sampling: one program a row turns what the splits found into a token id.

Where a row's bracket has an upper end, each id listed that beats the best of what is above is
looked up in the whole row, mostly none.

Else the threshold of the filter is searched for in a *source*, the lists of a row's splits or else
the whole row: a tuple (row, ids_ptr, starts, offsets, ends, step, num_steps). A lane reads the
places offset, offset + step, ... of a list that starts at ``start`` and has ``end`` entries;
ids_ptr is None where a place is an id. *Row* is (logits_ptr, edited_ptr, is_edited, vocab_size,
shift), *limits* are (top_k, top_p, maximum, scale).
"""

import triton
import triton.language as tl

from octavo.executor.ops.bracket import (
    BRACKET_WORDS,
    HIGH,
    IS_FLOOR,
    KEEP_FROM,
    LOW,
    MAXIMUM,
    TOTAL,
)
from octavo.executor.ops.logits import (
    ABOVE_HIGH,
    ABOVE_LOW,
    LENGTH,
    LOG2_E,
    MAX_INT,
    MAX_SPLITS,
    PARTIAL_WORDS,
    SCORE,
    SCORE_ID,
    from_sort_key,
    load_logits,
    sort_key,
    take_best,
)
from octavo.executor.ops.noise import draw_words, gumbel, load_seed, select_word
from octavo.executor.ops.row_parameters import load_filter

# Faults.
NON_FINITE = tl.constexpr(1)
EXHAUSTED = tl.constexpr(2)

SLACK = tl.constexpr(2e-5)  # more than the rounding of the sums that ``scan`` makes in passing


@triton.jit(do_not_specialize=["num_splits", "list_capacity", "history_length"])
def choose_kernel(
    logits_ptr,  # (batch, vocab_size)
    edited_ptr,  # like logits, float32, or None
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,
    list_ids_ptr,  # (batch, num_splits, list_capacity)
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
    WIDE_TILE: tl.constexpr,
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
    if is_filtered & (best == best):
        brackets_ptr += index * BRACKET_WORDS
        low, high = tl.load(brackets_ptr + LOW), tl.load(brackets_ptr + HIGH)
        has_threshold = (top_k > 0) | (top_p < 1.0)
        if (low < high) | (has_threshold & (low == high)):
            if edited_ptr is None:
                edited_row_ptr: tl.constexpr = None
            else:
                edited_row_ptr = edited_ptr + index * stride_edited
            # The keys of sixteen-bit logits differ in their upper bits alone: fewer bisections.
            shift = tl.where(is_edited, 0, KEY_SHIFT)
            logits_row_ptr = logits_ptr + index * stride_logits
            row_logits = (logits_row_ptr, edited_row_ptr, is_edited, vocab_size, shift)
            lanes = tl.arange(0, TILE)
            WIDTH: tl.constexpr = TILE // SPLITS_PAD
            split = lanes // WIDTH
            lengths_ptr = partials_ptr.to(tl.pointer_type(tl.int32)) + LENGTH
            lengths = tl.load(lengths_ptr + split * PARTIAL_WORDS, mask=split < num_splits, other=0)
            longest = tl.max(lengths)
            listed = (
                row_logits,
                list_ids_ptr + index * num_splits * list_capacity,
                split * list_capacity,
                lanes % WIDTH,
                lengths,
                WIDTH,
                tl.cdiv(tl.minimum(longest, list_capacity), WIDTH),
            )
            limits = (top_k, top_p, tl.load(brackets_ptr + MAXIMUM), LOG2_E / temperature)
            draw = (
                load_seed(parameters_ptr, row),
                position,
                1.0 / temperature,
                tl.load(brackets_ptr + KEEP_FROM),
            )
            wanted = top_k.to(tl.float32)
            if top_k == 0:
                wanted = top_p * tl.load(brackets_ptr + TOTAL)
            by_rank = top_k > 0
            low_key = sort_key(low) >> shift
            is_floor = tl.load(brackets_ptr + IS_FLOOR) != 0.0
            # Is the threshold in the bracket, and all that matters in the lists?
            is_settled = longest <= list_capacity
            if high < float("inf"):
                above_high = _merge_amounts(partials_ptr + ABOVE_HIGH, num_splits, SPLITS_PAD)
                above_low = _merge_amounts(partials_ptr + ABOVE_LOW, num_splits, SPLITS_PAD)
                is_settled &= above_high < wanted * (1.0 - SLACK)
                is_settled &= is_floor | (above_low >= wanted * (1.0 + SLACK))
                if is_settled:
                    best, best_id = _settle(
                        listed, low_key, wanted, draw, limits, best, best_id, WIDE_TILE
                    )
                    is_settled = best > -float("inf")  # else START was too high
            else:
                if is_settled & ~is_floor:
                    is_settled = _measure(listed, low_key, by_rank, limits) >= wanted
                if is_settled:
                    threshold = _find_threshold(listed, low, wanted, limits)
                    best, best_id = _draw_kept(listed, threshold, draw, best, best_id)
            if ~is_settled:
                nothing = low - float("inf")
                num_steps = tl.cdiv(vocab_size, TILE)
                whole = (row_logits, None, 0, tl.arange(0, TILE), vocab_size, TILE, num_steps)
                threshold = _find_threshold(whole, nothing, wanted, limits)
                best, best_id = _draw_kept(whole, threshold, draw, nothing, best_id)
    is_fault = best - best != 0.0  # infinite or NaN
    token_id = tl.where(is_fault, 0, best_id)
    is_exhausted = is_edited & (best == -float("inf"))
    fault = tl.where(is_exhausted, EXHAUSTED, tl.where(is_fault, NON_FINITE, 0))
    tl.store(token_ids_ptr + index, token_id)
    tl.store(faults_ptr + index, fault)
    if history_ptr is not None:
        target_ptr = history_ptr + row * history_length + position
        tl.store(target_ptr, token_id, mask=position < history_length)


@triton.jit
def _merge_scores(partials_ptr, num_splits, SPLITS_PAD: tl.constexpr):
    """Return the best score of all splits, and its id."""
    split = tl.arange(0, SPLITS_PAD)
    record_ptr = partials_ptr + split * PARTIAL_WORDS
    words_ptr = record_ptr.to(tl.pointer_type(tl.int32))
    scores = tl.load(record_ptr + SCORE, mask=split < num_splits, other=-float("inf"))
    ids = tl.load(words_ptr + SCORE_ID, mask=split < num_splits, other=MAX_INT)
    return take_best(scores, ids, -float("inf"), 0)


@triton.jit
def _merge_amounts(amounts_ptr, num_splits, SPLITS_PAD: tl.constexpr):
    """Return the sum of a word of all splits."""
    split = tl.arange(0, SPLITS_PAD)
    return tl.sum(tl.load(amounts_ptr + split * PARTIAL_WORDS, mask=split < num_splits, other=0.0))


@triton.jit
def _settle(listed, key, wanted, draw, limits, best, best_id, WIDE_TILE: tl.constexpr):
    """Return the better of ``best``, which is kept, and the best listed that is kept, and its id.

    What is kept has less than ``wanted`` above it in the whole row. Few lists have any id that
    would be better, so few rows are read again.
    """
    logits_ptr, edited_ptr, is_edited, vocab_size, shift = listed[0]
    score = float("inf")
    while score > best:
        score, token_id = _draw_kept(listed, key, draw, best, best_id)
        if score > best:
            x = load_logits(logits_ptr, edited_ptr, is_edited, token_id, vocab_size)
            if _measure_above(listed[0], x, limits, WIDE_TILE) < wanted:
                best, best_id = score, token_id
            key = (sort_key(x) >> shift) + 1  # if this one is not kept, none below is
    return best, best_id


@triton.jit
def _measure_above(row_logits, value, limits, TILE: tl.constexpr):
    """Return how many logits of the row are above ``value``, or, without top-k, their mass."""
    logits_ptr, edited_ptr, is_edited, vocab_size, _ = row_logits
    top_k, _, maximum, scale = limits
    scale = tl.where(top_k > 0, 0.0, scale)
    WIDTH: tl.constexpr = TILE // 8
    amounts = tl.zeros([WIDTH], tl.float32)
    for tile in range(tl.cdiv(vocab_size, TILE)):
        first_ids = (tile * WIDTH + tl.arange(0, WIDTH)) * 8
        ids = first_ids[:, None] + tl.arange(0, 8)[None, :]
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        weights = tl.exp2((x - maximum) * scale)
        amounts += tl.sum(tl.where(x > value, weights, 0.0), axis=1)
    return tl.sum(amounts)


@triton.jit
def _find_threshold(source, low, wanted, limits):
    """Return the key from which on the source is kept; it holds the logits from ``low`` on."""
    top_k, top_p, maximum, scale = limits
    shift = source[0][4]
    top = _find_maximum(source)
    if top_k > 0:
        # Top-k needs no pass for the row's maximum: the one in the bracket is the sample's.
        maximum = top
    limits = (top_k, top_p, maximum, scale)
    threshold = sort_key(low) >> shift
    end_key = (sort_key(top) >> shift) + 1
    if (top_k > 0) | (top_p < 1.0):
        threshold = _bisect(source, threshold, end_key, wanted, top_k > 0, limits)
    if (top_k > 0) & (top_p < 1.0):
        wanted = _measure(source, threshold, False, limits) * top_p
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
    """Return how many of the source have keys from ``key`` on, or else their mass.

    No ``key`` asked for is as low as that of -inf.
    """
    maximum, scale = limits[2], limits[3]
    lowest = from_sort_key(key << source[0][4])
    amounts = tl.zeros(source[3].shape, tl.float32)
    for number in range(source[6]):
        _, x = _load_step(source, number)
        weights = tl.where(by_rank, 1.0, tl.exp2((x - maximum) * scale))
        amounts += tl.where(x >= lowest, weights, 0.0)
    return tl.sum(amounts)


@triton.jit
def _find_maximum(source):
    """Return the largest logit of the source."""
    maxima = tl.full(source[3].shape, -float("inf"), tl.float32)
    for number in range(source[6]):
        _, x = _load_step(source, number)
        maxima = tl.maximum(maxima, x)
    return tl.max(maxima)


@triton.jit
def _draw_kept(source, threshold, draw, best, best_id):
    """Return the better of ``best`` and the best score of what the source keeps, and its id."""
    seed, position, inverse_temperature, keep_from = draw
    shift = source[0][4]
    for number in range(source[6]):
        ids, x = _load_step(source, number)
        w0, w1, w2, w3 = draw_words(seed, position, ids // 4)
        noise = gumbel(select_word(w0, w1, w2, w3, ids % 4))
        is_kept = (ids < MAX_INT) & ((sort_key(x) >> shift) >= threshold) & (x >= keep_from)
        scores = tl.where(is_kept, x * inverse_temperature + noise, -float("inf"))
        best, best_id = take_best(scores, ids, best, best_id)
    return best, best_id


@triton.jit
def _load_step(source, number):
    """Return ids and logits of one step, MAX_INT and -inf beyond the ends."""
    row_logits, ids_ptr, starts, offsets, ends, step, _ = source
    logits_ptr, edited_ptr, is_edited, vocab_size, _ = row_logits
    places = offsets + number * step
    if ids_ptr is None:
        ids = tl.where(places < ends, places, MAX_INT)
    else:
        ids = tl.load(ids_ptr + starts + places, mask=places < ends, other=MAX_INT)
    return ids, load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
