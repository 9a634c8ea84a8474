"""State of the running requests: one row each, from admission to finish or retraction.

Rows are never moved and never used as an input of the network: ``input_batch`` gathers from them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.executor.step import Int32Array, NewRow, RowSampling

LARGEST_BIAS = 1e30
"""Beyond every logit, yet finite in float32."""


class Rows:
    """Owns token history, block table and sampling parameters of every row.

    ``token_ids[row, : num_tokens[row]]`` holds prompt and outputs; a token that was just sampled is
    there before the host knows it. What lies beyond is left over from earlier requests.
    """

    def __init__(self, num_rows: int, *, max_tokens: int, max_blocks: int) -> None:
        self.token_ids: Int32Array = np.zeros((num_rows, max_tokens), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.block_tables: Int32Array = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.sampling = SamplingColumns(num_rows)
        self.edits: list[EditedIds | None] = [None] * num_rows
        self.num_logprobs: list[int | None] = [None] * num_rows
        self.num_prompt_logprobs: list[int | None] = [None] * num_rows
        self.takes_maximum: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        """The row's token is the most likely one under the raw logits."""
        self.is_held: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)

    def release(self, row: int) -> None:
        """Take a row out of use."""
        assert self.is_held[row], f"row {row} is released but nobody has it"
        self.is_held[row] = False

    def write(self, new: NewRow) -> None:
        """Write a row whole; nothing of its last request stays."""
        row, sampling, length = new.row, new.sampling, len(new.token_ids)
        assert not self.is_held[row], f"row {row} is taken by two requests"
        self.is_held[row] = True
        self.token_ids[row, :length] = new.token_ids
        self.num_tokens[row] = length
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_blocks[row] = 0
        self.grow(row, new.block_ids)
        self.sampling.write(row, sampling)
        self.edits[row] = EditedIds.find(sampling)
        self.num_logprobs[row] = sampling.num_logprobs
        self.num_prompt_logprobs[row] = sampling.num_prompt_logprobs
        is_edited = self.edits[row] is not None or has_penalty(sampling)
        self.takes_maximum[row] = sampling.temperature == 0 and not is_edited

    def grow(self, row: int, block_ids: tuple[int, ...]) -> None:
        """Append blocks to a row's table."""
        first = self.num_blocks[row]
        self.block_tables[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def append(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Add one sampled token to each of ``rows``."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1


class SamplingColumns:
    """The numbers of ``RowSampling``, one column each."""

    def __init__(self, num_rows: int) -> None:
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int32)
        self.top_p = np.zeros(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.presence_penalty = np.zeros(num_rows, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_rows, dtype=np.float32)
        self.repetition_penalty = np.zeros(num_rows, dtype=np.float32)

    def write(self, row: int, sampling: RowSampling) -> None:
        """Write one row."""
        self.seed[row] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, np.iinfo(np.int32).max)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = sampling.repetition_penalty


@dataclass(frozen=True, slots=True)
class EditedIds:
    """Token ids whose logits a row changes before sampling, ready for indexing."""

    allowed: NDArray[np.int64] | None
    bad_words: tuple[Int32Array, ...]
    held_back: NDArray[np.int64]
    min_tokens: int
    biased: NDArray[np.int64]
    biases: NDArray[np.float32]

    @classmethod
    def find(cls, sampling: RowSampling) -> "EditedIds | None":
        """Return the ids that ``sampling`` names; None when it changes no logit by id."""
        is_held_back = sampling.min_tokens > 0 and sampling.held_back_ids
        is_restricted = sampling.allowed_token_ids is not None or sampling.bad_words_ids
        if not (is_held_back or is_restricted or sampling.logit_bias):
            return None
        allowed = sampling.allowed_token_ids
        biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        return cls(
            allowed=None if allowed is None else np.array(allowed, dtype=np.int64),
            bad_words=tuple(np.array(word, dtype=np.int32) for word in sampling.bad_words_ids),
            held_back=np.array(sampling.held_back_ids, dtype=np.int64),
            min_tokens=sampling.min_tokens,
            biased=np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64),
            biases=biases.clip(-LARGEST_BIAS, LARGEST_BIAS).astype(np.float32),
        )


def has_penalty(sampling: RowSampling) -> bool:
    """Return True when logits depend on which tokens there were before."""
    return (
        sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
    )
