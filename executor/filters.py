"""Top-k, top-p and min-p as one lowest score per row: what lies below is masked, ties stay."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.step import Int32Array

NUM_CANDIDATES = 1024
"""A nucleus nearly always ends among the likeliest tokens: the others need no sorting."""

Float32Array = NDArray[np.float32]


def filter_scores(
    scores: Tensor, *, top_k: Int32Array, top_p: Float32Array, min_p: Float32Array
) -> None:
    """Mask what the rows' filters exclude with -inf, in place.

    ``scores``, (num_rows, vocab_size), have a maximum of 0; the columns are those of
    ``RowSampling``. Top-p counts probability among what top-k leaves. The likeliest token stays.
    """
    vocab_size = scores.shape[1]
    with np.errstate(divide="ignore"):
        lowest = torch.from_numpy(np.log(min_p))
    limits = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    pending = np.flatnonzero((limits < vocab_size) | (top_p < 1))
    for num_candidates in (NUM_CANDIDATES, vocab_size):
        if len(pending):
            count = min(num_candidates, int(limits[pending].max()))
            found, is_final = _find_lowest(
                scores[pending], limits[pending], top_p[pending], num_candidates=count
            )
            settled = pending[is_final]
            lowest[settled] = lowest[settled].maximum(found[torch.from_numpy(is_final)])
            pending = pending[~is_final]
    scores.masked_fill_(scores < lowest.unsqueeze(1), -torch.inf)


def _find_lowest(
    scores: Tensor, limits: NDArray[np.int64], top_p: Float32Array, *, num_candidates: int
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return each row's lowest score that stays, and whether the candidates were enough for it.

    Probabilities are left unnormalised: ``total`` is what they add up to.
    """
    best = scores.topk(num_candidates, dim=1).values
    limit = torch.from_numpy(limits).unsqueeze(1)
    is_within = torch.arange(num_candidates) < limit
    weights = best.exp() * is_within
    is_all = limit <= num_candidates
    total = weights.sum(dim=1, keepdim=True)
    if not is_all.all():
        total = torch.where(is_all, total, scores.exp().sum(dim=1, keepdim=True))
    share = torch.from_numpy(np.where(top_p < 1, top_p, np.inf)).unsqueeze(1) * total
    reached = weights.cumsum(dim=1)
    num_kept = (is_within & (reached - weights < share)).sum(dim=1, keepdim=True).clamp(min=1)
    lowest = best.gather(1, num_kept - 1).squeeze(1)
    is_whole = limit == scores.shape[1]  # else ``total`` counts what top-k excludes
    is_final = is_all | (is_whole & (reached[:, -1:] >= share))
    return lowest, is_final.squeeze(1).numpy()
