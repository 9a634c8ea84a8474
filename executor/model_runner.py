"""Runs one Step on the device: rows, copies, one forward pass, sampling, write-back."""

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import Attention, AttentionBackend
from octavo.block_manager.block_table import BlockSpec, blocks_needed
from octavo.executor.input_batch import InputBatch, gather_inputs
from octavo.executor.logprobs import MAX_LOGIT_ROWS, PromptSpan, find_logprobs
from octavo.executor.rows import Rows
from octavo.executor.sampler import NON_FINITE, Samples, sample
from octavo.executor.step import ExecutorInfo, Int32Array, PositionLogprobs, Step, StepResult
from octavo.executor.threads import StepThreads

logger = logging.getLogger(__name__)


class Network(Protocol):
    """What a runner needs of a network."""

    def __call__(
        self, input_ids: Tensor, attention: Attention, wanted: Tensor | None = None
    ) -> Tensor:
        """Map (num_tokens,) ids to normalised hidden states, (num_tokens or n, hidden_size), of all
        tokens or of ``wanted``, (n,) indices of rows' last tokens, at least one.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden_size) to (n, vocab_size) in the network's type."""


class ModelRunner:
    """Owns the rows; uses the network, and the backend with its KV pool.

    A ``run`` that raises has applied its step's rows, copies and blocks, so that the next step may
    release these rows.
    """

    def __init__(
        self,
        model: Network,
        backend: AttentionBackend,
        info: ExecutorInfo,
        *,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.info = info
        self._threads = StepThreads()
        self._before_step = before_step or (lambda: None)
        self._model = model
        self._backend = backend
        max_blocks = blocks_needed(BlockSpec(info.block_size), info.max_model_len)
        self._rows = Rows(info.num_rows, max_tokens=info.max_model_len, max_blocks=max_blocks)

    def launch(self, step: Step) -> Callable[[], StepResult]:
        """Execute one step; its result is there when this returns."""
        result = self.run(step)
        return lambda: result

    def prepare(self) -> bool:
        """Do nothing: steps need nothing that they do not make themselves."""
        return False

    def run(self, step: Step) -> StepResult:
        """Execute one step and wait for it."""
        self._before_step()
        with torch.inference_mode(), self._threads.use(int(step.num_tokens.sum())):
            self._apply(step)
            return self._compute(step)

    def _apply(self, step: Step) -> None:
        for row in step.released_rows:
            self._rows.release(row)
        for new in step.new_rows:
            self._rows.write(new)
        for copy in step.copies:
            self._backend.copy_block(copy.source, copy.target)
        for growth in step.new_blocks:
            self._rows.grow(growth.row, growth.block_ids)

    def _compute(self, step: Step) -> StepResult:
        if not len(step.rows):
            return StepResult(step.step_id, np.empty(0, dtype=np.int32))
        batch = gather_inputs(self._rows, step, block_size=self.info.block_size)
        attention = self._backend.bind(batch.attention)
        hidden = self._model(batch.input_ids, attention, batch.wanted)
        samples = self._sample(batch, hidden)
        sampled = np.flatnonzero(step.sample)
        errors = {int(sampled[index]): message for index, message in samples.errors.items()}
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        for span in batch.prompt_spans:
            if (entries := self._find_prompt_logprobs(span, hidden)) is None:
                errors[span.index] = NON_FINITE
            else:
                prompt_logprobs[span.index] = entries
        return StepResult(
            step.step_id, samples.token_ids, samples.logprobs, prompt_logprobs, errors
        )

    def _sample(self, batch: InputBatch, hidden: Tensor) -> Samples:
        """Sample a token for each row that is due and append it to the row."""
        if not len(batch.sampled_rows):
            return Samples(np.empty(0, dtype=np.int32))
        if batch.wanted is None:
            hidden = hidden.index_select(0, batch.sampled_tokens)
        logits = self._model.compute_logits(hidden)
        samples = sample(logits, self._rows, batch.sampled_rows)
        self._rows.append(batch.sampled_rows, samples.token_ids)
        return samples

    def _find_prompt_logprobs(
        self, span: PromptSpan[Int32Array], hidden: Tensor
    ) -> list[PositionLogprobs] | None:
        """Return one entry per token of the span; None when a logit is not finite."""
        entries: list[PositionLogprobs] = []
        for begin in range(0, len(span.targets), MAX_LOGIT_ROWS):
            targets = span.targets[begin : begin + MAX_LOGIT_ROWS]
            first = span.first_token + begin
            logits = self._model.compute_logits(hidden[first : first + len(targets)])
            if not logits.amax(dim=1).isfinite().all():
                return None
            entries += find_logprobs(logits, targets, [span.num_logprobs] * len(targets))
        return entries
