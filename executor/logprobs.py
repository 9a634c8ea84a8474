"""Log-probabilities under the raw logits, of the token that is there and of the likeliest."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from octavo.executor.step import Int32Array, PositionLogprobs, Step

Ids = TypeVar("Ids", Int32Array, Tensor)

WHOLE_VOCABULARY = -1
MAX_LOGIT_ROWS = 1024
"""Logits of a prompt are computed in slices of at most this many tokens."""


@dataclass(frozen=True, slots=True)
class PromptSpan(Generic[Ids]):
    """Tokens of a row whose logits are compared with the prompt's next tokens."""

    index: int
    """Index into ``Step.rows``."""
    first_token: int
    """Index into the flat batch."""
    targets: Ids  # (num_tokens,) int32: the prompt token after each
    num_logprobs: int


def find_prompt_spans(
    step: Step,
    find_wish: Callable[[int], tuple[int | None, int]],
    read_ids: Callable[[int, slice], Ids],
) -> Iterator[PromptSpan[Ids]]:
    """Find them in a step.

    ``find_wish`` tells of a row how many log-probabilities its prompt's tokens are to have, if any,
    and how long that is; ``read_ids`` reads some of its tokens.
    """
    first_token = 0
    columns = step.rows.tolist(), step.num_computed_tokens.tolist(), step.num_tokens.tolist()
    for index, (row, begin, count) in enumerate(zip(*columns, strict=True)):
        num_logprobs, num_prompt_tokens = find_wish(row)
        end = min(begin + count, num_prompt_tokens - 1)
        if num_logprobs is not None and begin < end:
            targets = read_ids(row, slice(begin + 1, end + 1))
            yield PromptSpan(index, first_token, targets, num_logprobs)
        first_token += count


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
