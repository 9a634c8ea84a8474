"""Core process: a request, its status and token counts. The scheduler and its steps write them."""

import sys
from array import array
from enum import Enum, auto

from octavo.engine.messages import AddRequest
from octavo.outputs import FinishReason


class RequestStatus(Enum):
    """Where a request is in its life, and which container of the scheduler holds it."""

    WAITING = auto()
    """Never admitted; in ``waiting``."""
    RUNNING = auto()
    """Has a row and blocks; in ``running``."""
    RETRACTED = auto()
    """Lost its row and blocks, kept its tokens; in ``waiting``."""
    DRAINING = auto()
    """All its tokens are promised by launched steps; holds nothing; in ``draining``."""
    FINISHED = auto()
    """Has its final output; in no container."""


TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {
        RequestStatus.RETRACTED,
        RequestStatus.DRAINING,
        RequestStatus.FINISHED,
    },
    RequestStatus.RETRACTED: {RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.DRAINING: {RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


class Request:
    """One request in the core.

    Token counts (docs/scheduler.md): ``num_known_tokens`` ids are on the host;
    ``num_promised_tokens`` more will be sampled by launched steps; launched steps store the K/V of
    ``num_computed_tokens``. A step closes part of the gap ``num_tokens - num_computed_tokens``.
    """

    __slots__ = (
        "arrival_s",
        "ending_ids",
        "finish_error",
        "finish_reason",
        "first_scheduled_s",
        "max_total_tokens",
        "message",
        "num_allocated_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_deferrals",
        "num_matched_tokens",
        "num_prompt_tokens",
        "num_retractions",
        "num_spent_before",
        "num_tokens",
        "num_tokens_to_compute",
        "number",
        "row",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, message: AddRequest) -> None:
        self.message = message
        self.number = message.number
        self.arrival_s = message.arrival_s
        self.ending_ids = frozenset(message.eos_ids + message.stop_ids)
        """Tokens that end the request."""
        self.token_ids = _read_ids(message.prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = self.num_prompt_tokens + message.max_tokens
        self.num_tokens_to_compute = max(self.num_prompt_tokens, self.max_total_tokens - 1)
        """The last output token has no successor, so it is not computed. A prompt without outputs
        is computed to its end.
        """
        self.status = RequestStatus.WAITING
        self.num_tokens = self.num_prompt_tokens
        """Known and promised tokens: grows when a step that samples is planned."""
        self.num_computed_tokens = 0
        self.num_allocated_tokens = 0
        """Tokens that the request's blocks have room for."""
        self.row: int | None = None
        self.num_matched_tokens = 0
        """Tokens that the present admission read from the cache."""
        self.num_spent_before = 0
        """Tokens that earlier admissions computed."""
        self.num_cached_tokens = 0
        self.num_retractions = 0
        self.num_deferrals = 0
        self.first_scheduled_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.finish_error: str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.number} {self.status.name}, known={self.num_known_tokens}, "
            f"promised={self.num_promised_tokens}, computed={self.num_computed_tokens})"
        )

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose ids are on the host."""
        return len(self.token_ids)

    @property
    def num_promised_tokens(self) -> int:
        """Tokens that launched steps will sample; their ids are only on the device."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_spent_tokens(self) -> int:
        """Tokens that launched steps compute, also again after retractions."""
        return self.num_spent_before + self.num_computed_tokens - self.num_matched_tokens

    @property
    def is_exhausted(self) -> bool:
        """True when launched steps compute all that will ever be."""
        return self.num_computed_tokens >= self.num_tokens_to_compute

    @property
    def is_finished(self) -> bool:
        """True once the final output exists."""
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Change the status along an allowed transition."""
        assert status in TRANSITIONS[self.status], f"{self!r} cannot become {status.name}"
        self.status = status

    def stop_reason_of(self, token_id: int) -> int | None:
        """Return the stop_reason of one of the ``ending_ids``: None for EOS."""
        return None if token_id in self.message.eos_ids else token_id


def _read_ids(data: bytes) -> "array[int]":
    """Decode what ``messages.pack_ids`` wrote, without a number object for each token."""
    token_ids = array("i", data)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids
