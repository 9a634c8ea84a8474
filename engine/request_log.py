"""Core process: what can be told about a request, while it lives and for a while after its end."""

from collections import deque

from octavo.engine.messages import RequestExplanation
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler import Scheduler
from octavo.engine.waits import Holdups, WaitKind

NUM_ENDED_KEPT = 1_000
WAITING = (RequestStatus.WAITING, RequestStatus.RETRACTED)


class RequestLog:
    """Reads the living from the scheduler; owns times of events and the records of the ended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tokenless: list[Request] = []
        """Those that started and have got no token yet."""
        self._first_token_s: dict[int, float] = {}
        self._ended: deque[RequestExplanation] = deque(maxlen=NUM_ENDED_KEPT)

    def note_start(self, request: Request) -> None:
        """Expect the first token of a request."""
        self._tokenless.append(request)

    def note_first_tokens(self, now_s: float) -> None:
        """Remember when requests got their first tokens, if they did now."""
        if not self._tokenless:
            return
        for request in self._tokenless:
            if request.num_output_tokens:
                self._first_token_s[request.number] = now_s
        self._tokenless = [
            request
            for request in self._tokenless
            if not request.num_output_tokens and not request.is_finished
        ]

    def note_end(self, request: Request, now_s: float) -> None:
        """Keep the record of a request that has just ended."""
        self._ended.append(self._describe(request, wait_reason=None, ended_s=now_s))
        self._first_token_s.pop(request.number, None)

    def explain(self, request_id: str, holdups: Holdups) -> list[RequestExplanation]:
        """Tell all that is known of the requests with this id, the newest last.

        ``holdups`` are why those that wait do so.
        """
        ended = [record for record in self._ended if record.request_id == request_id]
        living = [
            self._describe(request, wait_reason=_find_wait(request, holdups), ended_s=None)
            for request in self._scheduler.requests.values()
            if request.message.request_id == request_id
        ]
        return ended + living

    def _describe(
        self, request: Request, *, wait_reason: str | None, ended_s: float | None
    ) -> RequestExplanation:
        is_waiting = request.status in WAITING
        return RequestExplanation(
            number=request.number,
            request_id=request.message.request_id,
            state=request.status.name.lower(),
            place_in_queue=self._scheduler.waiting.position(request) if is_waiting else None,
            wait_reason=wait_reason,
            finish_reason=request.finish_reason,
            error=request.finish_error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_computed_tokens=request.num_spent_tokens,
            num_retractions=request.num_retractions,
            arrival_s=request.arrival_s,
            first_scheduled_s=request.first_scheduled_s,
            first_token_s=self._first_token_s.get(request.number),
            ended_s=ended_s,
        )


def _find_wait(request: Request, holdups: Holdups) -> str | None:
    """Say what the request waits for; one that runs waits only for the end of a pause."""
    reason = holdups.reason(request.number)
    return reason.text if request.status in WAITING or reason.kind is WaitKind.PAUSE else None
