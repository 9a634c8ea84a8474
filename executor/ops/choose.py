"""The last launch of sampling: one program a row turns what the splits found into a token id.

The threshold of a filter is searched in a *source*, the lists of a row's splits or else the whole
row: a tuple (row, ids_ptr, starts, offsets, ends, step, num_steps). A lane reads the places offset,
offset + step, ... of a list that starts at ``start`` and has ``end`` entries; ids_ptr is None where
a place is an id. *Row* is (logits_ptr, edited_ptr, is_edited, vocab_size, shift), *limits* are
(top_k, top_p, maximum, scale).
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
    COUNT_ABOVE,
    LENGTH,
    LOG2_E,
    MASS_ABOVE,
    MAX_INT,
    MAX_SPLITS,
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
        if low < high:
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
            above = _merge_above(partials_ptr, num_splits, top_k > 0, SPLITS_PAD)
            # Is the threshold in the bracket, and all of the bracket in the lists?
            is_covered = (longest <= list_capacity) & (above < wanted)
            if is_covered & (tl.load(brackets_ptr + IS_FLOOR) == 0.0):
                low_key = sort_key(low) >> shift
                is_covered = above + _measure(listed, low_key, top_k > 0, limits) >= wanted
            if is_covered:
                threshold = _find_threshold(listed, low, high, wanted - above, limits)
                best, best_id = _draw_kept(listed, threshold, draw, best, best_id)
            else:
                nothing = low - float("inf")
                whole = (
                    row_logits,
                    None,
                    lanes * 0,
                    lanes,
                    lanes * 0 + vocab_size,
                    TILE,
                    tl.cdiv(vocab_size, TILE),
                )
                threshold = _find_threshold(whole, nothing, -nothing, wanted, limits)
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
def _merge_above(partials_ptr, num_splits, by_rank, SPLITS_PAD: tl.constexpr):
    """Return how much lies above the bracket: a count, or else mass."""
    split = tl.arange(0, SPLITS_PAD)
    record_ptr = partials_ptr + split * PARTIAL_WORDS
    words_ptr = record_ptr.to(tl.pointer_type(tl.int32))
    counts = tl.load(words_ptr + COUNT_ABOVE, mask=split < num_splits, other=0)
    masses = tl.load(record_ptr + MASS_ABOVE, mask=split < num_splits, other=0.0)
    return tl.where(by_rank, tl.sum(counts).to(tl.float32), tl.sum(masses))


@triton.jit
def _find_threshold(source, low, high, wanted, limits):
    """Return the key from which on the source is kept; it holds logits from ``low`` to ``high``."""
    top_k, top_p, maximum, scale = limits
    shift = source[0][4]
    top = high
    if high == float("inf"):
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
    """Return how many of the source have keys from ``key`` on, or else their mass."""
    _, _, maximum, scale = limits
    shift = source[0][4]
    amounts = tl.zeros(source[3].shape, tl.float32)
    for number in range(source[6]):
        ids, x = _load_step(source, number)
        is_kept = (ids < MAX_INT) & ((sort_key(x) >> shift) >= key)
        amounts += tl.where(is_kept, tl.where(by_rank, 1.0, tl.exp2((x - maximum) * scale)), 0.0)
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
