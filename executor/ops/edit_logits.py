"""Changes of a row's logits before it is sampled: masks, bias and penalties.

Rows without edits are left alone: ``sample`` reads the model's logits. A row with edits gets a
float32 copy, changed in the order of RowSampling. The model's own logits stay as they are, for
log-probabilities are of those. Four launches; in each, programs of other rows end at once:

1. clear  (rows x splits)  one word for each token id, 0
2. mark   (rows)           in the words: counts of the row's history, what is allowed and masked
3. copy   (rows x splits)  each word turns into the edited logit of its id
4. bias   (rows)           biased ids once more, one by one

Nothing is kept between steps: counts are made from the row's history, in the memory of the copy
itself. A row that was retracted, or whose last tokens were taken back, needs no repair. Against
count tables kept up to date this costs one more write and read of 4 bytes a token id, in rows with
edits only, and saves a table of the vocabulary's size for each of them.

A row's *edit list* is an int32 vector on the device; the row's record holds its address::

    num_allowed (-1: no limit), num_held_back, num_biased, num_bad_words,
    allowed ids ..., held-back ids ..., biased ids ..., biases (float32 bits) ...,
    each bad word: length, ids ...
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.attention.ops.sizes import cdiv
from octavo.executor.ops.row_parameters import (
    EDIT_LIST,
    EDITS,
    FREQUENCY_PENALTY,
    LISTS,
    MIN_TOKENS,
    NUM_PROMPT_TOKENS,
    NUM_WORDS,
    PENALTIES,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
)
from octavo.executor.ops.sample import SampledRows

TILE = 2048
NUM_SPLITS = 8
LARGEST_LOGIT = tl.constexpr(1e30)  # an infinite one would have no distance to any other

# A word: flags, and below them how often the id occurs in the row's outputs.
IS_ALLOWED = tl.constexpr(1 << 30)
IS_MASKED = tl.constexpr(1 << 29)
IS_IN_PROMPT = tl.constexpr(1 << 28)
COUNT_BITS = tl.constexpr((1 << 28) - 1)
LIST_HEADER = tl.constexpr(4)


def edit_logits(logits: Tensor, batch: SampledRows, *, edited: Tensor) -> None:
    """Write the rows with edits of float32 ``edited``, (batch, vocab_size), from ``logits``.

    Row i of ``edited`` belongs to row i of ``logits``; the others are left as they are. Nothing is
    allocated and nothing is read on the host.
    """
    assert batch.history is not None, "penalties and bad words look at the history"
    size, vocab_size = logits.shape
    grid = (size, min(NUM_SPLITS, cdiv(vocab_size, TILE)))
    row_columns = (batch.rows, batch.positions, batch.parameters)
    history = (batch.history, batch.history.stride(0))
    target = (edited, edited.stride(0))
    source = (logits, logits.stride(0))
    _clear_kernel[grid](batch.rows, batch.parameters, *target, vocab_size, TILE=TILE, num_warps=4)
    _mark_kernel[(size,)](*row_columns, *history, *target, TILE=TILE, num_warps=8)
    _copy_kernel[grid](
        batch.rows, batch.parameters, *source, *target, vocab_size, TILE=TILE, num_warps=4
    )
    _bias_kernel[(size,)](*row_columns, *history, *source, *target, BLOCK=32, TILE=256, num_warps=4)


@triton.jit
def _clear_kernel(
    rows_ptr, parameters_ptr, edited_ptr, stride_edited, vocab_size, TILE: tl.constexpr
):
    """Zero the words of the rows with edits."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    if tl.load(parameters_ptr + row * NUM_WORDS + EDITS) == 0:
        return
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        ids = tile * TILE + tl.arange(0, TILE)
        tl.store(edited_ptr + index * stride_edited + ids, 0.0, mask=ids < vocab_size)


@triton.jit
def _mark_kernel(
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    history_ptr,  # (num_rows, max_model_len)
    stride_history,
    edited_ptr,
    stride_edited,
    TILE: tl.constexpr,
):
    """Count the history of rows with penalties, and flag what the edit lists name."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    record_ptr = parameters_ptr + row * NUM_WORDS
    edits = tl.load(record_ptr + EDITS)
    words_ptr = (edited_ptr + index * stride_edited).to(tl.pointer_type(tl.int32))
    history_ptr += row * stride_history
    num_tokens = tl.load(positions_ptr + index)
    num_prompt_tokens = tl.load(record_ptr + NUM_PROMPT_TOKENS)
    if edits & PENALTIES:
        for start in range(0, num_tokens, TILE):
            places = start + tl.arange(0, TILE)
            is_token = places < num_tokens
            is_output = places >= num_prompt_tokens
            ids = tl.load(history_ptr + places, mask=is_token, other=0)
            tl.atomic_add(words_ptr + ids, 1, mask=is_token & is_output, sem="relaxed")
            tl.atomic_or(words_ptr + ids, IS_IN_PROMPT, mask=is_token & ~is_output, sem="relaxed")
    if edits & LISTS:
        list_ptr = _load_list(record_ptr)
        num_allowed = tl.maximum(tl.load(list_ptr), 0)
        num_held_back = tl.load(list_ptr + 1)
        num_biased = tl.load(list_ptr + 2)
        ids_ptr = list_ptr + LIST_HEADER
        _flag(words_ptr, ids_ptr, num_allowed, IS_ALLOWED, TILE)
        num_outputs = num_tokens - num_prompt_tokens
        if num_outputs < tl.load(record_ptr + MIN_TOKENS):
            _flag(words_ptr, ids_ptr + num_allowed, num_held_back, IS_MASKED, TILE)
        word_ptr = ids_ptr + num_allowed + num_held_back + 2 * num_biased
        for _ in range(tl.load(list_ptr + 3)):
            length = tl.load(word_ptr)
            if length - 1 <= num_outputs:
                end_ptr = history_ptr + num_tokens
                if _ends_with(end_ptr, word_ptr + 1, length - 1, TILE):
                    tl.atomic_or(words_ptr + tl.load(word_ptr + length), IS_MASKED, sem="relaxed")
            word_ptr += 1 + length


@triton.jit
def _load_list(record_ptr):
    """Return the pointer to a row's edit list."""
    address = tl.load((record_ptr + EDIT_LIST).to(tl.pointer_type(tl.int64)))
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _flag(words_ptr, ids_ptr, num_ids, FLAG: tl.constexpr, TILE: tl.constexpr):
    """Set a flag in the words of a list of ids."""
    for start in range(0, num_ids, TILE):
        places = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + places, mask=places < num_ids, other=0)
        tl.atomic_or(words_ptr + ids, FLAG, mask=places < num_ids, sem="relaxed")


@triton.jit
def _ends_with(end_ptr, ids_ptr, num_ids, TILE: tl.constexpr):
    """Return True if the ``num_ids`` ids before ``end_ptr`` are those at ``ids_ptr``."""
    num_different = 0
    for start in range(0, num_ids, TILE):
        places = start + tl.arange(0, TILE)
        wanted = tl.load(ids_ptr + places, mask=places < num_ids, other=0)
        found = tl.load(end_ptr - num_ids + places, mask=places < num_ids, other=0)
        num_different += tl.sum((wanted != found).to(tl.int32))
    return num_different == 0


