"""API process: a synchronous engine for one thread, the base of the offline class."""

import time
from collections.abc import Callable, Iterable, Sequence

from octavo.engine.core_client import CoreClient
from octavo.engine.door import NO_CAPS, Door
from octavo.engine.messages import AddRequest, CoreMessage, CoreOutputs, ResetPrefixCache
from octavo.engine.prompt import Prompt
from octavo.engine.request_tracker import RequestTracker
from octavo.errors import EngineDeadError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams


class LLMEngine:
    """Runs requests when ``step`` is called, and at no other time.

    Whoever has many requests at hand adds them while ``wants_requests``, between steps: so the
    device does not wait until the last of them has been taken in.
    """

    def __init__(
        self,
        client: CoreClient,
        tracker: RequestTracker,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._tracker = tracker
        self._clock = clock
        self._unreported: set[int] = set()  # numbers whose end the core has still to report
        self._door = Door(NO_CAPS)  # knows who waits
        self._had_room = False  # in a step since there last was nothing to do

    @property
    def now_s(self) -> float:
        """The time by the clock of arrivals."""
        return self._clock()

    @property
    def wants_requests(self) -> bool:
        """Whether the next step might compute more, or others first, if more requests waited.

        Where later requests may go first, that is always so. Otherwise prompts that fill a step are
        enough until one has room though they did: then much of them is cached, and as many must
        wait as a plan looks at.
        """
        info, door = self._client.info, self._door
        if info.plan_window is None:
            return True
        fills_step = door.num_tokens >= info.max_num_batched_tokens
        return door.num_requests < info.plan_window and (self._had_room or not fills_step)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> None:
        """Put a request into the queue; it arrives now, or has arrived at ``arrival_s``.

        Raises:
            InvalidRequestError: it cannot be served as written; nothing has been queued.
            EngineDeadError: the engine has died.
        """
        messages = self._tracker.add(
            prompt,
            params,
            request_id=request_id,
            arrival_s=self._clock() if arrival_s is None else arrival_s,
            priority=priority,
        )
        self._send(messages)

    def abort_request(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests at once and return their final outputs; unknown ids are ignored."""
        outputs, message = self._tracker.abort(request_ids, self._clock())
        if message.numbers:
            self._send([message])
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether ``step`` has anything left to do."""
        return bool(self._unreported)

    def step(self) -> list[RequestOutput]:
        """Compute until there is something to report; return the outputs that clients are owed.

        Raises:
            EngineDeadError: the engine has died, and with it every open request.
        """
        if not self._unreported:
            return []
        try:
            outputs = self._client.receive()
        except EngineDeadError as error:
            self._unreported.clear()
            self._tracker.fail_all(str(error), self._clock())
            raise
        self._note(outputs)
        results, finishes = self._tracker.update(outputs)
        if finishes:
            self._send(finishes)
        return results

    def reset_prefix_cache(self) -> bool:
        """Drop the cached blocks that no request uses; return whether that were all."""
        self._send([ResetPrefixCache()])
        return not self._unreported

    def shutdown(self) -> None:
        """Stop the core and free what it holds."""
        self._client.shutdown()

    def _send(self, messages: Sequence[CoreMessage]) -> None:
        self._client.send(messages)
        for message in messages:
            if isinstance(message, AddRequest):
                self._unreported.add(message.number)
                self._door.enter(message.number, len(message.prompt) // 4)

    def _note(self, outputs: CoreOutputs) -> None:
        """Keep count of who waits, and of whom the core has still to report the end."""
        for started in outputs.started:
            self._door.start(started.number, now_s=outputs.now_s)
        for report in outputs.finished:
            self._door.leave(report.number)
            self._unreported.discard(report.number)
        budget = self._client.info.max_num_batched_tokens
        has_room = outputs.stats.num_tokens_scheduled < budget
        self._had_room = bool(self._unreported) and (self._had_room or has_room)
