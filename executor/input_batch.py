"""Inputs of one step, gathered from the rows: made anew for every step and never kept."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import AttentionInputs
from octavo.executor.logprobs import PromptSpan, find_prompt_spans
from octavo.executor.rows import Rows
from octavo.executor.step import Int32Array, Step


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The flat batch: the tokens of the first scheduled row, then those of the second, ..."""

    input_ids: Tensor  # (num_tokens,) int32
    attention: AttentionInputs
    sampled_rows: Int32Array  # (num_sampled,) row of each token to sample
    sampled_tokens: Tensor  # (num_sampled,) index into the flat batch of the row's last token
    prompt_spans: tuple[PromptSpan[Int32Array], ...]

    @property
    def wanted(self) -> Tensor | None:
        """Tokens, at least one, whose hidden states are needed; None is all."""
        num_sampled = len(self.sampled_tokens)
        if self.prompt_spans or num_sampled == len(self.input_ids):
            return None
        return self.sampled_tokens if num_sampled else self.sampled_tokens.new_zeros(1)


def gather_inputs(rows: Rows, step: Step, *, block_size: int) -> InputBatch:
    """Gather what the step computes; ids that the host does not know yet come from the rows."""
    counts, begins = step.num_tokens, step.num_computed_tokens
    ends = begins + counts
    assert (rows.is_held[step.rows]).all(), f"rows {step.rows} hold a row that nobody has"
    assert (ends <= rows.num_tokens[step.rows]).all(), f"step {step.step_id} is ahead of its rows"
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    token_rows = np.repeat(step.rows, counts)
    positions = np.arange(query_start[-1], dtype=np.int32)
    positions += np.repeat(begins - query_start[:-1], counts)
    blocks, offsets = np.divmod(positions, block_size)
    slots = rows.block_tables[token_rows, blocks].astype(np.int64) * block_size + offsets
    num_blocks = -(-int(ends.max()) // block_size)
    attention = AttentionInputs(
        query_start=torch.from_numpy(query_start),
        context_lengths=torch.from_numpy(ends),
        block_tables=torch.from_numpy(rows.block_tables[step.rows, :num_blocks]),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
    )
    return InputBatch(
        input_ids=torch.from_numpy(rows.token_ids[token_rows, positions]),
        attention=attention,
        sampled_rows=step.rows[step.sample],
        sampled_tokens=torch.from_numpy(query_start[1:][step.sample] - 1),
        prompt_spans=tuple(
            find_prompt_spans(
                step,
                lambda row: (rows.num_prompt_logprobs[row], int(rows.num_prompt_tokens[row])),
                lambda row, part: rows.token_ids[row, part].copy(),
            )
        ),
    )
