"""API process: what the core is asked to tell or to do besides answering requests."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from octavo.engine.messages import (
    CoreMessage,
    CoreOutputs,
    Done,
    ExplainRequest,
    Explanation,
    PauseScheduling,
    RequestExplanation,
    ResetPrefixCache,
    ResumeScheduling,
)
from octavo.errors import EngineDeadError

ANSWER_TIMEOUT_S = 10.0
"""The core answers with its next step. One that stands still says nothing."""

CoreAnswer = Explanation | Done


class CoreControl:
    """Owns the questions without an answer, and what the core has said of a pause.

    Everything here waits on the event loop for the core's word. After a ``TimeoutError`` what was
    asked for is done all the same, when the core has ended its step.
    """

    def __init__(
        self,
        send: Callable[[Sequence[CoreMessage]], None],
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._tickets = count()
        self._open: dict[int, asyncio.Future[CoreAnswer]] = {}
        self._is_paused = False
        self._death: str | None = None

    @property
    def is_paused(self) -> bool:
        """True from the core's word that it is paused until its word that it goes on."""
        return self._is_paused

    async def explain(self, request_id: str) -> list[RequestExplanation]:
        """Tell what the core knows of a request, open or ended a while ago: an entry a choice.

        Raises:
            EngineDeadError: the core has died.
            TimeoutError: the core has not ended a step for seconds.
        """
        answer = await self._ask(partial(ExplainRequest, request_id))
        assert isinstance(answer, Explanation)
        return answer.requests

    async def pause(self) -> None:
        """Let no step be planned any more; requests stay open. Raises as ``explain`` does."""
        await self._ask(PauseScheduling)

    async def resume(self) -> None:
        """End a pause. Raises as ``explain`` does."""
        await self._ask(ResumeScheduling)

    def end_pause(self) -> None:
        """End a pause, if there is one, without waiting for the core's word."""
        self._send([ResumeScheduling()])

    async def reset_prefix_cache(self) -> int:
        """Forget the cached K/V that no request uses; return how many blocks that were.

        Raises as ``explain`` does.
        """
        answer = await self._ask(ResetPrefixCache)
        assert isinstance(answer, Done)
        return answer.num_blocks_dropped

    def update(self, outputs: CoreOutputs) -> None:
        """Hand answers to whoever asked, if they still wait."""
        self._is_paused = outputs.stats.is_paused
        answers: list[CoreAnswer] = [*outputs.explanations, *outputs.done]
        for answer in answers:
            question = self._open.get(answer.ticket)
            if question is not None and not question.done():
                question.set_result(answer)

    def fail(self, reason: str) -> None:
        """Tell all who wait, and who ask later, that no answer will come."""
        self._death = reason
        self._is_paused = False
        for question in self._open.values():
            if not question.done():
                question.set_exception(EngineDeadError(reason))

    async def _ask(self, create: Callable[[int], CoreMessage]) -> CoreAnswer:
        if self._death is not None:
            raise EngineDeadError(self._death)
        ticket = next(self._tickets)
        answer: asyncio.Future[CoreAnswer] = asyncio.get_running_loop().create_future()
        self._open[ticket] = answer
        try:
            self._send([create(ticket)])
            return await asyncio.wait_for(answer, self._timeout_s)
        finally:
            del self._open[ticket]
