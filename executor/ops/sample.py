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
                 noise and argmax     noise; into the list     dropped
                                      if it may win

4. choose     (rows)           the best of all splits; any in the list that beats it is kept if the
                               row has little enough above it

A row without filter is all above high. Where the bracket holds few logits, as in a language model's
usual rows, it has no upper end: ``scan`` lists all of it without noise, and ``choose`` finds the
exact threshold in the list by bisection, adds the noise and takes the argmax of what is kept.

When ``choose`` finds that the guess was wrong (the threshold is not in the bracket, or the list was
too short) it takes the whole row for the list: slower, the same result. What a row gets depends on
nothing but the row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.ops.sizes import cdiv
from octavo.executor.ops.bracket import BRACKET_WORDS, bracket_kernel, summarise_kernel
from octavo.executor.ops.choose import choose_kernel
from octavo.executor.ops.logits import MAX_SPLITS, PARTIAL_WORDS
from octavo.executor.ops.scan import scan_kernel

SAMPLE, SAMPLE_WARPS = 8192, 8
MAX_LISTED = 4096
"""Logits in a bracket from which on it gets an upper end."""
LIST_CAPACITY = 16_384
"""Logits that can be listed for each row of a full batch; a smaller batch has room for more."""
SUMMARY_TILE, SUMMARY_WARPS = 2048, 4
SCAN_TILE, SCAN_WARPS = 256, 1
CHOICE_TILE, CHOICE_WARPS = 1024, 8
WIDE_TILE = 8192
"""Logits that ``choose`` reads at once to measure how much of a row is above one."""
SCAN_REGISTERS = 64
"""With as many 32 programs fit an SM, so NUM_PROGRAMS run at once."""
NUM_PROGRAMS, NUM_SUMMARY_PROGRAMS = 4096, 1024
VARIED_BATCHES = (1, 64, 256)
"""Batch sizes that need different variants of the kernels; any other shares one of these."""
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Bits at the end of a float32 that are 0 for every value of the type."""


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Results and scratch of ``sample`` for batches up to a size; addresses are stable."""

    token_ids: Tensor  # (max_batch,) int32
    faults: Tensor  # (max_batch,) int32: 0, NON_FINITE or EXHAUSTED
    partials: Tensor  # (max_batch, MAX_SPLITS, PARTIAL_WORDS) float32
    brackets: Tensor  # (max_batch, BRACKET_WORDS) float32
    list_ids: Tensor  # (max_batch * list_capacity,) int32

    @classmethod
    def create(
        cls, max_batch: int, device: torch.device | str, *, list_capacity: int = LIST_CAPACITY
    ) -> "SampleWorkspace":
        """Allocate; 70 KB a row of the batch."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            token_ids=empty(max_batch, dtype=torch.int32),
            faults=empty(max_batch, dtype=torch.int32),
            partials=empty(max_batch, MAX_SPLITS.value, PARTIAL_WORDS.value),
            brackets=empty(max_batch, BRACKET_WORDS.value),
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
    num_splits = _count_splits(NUM_PROGRAMS, size, cdiv(vocab_size, SCAN_TILE))
    num_summaries = _count_splits(NUM_SUMMARY_PROGRAMS, size, cdiv(vocab_size, SUMMARY_TILE))
    list_capacity = workspace.list_ids.numel() // (size * num_splits)
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
    scan_kernel[(size, num_splits)](
        logits,
        edited,
        batch.rows,
        batch.positions,
        batch.parameters,
        workspace.partials,
        workspace.brackets,
        workspace.list_ids,
        vocab_size,
        *strides,
        list_capacity,
        NEIGHBOURS=16 // logits.element_size(),
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
        SPLITS_PAD=_pad_splits(num_splits),
        TILE=CHOICE_TILE,
        WIDE_TILE=WIDE_TILE,
        num_warps=CHOICE_WARPS,
    )
    return workspace.token_ids[:size], workspace.faults[:size]


def _count_splits(num_programs: int, batch_size: int, num_tiles: int) -> int:
    return min(int(MAX_SPLITS.value), -(-num_programs // batch_size), num_tiles)


def _pad_splits(num_splits: int) -> int:
    """Round so that few variants of a kernel are compiled; see ``VARIED_BATCHES``."""
    return next(pad for pad in (16, 64, int(MAX_SPLITS.value)) if num_splits <= pad)
