"""Sampling without sorting: logits of a batch -> token ids, four launches for every mix of rows.

Order of effects as in RowSampling: temperature, top-k, top-p over what top-k kept, min-p, then
the argmax of logits / temperature + noise (executor/ops/noise.py). Temperature 0 is the plain
argmax. A filter keeps the logits at or above a threshold, so also all that tie with the last one
kept: top-k may keep more than k tokens. Of equal scores the lowest id wins.

1. summarise  (rows x splits)  maximum and sum of exponentials    } only rows with a filter;
2. bracket    (rows)           two values around the threshold,   } the others' programs end
                               guessed from a sample of the row   } at once
3. scan       (rows x splits)  one pass over every row:

       likely |-- at or above high --|----- bracket -----|-- below low --| unlikely
                 noise and argmax       into the list        dropped

4. choose     (rows)           exact threshold inside the list, by bisection; noise and argmax
                               of what it keeps; the best of all splits is written

A row without filter is all above high. When ``choose`` finds that the guess was wrong (the
threshold is not in the bracket, or the list was too short) it takes the whole row for the list:
slower, the same result. What a row gets depends on nothing but the row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.ops.bracket import (
    BRACKET_WORDS,
    HIGH,
    KEEP_FROM,
    LOW,
    TOTAL_MAXIMUM,
    bracket_kernel,
    summarise_kernel,
)
from octavo.executor.ops.choose import choose_kernel
from octavo.executor.ops.logits import (
    COUNT_ABOVE,
    LENGTH,
    LOG2_E,
    LOWEST,
    MASS_ABOVE,
    MAX_SPLITS,
    MAXIMUM,
    PARTIAL_WORDS,
    SCORE,
    SCORE_ID,
    load_logits,
    take_best,
)
from octavo.executor.ops.noise import (
    LOWEST_NOISE,
    REACH,
    draw_words,
    gumbel,
    interleave,
    lift,
    load_seed,
)
from octavo.executor.ops.row_parameters import load_filter

SAMPLE, SAMPLE_WARPS = 8192, 8
MAX_LISTED = 4096
"""Logits in a bracket from which on it gets an upper end."""
LIST_CAPACITY = 16_384
"""Logits that can be listed for each row of a full batch; a smaller batch has room for more."""
SUMMARY_TILE, SUMMARY_WARPS = 2048, 4
SCAN_TILE, SCAN_WARPS, SCAN_REGISTERS = 512, 1, 128
CHOICE_TILE, CHOICE_WARPS = 1024, 8
NUM_PROGRAMS, NUM_SUMMARY_PROGRAMS = 2048, 1024
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits at the end of a float32 that are 0 for every value of the type."""


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Results and scratch of ``sample`` for batches up to a size; addresses are stable."""

    token_ids: Tensor  # (max_batch,) int32
    faults: Tensor  # (max_batch,) int32: 0, NON_FINITE or EXHAUSTED
    partials: Tensor  # (max_batch, MAX_SPLITS, PARTIAL_WORDS) float32
    brackets: Tensor  # (max_batch, BRACKET_WORDS) float32
    list_values: Tensor  # (max_batch * list_capacity,) float32
    list_ids: Tensor  # (max_batch * list_capacity,) int32

    @classmethod
    def create(
        cls, max_batch: int, device: torch.device | str, *, list_capacity: int = LIST_CAPACITY
    ) -> "SampleWorkspace":
        """Allocate; 140 KB a row of the batch."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            token_ids=empty(max_batch, dtype=torch.int32),
            faults=empty(max_batch, dtype=torch.int32),
            partials=empty(max_batch, MAX_SPLITS.value, PARTIAL_WORDS.value),
            brackets=empty(max_batch, BRACKET_WORDS.value),
            list_values=empty(max_batch * list_capacity),
            list_ids=empty(max_batch * list_capacity, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Which rows a batch of logits belongs to; row i of the logits is ``rows[i]``'s."""

    rows: Tensor  # (batch,) int32, negative: padding, nothing is written
    positions: Tensor  # (batch,) int32, of the token to be sampled
    parameters: Tensor  # (num_rows, NUM_WORDS) int32, see executor/ops/row_parameters.py
    history: Tensor | None = None  # (num_rows, max_model_len) int32: gets the token at its position


def sample(
    logits: Tensor,
    batch: SampledRows,
    *,
    workspace: SampleWorkspace,
    edited: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token a row; return views (batch,) of the workspace's token ids and faults.

    ``edited`` is the float32 copy that ``edit_logits`` made of the rows that have edits. A row's
    fault is NON_FINITE when a logit is NaN or inf or all are -inf, EXHAUSTED when its edits mask
    every token; its token is 0 then. Nothing is allocated.
    """
    size, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of a row are {logits.stride(1)} apart"
    num_splits = min(
        MAX_SPLITS.value, triton.cdiv(NUM_PROGRAMS, size), triton.cdiv(vocab_size, SCAN_TILE)
    )
    num_summaries = min(MAX_SPLITS.value, triton.cdiv(NUM_SUMMARY_PROGRAMS, size))
    list_capacity = workspace.list_values.numel() // (size * num_splits)
    history = batch.history
    strides = (logits.stride(0), edited.stride(0) if edited is not None else 0)
    summarise_kernel[(size, num_summaries)](
        logits,
        edited,
        batch.rows,
        batch.parameters,
        workspace.partials,
        vocab_size,
        *strides,
        TILE=SUMMARY_TILE,
        num_warps=SUMMARY_WARPS,
    )
    bracket_kernel[(size,)](
        logits,
        edited,
        batch.rows,
        batch.parameters,
        workspace.partials,
        workspace.brackets,
        vocab_size,
        *strides,
        num_summaries,
        SAMPLE=SAMPLE,
        MAX_LISTED=MAX_LISTED,
        num_warps=SAMPLE_WARPS,
    )
    _scan_kernel[(size, num_splits)](
        logits,
        edited,
        batch.rows,
        batch.positions,
        batch.parameters,
        workspace.partials,
        workspace.brackets,
        workspace.list_values,
        workspace.list_ids,
        vocab_size,
        *strides,
        list_capacity,
        TILE=SCAN_TILE,
        num_warps=SCAN_WARPS,
        maxnreg=SCAN_REGISTERS,
    )
    choose_kernel[(size,)](
        logits,
        edited,
        batch.rows,
        batch.positions,
        batch.parameters,
        workspace.partials,
        workspace.brackets,
        workspace.list_values,
        workspace.list_ids,
        workspace.token_ids,
        workspace.faults,
        history,
        vocab_size,
        *strides,
        num_splits,
        list_capacity,
        history.shape[1] if history is not None else 0,
        KEY_SHIFT=KEY_SHIFTS[logits.dtype],
        SPLITS_PAD=triton.next_power_of_2(num_splits),
        TILE=CHOICE_TILE,
        num_warps=CHOICE_WARPS,
    )
    return workspace.token_ids[:size], workspace.faults[:size]


@triton.jit
def _scan_kernel(
    logits_ptr,  # (batch, vocab_size)
    edited_ptr,  # like logits, float32, or None
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    partials_ptr,
    brackets_ptr,
    list_values_ptr,  # (batch, num_splits, list_capacity)
    list_ids_ptr,
    vocab_size,
    stride_logits,
    stride_edited,
    list_capacity,
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
        drawn_from = -float("inf")
        if is_filtered:
            bracket_ptr = brackets_ptr + index * BRACKET_WORDS
            low, high = tl.load(bracket_ptr + LOW), tl.load(bracket_ptr + HIGH)
            drawn_from = tl.maximum(high, tl.load(bracket_ptr + KEEP_FROM))
            if low < high:
                scale = LOG2_E / temperature
                bracket = (low, high, tl.load(bracket_ptr + TOTAL_MAXIMUM), scale)
                start = (index * tl.num_programs(1) + split) * list_capacity
                target = (list_values_ptr + start, list_ids_ptr + start, list_capacity)
                _collect(source, bracket, target, partial_ptr, TILE)
        best, best_id = -float("inf"), 0
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

    The noise's two logarithms are taken only for tiles in which some word may beat the best so far:
    about one in each doubling of the tiles seen.
    """
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    seed, position, inverse_temperature = draw
    # One logit from ``drawn_from`` on is kept, in this split or another: no score below counts.
    best = tl.maximum(drawn_from * inverse_temperature + LOWEST_NOISE, LOWEST)
    best_id = -1
    sums = tl.zeros([TILE // 4], tl.float32)  # NaN where a logit is
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        groups = tile * (TILE // 4) + tl.arange(0, TILE // 4)
        ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        w0, w1, w2, w3 = draw_words(seed, position, groups)
        words = interleave(w0, w1, w2, w3)
        lifted = lift(words, x * inverse_temperature - best)
        sums += tl.sum(lifted, axis=1)
        if tl.max(lifted) >= REACH:
            scores = x * inverse_temperature + gumbel(words)
            scores = tl.where(x < drawn_from, -float("inf"), scores)
            best, best_id = take_best(scores, ids, best, best_id)
    best = tl.where(best_id < 0, -float("inf"), best)
    has_nan = tl.max((sums != sums).to(tl.int32)) > 0
    return tl.where(has_nan, float("nan"), best), best_id


@triton.jit
def _collect(source, bracket, target, partial_ptr, TILE: tl.constexpr):
    """List the logits inside the bracket; write count and mass of those above, and the maximum."""
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    low, high, total_maximum, scale = bracket
    values_ptr, ids_ptr, capacity = target
    length, maximum = 0, -float("inf")
    count_above, mass_above = 0, 0.0
    # A column is 8 neighbours, 16 bytes of a thread's own: places are counted without shuffles.
    COLUMNS: tl.constexpr = TILE // 8
    sums = tl.zeros([COLUMNS], tl.float32)  # NaN where a logit is
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        ids = columns[None, :] * 8 + tl.arange(0, 8)[:, None]
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        sums += tl.sum(x, axis=0)
        tile_maximum = tl.max(x)
        if tile_maximum >= low:
            maximum = tl.maximum(maximum, tile_maximum)
            is_inside = (x >= low) & (x < high)
            marks = is_inside.to(tl.int32)
            column_counts = tl.sum(marks, axis=0)
            column_ends = tl.cumsum(column_counts)
            places = length + (column_ends - column_counts)[None, :] + tl.cumsum(marks, axis=0) - 1
            fits = is_inside & (places < capacity)
            tl.store(values_ptr + places, x, mask=fits)
            tl.store(ids_ptr + places, ids, mask=fits)
            length += tl.sum(column_counts)
            if tile_maximum >= high:
                is_above = x >= high
                count_above += tl.sum(is_above.to(tl.int32))
                masses = tl.where(is_above, tl.exp2((x - total_maximum) * scale), 0.0)
                mass_above += tl.sum(masses)
    has_nan = tl.max((sums != sums).to(tl.int32)) > 0
    words_ptr = partial_ptr.to(tl.pointer_type(tl.int32))
    tl.store(words_ptr + COUNT_ABOVE, count_above)
    tl.store(partial_ptr + MASS_ABOVE, mass_above)
    tl.store(partial_ptr + MAXIMUM, tl.where(has_nan, float("nan"), maximum))
    tl.store(words_ptr + LENGTH, length)
