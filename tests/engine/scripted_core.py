"""A core client whose answers are written by the test."""

from collections import deque

from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreInfo,
    CoreOutputs,
    FinishedRequest,
    FinishRequest,
    pack_ids,
)
from octavo.errors import EngineDeadError

INFO = CoreInfo(
    max_tokens_per_request=64,
    max_model_len=64,
    num_blocks=100,
    block_size=16,
    vocab_size=345,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    scheduling_policy="fcfs",
)


class ScriptedClient:
    """Gives every request the same output, one token a step, and keeps what it was sent."""

    def __init__(self, output_ids=(), info=INFO):
        self.info = info
        self.sent = []
        self.is_dead = False
        self._output_ids = list(output_ids)
        self._running = {}
        self._finished = deque()
        self._now_s = 0.0

    def send(self, messages):
        if self.is_dead:
            raise EngineDeadError("dead")
        self.sent += messages
        for message in messages:
            match message:
                case AddRequest():
                    self._running[message.number] = self._output_ids[: message.max_tokens]
                case AbortRequests():
                    for number in message.numbers:
                        self._end(number, FinishedRequest(number, "abort"))
                case FinishRequest():
                    self._end(message.number, FinishedRequest(message.number, "stop"))

    def receive(self):
        if self.is_dead:
            raise EngineDeadError("the core died")
        assert self._running or self._finished, "receive would wait for ever"
        self._now_s += 1
        numbers = list(self._running)
        token_ids = [self._running[number].pop(0) for number in numbers]
        for number in [number for number in numbers if not self._running[number]]:
            self._end(number, FinishedRequest(number, "length"))
        finished = list(self._finished)
        self._finished.clear()
        return CoreOutputs(
            numbers=numbers, token_ids=pack_ids(token_ids), finished=finished, now_s=self._now_s
        )

    def shutdown(self):
        self.is_dead = True

    def _end(self, number, report):
        if self._running.pop(number, None) is not None:
            self._finished.append(report)
