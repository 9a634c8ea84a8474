"""Log-probabilities of a step on the device, computed behind it and read with its result."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.executor.logprobs import MAX_LOGIT_ROWS, WHOLE_VOCABULARY, PromptSpan
from octavo.executor.ops.logprobs import TokenLogprobs, compute_logprobs
from octavo.executor.staging import to_device
from octavo.executor.step import PositionLogprobs
from octavo.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """``TokenLogprobs`` on their way to pinned memory; valid once the step's event has passed."""

    ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    @classmethod
    def fetch(cls, found: TokenLogprobs) -> "HostLogprobs":
        """Start to copy, on the current stream."""
        return cls(_fetch(found.ids), _fetch(found.logprobs), _fetch(found.ranks))

    def entry(self, index: int, num_top: int) -> PositionLogprobs:
        """Return one position, with ``num_top`` tokens besides the one that is there."""
        return PositionLogprobs(
            self.ids[index, : 1 + num_top].numpy(),
            self.logprobs[index, : 1 + num_top].numpy(),
            int(self.ranks[index]),
        )


@dataclass(frozen=True, slots=True)
class LogprobReadback:
    """The log-probabilities of sampled tokens whose rows asked for them."""

    counts: dict[int, int]
    """Index into the sampled column -> likeliest tokens besides the sampled one."""
    values: HostLogprobs

    @classmethod
    def launch(
        cls, logits: Tensor, token_ids: Tensor, wanted: Mapping[int, int]
    ) -> "LogprobReadback":
        """Compute them for rows of ``logits``, whose tokens are ``token_ids``."""
        counts = {index: _num_top(count, logits) for index, count in wanted.items()}
        which = to_device(np.array(list(counts), dtype=np.int32), logits.device)
        found = compute_logprobs(
            logits.index_select(0, which),
            token_ids.index_select(0, which),
            num_top=max(counts.values()),
        )
        return cls(counts, HostLogprobs.fetch(found))

    def read(self) -> dict[int, PositionLogprobs]:
        """Return them by index into the sampled column."""
        return {
            index: self.values.entry(place, count)
            for place, (index, count) in enumerate(self.counts.items())
        }


@dataclass(frozen=True, slots=True)
class PromptLogprobReadback:
    """The log-probabilities of the prompt tokens that follow those of one span."""

    num_top: int
    slices: tuple[HostLogprobs, ...]

    @classmethod
    def launch(
        cls, model: CausalLM, hidden: Tensor, span: PromptSpan[Tensor]
    ) -> "PromptLogprobReadback":
        """Compute them from the hidden states of the flat batch, (num_tokens, hidden_size)."""
        slices = []
        num_top = 0
        hidden = hidden[span.first_token :][: len(span.targets)]
        for begin in range(0, len(hidden), MAX_LOGIT_ROWS):
            logits = model.compute_logits(hidden[begin : begin + MAX_LOGIT_ROWS])
            num_top = _num_top(span.num_logprobs, logits)
            part = span.targets[begin : begin + MAX_LOGIT_ROWS].contiguous()
            slices.append(HostLogprobs.fetch(compute_logprobs(logits, part, num_top=num_top)))
        return cls(num_top, tuple(slices))

    def read(self) -> list[PositionLogprobs] | None:
        """Return one entry a token; None when a logit was not finite."""
        if any(part.logprobs.isnan().any() for part in self.slices):
            return None
        return [
            part.entry(index, self.num_top)
            for part in self.slices
            for index in range(len(part.ranks))
        ]


def _num_top(count: int, logits: Tensor) -> int:
    vocab_size = logits.shape[1]
    return vocab_size if count == WHOLE_VOCABULARY else min(count, vocab_size)


def _fetch(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
