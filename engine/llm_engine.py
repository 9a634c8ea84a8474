"""API process: a synchronous engine for one thread, the base of the offline class."""

import time
from collections.abc import Callable, Iterable, Sequence

from octavo.engine.core_client import CoreClient
from octavo.engine.messages import AddRequest, CoreMessage, ResetPrefixCache
from octavo.engine.prompt import Prompt
from octavo.engine.request_tracker import RequestTracker
from octavo.errors import EngineDeadError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams


class LLMEngine:
    """Runs requests when ``step`` is called, and at no other time."""

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

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Put a request into the queue.

        Raises:
            InvalidRequestError: it cannot be served as written; nothing has been queued.
            EngineDeadError: the engine has died.
        """
        messages = self._tracker.add(
            prompt,
            params,
            request_id=request_id,
            arrival_s=self._clock(),
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
        self._unreported.difference_update(report.number for report in outputs.finished)
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
        added = (message.number for message in messages if isinstance(message, AddRequest))
        self._unreported.update(added)
