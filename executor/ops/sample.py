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
    bracket_kernel,
    compute_min_p_threshold,
    summarise_kernel,
)
from octavo.executor.ops.choose import choose_kernel
from octavo.executor.ops.logits import (
    LOG2_E,
    MAX_SPLITS,
    PARTIAL_WORDS,
    load_logits,
    take_best,
)
from octavo.executor.ops.noise import cannot_reach, draw_words, gumbel, interleave, load_seed
from octavo.executor.ops.row_parameters import load_filter

LIST_CAPACITY = 8192
SAMPLE, SAMPLE_WARPS = 4096, 8
SUMMARY_TILE, SUMMARY_WARPS = 2048, 4
SCAN_TILE, SCAN_WARPS = 256, 1
CHOICE_TILE, CHOICE_WARPS = 1024, 4
NUM_PROGRAMS = 4096
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits at the end of a float32 that are 0 for every value of the type."""


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Results and scratch of ``sample`` for batches up to a size; addresses are stable."""

    token_ids: Tensor  # (max_batch,) int32
    faults: Tensor  # (max_batch,) int32: 0, NON_FINITE or EXHAUSTED
    partials: Tensor  # (max_batch, MAX_SPLITS, PARTIAL_WORDS) float32
    brackets: Tensor  # (max_batch, BRACKET_WORDS) float32
    list_counts: Tensor  # (max_batch,) int32
    list_values: Tensor  # (max_batch, list_capacity) float32
    list_ids: Tensor  # (max_batch, list_capacity) int32

    @classmethod
    def create(
        cls, max_batch: int, device: torch.device | str, *, list_capacity: int = LIST_CAPACITY
    ) -> "SampleWorkspace":
        """Allocate; 68 KB a row of the batch."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((max_batch, *shape), dtype=dtype, device=device)

        return cls(
            token_ids=empty(dtype=torch.int32),
            faults=empty(dtype=torch.int32),
            partials=empty(MAX_SPLITS.value, PARTIAL_WORDS.value, dtype=torch.float32),
            brackets=empty(BRACKET_WORDS.value, dtype=torch.float32),
            list_counts=empty(dtype=torch.int32),
            list_values=empty(list_capacity, dtype=torch.float32),
            list_ids=empty(list_capacity, dtype=torch.int32),
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

    ``edited`` is the float32 copy that ``apply_edits`` made of the rows that have edits. A row's
    fault is NON_FINITE when a logit is NaN or inf or all are -inf, EXHAUSTED when its edits mask
    every token; its token is 0 then. Nothing is allocated.
    """
    size, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"logits of a row are {logits.stride(1)} apart"
    num_splits = min(MAX_SPLITS.value, triton.cdiv(NUM_PROGRAMS, size))
    history = batch.history
    strides = (logits.stride(0), edited.stride(0) if edited is not None else 0)
    list_capacity = workspace.list_values.shape[1]
    summarise_kernel[(size, num_splits)](
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
        workspace.list_counts,
        vocab_size,
        *strides,
        num_splits,
        SAMPLE=SAMPLE,
        LIST_CAPACITY=list_capacity,
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
        workspace.list_counts,
        workspace.list_values,
        workspace.list_ids,
        vocab_size,
        *strides,
        LIST_CAPACITY=list_capacity,
        TILE=SCAN_TILE,
        num_warps=SCAN_WARPS,
    )
    choose_kernel[(size,)](
        logits,
        edited,
        batch.rows,
        batch.positions,
        batch.parameters,
        workspace.partials,
        workspace.brackets,
        workspace.list_counts,
        workspace.list_values,
        workspace.list_ids,
        workspace.token_ids,
        workspace.faults,
        history,
        vocab_size,
        *strides,
        num_splits,
        history.shape[1] if history is not None else 0,
        KEY_SHIFT=KEY_SHIFTS[logits.dtype],
        LIST_CAPACITY=list_capacity,
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
    list_counts_ptr,
    list_values_ptr,
    list_ids_ptr,
    vocab_size,
    stride_logits,
    stride_edited,
    LIST_CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the best score of each split, and put the logits inside the bracket into the list."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    temperature, _, _, min_p, is_filtered, is_edited = load_filter(parameters_ptr, row, vocab_size)
    if edited_ptr is None:
        edited_row_ptr: tl.constexpr = None
    else:
        edited_row_ptr = edited_ptr + index * stride_edited
    source = (logits_ptr + index * stride_logits, edited_row_ptr, is_edited, vocab_size)
    count_above, mass_above = 0, 0.0
    if temperature == 0.0:
        best, best_id = _scan_maximum(source, TILE)
    else:
        drawn_from = -float("inf")
        if is_filtered:
            low = tl.load(brackets_ptr + index * BRACKET_WORDS)
            high = tl.load(brackets_ptr + index * BRACKET_WORDS + 1)
            maximum = tl.load(brackets_ptr + index * BRACKET_WORDS + 2)
            drawn_from = tl.maximum(high, compute_min_p_threshold(temperature, min_p, maximum))
            if low < high:
                bracket = (low, high, maximum, LOG2_E / temperature)
                place = index * LIST_CAPACITY
                target = (list_counts_ptr + index, list_values_ptr + place, list_ids_ptr + place)
                count_above, mass_above = _collect(source, bracket, target, LIST_CAPACITY, TILE)
        best, best_id = -float("inf"), 0
        if drawn_from < float("inf"):
            draw = (
                load_seed(parameters_ptr, row),
                tl.load(positions_ptr + index),
                1.0 / temperature,
            )
            best, best_id = _scan_scores(source, drawn_from, draw, TILE)
    partial_ptr = partials_ptr + (index * MAX_SPLITS + tl.program_id(1)) * PARTIAL_WORDS
    tl.store(partial_ptr, best)
    tl.store(partial_ptr.to(tl.pointer_type(tl.int32)) + 1, best_id)
    tl.store(partial_ptr.to(tl.pointer_type(tl.int32)) + 2, count_above)
    tl.store(partial_ptr + 3, mass_above)


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
    best, best_id = -float("inf"), 0
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        groups = tile * (TILE // 4) + tl.arange(0, TILE // 4)
        ids = groups[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        if drawn_from > -float("inf"):
            x = tl.where(x < drawn_from, -float("inf"), x)
        w0, w1, w2, w3 = draw_words(seed, position, groups)
        words = interleave(w0, w1, w2, w3)
        scores = x * inverse_temperature
        if tl.min(cannot_reach(words, scores - best).to(tl.int32)) == 0:
            best, best_id = take_best(scores + gumbel(words), ids, best, best_id)
    return best, best_id


@triton.jit
def _collect(source, bracket, target, LIST_CAPACITY: tl.constexpr, TILE: tl.constexpr):
    """Append the logits inside the bracket to the list; return count and mass of those above."""
    logits_ptr, edited_ptr, is_edited, vocab_size = source
    low, high, maximum, scale = bracket
    count_ptr, values_ptr, ids_ptr = target
    counts = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_logits(logits_ptr, edited_ptr, is_edited, ids, vocab_size)
        is_inside = (x >= low) & (x < high)
        if tl.max(is_inside.to(tl.int32)) > 0:
            places = tl.atomic_add(count_ptr + ids * 0, 1, mask=is_inside, sem="relaxed")
            fits = is_inside & (places < LIST_CAPACITY)
            tl.store(values_ptr + places, x, mask=fits)
            tl.store(ids_ptr + places, ids, mask=fits)
        if high < float("inf"):
            is_above = x >= high
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp2((x - maximum) * scale), 0.0)
    return tl.sum(counts), tl.sum(masses)
