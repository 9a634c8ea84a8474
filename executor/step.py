"""Between planning and computing: ``Step`` goes to an executor, ``StepResult`` comes back.

A Step is complete: an executor that has seen every Step since a row's ``new_rows`` needs nothing
else. Its parts are executed in this order: released rows, new rows, block copies, new blocks,
compute. No torch here.
"""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
EXHAUSTED = "no token is left to sample: allowed_token_ids, bad_words and min_tokens exclude all"
"""The error of a row whose own parameters are at fault, and not the model."""


class RowSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the sampler needs to know of a row; resolved, so no value means "look elsewhere".

    Order of effects on the logits of a position: ``allowed_token_ids``, ``bad_words_ids``,
    ``held_back_ids`` until ``min_tokens`` outputs exist, ``logit_bias``, penalties, then
    temperature, top-k, top-p, min-p. Log-probabilities are of the raw logits, before all of these.
    """

    seed: int
    """Noise is a function of (seed, position of the sampled token) alone."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency look at output tokens; ``repetition_penalty`` at prompt and output."""
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    held_back_ids: tuple[int, ...] = ()
    """Not sampled before ``min_tokens`` outputs exist: all EOS ids and the stop ids."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Never completed: the last id is masked when the ids before it were just produced."""
    num_logprobs: int | None = None
    """Most likely tokens to report besides the sampled one; -1 is the whole vocabulary."""
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request takes a row (admission or re-admission): the row is written whole."""

    row: int
    number: int
    """The request's number: unique for the life of the engine."""
    token_ids: Int32Array  # (num_known_tokens,)
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one KV block whole, before anything is computed."""

    source: int
    target: int


class NewBlocks(msgspec.Struct, frozen=True):
    """Blocks appended to a row's table."""

    row: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: per scheduled row, ``num_tokens`` tokens from ``num_computed_tokens`` on.

    ``sample[i]`` is True when the row's gap closes and it has an output to come, so that the logits
    of its last token give the next token. The executor keeps that token in the row; a later step
    may compute it before the host has seen its id.
    """

    step_id: int
    released_rows: tuple[int, ...]
    new_rows: tuple[NewRow, ...]
    copies: tuple[BlockCopy, ...]
    new_blocks: tuple[NewBlocks, ...]
    rows: Int32Array  # (num_rows,)
    num_tokens: Int32Array  # (num_rows,) at least 1 each
    num_computed_tokens: Int32Array  # (num_rows,) before this step
    sample: NDArray[np.bool_]  # (num_rows,)

    @property
    def num_sampled(self) -> int:
        """How many rows sample a token in this step."""
        return int(np.count_nonzero(self.sample))


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: ``ids[0]`` is the token there, then the most likely."""

    ids: Int32Array  # (1 + k,)
    logprobs: NDArray[np.float32]  # (1 + k,)
    rank: int
    """Rank of ``ids[0]`` among the vocabulary, from 1."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    The i-th entry of every sampled column belongs to the i-th True of ``Step.sample``.
    """

    step_id: int
    token_ids: Int32Array  # (num_sampled,)
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    """Index into the sampled column -> logprobs, for rows that asked for them."""
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    """Index into ``Step.rows`` -> one entry for each scheduled position p with
    p + 1 < num_prompt_tokens: the log-probabilities of the prompt token at p + 1."""
    row_errors: dict[int, str] = field(default_factory=dict)
    """Index into ``Step.rows`` -> why the row cannot go on (non-finite logits)."""


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return what it produced; raises what the device raised."""


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What the rest of the engine must know of the device, measured at start."""

    num_blocks: int
    block_size: int
    num_rows: int
    vocab_size: int
    max_model_len: int
    """The model's own limit, or the configured one."""
    cache_namespace: bytes
    """Root of every block key: names the weights and everything else that K/V values depend on."""
    dtype: str
    """Of weights and K/V."""
    attention_backend: str
    quantization: str | None = None
    """What matrices are rounded to, by the settings or because they are stored so."""


class Executor(Protocol):
    """Runs steps in submission order on one stream."""

    info: ExecutorInfo

    def submit(self, step: Step) -> StepHandle:
        """Launch a step; returns before it has finished where the device allows it.

        If it raises, rows, blocks and copies of the step are applied and nothing was computed.
        """

    def prepare(self) -> bool:
        """Do a little of what later steps will need, a tenth of a second at most, while no step
        runs; False when nothing is left to do.
        """

    def shutdown(self) -> None:
        """Free the device; nothing may be submitted afterwards."""
