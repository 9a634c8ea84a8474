"""The launch of sampling that reads whole rows: each split leaves its best score and its list."""

import triton
import triton.language as tl

from octavo.executor.ops.bracket import BRACKET_WORDS, HIGH, KEEP_FROM, LOW, MAXIMUM
from octavo.executor.ops.logits import (
    COUNT_ABOVE,
    LENGTH,
    LOG2_E,
    LOWEST,
    MASS_ABOVE,
    MAX_SPLITS,
    PARTIAL_WORDS,
    SCORE,
    SCORE_ID,
    find_lowest,
    load_logits,
    take_best,
)
from octavo.executor.ops.noise import (
    LIFT_MARGIN,
    LOWEST_NOISE,
    REACH,
    draw_words,
    gumbel,
    interleave,
    lift,
    load_seed,
)
from octavo.executor.ops.row_parameters import load_filter


@triton.jit(do_not_specialize=["list_capacity"])
def scan_kernel(
    logits_ptr,  # (batch, vocab_size)
    edited_ptr,  # like logits, float32, or None
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,
    list_ids_ptr,  # (batch, num_splits, list_capacity)
    vocab_size,
    stride_logits,
    stride_edited,
    list_capacity,
    NEIGHBOURS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the best score of each split, and list the logits inside the bracket."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature, _, _, _, is_filtered, is_edited = load_filter(parameters_ptr, row, vocab_size)
    if edited_ptr is None:
        edited_row_ptr: tl.constexpr = None
    else:
        edited_row_ptr = edited_ptr + index * stride_edited
    source = (logits_ptr + index * stride_logits, edited_row_ptr, is_edited, vocab_size)
    partial_ptr = partials_ptr + (index * MAX_SPLITS + split) * PARTIAL_WORDS
    if temperature == 0.0:
        best, best_id = _scan_maximum(source, 2 * TILE)
    else:
        best, best_id = -float("inf"), 0
        drawn_from = -float("inf")
        if is_filtered:
            bracket_ptr = brackets_ptr + index * BRACKET_WORDS
            low, high = tl.load(bracket_ptr + LOW), tl.load(bracket_ptr + HIGH)
            drawn_from = tl.maximum(high, tl.load(bracket_ptr + KEEP_FROM))
            if low < high:
                scale = LOG2_E / temperature
                bracket = (low, high, tl.load(bracket_ptr + MAXIMUM), scale)
                start = (index * tl.num_programs(1) + split) * list_capacity
                target = (list_ids_ptr + start, list_capacity, partial_ptr)
                best = _collect(source, bracket, target, NEIGHBOURS, TILE)
        if drawn_from < float("inf"):
            draw = (
                load_seed(parameters_ptr, row),
                tl.load(positions_ptr + index),
                1.0 / temperature,
            )
            best, best_id = _scan_scores(source, drawn_from, draw, TILE)
    tl.store(partial_ptr + SCORE, best)
    tl.store(partial_ptr.to(tl.pointer_type(tl.int32)) + SCORE_ID, best_id)


@triton.jit
def _scan_maximum(source, TILE: tl.constexpr):
    """Return the largest logit of the split and its id; every lane keeps its own until the end."""
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    lanes = tl.full([TILE], -float("inf"), tl.float32)
    lane_ids = tl.zeros([TILE], tl.int32)
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        lane_ids = tl.where(x > lanes, ids, lane_ids)
        lanes = tl.maximum(lanes, x, propagate_nan=tl.PropagateNan.ALL)
    return take_best(lanes, lane_ids, -float("inf"), 0)


@triton.jit
def _scan_scores(source, drawn_from, draw, TILE: tl.constexpr):
    """Return the best logit / temperature + noise of the logits from ``drawn_from`` on, and its id.

    The noise's two logarithms are taken only where a word may beat the best so far: for a few words
    of about one tile in each doubling of the tiles seen.
    """
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    seed, position, inverse_temperature = draw
    # One logit from ``drawn_from`` on is kept, in this split or another: no score below counts.
    best = tl.maximum(drawn_from * inverse_temperature + LOWEST_NOISE, LOWEST)
    best_id = -1
    sums = tl.zeros([TILE // 4], tl.float32)  # NaN where a logit is
    member = tl.arange(0, 4)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        groups = tile * (TILE // 4) + tl.arange(0, TILE // 4)
        x = load_logits(logits_ptr, edited_ptr, is_edited, groups[:, None] * 4 + member, vocab_size)
        w0, w1, w2, w3 = draw_words(seed, position, groups)
        words = interleave(w0, w1, w2, w3)
        power = x * (inverse_temperature * LOG2_E) - (best * LOG2_E - LIFT_MARGIN)
        lifted = lift(words, power)
        sums += tl.sum(lifted, axis=1)
        if tl.max(lifted) >= REACH:
            scores = tl.where(x < drawn_from, -float("inf"), x * inverse_temperature)
            marks = tl.sum((lifted >= REACH).to(tl.int32) << member, axis=1)
            num_marked = 1
            while num_marked > 0:
                place = find_lowest(marks)
                is_here = member == place[:, None]
                word = tl.sum(tl.where(is_here, words, 0), axis=1)
                score = tl.sum(tl.where(is_here, scores, 0.0), axis=1) + gumbel(word)
                score = tl.where(marks > 0, score, -float("inf"))
                best, best_id = take_best(score, groups * 4 + place, best, best_id)
                marks = marks & (marks - 1)
                num_marked = tl.max(marks)
    best = tl.where(best_id < 0, -float("inf"), best)
    faults = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
    has_nan = tl.max((faults != faults).to(tl.int32)) > 0
    return tl.where(has_nan, float("nan"), best), best_id


@triton.jit
def _collect(source, bracket, target, NEIGHBOURS: tl.constexpr, TILE: tl.constexpr):
    """List the ids inside the bracket; write how many, and count and mass of the logits above.

    Return NaN if a logit is NaN or inf, else -inf. NEIGHBOURS, 16 bytes, are one thread's: it marks
    those inside as bits; as long as any has a bit left, every thread that has lists one id.
    """
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    low, high, maximum, scale = bracket
    ids_ptr, capacity, partial_ptr = target
    WIDTH: tl.constexpr = TILE // NEIGHBOURS
    length = 0
    sums = tl.zeros([WIDTH], tl.float32)
    counts = tl.zeros([WIDTH], tl.int32)
    masses = tl.zeros([WIDTH], tl.float32)
    member = tl.arange(0, NEIGHBOURS)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        first_ids = (tile * WIDTH + tl.arange(0, WIDTH)) * NEIGHBOURS
        ids = first_ids[:, None] + member
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        sums += tl.sum(x, axis=1)
        marks = tl.sum(((x >= low) & (x < high)).to(tl.int32) << member, axis=1)
        num_marked = tl.sum((marks > 0).to(tl.int32))
        while num_marked > 0:
            places = length + tl.cumsum((marks > 0).to(tl.int32)) - 1
            fits = (marks > 0) & (places < capacity)
            tl.store(ids_ptr + places, first_ids + find_lowest(marks), mask=fits)
            length += num_marked
            marks = marks & (marks - 1)
            num_marked = tl.sum((marks > 0).to(tl.int32))
        if high < float("inf"):
            is_above = x >= high
            counts += tl.sum(is_above.to(tl.int32), axis=1)
            weights = tl.where(is_above, tl.exp2((x - maximum) * scale), 0.0)
            masses += tl.sum(weights, axis=1)
    words_ptr = partial_ptr.to(tl.pointer_type(tl.int32))
    tl.store(words_ptr + LENGTH, length)
    tl.store(words_ptr + COUNT_ABOVE, tl.sum(counts))
    tl.store(partial_ptr + MASS_ABOVE, tl.sum(masses))
    # Masked logits make a sum -inf, which is no fault.
    faults = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
    is_fault = tl.max((faults - faults != 0.0).to(tl.int32)) > 0
    return tl.where(is_fault, float("nan"), -float("inf"))
