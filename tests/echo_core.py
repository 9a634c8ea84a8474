"""A core without scheduler and model: every request gets the ids of its prompt back, one a step.

Stands in for the engine where processes, streams and HTTP are tested or measured.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreMessage,
    CoreOutputs,
    CoreStats,
    ExpireRequests,
    FinishedRequest,
    FinishRequest,
    LogprobEntry,
    StartedRequest,
    unpack_ids,
)
from octavo.errors import EngineDeadError

ECHO_INFO = CoreInfo(
    max_tokens_per_request=4096,
    max_model_len=4096,
    num_blocks=1024,
    block_size=16,
    vocab_size=345,
    max_num_seqs=1024,
    max_num_batched_tokens=8192,
    scheduling_policy="fcfs",
)


class EchoCore:
    """Repeats prompts until ``max_tokens``; a request with id "crash" makes it raise.

    ``step_time_s`` is how long a step takes at least.
    """

    def __init__(self, info: CoreInfo = ECHO_INFO, *, step_time_s: float = 0.0) -> None:
        self.info = info
        self.num_added = 0
        self.running: dict[int, EchoRequest] = {}
        self._step_time_s = step_time_s
        self._started: list[StartedRequest] = []
        self._finished: list[FinishedRequest] = []
        self._is_changed = False

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self._is_changed

    def apply(self, messages: Sequence[CoreMessage]) -> None:
        for message in messages:
            self._is_changed = True
            match message:
                case AddRequest(request_id="crash"):
                    raise RuntimeError("crash on demand")
                case AddRequest():
                    self._add(message)
                case AbortRequests():
                    for number in message.numbers:
                        self._end(FinishedRequest(number, "abort"))
                case ExpireRequests():
                    for number in message.numbers:
                        self._end(FinishedRequest(number, "error", error=message.error))
                case FinishRequest():
                    self._end(FinishedRequest(message.number, "stop", message.stop_reason))

    def step(self) -> CoreOutputs | None:
        if not self.has_work:
            return None
        self._is_changed = False
        if self._step_time_s:
            time.sleep(self._step_time_s)
        prompt_logprobs = self._score_prompts()
        numbers = list(self.running)
        token_ids = np.array([request.next_id() for request in self.running.values()], dtype="<i4")
        logprobs = {
            number: make_logprobs(int(token_id), request.num_logprobs)
            for (number, request), token_id in zip(self.running.items(), token_ids, strict=True)
            if request.num_logprobs is not None
        }
        for number in numbers:
            if self.running[number].num_left == 0:
                del self.running[number]
                self._finished.append(FinishedRequest(number, "length"))
        outputs = CoreOutputs(
            numbers=numbers,
            token_ids=token_ids.tobytes(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            started=self._started,
            finished=self._finished,
            now_s=time.monotonic(),
            stats=self._stats(len(numbers)),
        )
        self._started, self._finished = [], []
        return outputs

    def prepare(self) -> bool:
        """Nothing can be prepared."""
        return False

    def shutdown(self) -> None:
        self.running.clear()

    def _score_prompts(self) -> dict[int, list[LogprobEntry]]:
        """Take the scores that are due, and end the requests that were added for them alone."""
        scores = {
            number: entries
            for number, request in self.running.items()
            if (entries := request.take_scores())
        }
        for number in [n for n, request in self.running.items() if request.num_left == 0]:
            del self.running[number]
            self._finished.append(FinishedRequest(number, "length"))
        return scores

    def _add(self, request: AddRequest) -> None:
        self.num_added += 1
        self.running[request.number] = EchoRequest(request)
        self._started.append(StartedRequest(request.number, time.monotonic(), 0))

    def _end(self, report: FinishedRequest) -> None:
        if self.running.pop(report.number, None):
            self._finished.append(report)

    def _stats(self, num_tokens: int) -> CoreStats:
        return CoreStats(
            num_running=len(self.running),
            num_blocks_used=len(self.running),
            num_blocks=self.info.num_blocks,
            num_tokens_scheduled=num_tokens,
        )


class ThreadClient:
    """A client of a core that runs in the thread that receives."""

    def __init__(self, core: EchoCore) -> None:
        self.info = core.info
        self.core = core
        self._inbox: SimpleQueue[Sequence[CoreMessage] | None] = SimpleQueue()
        self._is_dead = False
        self._thread: threading.Thread | None = None

    def send(self, messages: Sequence[CoreMessage]) -> None:
        if self._is_dead:
            raise EngineDeadError("the core is gone")
        self._inbox.put(messages)

    def sent(self) -> list[CoreMessage]:
        """Return what was sent, for tests that run the core themselves."""
        messages: list[CoreMessage] = []
        while not self._inbox.empty():
            messages += self._inbox.get()
        return messages

    def receive(self) -> CoreOutputs:
        while True:
            while not self._inbox.empty() or not self.core.has_work:
                messages = self._inbox.get()
                if messages is None:
                    raise EngineDeadError("the core was stopped")
                self._apply(messages)
            outputs = self.core.step()
            if outputs is not None:
                return outputs

    def listen(
        self, on_outputs: Callable[[CoreOutputs], None], on_death: Callable[[str], None]
    ) -> None:
        loop = asyncio.get_running_loop()

        def report() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(on_outputs, self.receive())
            except EngineDeadError as death:
                loop.call_soon_threadsafe(on_death, str(death))

        self._thread = threading.Thread(target=report)
        self._thread.start()

    def hang_up(self) -> None:
        self._is_dead = True
        self._inbox.put(None)

    def shutdown(self) -> None:
        self.hang_up()
        if self._thread is not None:
            self._thread.join()

    def _apply(self, messages: Sequence[CoreMessage]) -> None:
        try:
            self.core.apply(messages)
        except RuntimeError as error:
            self._is_dead = True
            raise EngineDeadError(str(error)) from error


class EchoRequest:
    def __init__(self, message: AddRequest) -> None:
        self.prompt = unpack_ids(message.prompt).tolist()
        self.num_left = message.max_tokens
        self.num_logprobs = message.sampling.num_logprobs
        self._num_scores = message.sampling.num_prompt_logprobs
        self._position = 0

    def take_scores(self) -> list[LogprobEntry]:
        """Return, once, the log-probabilities of the prompt, if they were asked for."""
        num_scores, self._num_scores = self._num_scores, None
        if num_scores is None:
            return []
        return [make_logprobs(token_id, num_scores) for token_id in self.prompt[1:]]

    def next_id(self) -> int:
        token_id = self.prompt[self._position % len(self.prompt)]
        self._position += 1
        self.num_left -= 1
        return token_id


def make_logprobs(token_id: int, num_logprobs: int) -> LogprobEntry:
    """Make an entry whose sampled token has rank 1 and the highest of made-up logprobs."""
    ids = [token_id, token_id, *range(3, 3 + num_logprobs)][: 1 + num_logprobs]
    logprobs = [-0.5, -0.5, *(-1.0 - i for i in range(num_logprobs))][: 1 + num_logprobs]
    return LogprobEntry(np.array(ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes(), rank=1)
