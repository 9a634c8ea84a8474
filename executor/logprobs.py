"""Log-probabilities under the raw logits, of the token that is there and of the likeliest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.executor.step import Int32Array, PositionLogprobs

WHOLE_VOCABULARY = -1
MAX_LOGIT_ROWS = 1024
"""Logits of a prompt are computed in slices of at most this many tokens."""


def find_logprobs(
    logits: Tensor, token_ids: Int32Array, counts: Sequence[int]
) -> list[PositionLogprobs]:
    """Return one entry per row of ``logits``, (num_rows, vocab_size).

    ``counts[i]`` likeliest tokens are reported besides ``token_ids[i]``; -1 reports all.
    """
    logits = logits.float()
    vocab_size = logits.shape[1]
    sizes = [vocab_size if n == WHOLE_VOCABULARY else min(n, vocab_size) for n in counts]
    targets = torch.from_numpy(token_ids).long().unsqueeze(1)
    chosen = logits.gather(1, targets)
    ranks = ((logits > chosen).sum(dim=1) + 1).tolist()
    best = logits.topk(max(sizes), dim=1)
    ids = torch.cat((targets, best.indices), dim=1).int().numpy()
    values = torch.cat((chosen, best.values), dim=1) - logits.logsumexp(dim=1, keepdim=True)
    logprobs = values.numpy()
    return [
        PositionLogprobs(ids[i, : 1 + size], logprobs[i, : 1 + size], ranks[i])
        for i, size in enumerate(sizes)
    ]
