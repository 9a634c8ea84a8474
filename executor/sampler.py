"""From logits to token ids: see ``RowSampling`` for the order of effects.

A token depends on its row's logits, parameters, history and seed; not on the other rows.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.filters import filter_scores
from octavo.executor.logit_edits import edit_logits
from octavo.executor.logprobs import find_logprobs
from octavo.executor.noise import add_gumbel_noise
from octavo.executor.rows import Rows
from octavo.executor.step import EXHAUSTED, Int32Array, PositionLogprobs

NON_FINITE = "the model's logits are not finite (NaN, +inf or all -inf)"


@dataclass(frozen=True, slots=True)
class Samples:
    """One token per sampled row; keys are indices into the sampled rows."""

    token_ids: Int32Array
    """Where a row has an error, its id means nothing but is within the vocabulary."""
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def sample(logits: Tensor, rows: Rows, row_ids: Int32Array) -> Samples:
    """Choose the next token of each row from its ``logits``, (len(row_ids), vocab_size)."""
    choices, maxima = _find_maxima(logits.float())
    is_finite = np.isfinite(maxima)
    errors = {int(index): NON_FINITE for index in np.flatnonzero(~is_finite)}
    special = np.flatnonzero(is_finite & ~rows.takes_maximum[row_ids])
    if len(special):
        scores = logits[torch.from_numpy(special)].float()
        edit_logits(scores, rows, row_ids[special])
        is_exhausted = (scores.amax(dim=1) == -torch.inf).numpy()
        errors |= {int(index): EXHAUSTED for index in special[is_exhausted]}
        choices[special] = _choose(scores, rows, row_ids[special])
    return Samples(choices, _report(logits, rows, row_ids, choices), errors)


def _find_maxima(scores: Tensor) -> tuple[Int32Array, NDArray[np.float32]]:
    """Return index and value of each row's maximum; a NaN is its row's maximum."""
    values: NDArray[np.float32] = scores.numpy()
    indices = values.argmax(axis=1)  # torch's takes twenty times as long
    return indices.astype(np.int32), values[np.arange(len(values)), indices]


def _choose(scores: Tensor, rows: Rows, row_ids: Int32Array) -> Int32Array:
    """Take the maximum of greedy rows, and that of the noisy filtered scores of the others."""
    drawn = np.flatnonzero(rows.sampling.temperature[row_ids] > 0)
    if len(drawn):
        picked, drawn_ids = torch.from_numpy(drawn), row_ids[drawn]
        scores[picked] = _add_noise(scores[picked], rows, drawn_ids)
    return _find_maxima(scores)[0]


def _add_noise(scores: Tensor, rows: Rows, row_ids: Int32Array) -> Tensor:
    columns = rows.sampling
    temperature = torch.from_numpy(columns.temperature[row_ids]).unsqueeze(1)
    # Differences first: a tiny temperature may send others to -inf, but never the maximum.
    scores = (scores - scores.amax(dim=1, keepdim=True)) / temperature
    filter_scores(
        scores,
        top_k=columns.top_k[row_ids],
        top_p=columns.top_p[row_ids],
        min_p=columns.min_p[row_ids],
    )
    add_gumbel_noise(scores, columns.seed[row_ids], rows.num_tokens[row_ids])
    return scores


def _report(
    logits: Tensor, rows: Rows, row_ids: Int32Array, token_ids: Int32Array
) -> dict[int, PositionLogprobs]:
    wanted = {
        index: count
        for index, row in enumerate(row_ids)
        if (count := rows.num_logprobs[row]) is not None
    }
    if not wanted:
        return {}
    which = list(wanted)
    found = find_logprobs(logits[which], token_ids[which], list(wanted.values()))
    return dict(zip(which, found, strict=True))
