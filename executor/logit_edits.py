"""Changes of the logits that come before temperature: masks, bias and penalties.

All rows of a step are edited together; what a row asks for touches its own scores alone.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.rows import EditedIds, Rows
from octavo.executor.step import Int32Array

LARGEST_SCORE = 1e30
"""No score is left above this: one of +inf would have no distance to any other."""


def edit_logits(scores: Tensor, rows: Rows, row_ids: Int32Array) -> None:
    """Apply all that the rows ask for to float32 ``scores``, (len(row_ids), vocab_size)."""
    edits = {index: edit for index, row in enumerate(row_ids) if (edit := rows.edits[row])}
    if edits:
        _keep_allowed(scores, edits)
        banned = ((index, _find_banned(rows, row_ids[index], edits[index])) for index in edits)
        scores.view(-1)[_find_places(scores, banned)] = -torch.inf
        _add_biases(scores, edits)
    _apply_penalties(scores, rows, row_ids)
    scores.clamp_(max=LARGEST_SCORE)


def _keep_allowed(scores: Tensor, edits: dict[int, EditedIds]) -> None:
    allowed = {index: edit.allowed for index, edit in edits.items() if edit.allowed is not None}
    if allowed:
        places = _find_places(scores, allowed.items())
        kept = scores.view(-1)[places]
        scores[list(allowed)] = -torch.inf
        scores.view(-1)[places] = kept


def _find_banned(rows: Rows, row: int, edit: EditedIds) -> NDArray[np.int64]:
    """Return the ids that must not come next: held back, or the end of a bad word."""
    outputs = rows.token_ids[row, rows.num_prompt_tokens[row] : rows.num_tokens[row]]
    ends = [word[-1] for word in edit.bad_words if _ends_with(outputs, word[:-1])]
    banned = np.array(ends, dtype=np.int64)
    if len(outputs) >= edit.min_tokens:
        return banned
    return np.concatenate((banned, edit.held_back))


def _ends_with(token_ids: Int32Array, suffix: Int32Array) -> bool:
    return np.array_equal(token_ids[len(token_ids) - len(suffix) :], suffix)


def _add_biases(scores: Tensor, edits: dict[int, EditedIds]) -> None:
    places = _find_places(scores, ((index, edit.biased) for index, edit in edits.items()))
    biases = torch.from_numpy(np.concatenate([edit.biases for edit in edits.values()]))
    scores.view(-1).index_add_(0, places, biases)


def _find_places(scores: Tensor, pairs: Iterable[tuple[int, NDArray[np.int64]]]) -> Tensor:
    """Return indices into the flattened scores of all (index of a row, token ids)."""
    width = scores.shape[1]
    return torch.from_numpy(np.concatenate([index * width + ids for index, ids in pairs]))


def _apply_penalties(scores: Tensor, rows: Rows, row_ids: Int32Array) -> None:
    """Subtract presence and frequency of outputs; divide positive logits of all seen ids by
    ``repetition_penalty`` and multiply negative ones, as transformers does.
    """
    columns = rows.sampling
    repetition = columns.repetition_penalty[row_ids]
    which = np.flatnonzero(repetition != 1)
    if len(which):
        seen = _count_tokens(scores, rows, row_ids[which], with_prompt=True) > 0
        old, factor = scores[which], torch.from_numpy(repetition[which]).unsqueeze(1)
        scores[which] = torch.where(seen, torch.where(old > 0, old / factor, old * factor), old)
    presence, frequency = columns.presence_penalty[row_ids], columns.frequency_penalty[row_ids]
    which = np.flatnonzero((presence != 0) | (frequency != 0))
    if len(which):
        counts = _count_tokens(scores, rows, row_ids[which], with_prompt=False)
        scores[which] -= counts * torch.from_numpy(frequency[which]).unsqueeze(1)
        scores[which] -= (counts > 0) * torch.from_numpy(presence[which]).unsqueeze(1)


def _count_tokens(scores: Tensor, rows: Rows, row_ids: Int32Array, *, with_prompt: bool) -> Tensor:
    """Count how often each id occurs in the rows' outputs, or in prompt and outputs."""
    lengths = rows.num_tokens[row_ids]
    columns = np.arange(lengths.max())
    is_counted = columns < lengths[:, None]
    if not with_prompt:
        is_counted &= columns >= rows.num_prompt_tokens[row_ids][:, None]
    ids = torch.from_numpy(rows.token_ids[row_ids, : lengths.max()].astype(np.int64))
    weights = torch.from_numpy(is_counted.astype(np.float32))
    return scores.new_zeros(len(row_ids), scores.shape[1]).scatter_add_(1, ids, weights)
