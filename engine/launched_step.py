"""Core process: a step between its plan and its update, and what the update made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.engine.request import Request
from octavo.executor.step import Step


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A planned step whose result is not known yet: column i belongs to ``requests[i]``."""

    step: Step
    requests: tuple[Request, ...]
    sampling: tuple[Request, ...]
    """Those that get a token, in the order of the result's."""

    def append_tokens(self, token_ids: Sequence[int], *, block_size: int) -> "AppendedTokens":
        """Give the requests that have not ended their tokens, which they were promised."""
        appended = AppendedTokens()
        sampled, full, ended = appended.sampled, appended.full, appended.ended
        for request, token_id in zip(self.sampling, token_ids, strict=True):
            if request.finish_reason is not None:
                sampled.append(None)
                continue
            known_ids = request.token_ids
            known_ids.append(token_id)
            sampled.append(request)
            num_known = len(known_ids)
            if num_known % block_size == 0:
                full.append(request)
            if token_id in request.ending_ids or num_known == request.max_total_tokens:
                ended.append(request)
        return appended

    def list_scored(self) -> list[Request]:
        """Return the requests that have no outputs to come, whose prompts the step has computed."""
        step = self.step
        if step.num_sampled == len(step.rows):
            return []
        scored = []
        for index in (~step.sample).nonzero()[0].tolist():
            request = self.requests[index]
            end = step.num_computed_tokens[index] + step.num_tokens[index]
            if end == request.max_total_tokens and not request.is_finished:
                scored.append(request)
        return scored


@dataclass(frozen=True, slots=True)
class AppendedTokens:
    """Whom a step's tokens were given to, and what that means for them."""

    sampled: list[Request | None] = field(default_factory=list)
    """None where the request had ended, and the token was dropped."""
    full: list[Request] = field(default_factory=list)
    """Those whose known tokens fill their last block."""
    ended: list[Request] = field(default_factory=list)
    """Those whose newest token is their last."""


@dataclass(frozen=True, slots=True)
class UpdatedStep:
    """A step whose result has been applied; ``sampled`` is None where the token was dropped."""

    launched: LaunchedStep
    sampled: tuple[Request | None, ...]
    scored: tuple[Request, ...]
    """Requests without outputs that ended because this step computed the rest of their prompts."""