@triton.jit
def _copy_kernel(
    rows_ptr,
    parameters_ptr,
    logits_ptr,  # (batch, vocab_size)
    stride_logits,
    edited_ptr,  # (batch, vocab_size) in: words, out: float32
    stride_edited,
    vocab_size,
    TILE: tl.constexpr,
):
    """Replace each word of the rows with edits by the logit of its id, masked or penalised."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    record_ptr = parameters_ptr + row * NUM_WORDS
    edits = tl.load(record_ptr + EDITS)
    if edits == 0:
        return
    needed = 0  # what a word must have not to be masked
    if edits & LISTS:
        num_allowed = tl.load(_load_list(record_ptr))
        needed = tl.where(num_allowed >= 0, IS_ALLOWED, 0)
    penalties = _load_penalties(record_ptr)
    edited_ptr += index * stride_edited
    for tile in range(tl.program_id(1), tl.cdiv(vocab_size, TILE), tl.num_programs(1)):
        ids = tile * TILE + tl.arange(0, TILE)
        is_id = ids < vocab_size
        x = tl.load(logits_ptr + index * stride_logits + ids, mask=is_id, other=0.0)
        x = x.to(tl.float32)
        words = tl.load(edited_ptr.to(tl.pointer_type(tl.int32)) + ids, mask=is_id, other=0)
        is_kept = (words & (needed | IS_MASKED)) == needed
        # A logit that is no number stays one: masking it would hide that the model failed.
        masked = tl.where(x < float("inf"), -float("inf"), float("nan"))
        values = tl.where(is_kept, _penalise(x, words, penalties), masked)
        tl.store(edited_ptr + ids, values, mask=is_id)


@triton.jit
def _load_penalties(record_ptr):
    """Return (presence, frequency, repetition); without effect unless the row has them."""
    presence = tl.load(record_ptr + PRESENCE_PENALTY).to(tl.float32, bitcast=True)
    frequency = tl.load(record_ptr + FREQUENCY_PENALTY).to(tl.float32, bitcast=True)
    repetition = tl.load(record_ptr + REPETITION_PENALTY).to(tl.float32, bitcast=True)
    return presence, frequency, repetition


@triton.jit
def _penalise(x, words, penalties):
    """Return logits less the penalties for what their words counted."""
    presence, frequency, repetition = penalties
    counts = words & COUNT_BITS
    is_seen = (words & (COUNT_BITS | IS_IN_PROMPT)) != 0
    x = tl.where(is_seen, tl.where(x > 0, x / repetition, x * repetition), x)
    x -= counts.to(tl.float32) * frequency
    x -= tl.where(counts > 0, presence, 0.0)
    return tl.where(x > LARGEST_LOGIT, LARGEST_LOGIT, x)


@triton.jit
def _bias_kernel(
    rows_ptr,
    positions_ptr,
    parameters_ptr,
    history_ptr,
    stride_history,
    logits_ptr,
    stride_logits,
    edited_ptr,
    stride_edited,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the biased ids again: bias comes before penalties, whose counts copy has consumed."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    record_ptr = parameters_ptr + row * NUM_WORDS
    edits = tl.load(record_ptr + EDITS)
    if edits & LISTS == 0:
        return
    list_ptr = _load_list(record_ptr)
    num_biased = tl.load(list_ptr + 2)
    ids_ptr = list_ptr + LIST_HEADER + tl.maximum(tl.load(list_ptr), 0) + tl.load(list_ptr + 1)
    num_tokens = tl.where((edits & PENALTIES) != 0, tl.load(positions_ptr + index), 0)
    num_prompt_tokens = tl.load(record_ptr + NUM_PROMPT_TOKENS)
    penalties = _load_penalties(record_ptr)
    for start in range(0, num_biased, BLOCK):
        places = start + tl.arange(0, BLOCK)
        is_biased = places < num_biased
        ids = tl.load(ids_ptr + places, mask=is_biased, other=0)
        biases = tl.load(ids_ptr + num_biased + places, mask=is_biased, other=0)
        words = tl.zeros([BLOCK], tl.int32)
        for first in range(0, num_tokens, TILE):
            columns = first + tl.arange(0, TILE)
            found = tl.load(
                history_ptr + row * stride_history + columns, mask=columns < num_tokens, other=-1
            )
            weights = tl.where(columns < num_prompt_tokens, 0, 1)
            is_equal = found[None, :] == ids[:, None]
            words += tl.sum(tl.where(is_equal, weights[None, :], 0), axis=1)
            is_prompt = is_equal & (columns < num_prompt_tokens)[None, :]
            words |= tl.max(tl.where(is_prompt, IS_IN_PROMPT, 0), axis=1)
        x = tl.load(logits_ptr + index * stride_logits + ids, mask=is_biased, other=0.0)
        x = x.to(tl.float32) + biases.to(tl.float32, bitcast=True)
        targets_ptr = edited_ptr + index * stride_edited + ids
        old = tl.load(targets_ptr, mask=is_biased, other=0.0)
        values = tl.where(old > -float("inf"), _penalise(x, words, penalties), old)
        tl.store(targets_ptr, values, mask=is_biased)
