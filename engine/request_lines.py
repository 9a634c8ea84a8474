"""API process: lines in the log about single requests, for whoever asks for them.

No texts: what clients ask and get is nobody else's.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from octavo.engine.open_request import OpenRequest
from octavo.engine.request_factory import Submission
from octavo.engine.request_tracker import RequestTracker
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


def log_requests(tracker: RequestTracker, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Log a line when a request is admitted and one when each of its prompts has its answers."""
    tracker.on_begin = _log_begin
    tracker.on_end = lambda request: _log_end(request, clock())


def _log_begin(submission: Submission) -> None:
    num_tokens = [len(prompt.token_ids) for prompt in submission.prompts]
    logger.info(
        "request %s begins: %s prompt tokens%s",
        submission.request_id,
        " + ".join(map(str, num_tokens)),
        _describe_parameters(submission.params),
    )


def _log_end(request: OpenRequest, now_s: float) -> None:
    facts, times = request.describe(now_s), request.metrics
    logger.info(
        "request %s ends (%s) after %.3f s: %d tokens, %d of %d prompt tokens cached, %s, %s",
        request.request_id,
        ", ".join(request.finish_reasons),
        facts.age_s,
        facts.num_output_tokens,
        facts.num_cached_tokens,
        facts.num_prompt_tokens,
        _describe_time("first step", times.time_in_queue),
        _describe_time("first token", times.time_to_first_token),
    )


def _describe_time(event: str, seconds: float | None) -> str:
    return f"no {event}" if seconds is None else f"{event} after {seconds:.3f} s"


def _describe_parameters(params: SamplingParams) -> str:
    """Return the numbers and switches that are not the defaults."""
    given = msgspec.to_builtins(params)
    given.pop("output_kind", None)  # the server's own choice
    numbers = {name: value for name, value in given.items() if isinstance(value, int | float)}
    return "".join(f", {name} {value}" for name, value in numbers.items())
