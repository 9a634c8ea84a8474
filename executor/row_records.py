"""What a NewRow tells the sampling kernels, as words: the row's record and its edit list."""

import numpy as np
from numpy.typing import NDArray

from octavo.executor.ops.row_parameters import LISTS, PENALTIES, ROW_PARAMETERS
from octavo.executor.rows import EditedIds, has_penalty
from octavo.executor.step import Int32Array, NewRow, RowSampling

LARGEST_INT = np.iinfo(np.int32).max


def pack_edit_list(sampling: RowSampling) -> Int32Array | None:
    """Return the edit list that ops/edit_logits.py describes; None if no logit changes by id."""
    edits = EditedIds.find(sampling)
    if edits is None:
        return None
    allowed = np.empty(0, dtype=np.int64) if edits.allowed is None else edits.allowed
    num_allowed = -1 if edits.allowed is None else len(allowed)
    header = np.array([num_allowed, len(edits.held_back), len(edits.biased), len(edits.bad_words)])
    words = [part for word in edits.bad_words for part in (np.array([len(word)]), word)]
    parts = (header, allowed, edits.held_back, edits.biased, edits.biases.view(np.int32), *words)
    return np.concatenate(parts, dtype=np.int32, casting="same_kind")


def pack_record(new: NewRow, *, edit_list_address: int | None) -> NDArray[np.int32]:
    """Return the row's record, (NUM_WORDS,); the address is that of its edit list on the device."""
    sampling = new.sampling
    record = np.zeros(1, dtype=ROW_PARAMETERS)
    record["temperature"] = sampling.temperature
    record["top_k"] = min(sampling.top_k, LARGEST_INT)
    record["top_p"] = sampling.top_p
    record["min_p"] = sampling.min_p
    record["seed"] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
    record["presence_penalty"] = sampling.presence_penalty
    record["frequency_penalty"] = sampling.frequency_penalty
    record["repetition_penalty"] = sampling.repetition_penalty
    record["min_tokens"] = min(sampling.min_tokens, LARGEST_INT)
    record["num_prompt_tokens"] = new.num_prompt_tokens
    record["edits"] = PENALTIES.value * has_penalty(sampling) + LISTS.value * (
        edit_list_address is not None
    )
    record["edit_list"] = edit_list_address or 0
    return record.view(np.int32)
