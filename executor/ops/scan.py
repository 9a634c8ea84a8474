"""The launch of sampling that reads whole rows: each split leaves its best score, and a short list.

A row without filter, or with min-p alone, needs nothing more. Of one whose bracket has an upper end
a split also sums up what lies above each end, and lists the ids inside that might still win: few,
as they would have to beat all that are surely kept. Of any other it lists all ids from the
bracket's lower end on; noise is for ``choose`` to add.
"""

import triton
import triton.language as tl

from octavo.executor.ops.bracket import BRACKET_WORDS, HIGH, LOW, MAXIMUM, START
from octavo.executor.ops.logits import (
    ABOVE_HIGH,
    ABOVE_LOW,
    LENGTH,
    LOG2_E,
    LOWEST,
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
    """Write the best score of each split, what it has above the bracket, and its list."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature, top_k, _, _, is_filtered, is_edited = load_filter(parameters_ptr, row, vocab_size)
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
        draw = (
            load_seed(parameters_ptr, row),
            tl.load(positions_ptr + index),
            1.0 / temperature,
        )
        if is_filtered:
            bracket_ptr = brackets_ptr + index * BRACKET_WORDS
            low, high = tl.load(bracket_ptr + LOW), tl.load(bracket_ptr + HIGH)
            start = (index * tl.num_programs(1) + split) * list_capacity
            target = (list_ids_ptr + start, list_capacity, partial_ptr)
            if high < float("inf"):
                bracket = (
                    low,
                    high,
                    tl.load(bracket_ptr + START),
                    tl.load(bracket_ptr + MAXIMUM),
                    top_k > 0,
                )
                best, best_id = _scan_bracket(source, bracket, draw, target, TILE)
            else:
                best = _collect(source, low, target, NEIGHBOURS, TILE)
        else:
            best, best_id = _scan_scores(source, draw, TILE)
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
def _scan_scores(source, draw, TILE: tl.constexpr):
    """Return the best logit / temperature + noise of the split, and its id.

    The noise's two logarithms are taken only where a word may beat the best so far: for a few words
    of about one tile in each doubling of the tiles seen.
    """
    vocab_size = source[3]
    inverse_temperature = draw[2]
    best, best_id = LOWEST, -1
    member = tl.arange(0, 4)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        groups, x, words = _load_tile(source, draw, tile, TILE)
        power = x * (inverse_temperature * LOG2_E) - (best * LOG2_E - LIFT_MARGIN)
        lifted = lift(words, tl.exp2(power))
        if tl.max(lifted) >= REACH:
            marks = tl.sum((lifted >= REACH).to(tl.int32) << member, axis=1)
            scores = x * inverse_temperature
            best, best_id = _take_marked(marks, groups, words, scores, best, best_id)
    return tl.where(best == LOWEST, -float("inf"), best), best_id


@triton.jit
def _scan_bracket(source, bracket, draw, target, TILE: tl.constexpr):
    """Return the best logit / temperature + noise of the logits from ``high`` on, and its id.

    List the ids from ``low`` to ``high`` whose score may be better; write how much lies above each
    of the two. Scores up to ``start`` are passed over.
    """
    vocab_size = source[3]
    low, high, start, maximum, by_rank = bracket
    inverse_temperature = draw[2]
    _, _, partial_ptr = target
    scale = inverse_temperature * LOG2_E
    best, best_id = start, -1
    length = 0
    above_low = tl.zeros([TILE // 4], tl.float32)  # a count, or mass in units of the best's
    above_high = tl.zeros([TILE // 4], tl.float32)
    member = tl.arange(0, 4)[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        groups, x, words = _load_tile(source, draw, tile, TILE)
        power = x * scale - (best * LOG2_E - LIFT_MARGIN)
        weights = tl.where(x < low, 0.0, tl.exp2(power))
        lifted = lift(words, weights)
        amounts = tl.where(by_rank, tl.where(x < low, 0.0, 1.0), weights)
        above_low += tl.sum(amounts, axis=1)
        above_high += tl.sum(tl.where(x >= high, amounts, 0.0), axis=1)
        if tl.max(lifted) >= REACH:
            last = best
            marks = tl.sum(((lifted >= REACH) & ~(x < high)).to(tl.int32) << member, axis=1)
            scores = x * inverse_temperature
            best, best_id = _take_marked(marks, groups, words, scores, best, best_id)
            shrunk = tl.where(by_rank, 1.0, tl.exp2((last - best) * LOG2_E))
            above_low *= shrunk
            above_high *= shrunk
            if low < high:
                weights = tl.exp2(x * scale - (best * LOG2_E - LIFT_MARGIN))
                is_open = (lift(words, weights) >= REACH) & (x >= low) & (x < high)
                marks = tl.sum(is_open.to(tl.int32) << member, axis=1)
                length = _append(marks, groups * 4, target, length)
    unit = tl.exp2((best - maximum * inverse_temperature) * LOG2_E - LIFT_MARGIN)
    unit = tl.where(by_rank, 1.0, unit)
    tl.store(partial_ptr + ABOVE_LOW, tl.sum(above_low) * unit)
    tl.store(partial_ptr + ABOVE_HIGH, tl.sum(above_high) * unit)
    tl.store(partial_ptr.to(tl.pointer_type(tl.int32)) + LENGTH, length)
    return tl.where(best == start, -float("inf"), best), best_id


@triton.jit
def _load_tile(source, draw, tile, TILE: tl.constexpr):
    """Return numbers of groups of four tokens, and logits and random words, (TILE // 4, 4)."""
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    seed, position, _ = draw
    groups = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
    w0, w1, w2, w3 = draw_words(seed, position, groups)
    return groups, x, interleave(w0, w1, w2, w3)


@triton.jit
def _take_marked(marks, groups, words, scores, best, best_id):
    """Return the better of ``best`` and the best marked score with noise, and its id.

    Bit j of marks[i] stands for token 4 * groups[i] + j.
    """
    member = tl.arange(0, 4)[None, :]
    num_marked = tl.max(marks)
    while num_marked > 0:
        place = find_lowest(marks)
        is_here = member == place[:, None]
        word = tl.sum(tl.where(is_here, words, 0), axis=1)
        score = tl.sum(tl.where(is_here, scores, 0.0), axis=1) + gumbel(word)
        score = tl.where(marks > 0, score, -float("inf"))
        best, best_id = take_best(score, groups * 4 + place, best, best_id)
        marks = marks & (marks - 1)
        num_marked = tl.max(marks)
    return best, best_id


@triton.jit
def _collect(source, low, target, NEIGHBOURS: tl.constexpr, TILE: tl.constexpr):
    """List the ids of logits from ``low`` on; return NaN if a logit is NaN or inf, else -inf.

    NEIGHBOURS, 16 bytes, are one thread's.
    """
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    _, _, partial_ptr = target
    WIDTH: tl.constexpr = TILE // NEIGHBOURS
    length = 0
    sums = tl.zeros([WIDTH], tl.float32)
    member = tl.arange(0, NEIGHBOURS)[None, :]
    first_ids = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)) * NEIGHBOURS
    stride = tl.num_programs(1) * TILE
    x = load_logits(logits_ptr, edited_ptr, is_edited, first_ids[:, None] + member, vocab_size)
    for _ in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        next_ids = (first_ids + stride)[:, None] + member
        following = load_logits(logits_ptr, edited_ptr, is_edited, next_ids, vocab_size)
        sums += tl.sum(x, axis=1)
        marks = tl.sum((x >= low).to(tl.int32) << member, axis=1)
        length = _append(marks, first_ids, target, length)
        first_ids += stride
        x = following
    tl.store(partial_ptr.to(tl.pointer_type(tl.int32)) + LENGTH, length)
    # Masked logits make a sum -inf, which is no fault.
    faults = tl.maximum(sums, 0.0, propagate_nan=tl.PropagateNan.ALL)
    is_fault = tl.max((faults - faults != 0.0).to(tl.int32)) > 0
    return tl.where(is_fault, float("nan"), -float("inf"))


@triton.jit
def _append(marks, first_ids, target, length):
    """Append first_ids[i] + j for each bit j of marks[i]; return the list's length.

    As long as any thread has a bit left, every thread that has lists one id.
    """
    ids_ptr, capacity, _ = target
    num_marked = tl.sum((marks > 0).to(tl.int32))
    while num_marked > 0:
        places = length + tl.cumsum((marks > 0).to(tl.int32)) - 1
        fits = (marks > 0) & (places < capacity)
        tl.store(ids_ptr + places, first_ids + find_lowest(marks), mask=fits)
        length += num_marked
        marks = marks & (marks - 1)
        num_marked = tl.sum((marks > 0).to(tl.int32))
    return length
