"""API process: many concurrent requests over one core, for asyncio.

Everything here runs on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from octavo.engine.conditions import Conditions
from octavo.engine.core_client import ListeningCoreClient
from octavo.engine.core_control import CoreControl
from octavo.engine.delivery_log import DeliveryLog
from octavo.engine.door import Door
from octavo.engine.limits import NO_LIMITS, ServingLimits
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    ExpireRequests,
    RequestExplanation,
)
from octavo.engine.metrics import EngineMetrics
from octavo.engine.open_request import InFlight, OpenRequest
from octavo.engine.open_streams import OpenStreams
from octavo.engine.prompt import EncodedPrompt
from octavo.engine.prompt_encoder import PromptEncoder
from octavo.engine.request_factory import Submission
from octavo.engine.request_stream import PromptStream, RequestStream
from octavo.engine.request_tracker import RequestTracker
from octavo.engine.stall import StallDetector
from octavo.errors import EngineDeadError, QueueFullError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Serves requests on the event loop that ``start`` was called on.

    Owns the open streams. Every admitted request gets exactly one output with ``finished``: when
    the core dies that is an ``error`` for each of them, and later requests are refused.
    """

    def __init__(
        self,
        client: ListeningCoreClient,
        tracker: RequestTracker,
        metrics: EngineMetrics,
        limits: ServingLimits = NO_LIMITS,
    ) -> None:
        self.metrics = metrics
        self.prompts = PromptEncoder(tracker)
        self.control = CoreControl(self._send)
        self._limits = limits
        self._door = Door(limits.queue_caps)
        self._deliveries = DeliveryLog()
        self._client = client
        self._tracker = tracker
        self._streams = OpenStreams()
        self._dead = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: str | None = None
        self._stall = StallDetector(limits.stall_timeout_s)
        metrics.queue.measure_stall = lambda: self._stall.stalled_s
        self._loop: asyncio.AbstractEventLoop
        self._watch: asyncio.Task[None]

    @property
    def info(self) -> CoreInfo:
        """Limits of the engine."""
        return self._client.info

    @property
    def death(self) -> str | None:
        """Why the engine cannot answer any more; None while it can."""
        return self._death

    @property
    def num_open_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._streams)

    @property
    def open_request_ids(self) -> list[str]:
        """The ids of the requests that have not ended, the oldest first."""
        return self._streams.request_ids

    def list_open(self, limit: int) -> list[InFlight]:
        """Describe the open requests, the oldest first, at most ``limit`` of them."""
        return self._tracker.list_open(limit, time.monotonic())

    @property
    def stall(self) -> str | None:
        """Which request waits for what, when the core owes answers and no step ends; else None."""
        return self._stall.stall

    def start(self) -> None:
        """Begin to listen to the core, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._client.listen(self._update, self._die)
        self._watch = asyncio.create_task(self._watch_steps())

    async def add(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, conditions: Conditions
    ) -> RequestStream:
        """Admit a request with all of its prompts or none; when this returns it is on its way.

        Raises:
            InvalidRequestError: the request cannot be served as written.
            QueueFullError: as much waits as may wait.
            EngineDeadError: the core had died before.
        """
        bad_words_ids = await self.prompts.encode_bad_words(params)
        if self._death is not None:
            raise EngineDeadError(self._death)
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._check_door(params.n * len(prompts), params.n * num_tokens)
        request_id, keys = self._streams.choose_id(conditions.request_id, len(prompts))
        submission = Submission(
            request_id=request_id,
            keys=keys,
            prompts=prompts,
            params=params,
            arrival_s=conditions.arrival_s,
            priority=conditions.priority,
            bad_words_ids=bad_words_ids,
        )
        answers = self._tracker.submit(submission)
        streams = self._streams.open(request_id, keys)
        for stream, group in zip(streams, answers, strict=True):
            numbers = [message.number for message in group]
            stream.note_delivery = partial(self._note_delivery, numbers)
        self._start_timers(streams, conditions)
        request_stream = RequestStream(streams, close=self.abort)
        self._submit(answers, keys)
        return request_stream

    def abort(self, *request_ids: str) -> None:
        """End requests with ``abort``; ids that belong to no open request are ignored."""
        keys = self._streams.find_keys(request_ids)
        self._end_early(*self._tracker.abort(keys, time.monotonic()))

    async def explain(self, request_id: str) -> list[RequestExplanation]:
        """Tell what is known of a request, open or ended a while ago: an entry a choice.

        Raises:
            EngineDeadError: the core has died.
            TimeoutError: the core has not ended a step for seconds.
        """
        return [
            replace(entry, delivered_s=self._deliveries.find(entry.number))
            for entry in await self.control.explain(request_id)
        ]

    def abort_all(self) -> None:
        """End every open request with ``abort``."""
        self.abort(*self._streams.request_ids)

    async def wait_until_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    async def wait_until_dead(self) -> str:
        """Return when the core has died, with the reason."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    async def shutdown(self) -> None:
        """Abort what is open; stop the core and the pool."""
        self.abort_all()
        self._watch.cancel()
        self._stall.stop()
        self._death = self._death or "the engine is shut down"
        self.control.fail(self._death)
        self.prompts.shutdown()
        self._client.hang_up()
        await asyncio.to_thread(self._client.shutdown)

    def _submit(self, answers: Sequence[Sequence[AddRequest]], keys: Sequence[str]) -> None:
        """Send the messages of opened requests to the core."""
        self._idle.clear()
        for group in answers:
            self.metrics.add(group)
        messages = [message for group in answers for message in group]
        for message in messages:
            self._door.enter(message.number, len(message.prompt) // 4)
        is_sent = False
        try:
            self._send(messages)
            is_sent = True
        finally:
            if not is_sent:
                self.abort(*keys)  # they were opened, and nobody will read their streams
        if self._death is None:
            self._stall.add(messages)

    def _start_timers(self, streams: Sequence[PromptStream], conditions: Conditions) -> None:
        timeout_s = conditions.timeout_s or self._limits.request_timeout_s
        if timeout_s is None:
            return
        remaining_s = max(0.0, conditions.arrival_s + timeout_s - time.monotonic())
        for stream in streams:
            stream.timer = self._loop.call_later(remaining_s, self._expire, stream.key, timeout_s)

    def _expire(self, key: str, timeout_s: float) -> None:
        """End a request whose time is up; its client hears of it whatever the core is doing."""
        self._end_early(*self._tracker.expire(key, timeout_s, time.monotonic()))

    def _note_delivery(self, numbers: Sequence[int]) -> None:
        self._deliveries.note(numbers, time.monotonic())

    def _end_early(
        self, outputs: Sequence[RequestOutput], message: AbortRequests | ExpireRequests
    ) -> None:
        for number in message.numbers:
            self._door.leave(number)
        self._deliver(outputs)
        if message.numbers:
            self._send([message])

    async def _watch_steps(self) -> None:
        """Let a stall be logged when it begins; the task ends with the engine."""
        while True:
            await asyncio.sleep(self._stall.check())

    def _check_door(self, num_requests: int, num_tokens: int) -> None:
        try:
            self._door.check(num_requests, num_tokens, now_s=time.monotonic())
        except QueueFullError as refusal:
            self.metrics.queue.note_refusal(refusal.reason_code)
            raise

    def _send(self, messages: Sequence[CoreMessage]) -> None:
        """Send; a death that is noticed here ends the open streams like any other."""
        self.metrics.note_ends(messages)
        if self._death is not None:
            return  # nobody hears it
        try:
            self._client.send(messages)
        except EngineDeadError as death:
            self._die(str(death))

    def _update(self, outputs: CoreOutputs) -> None:
        """Apply what a step produced; readers get their turn after what else has come with it."""
        if self._death is not None:
            return
        self._note(outputs)
        try:
            self.metrics.update(outputs)
            owed, messages = self._tracker.apply(outputs)
        except Exception as error:  # the API process's half of the engine's main loop
            logger.exception("the outputs of a step cannot be applied: %s", outputs)
            self._die(f"the outputs of a step cannot be applied: {error!r}")
            return
        self._deliver(owed)
        if messages:
            self._send(messages)

    def _note(self, outputs: CoreOutputs) -> None:
        """Keep what the queue and the curious need to know."""
        self._stall.update(outputs)
        self.control.update(outputs)
        now_s = time.monotonic()
        for started in outputs.started:
            self._door.start(started.number, now_s=now_s)
        for report in outputs.finished:
            self._door.leave(report.number)

    def _deliver(self, owed: Sequence[OpenRequest | RequestOutput]) -> None:
        self._streams.deliver(owed)
        if not self._streams:
            self._idle.set()

    def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = reason
        self._stall.stop()
        now_s = time.monotonic()
        self.control.fail(reason)
        self.metrics.fail_all(now_s)
        self._deliver(self._tracker.fail_all(reason, now_s))
        self._dead.set()
