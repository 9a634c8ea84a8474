"""What a request returns: vLLM's ``RequestOutput`` and ``CompletionOutput`` with their names."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
REQUEST_TIMEOUT = "request_timeout"
"""The ``reason_code`` of an answer whose time was up."""
NO_TOKEN_LEFT = "no_token_left"
"""The ``reason_code`` of an answer whose parameters left no token to go on with."""
ENGINE_DEAD = "engine_dead"
"""The ``reason_code`` of an answer whose engine died."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model's raw logits; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob of one position: the token that is there, and the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` answers to a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    reason_code: str | None = None
    """The kind of ``error`` in a word that does not change; None if it has no name."""

    @property
    def finished(self) -> bool:
        """True when no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of one monotonic clock; None until the event has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_retractions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed a token of it."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first generated token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """Everything known about a request; the last one of a request has ``finished`` True."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
